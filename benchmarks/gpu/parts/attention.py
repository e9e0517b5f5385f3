"""Device attention, implementation by implementation, on the shapes of ``decode``: which one should ``auto`` take?"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, Measured
from benchmarks.gpu.clock import graph_of, median_seconds
from benchmarks.gpu.engines import attentions
from benchmarks.gpu.models import LLAMA_8B, TINY
from omniserve.ops.attention import DeviceAttention, HostLengths, is_graph_safe, resolve_attention
from omniserve.spec import AttentionSpec

_BLOCK = 64
_LAYERS = 8
"""Each attends to KV of its own: what fits into a cache would be read from there."""
_COMPILES_S = 20.0
_COMPILED = ("flex",)


@dataclass(frozen=True, slots=True)
class _Case:
    """So many requests, each with so many queries at the end of a context."""

    requests: int
    queries: int
    context: int

    def __str__(self) -> str:
        rows = f"{self.requests} decodes" if self.queries == 1 else f"{self.requests} chunks of {self.queries}"
        return f"{rows} at {self.context} tokens"


_CASES = (_Case(32, 1, 1024), _Case(8, 1, 1024), _Case(1, 2048, 2048))
_DRY_CASES = (_Case(4, 1, 40), _Case(1, 32, 40))


def run(bench: Bench) -> None:
    """Time a layer of each implementation; those that have to be compiled first come last."""
    found = attentions(bench.device)
    for name in sorted(found, key=lambda name: (name in _COMPILED, name)):
        for case in _DRY_CASES if bench.dry else _CASES:
            label = f"{name}, {case}: a layer"
            if found[name]:
                bench.skip(label, "us", found[name])
                continue
            attend = resolve_attention(name, bench.device)
            bench.take(
                label, "us", functools.partial(_layer_us, bench, attend, case), floor=_floor_us(bench, case),
                needs_s=_COMPILES_S if name in _COMPILED and not bench.dry else 0.0,
            )  # fmt: skip


def _sizes(bench: Bench) -> tuple[int, int, int]:
    """Return query heads, KV heads and head size."""
    fields = (TINY if bench.dry else LLAMA_8B).fields
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    return heads, kv_heads, fields["hidden_size"] // heads


def _floor_us(bench: Bench, case: _Case) -> float:
    """Return the microseconds that reading K and V takes, or the products if they take longer."""
    heads, kv_heads, head_size = _sizes(bench)
    read_s = case.requests * case.context * 2 * kv_heads * head_size * 2 / bench.limits.copy_bytes_per_s
    keys_seen = case.requests * case.queries * (case.context - (case.queries - 1) / 2)
    return 1e6 * max(read_s, 4 * keys_seen * heads * head_size / bench.limits.matmul_flops)


@torch.inference_mode()
def _layer_us(bench: Bench, attend: DeviceAttention, case: _Case) -> Measured:
    heads, kv_heads, head_size = _sizes(bench)
    device, blocks = bench.device, -(-case.context // _BLOCK)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    num_blocks = case.requests * blocks
    q_TNH = tensor(case.requests * case.queries, heads, head_size)
    caches = [[tensor(num_blocks, kv_heads, _BLOCK, head_size) for _ in "kv"] for _ in range(_LAYERS)]
    table_RM = torch.randperm(num_blocks, device=device).int().view(case.requests, blocks)
    starts_R1 = torch.arange(case.requests + 1, device=device, dtype=torch.int32) * case.queries
    lens_R = torch.full((case.requests,), case.context, device=device, dtype=torch.int32)
    lengths = HostLengths(query_lens=(case.queries,) * case.requests, seq_lens=(case.context,) * case.requests)
    spec, decodes = AttentionSpec(scale=head_size**-0.5), case.queries == 1
    is_recorded = decodes and is_graph_safe(attend)

    def run() -> None:
        for k, v in caches:
            attend(
                q_TNH, k, v, table_RM, starts_R1, lens_R, spec, lengths=None if is_recorded else lengths,
                one_query_each=is_recorded,
            )  # fmt: skip

    timed = graph_of(run, device) if is_recorded else run
    taken_s = median_seconds(timed, device, repeats=3 if bench.dry else 20)
    return Measured(value=1e6 * taken_s / _LAYERS, note="in a graph" if is_recorded else "launched one by one")
