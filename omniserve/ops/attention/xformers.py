"""``xformers``: its memory-efficient attention. Letters as in `base`; G = N / K."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from omniserve.core.spec import AttentionSpec
from omniserve.ops.attention.base import (
    DEVICE_ATTENTION,
    AttentionMetadata,
    gather_keys,
    head_pages,
    host_lengths,
    why_not_xformers,
)


@DEVICE_ATTENTION.register("xformers")
def attend_xformers(
    q_TNH: Tensor, k_cache_BKSH: Tensor, v_cache_BKSH: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
) -> Tensor:
    """Attend with xformers: decodes over the pages where its kernel can, the rest over gathered KV.

    Paged (``triton_splitK``): every request has one query token, S is a multiple of 64, H is a power of two from 16,
    half precision, no window. Not yet run on CUDA. Not graph-safe: the bias objects hold the lengths in host lists, on
    which the launches depend, so a graph would repeat the lengths of its capture.

    Raises:
        ValueError: The layer soft-caps its scores, has sinks, ALiBi or chunks, or there is a direction table, which
            xformers does not support. Or the call is captured in a graph, or has ``one_query_each`` without
            ``host_lengths``.
        NotImplementedError: xformers has no kernel for this GPU, dtype or head size; its message says why.
    """
    from xformers.ops import fmha  # optional; slow to import
    from xformers.ops.fmha.attn_bias import (
        BlockDiagonalCausalFromBottomRightMask,
        PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
    )

    if metadata.reversed_RM is not None:
        raise ValueError("xformers reads blocks from the left only; give attention='triton' or 'sdpa'")
    if refusal := why_not_xformers(spec):
        raise ValueError(refusal)
    lengths, block_table_RM = host_lengths(metadata, "xformers"), metadata.block_table_RM
    has_padding = metadata.one_query_each and 0 in lengths.seq_lens
    if has_padding:
        # Padding attends to the first row of the first block, and its result is replaced below.
        lengths = replace(lengths, seq_lens=tuple(max(1, seq_len) for seq_len in lengths.seq_lens))
        block_table_RM = block_table_RM.clamp(min=0)
    (_, num_heads, head_size), (_, kv_heads, block_size, _) = q_TNH.shape, k_cache_BKSH.shape
    if not q_TNH.shape[0]:
        return torch.empty_like(q_TNH)
    paged = (
        all(query_len == 1 for query_len in lengths.query_lens)
        and block_size % 64 == 0
        and head_size in (16, 32, 64, 128, 256)
        and q_TNH.dtype in (torch.bfloat16, torch.float16)
        and not spec.window
    )
    operator = None  # xformers chooses
    if paged:
        # This is the only operator with pages. xformers itself does not choose it for more than 32 queries, which are
        # (request, KV head) pairs here, nor for groups of one head.
        operator = fmha.triton_splitk.FwOp
        # xformers' pages are token-major, ours head-major: a (block, KV head) pair is a page with one head, and a
        # (request, KV head) pair a sequence whose G heads share it.
        q = q_TNH.reshape(1, -1, 1, num_heads // kv_heads, head_size)
        k, v = (
            cache.view(1, -1, 1, 1, head_size).expand(1, -1, 1, num_heads // kv_heads, head_size)
            for cache in (k_cache_BKSH, v_cache_BKSH)
        )
        bias = PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            q_seqlen=[1] * (len(lengths.seq_lens) * kv_heads),
            kv_seqlen=[seq_len for seq_len in lengths.seq_lens for _ in range(kv_heads)],
            block_tables=head_pages(block_table_RM, kv_heads),
            page_size=block_size,
            device=q_TNH.device,
        )
    else:
        active = [r for r, query_len in enumerate(lengths.query_lens) if query_len]
        query_lens = [lengths.query_lens[r] for r in active]
        firsts = [spec.first_key(lengths.seq_lens[r] - lengths.query_lens[r]) for r in active]
        bias = BlockDiagonalCausalFromBottomRightMask.from_seqlens(
            query_lens,
            [lengths.seq_lens[r] - first for r, first in zip(active, firsts, strict=True)],
            device=q_TNH.device,
        )
        if spec.window:
            bias = bias.make_local_attention_from_bottomright(spec.window)
        ranges = [(block_table_RM[r], first, lengths.seq_lens[r]) for r, first in zip(active, firsts, strict=True)]
        k, v = (
            torch.cat([gather_keys(cache, *keys) for keys in ranges])[None, :, :, None].expand(
                -1, -1, -1, num_heads // kv_heads, -1
            )
            for cache in (k_cache_BKSH, v_cache_BKSH)
        )
        q = q_TNH.reshape(1, -1, kv_heads, num_heads // kv_heads, head_size)
    with torch.cuda.device_of(q_TNH):  # Triton launches on the current device
        out = fmha.memory_efficient_attention_forward(q, k, v, attn_bias=bias, scale=spec.scale, op=operator)
    out = out.reshape(q_TNH.shape)
    return out.masked_fill(metadata.seq_lens_R[:, None, None] == 0, 0) if has_padding else out
