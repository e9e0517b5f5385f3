"""StepCounter: a step's kernels in the order of their launch, from the compiled layers and the operators' formulas.

What is behind a row's own kernel is counted as it is launched: padding, partial results of split attention, the rows of
seats. Not counted: the copies of the step's inputs and of its tokens, a few KiB each.

Legend: T device rows, P seats, D hidden, N query heads, K KV heads, H head size, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.forecast.kernels import Compiled, Work, eager_work, fake_mode, layers_on_gpu, recorded
from omniserve import EngineConfig
from omniserve.ops.kernels.attention_launch import Device, choose_launch

_BF16 = 2
_LONG = 8
_FLAG = 8
_HOPPER = Device(shared_bytes=227 << 10, multiprocessors=132, has_wide_tensor_cores=True)
PARTS = ("before", "behind", "between")


@dataclass(frozen=True, kw_only=True, slots=True)
class Decode:
    """A captured step of decodes, with seats for piggyback rows in every layer."""

    batch: int
    context: int
    """Keys of each request, its own included."""
    seats: int = 0

    @property
    def num_tokens(self) -> int:
        return self.batch + self.seats


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A step with one chunk of a prompt, captured in pieces between the attentions."""

    num_tokens: int
    context: int
    """Keys before the chunk."""


class StepCounter:
    """Counts steps of one model in bf16; ``counts`` are the rows, with seats, of the steps that will be asked for."""

    def __init__(self, model_type: str, fields: Mapping[str, Any], counts: Sequence[int]) -> None:
        counts = tuple(sorted(set(counts)))
        family = recorded(model_type, fields)
        self.spec = family.spec()
        self._layers: dict[str, Compiled] = layers_on_gpu(family, parts=PARTS, counts=counts)
        self._mode = fake_mode()
        with self._mode:
            # Two layers: all have the same, and what is around them has no part in their number.
            config = AutoConfig.for_model(model_type, **{**fields, "num_hidden_layers": 2})
            self._model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        self.num_layers = int(fields["num_hidden_layers"])
        total = sum(each.numel() for each in self._model.parameters())
        in_layer = sum(each.numel() for each in self._model.model.layers[0].parameters())
        embedding: Any = self._model.get_input_embeddings()
        self.embedding_bytes: int = _BF16 * embedding.weight.numel()
        """Bytes of the embedding, of which a step reads a few rows."""
        self.parameter_bytes = _BF16 * (total + (self.num_layers - 2) * in_layer)
        """Bytes of all weights, the embedding included."""

    def kv_bytes(self, num_tokens: int) -> int:
        """Return the bytes of K and V of so many tokens, all layers."""
        return self.num_layers * num_tokens * 2 * self.spec.num_kv_heads * self.spec.head_size * _BF16

    def decode(self, step: Decode) -> list[Work]:
        """Return the launches of a captured step and of the head, in their order."""
        rows, layers = step.num_tokens, self._layers
        works = [*self._first(rows, step), *layers["before"].works[rows]]
        for layer in range(self.num_layers):
            works += self._piggyback_send(step)
            works += [self._store(step.batch), *self._attend_decodes(step)]
            works += self._piggyback_join(step)
            works += layers["between" if layer + 1 < self.num_layers else "behind"].works[rows]
        return [*works, *self._last(step.batch)]

    def prefill(self, step: Chunk) -> list[Work]:
        """Return the same for a step in pieces; its prompt samples a token."""
        rows, layers, spec = step.num_tokens, self._layers, self.spec
        q_bytes = rows * spec.num_heads * spec.head_size * _BF16
        works = [*self._first(rows), *layers["before"].works[rows]]
        for layer in range(self.num_layers):
            works.append(self._store(rows))
            works.append(Work(kind="rows", name="keep_queries", num_bytes=2 * q_bytes))
            works.append(Work(kind="rows", name="zeros", num_bytes=q_bytes))
            works.append(self._attend_chunk(step))
            works += [Work(kind="rows", name=name, num_bytes=2 * q_bytes) for name in ("unpad", "keep_attention")]
            works += layers["between" if layer + 1 < self.num_layers else "behind"].works[rows]
        return [*works, *self._last(1)]

    # -- around the layers ---------------------------------------------------------------------------------------------

    def _first(self, num_rows: int, step: Decode | None = None) -> tuple[Work, ...]:
        """Count embedding and rotary tables; seats have a row of these for each layer."""
        model = self._model
        seats = step.seats if step is not None else 0
        with self._mode:
            tokens = torch.zeros(num_rows, dtype=torch.int64)
            positions = torch.zeros(num_rows - seats + self.num_layers * seats, dtype=torch.int64)

            def run() -> None:
                rows = model.get_input_embeddings()(tokens)
                tables = model.model.rotary_emb(rows, position_ids=positions[None])
                if seats:
                    index = torch.zeros(self.num_layers * num_rows, dtype=torch.int64)
                    for table in tables:
                        table[0].index_select(0, index)

            return eager_work(run)

    def _last(self, num_rows: int) -> tuple[Work, ...]:
        """Count the rows that sample, final norm, head and the likeliest tokens."""
        model = self._model
        with self._mode:
            hidden = torch.empty(num_rows, self.spec.hidden_size, dtype=torch.bfloat16)
            rows = torch.zeros(num_rows, dtype=torch.int64)
            return eager_work(lambda: F.linear(model.model.norm(hidden[rows]), model.lm_head.weight).max(dim=-1))

    # -- attention and the operators that move rows --------------------------------------------------------------------

    def _store(self, num_rows: int) -> Work:
        spec = self.spec
        kv_bytes = num_rows * 2 * spec.num_kv_heads * spec.head_size * _BF16
        return Work(kind="rows", name="store_kv", num_bytes=2 * kv_bytes + num_rows * _LONG)

    def _attend_decodes(self, step: Decode) -> list[Work]:
        spec, config = self.spec, EngineConfig()
        launch = choose_launch(
            num_tokens=step.batch, num_requests=step.batch, num_heads=spec.num_heads, kv_heads=spec.num_kv_heads,
            head_size=spec.head_size, block_size=config.block_size, itemsize=_BF16, one_query_each=True,
            table_width=-(-spec.max_model_len // config.block_size), device=_HOPPER,
        )  # fmt: skip
        # Parts behind a request's keys are empty, and neither written nor read.
        parts = min(launch.num_splits, max(launch.full_splits, -(-step.context // launch.max_split_keys)))
        row_bytes = step.batch * spec.num_heads * spec.head_size * _BF16
        keys = self.kv_bytes(step.batch * step.context) / self.num_layers
        flops = 4.0 * step.batch * spec.num_heads * spec.head_size * step.context
        if launch.num_splits == 1:
            return [Work(kind="decode", name="attend", num_bytes=keys + 2 * row_bytes, flops=flops)]
        partial = 2 * parts * row_bytes  # float32
        return [
            Work(kind="decode", name="attend", num_bytes=keys + row_bytes + partial, flops=flops),
            Work(kind="rows", name="combine", num_bytes=partial + row_bytes),
        ]

    def _attend_chunk(self, step: Chunk) -> Work:
        spec = self.spec
        seen = step.num_tokens * step.context + step.num_tokens * (step.num_tokens + 1) / 2
        row_bytes = step.num_tokens * spec.num_heads * spec.head_size * _BF16
        keys = self.kv_bytes(step.context + step.num_tokens) / self.num_layers
        return Work(
            kind="prefill", name="attend", num_bytes=keys + 2 * row_bytes,
            flops=4.0 * spec.num_heads * spec.head_size * seen,
        )  # fmt: skip

    def _piggyback_send(self, step: Decode) -> list[Work]:
        """Return what takes the seats' rows to the host tier: q, k, v and a flag each over the bus."""
        spec = self.spec
        if not step.seats:
            return []
        qkv = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size * _BF16
        hidden = spec.hidden_size * _BF16
        return [
            Work(
                kind="rows", name="piggyback_send", num_bytes=step.seats * (qkv + 2 * hidden + _LONG),
                bus_bytes=step.seats * (qkv + _FLAG),
            )
        ]  # fmt: skip

    def _piggyback_join(self, step: Decode) -> list[Work]:
        """Return what puts results into the seats, and their residuals under them."""
        if not step.seats:
            return []
        attn, hidden = (width * _BF16 for width in (self.spec.num_heads * self.spec.head_size, self.spec.hidden_size))
        return [
            Work(kind="rows", name="piggyback_concat", num_bytes=2 * step.num_tokens * attn + step.seats * _LONG),
            Work(kind="rows", name="residual_fetch", num_bytes=step.seats * (2 * hidden + _LONG)),
        ]
