"""``flex``: torch's FlexAttention over the pages, without gathering KV. Letters as in `base`.

A (block, KV head) pair is a page with one head, so the cache is one long sequence ``[1, 1, B * K * S, H]``; a (request,
KV head) pair is a batch entry, whose rows are the queries of the group's heads. The block mask lists its pages; the
mask turns a place in the cache into a position with the inverse of the block table.

Letters: G = N / K, L rows of a batch entry, Q tiles of rows, E = R * K batch entries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, flex_attention

from omniserve.core.spec import AttentionSpec
from omniserve.ops.attention.base import (
    DEVICE_ATTENTION,
    AttentionMetadata,
    graph_safe,
    head_pages,
    host_lengths,
    per_head,
)

_TILE_ROWS = 128
"""Rows that share a list of pages: FlexAttention's own default."""


@DEVICE_ATTENTION.register("flex")
@graph_safe
def attend_flex(
    q_TNH: Tensor, k_cache_BKSH: Tensor, v_cache_BKSH: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
) -> Tensor:
    """Attend with FlexAttention: compiled on CUDA; on the CPU as plain torch over the whole cache, for tests.

    Chunks are padded to the longest one, whose length is read from ``host_lengths`` or from the device; with
    ``one_query_each`` there is no padding. Slots that were never written in a request's blocks are multiplied by 0, so
    they must be finite: the KV storage begins with zeros. Not yet run on CUDA.

    Raises:
        ValueError: On CUDA, S is no power of two from 16.
    """
    (num_tokens, num_heads, head_size), (_, kv_heads, block_size, _) = q_TNH.shape, k_cache_BKSH.shape
    if q_TNH.is_cuda and (block_size < 16 or block_size & (block_size - 1)):
        raise ValueError(
            f"device attention 'flex' needs a block_size of 16, 32, 64 ...; got {block_size}; give attention='triton'"
        )
    query_start_loc_R1 = metadata.query_start_loc_R1
    num_requests, group = metadata.block_table_RM.shape[0], num_heads // kv_heads
    if not num_tokens:
        return torch.empty_like(q_TNH)
    longest, place_T = 1, None
    if metadata.one_query_each:
        q_RLKGH = q_TNH.reshape(num_requests, 1, kv_heads, group, head_size)
    else:
        longest = max(host_lengths(metadata, "flex").query_lens)
        request_T = torch.repeat_interleave(query_start_loc_R1.diff(), output_size=num_tokens)
        begin_T = query_start_loc_R1[request_T]
        place_T = request_T * longest + torch.arange(num_tokens, device=q_TNH.device) - begin_T
        padded = q_TNH.new_zeros(num_requests * longest, num_heads, head_size)
        padded[place_T] = q_TNH
        q_RLKGH = padded.view(num_requests, longest, kv_heads, group, head_size)
    q_E1LH = q_RLKGH.transpose(1, 2).reshape(num_requests * kv_heads, 1, longest * group, head_size)
    attend = _compiled() if q_TNH.is_cuda else _attend_pages
    out_E1LH = attend(
        q_E1LH,
        k_cache_BKSH,
        v_cache_BKSH,
        metadata.block_table_RM,
        query_start_loc_R1.diff(),
        metadata.seq_lens_R,
        metadata.reversed_RM,
        per_head(spec.sinks, q_TNH.device),
        per_head(spec.alibi_slopes, q_TNH.device),
        group=group,
        scale=spec.scale,
        window=spec.window,
        softcap=spec.softcap,
        chunk=spec.chunk,
    )
    out_RLKGH = out_E1LH.view(num_requests, kv_heads, longest, group, head_size).transpose(1, 2)
    out = out_RLKGH.reshape(num_requests * longest, num_heads, head_size)
    return out if place_T is None else out[place_T]


@cache
def _compiled() -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(_attend_pages, fullgraph=True)

    def attend(*args: Tensor | None, **constants: float) -> Tensor:
        # There is a graph for each kind of layer, and for one request, one query each, and chunks: together more than
        # torch's limit of 8.
        with torch._dynamo.config.patch(recompile_limit=64):
            return compiled(*args, **constants)

    return attend


