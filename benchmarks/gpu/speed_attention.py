"""Device attention, implementation by implementation, a layer at a time: which one should ``auto`` take?"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.common.timing import graph_of, median_seconds
from benchmarks.gpu.engines import LLAMA_8B, TINY, attentions
from benchmarks.gpu.script import Case, NotHere, Script
from omniserve.core.spec import AttentionSpec
from omniserve.ops.attention import AttentionMetadata, HostLengths, is_graph_safe, resolve_attention

_LOADS = ((32, 1, 1024), (8, 1, 1024), (1, 2048, 2048))
"""Loads: (requests, queries of each, tokens that the queries are the end of)."""
_LAYERS = 8
"""Layers, each with KV of its own: a cache would serve what fits into it."""


def attention(script: Script) -> None:
    found = attentions(script.device)
    for name in sorted(found, key=lambda name: (name == "flex", name)):  # flex has to be compiled first
        for requests, queries, context in ((4, 1, 40), (1, 32, 40)) if script.dry else _LOADS:
            rows = f"{requests} decodes" if queries == 1 else f"{requests} chunks of {queries}"
            with script.case(f"{name}, {rows} at {context} tokens: a layer") as case:
                if found[name]:
                    raise NotHere(found[name])
                if script.dry and name == "flex":
                    raise NotHere("compiling takes a while; not in a dry run")
                time_layer(script, case, name, requests, queries, context)


@torch.inference_mode()
def time_layer(script: Script, case: Case, name: str, requests: int, queries: int, context: int) -> None:
    """Time a layer's attention; its limit is reading K and V, or the products if they take longer."""
    fields = (TINY if script.dry else LLAMA_8B).fields
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    head_size = fields["hidden_size"] // heads
    keys_seen = requests * queries * (context - (queries - 1) / 2)
    limit_s = max(
        requests * context * 2 * kv_heads * head_size * 2 / script.limits.copy_bytes_per_s,
        4 * keys_seen * heads * head_size / script.limits.matmul_flops,
    )
    device, block = script.device, 64
    blocks = -(-context // block)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    q_TNH = tensor(requests * queries, heads, head_size)
    caches = [[tensor(requests * blocks, kv_heads, block, head_size) for _ in "kv"] for _ in range(_LAYERS)]
    attend, spec = resolve_attention(name, device), AttentionSpec(scale=head_size**-0.5)
    in_graph = queries == 1 and is_graph_safe(attend)
    lengths = HostLengths(query_lens=(queries,) * requests, seq_lens=(context,) * requests)
    metadata = AttentionMetadata(
        block_table_RM=torch.randperm(requests * blocks, device=device).int().view(requests, blocks),
        query_start_loc_R1=torch.arange(requests + 1, device=device, dtype=torch.int32) * queries,
        seq_lens_R=torch.full((requests,), context, device=device, dtype=torch.int32),
        host_lengths=None if in_graph else lengths, one_query_each=in_graph,
    )  # fmt: skip

    def run() -> None:
        for k, v in caches:
            attend(q_TNH, k, v, metadata, spec)

    timed = graph_of(run, device) if in_graph else run
    taken_s = median_seconds(timed, device, repeats=3 if script.dry else 20)
    note = "in a graph" if in_graph else "launched one by one"
    case.figure(1e6 * taken_s / _LAYERS, "us", limit=1e6 * limit_s, note=note)
