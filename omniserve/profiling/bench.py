"""The engine's modules alone, launched as an engine launches them, so that they are measured as they will run.

By default (``step_graphs="auto"``) an engine on a GPU runs steps in constant shapes: rows pass the dense halves in CUDA
graphs, decodes attend in them, too, and rows reach the host tier through its mailbox. So these are measured as replays
of a graph of all layers, in which launching costs what it costs there: nothing for each kernel. What is launched
one by one there is so here: attention to longer chunks, the head, and more rows than any captured shape has. Padding to
a shape is not measured: it is part of what measured steps add to their modules.

Without a GPU nothing is captured; with ``step_graphs="on"`` the same code runs there without graphs.

Legend: T rows, D hidden, N query heads, K KV heads, H head size, R rows of the head.
"""

from __future__ import annotations

import dataclasses
import gc
import random
from collections.abc import Callable
from itertools import islice, repeat

import torch
from torch import Tensor
from torch.nn.functional import pad

from omniserve.core.config import EngineConfig
from omniserve.core.plan import DeviceChunk, StepPlan
from omniserve.engine.capacity import fit_states, max_model_len
from omniserve.engine.fingerprint import has_constant_steps
from omniserve.kv.storage import DeviceKVStorage
from omniserve.layers.patched_model import PatchedModel
from omniserve.ops.attention import resolve_attention
from omniserve.runner.capturable import why_not_captured
from omniserve.runner.cuda_graphs.capture import Capture, CudaGraphCapture
from omniserve.runner.cuda_graphs.shapes import CHUNK_ROWS
from omniserve.runner.states import StepStates
from omniserve.runner.step_inputs import make_step_inputs


