"""ModuleBench: the engine's modules alone, launched as an engine launches them (see ``served``).

Legend: T rows, D hidden, N query heads, K KV heads, H head size, R rows of the head.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from itertools import repeat

import torch
from torch import Tensor
from torch.nn.functional import pad

from omniserve.core.config import EngineConfig
from omniserve.core.plan import DeviceChunk, StepPlan
from omniserve.kv.storage import DeviceKVStorage
from omniserve.layers.patching import PatchedModel
from omniserve.profiling.served import Served
from omniserve.runner.step_inputs import make_step_inputs


class ModuleBench:
    """Runs the modules of a patched model alone, all layers in turn.

    Args:
        model: The model.
        config: Says block size, attention and most rows of a step.
        max_tokens: Most tokens of KV.
        served: How modules are launched; None: as the configuration says.
    """

    def __init__(
        self, model: PatchedModel, config: EngineConfig, max_tokens: int, *, served: Served | None = None
    ) -> None:
        self.model, self.config = model, config
        self.num_blocks = -(-max_tokens // config.block_size)
        self.storage = DeviceKVStorage(
            model.spec,
            num_blocks=self.num_blocks,
            block_size=config.block_size,
            dtype=model.dtype,
            device=model.device,
        )
        self.storage.k_LBKSH.zero_()
        self.storage.v_LBKSH.zero_()
        self._served = served or Served(model, config)
        # Scattered like those of an engine that has been running for a while.
        self._blocks = random.Random(0).sample(range(self.num_blocks), self.num_blocks)

    def dense(self, num_rows: int) -> Callable[[], object]:
        """Return a pass through pre- and post-attention of all layers; queries stand in for attention's results.

        In constant shapes it is one graph, as in a decode step, of one compiled function between two attentions;
        that of a step with longer chunks is in pieces, of which a launch each is a layer's.
        """
        ids = torch.arange(num_rows, device=self.model.device) % self.model.spec.vocab_size
        positions = torch.arange(num_rows, device=self.model.device) % self.model.spec.max_model_len
        embedded = self.model.embed(ids, positions)
        rotary = self.model.rotary(positions) or (None, None)
        q_TNH, _, _ = self.model.pre_attention(0, embedded, *rotary)
        attn_TD = q_TNH.flatten(1).contiguous()

        def run() -> Tensor:
            return self.model.run_layers(
                range(self.model.num_layers), embedded, repeat(rotary), lambda *_: attn_TD,
                fused=self._served.is_constant(num_rows),
            )  # fmt: skip

        return self._served.launched(run, num_rows=num_rows)

    def head(self, num_rows: int) -> Callable[[], object]:
        """Return final norm, logits and greedy choice of some rows."""
        hidden_RD = torch.zeros(num_rows, self.model.spec.hidden_size, dtype=self.model.dtype, device=self.model.device)
        return lambda: self.model.logits(hidden_RD).max(dim=-1)[1].tolist()

    def attention(self, chunks: list[tuple[int, int]]) -> Callable[[], object]:
        """Return storing K and V and attending in all layers, for chunks of (rows, context before them).

        In constant shapes, decodes (chunks of one row) attend with ``one_query_each`` and the block table of the
        longest request, and are captured; longer chunks are not.
        """
        plan_chunks, first = [], 0
        for i, (count, start) in enumerate(chunks):
            blocks = -(-(start + count) // self.config.block_size)
            plan_chunks.append(
                DeviceChunk(
                    request_id=str(i),
                    token_ids=(0,) * count,
                    start=start,
                    block_ids=tuple(self._blocks[first : first + blocks]),
                    samples=False,
                )
            )
            first += blocks
        spec = self.model.spec
        inputs = make_step_inputs(
            StepPlan(step_id=0, chunks=tuple(plan_chunks)),
            block_size=self.config.block_size,
            num_layers=spec.num_layers,
            device=self.model.device,
        )
        rows = inputs.num_device_rows
        q_TNH, k_TKH, v_TKH = (
            torch.randn(rows, heads, spec.head_size, device=self.model.device).to(self.model.dtype)
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )

        decodes = self._served.constant and all(count == 1 for count, _ in chunks)
        metadata = inputs.attention
        if decodes:
            more_blocks = self._served.max_blocks - metadata.block_table_RM.shape[1]
            metadata = dataclasses.replace(
                metadata, block_table_RM=pad(metadata.block_table_RM, (0, more_blocks)), host_lengths=None,
                one_query_each=True,
            )  # fmt: skip

        def run() -> Tensor:
            out_TNH = q_TNH
            for layer in range(spec.num_layers):
                k_cache, v_cache = self.storage.k_layers[layer], self.storage.v_layers[layer]
                torch.ops.omniserve.store_kv.default(k_TKH, v_TKH, k_cache, v_cache, inputs.slot_mapping)
                out_TNH = self._served.attend(q_TNH, k_cache, v_cache, metadata, spec.attention[layer])
            return out_TNH

        return self._served.launched(run, num_rows=rows) if decodes else run
