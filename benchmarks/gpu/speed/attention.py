"""Device attention, implementation by implementation, a layer at a time: which one should ``auto`` take?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.common.timing import median_seconds
from benchmarks.gpu.engines import attentions
from benchmarks.gpu.models import LLAMA_8B, TINY
from benchmarks.gpu.script import Case, NotHere, Script, argument_parser
from benchmarks.gpu.timing import graph_of
from omniserve.core.spec import AttentionSpec
from omniserve.ops.attention import AttentionMetadata, HostLengths, is_graph_safe, resolve_attention

_BLOCK = 64
_LAYERS = 8
"""Each attends to KV of its own: what fits into a cache would be read from there."""
_COMPILED = ("flex",)
"""Implementations that have to be compiled first: they come last."""


@dataclass(frozen=True, slots=True)
class _Load:
    """So many requests, each with so many queries at the end of a context."""

    requests: int
    queries: int
    context: int

    def __str__(self) -> str:
        rows = f"{self.requests} decodes" if self.queries == 1 else f"{self.requests} chunks of {self.queries}"
        return f"{rows} at {self.context} tokens"


_LOADS = (_Load(32, 1, 1024), _Load(8, 1, 1024), _Load(1, 2048, 2048))
_DRY_LOADS = (_Load(4, 1, 40), _Load(1, 32, 40))


def main(arguments: Sequence[str] | None = None) -> int:
    script = Script("attention", argument_parser(__doc__).parse_args(arguments))
    found = attentions(script.device)
    for name in sorted(found, key=lambda name: (name in _COMPILED, name)):
        for load in _DRY_LOADS if script.dry else _LOADS:
            with script.case(f"{name}, {load}: a layer") as case:
                if found[name]:
                    raise NotHere(found[name])
                if script.dry and name in _COMPILED:
                    raise NotHere("compiling takes a while; not in a dry run")
                time_layer(script, case, name, load)
    return script.end()


@torch.inference_mode()
def time_layer(script: Script, case: Case, name: str, load: _Load) -> None:
    """Time a layer's attention; its limit is reading K and V, or the products if they take longer."""
    fields = (TINY if script.dry else LLAMA_8B).fields
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    head_size = fields["hidden_size"] // heads
    keys_seen = load.requests * load.queries * (load.context - (load.queries - 1) / 2)
    limit_s = max(
        load.requests * load.context * 2 * kv_heads * head_size * 2 / script.limits.copy_bytes_per_s,
        4 * keys_seen * heads * head_size / script.limits.matmul_flops,
    )
    device, blocks = script.device, -(-load.context // _BLOCK)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    num_blocks = load.requests * blocks
    q_TNH = tensor(load.requests * load.queries, heads, head_size)
    caches = [[tensor(num_blocks, kv_heads, _BLOCK, head_size) for _ in "kv"] for _ in range(_LAYERS)]
    attend, spec = resolve_attention(name, device), AttentionSpec(scale=head_size**-0.5)
    in_graph = load.queries == 1 and is_graph_safe(attend)
    lengths = HostLengths(query_lens=(load.queries,) * load.requests, seq_lens=(load.context,) * load.requests)
    metadata = AttentionMetadata(
        block_table_RM=torch.randperm(num_blocks, device=device).int().view(load.requests, blocks),
        query_start_loc_R1=torch.arange(load.requests + 1, device=device, dtype=torch.int32) * load.queries,
        seq_lens_R=torch.full((load.requests,), load.context, device=device, dtype=torch.int32),
        host_lengths=None if in_graph else lengths,
        one_query_each=in_graph,
    )

    def run() -> None:
        for k, v in caches:
            attend(q_TNH, k, v, metadata, spec)

    timed = graph_of(run, device) if in_graph else run
    taken_s = median_seconds(timed, device, repeats=3 if script.dry else 20) / _LAYERS
    note = "in a graph" if in_graph else "launched one by one"
    case.figure(1e6 * taken_s, "us", limit=1e6 * limit_s, note=note)


if __name__ == "__main__":
    sys.exit(main())
