"""Reads of the paged cache: rows gathered from blocks, and blocks as pages for the kernels of other projects.

Legend: K KV heads, H head size, B blocks, S block size, R requests, M blocks per request, C keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from omniserve.core.spec import AttentionSpec


def gather_keys(cache_BKSH: Tensor, blocks_M: Tensor, first: int, end: int, reversed_M: Tensor | None = None) -> Tensor:
    """Return rows [first, end) of one sequence, ``[end - first, K, H]``, copied out of its blocks."""
    block_size = cache_BKSH.shape[2]
    skipped = first // block_size
    held = slice(skipped, -(-end // block_size))
    rows_MSKH = cache_BKSH[blocks_M[held].long()].transpose(1, 2)
    if reversed_M is not None:
        rows_MSKH = torch.where(reversed_M[held, None, None, None], rows_MSKH.flip(1), rows_MSKH)
    return rows_MSKH.flatten(0, 1)[first - skipped * block_size : end - skipped * block_size]


def head_pages(block_table_RM: Tensor, kv_heads: int) -> Tensor:
    """Return the table ``[R * K, M]`` of (block, KV head) pages: page ``block * K + head`` is one head's rows."""
    heads_K = torch.arange(kv_heads, dtype=block_table_RM.dtype, device=block_table_RM.device)
    pages_RKM = block_table_RM[:, None].clamp(min=0) * kv_heads + heads_K[None, :, None]
    return pages_RKM.flatten(0, 1)


def first_key(query_len: int, seq_len: int, spec: AttentionSpec) -> int:
    """Return the lowest position that a chunk's first query sees."""
    return max(0, seq_len - query_len + 1 - spec.window) if spec.window else 0