class Served:
    """Says what an engine with these settings captures, and captures it.

    Args:
        capture: Makes the graphs; None: CUDA graphs on a GPU, else nothing is captured.
    """

    def __init__(self, model: PatchedModel, config: EngineConfig, *, capture: Capture | None = None) -> None:
        spec, on_cuda = model.spec, model.device.type == "cuda"
        self.attend = resolve_attention(
            config.execution.attention, model.device, spec.attention, kv_dtype=config.execution.kv_dtype
        )
        """Device attention."""
        self.constant = has_constant_steps(config, model.device) and not why_not_captured(model, self.attend, config)
        """Steps run in constant shapes."""
        self.mailbox = on_cuda or config.execution.step_graphs == "on"
        """Rows reach the host tier through its mailbox; else they are handed over by a call."""
        self.max_blocks = -(-max_model_len(config, spec) // config.block_size)
        """Width of the block table in constant shapes; attention is launched for it, whatever the lengths are."""
        device_rows = min(max(2 * config.max_num_seqs, CHUNK_ROWS[-1]), config.max_num_batched_tokens)
        self._most_rows = device_rows + config.max_piggyback_seats
        if capture is None and self.constant and on_cuda:
            capture = CudaGraphCapture((0, spec.num_heads, spec.head_size), model.dtype, model.device)
        self._capture = capture or Capture()

    def is_constant(self, num_rows: int) -> bool:
        """Tell whether a step of ``num_rows`` rows, seats included, runs in a constant shape."""
        return self.constant and num_rows <= self._most_rows

    def launched(self, run: Callable[[], Tensor], *, num_rows: int = 0) -> Callable[[], Tensor]:
        """Return a function that does the device work of a pass as an engine does it, replaying a graph where possible.

        Args:
            run: The pass, over tensors that stay where they are. It runs at least once if it is captured.
            num_rows: Rows of the step, seats included.
        """
        if not self.is_constant(num_rows):
            return run
        was_enabled = gc.isenabled()
        gc.disable()  # to free a graph while another is being captured is an error
        try:
            return self._capture.full(run)
        finally:
            if was_enabled:
                gc.enable()


class ModuleBench:
    """Runs the modules of a patched model alone, all layers in turn.

    Args:
        max_tokens: Most tokens of KV.
        served: How modules are launched; None: as the configuration says.
    """

    def __init__(
        self, model: PatchedModel, config: EngineConfig, max_tokens: int, *, served: Served | None = None
    ) -> None:
        self.model, self.config = model, config
        self.num_blocks = -(-max_tokens // config.block_size)
        self.storage = zeroed_storage(model, self.num_blocks, config)
        self._served = served or Served(model, config)
        self._most_decodes = fit_states(config, model.spec).max_num_seqs
        self._states = StepStates(model, num_slots=self._most_decodes if model.spec.state_bytes else 0)
        # Scattered like those of an engine that has been running for a while.
        self._blocks = random.Random(0).sample(range(self.num_blocks), self.num_blocks)

    def dense(self, num_rows: int) -> Callable[[], object]:
        """Return a pass through pre- and post-attention of all layers; queries stand in for attention's results.

        In constant shapes it is one graph, as in a decode step, of one compiled function between two attentions;
        that of a step with longer chunks is in pieces, of which a launch each is a layer's. Layers without attention
        are part of it; those with state have as many decodes as an engine may have, and the other rows are one prompt.
        """
        ids = torch.arange(num_rows, device=self.model.device) % self.model.spec.vocab_size
        positions = torch.arange(num_rows, device=self.model.device) % self.model.spec.max_model_len
        embedded = self.model.embed(ids, positions)
        rotary = self.model.rotary(positions) or (None, None)
        q_TNH, _, _ = self.model.pre_attention(self.model.layers.start, embedded, *rotary)
        attn_TD = q_TNH.flatten(1).contiguous()

        decodes = min(num_rows, self._most_decodes)
        chunks = [_chunk_with_state(slot, start=1, count=1) for slot in range(decodes)]
        if num_rows > decodes:
            chunks.append(_chunk_with_state(0, start=0, count=num_rows - decodes))
        between = self._states.of_plan(StepPlan(step_id=0, chunks=tuple(chunks)), frozenset())

        def run() -> Tensor:
            return self.model.run_layers(
                self.model.layers,
                embedded,
                repeat(rotary),
                lambda *_: attn_TD,
                between=between,
                fused=self._served.is_constant(num_rows),
            )

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
        plan_chunks, free = [], iter(self._blocks)
        for i, (count, start) in enumerate(chunks):
            block_ids = tuple(islice(free, -(-(start + count) // self.config.block_size)))
            plan_chunks.append(
                DeviceChunk(request_id=str(i), token_ids=(0,) * count, start=start, block_ids=block_ids, samples=False)
            )
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
                metadata,
                block_table_RM=pad(metadata.block_table_RM, (0, more_blocks)),
                host_lengths=None,
                one_query_each=True,
            )

        def run() -> Tensor:
            out_TNH = q_TNH
            for layer in self.model.layers:
                k_cache, v_cache = self.storage.k_layers[layer], self.storage.v_layers[layer]
                torch.ops.omniserve.store_kv.default(k_TKH, v_TKH, k_cache, v_cache, inputs.slot_mapping)
                out_TNH = self._served.attend(q_TNH, k_cache, v_cache, metadata, spec.attention[layer])
            return out_TNH

        return self._served.launched(run, num_rows=rows) if decodes else run


def _chunk_with_state(slot: int, *, start: int, count: int) -> DeviceChunk:
    return DeviceChunk(request_id="", token_ids=(0,) * count, start=start, block_ids=(), samples=False, state_slot=slot)


def zeroed_storage(model: PatchedModel, num_blocks: int, config: EngineConfig) -> DeviceKVStorage:
    """Return device KV of a model, every page of which was written."""
    storage = DeviceKVStorage(
        model.spec,
        num_blocks=num_blocks,
        block_size=config.block_size,
        dtype=model.dtype,
        device=model.device,
        layers=model.layers,
        kv_dtype=config.execution.kv_dtype,
    )
    storage.k_LBKSH.zero_()
    storage.v_LBKSH.zero_()
    return storage