def _attend_pages(
    q_E1LH: Tensor,
    k_cache_BKSH: Tensor,
    v_cache_BKSH: Tensor,
    block_table_RM: Tensor,
    query_lens_R: Tensor,
    seq_lens_R: Tensor,
    reversed_RM: Tensor | None,
    sinks_N: Tensor | None,
    slopes_N: Tensor | None,
    *,
    group: int,
    scale: float,
    window: int,
    softcap: float,
    chunk: int,
) -> Tensor:
    """Return ``[E, 1, L, H]``."""
    num_blocks, kv_heads, block_size, head_size = k_cache_BKSH.shape
    (num_requests, width), num_rows, device = block_table_RM.shape, q_E1LH.shape[2], q_E1LH.device
    num_keys = num_blocks * kv_heads * block_size
    context_R = seq_lens_R - query_lens_R
    first_R = (context_R + 1 - window).clamp(min=0) if window else torch.zeros_like(context_R)
    if chunk:
        first_R = torch.maximum(first_R, context_R - context_R % chunk)
    first_R = first_R // block_size

    # Pages that a tile of rows visits: from the first that the request's first query sees to that of its own last.
    tile_Q = torch.arange(-(-num_rows // _TILE_ROWS), dtype=torch.int32, device=device) * _TILE_ROWS
    end_RQ = torch.minimum(seq_lens_R[:, None], context_R[:, None] + (tile_Q + _TILE_ROWS - 1) // group + 1)
    count_RQ = ((end_RQ + block_size - 1) // block_size - first_R[:, None]).clamp(min=0)
    count_RQ = count_RQ * (tile_Q < query_lens_R[:, None] * group)
    entry_M = torch.arange(width, dtype=torch.int32, device=device)
    shifted_RM = (first_R[:, None] + entry_M).clamp(max=width - 1)
    pages_EM = head_pages(block_table_RM.gather(1, shifted_RM.long()), kv_heads)

    # The index of a block in its request, -1 for other blocks. Empty entries go to a last column that is never read.
    is_held_RM = (entry_M >= first_R[:, None]) & (entry_M * block_size < seq_lens_R[:, None])
    column_RM = torch.where(is_held_RM & (block_table_RM >= 0), block_table_RM, num_blocks).long()
    standing_RB = torch.full((num_requests, num_blocks + 1), -1, dtype=torch.int32, device=device)
    standing_RB.scatter_(1, column_RM, entry_M.expand(num_requests, width).contiguous())

    def positions(entry: Tensor, row: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the index of a place's block in the request, and the positions of the key and of the query."""
        request, block, offset = entry // kv_heads, place // block_size // kv_heads, place % block_size
        standing = standing_RB[request, block]
        if reversed_RM is not None:
            is_reversed = reversed_RM[request, standing.clamp(min=0)]
            offset = torch.where(is_reversed, block_size - 1 - offset, offset)
        return standing, standing * block_size + offset, context_R[request] + row // group

    def is_seen(entry: Tensor, _head: Tensor, row: Tensor, place: Tensor) -> Tensor:
        standing, key_pos, query_pos = positions(entry, row, place)
        head = place // block_size % kv_heads
        seen = (standing >= 0) & (head == entry % kv_heads) & (key_pos <= query_pos)
        if window:
            seen = seen & (key_pos > query_pos - window)
        return seen & (key_pos >= query_pos - query_pos % chunk) if chunk else seen

    # As tensors, because the compiler allows no number in a score function that differs between layers.
    scale_1, softcap_1 = torch.full((), scale, device=device), torch.full((), softcap, device=device)

    def soften(score: Tensor, entry: Tensor, _head: Tensor, row: Tensor, place: Tensor) -> Tensor:
        score = score * scale_1
        if softcap:
            score = softcap_1 * torch.tanh(score / softcap_1)
        if slopes_N is not None:
            _, key_pos, query_pos = positions(entry, row, place)
            score = score + slopes_N[entry % kv_heads * group + row % group] * (key_pos - query_pos)
        return score

    num_tiles = tile_Q.shape[0]
    mask = BlockMask.from_kv_blocks(
        count_RQ.repeat_interleave(kv_heads, 0)[:, None].to(torch.int32),
        pages_EM[:, None, None].expand(-1, 1, num_tiles, -1).contiguous(),
        BLOCK_SIZE=(_TILE_ROWS, block_size),
        mask_mod=is_seen,
        seq_lengths=(num_rows, num_keys),
        compute_q_blocks=False,
    )
    result: tuple[Tensor, AuxOutput] = flex_attention(
        q_E1LH,
        k_cache_BKSH.reshape(1, 1, num_keys, head_size),
        v_cache_BKSH.reshape(1, 1, num_keys, head_size),
        score_mod=soften,
        block_mask=mask,
        scale=1.0,
        kernel_options={"BLOCK_N": min(64, block_size)} if q_E1LH.is_cuda else None,
        return_aux=AuxRequest(lse=sinks_N is not None),
    )
    out, aux = result
    if sinks_N is None:
        return out
    assert aux.lse is not None
    # A sink takes its share of each row's weight.
    heads_KG = sinks_N.view(1, kv_heads, 1, group)
    lse_RKLG = aux.lse.view(num_requests, kv_heads, -1, group)
    share_E1L = torch.sigmoid(lse_RKLG - heads_KG).view(num_requests * kv_heads, 1, num_rows, 1)
    return (out * share_E1L).to(out.dtype)
