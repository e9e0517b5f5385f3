"""DEVICE_ATTENTION: who attends on the device tier. Chosen by name; nothing falls back by itself.

``cpu`` is the C++ operator. ``sdpa`` (any device, plain torch) and ``xformers`` (CUDA) gather each request's KV first.

Legend: T packed tokens, N query heads, K KV heads, G = N / K, H head size, B blocks, S block size, R requests,
M blocks per request, C keys of all requests together.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from omniserve.registry import Registry
from omniserve.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLengths:
    """Lengths of a batch's requests, on the host: without them a CUDA implementation must wait for the device."""

    query_lens: tuple[int, ...]
    """Query tokens of each request in this step."""
    seq_lens: tuple[int, ...]
    """Context of each request, this step's tokens included."""


class DeviceAttention(Protocol):
    """Attention of a step's device rows over the paged cache."""

    def __call__(
        self,
        q_TNH: Tensor,
        k_cache_BKSH: Tensor,
        v_cache_BKSH: Tensor,
        block_table_RM: Tensor,
        query_start_R1: Tensor,
        seq_lens_R: Tensor,
        spec: AttentionSpec,
        *,
        lengths: HostLengths | None = None,
        reversed_RM: Tensor | None = None,
    ) -> Tensor:
        """Return ``[T, N, H]``, the dtype of q.

        Args:
            q_TNH: Queries of all requests, one after the other; rotary applied.
            k_cache_BKSH: The layer's keys, head-major blocks, this step's tokens included.
            v_cache_BKSH: The layer's values.
            block_table_RM: Blocks of each request, int32.
            query_start_R1: Where each request's queries begin, int32; the last entry is T.
            seq_lens_R: Context of each request including this chunk, int32.
            spec: Scale, window, softcap.
            lengths: The same lengths on the host; None copies them from the device.
            reversed_RM: The direction table: which entries of the block table are of blocks that run from the right,
                bool, so that offset i of such a block is its row ``S - 1 - i``. None: no block does. Paper: bros 6.
        """
        ...


DEVICE_ATTENTION: Registry[DeviceAttention] = Registry("device attention", package="omniserve.ops.attention")


def resolve_attention(name: str, device: torch.device, *, is_directed: bool = False) -> DeviceAttention:
    """Return the implementation called ``name``; "auto" takes the best that ``device`` has.

    Args:
        is_directed: Some blocks will run from the right (``reversed_RM``).

    Raises:
        ValueError: The name is unknown, or its implementation does not run on this device or in both directions.
    """
    if name == "auto":
        name = "cpu" if device.type == "cpu" else "xformers" if importlib.util.find_spec("xformers") else "sdpa"
    if (wanted := {"cpu": "cpu", "xformers": "cuda"}.get(name, device.type)) != device.type:
        raise ValueError(f"device attention {name!r} runs on {wanted}, not on {device.type}; give 'sdpa' or 'auto'")
    if is_directed and name == "xformers":
        raise ValueError(
            "the KV manager lets blocks run in two directions, which device attention 'xformers' cannot read; "
            "set attention='sdpa', or a KV manager other than 'bidirectional'"
        )
    return DEVICE_ATTENTION.get(name)


@DEVICE_ATTENTION.register("cpu")
def attend_cpu(
    q_TNH: Tensor,
    k_cache_BKSH: Tensor,
    v_cache_BKSH: Tensor,
    block_table_RM: Tensor,
    query_start_R1: Tensor,
    seq_lens_R: Tensor,
    spec: AttentionSpec,
    *,
    lengths: HostLengths | None = None,
    reversed_RM: Tensor | None = None,
) -> Tensor:
    """Attend with the C++ operator."""
    return torch.ops.omniserve.paged_attention.default(
        q_TNH, k_cache_BKSH, v_cache_BKSH, block_table_RM, query_start_R1, seq_lens_R,
        spec.scale, spec.window, spec.softcap, reversed_RM,
    )  # fmt: skip


@DEVICE_ATTENTION.register("sdpa")
def attend_sdpa(
    q_TNH: Tensor,
    k_cache_BKSH: Tensor,
    v_cache_BKSH: Tensor,
    block_table_RM: Tensor,
    query_start_R1: Tensor,
    seq_lens_R: Tensor,
    spec: AttentionSpec,
    *,
    lengths: HostLengths | None = None,
    reversed_RM: Tensor | None = None,
) -> Tensor:
    """Attend request by request with torch's SDPA over gathered KV (soft-capped: plain matrix products).

    One kernel launch per request: for correctness where nothing better is installed. Not yet measured on CUDA.
    """
    lengths = lengths or _lengths_of(query_start_R1, seq_lens_R)
    out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    end = 0
    for request, (query_len, seq_len) in enumerate(zip(lengths.query_lens, lengths.seq_lens, strict=True)):
        begin, end = end, end + query_len
        if not query_len:
            continue
        first = _first_key(query_len, seq_len, spec)
        q_pos = torch.arange(seq_len - query_len, seq_len, device=q_TNH.device)[:, None]
        k_pos = torch.arange(first, seq_len, device=q_TNH.device)[None]
        seen = k_pos <= q_pos
        if spec.window:
            seen &= k_pos > q_pos - spec.window
        reversed_M = reversed_RM[request] if reversed_RM is not None else None
        k_CKH = gather_keys(k_cache_BKSH, block_table_RM[request], first, seq_len, reversed_M)
        v_CKH = gather_keys(v_cache_BKSH, block_table_RM[request], first, seq_len, reversed_M)
        q, k, v = (rows.transpose(0, 1)[None] for rows in (q_TNH[begin:end], k_CKH, v_CKH))
        if spec.softcap:
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = (q @ k.transpose(-1, -2)).float() * spec.scale
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
            out = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(v.dtype) @ v
        else:
            out = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=spec.scale, enable_gqa=True)
        out_TNH[begin:end] = out[0].transpose(0, 1)
    return out_TNH


@DEVICE_ATTENTION.register("xformers")
def attend_xformers(
    q_TNH: Tensor,
    k_cache_BKSH: Tensor,
    v_cache_BKSH: Tensor,
    block_table_RM: Tensor,
    query_start_R1: Tensor,
    seq_lens_R: Tensor,
    spec: AttentionSpec,
    *,
    lengths: HostLengths | None = None,
    reversed_RM: Tensor | None = None,
) -> Tensor:
    """Attend with xformers: decodes over the pages where its kernel can, the rest over gathered KV.

    Paged (``triton_splitKF``): every request has one query token, S is a multiple of 64, H is a power of two from 16,
    half precision, no window. Not yet run on CUDA.

    Raises:
        ValueError: The layer soft-caps its scores, or there is a direction table: xformers can do neither.
    """
    from xformers.ops import fmha  # optional; slow to import
    from xformers.ops.fmha.attn_bias import (
        BlockDiagonalCausalFromBottomRightMask,
        PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
    )

    if reversed_RM is not None:
        raise ValueError("xformers reads blocks from the left only; give attention='sdpa'")
    if spec.softcap:
        raise ValueError("xformers has no soft-capped attention; give attention='sdpa' for this model")
    lengths = lengths or _lengths_of(query_start_R1, seq_lens_R)
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
    if paged:
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
        firsts = [_first_key(lengths.query_lens[r], lengths.seq_lens[r], spec) for r in active]
        bias = BlockDiagonalCausalFromBottomRightMask.from_seqlens(
            query_lens, [lengths.seq_lens[r] - first for r, first in zip(active, firsts, strict=True)],
            device=q_TNH.device,
        )  # fmt: skip
        if spec.window:
            bias = bias.make_local_attention_from_bottomright(spec.window)
        k, v = (
            torch.cat(
                [
                    gather_keys(cache, block_table_RM[r], first, lengths.seq_lens[r])
                    for r, first in zip(active, firsts, strict=True)
                ]
            )[None, :, :, None].expand(-1, -1, -1, num_heads // kv_heads, -1)
            for cache in (k_cache_BKSH, v_cache_BKSH)
        )
        q = q_TNH.reshape(1, -1, kv_heads, num_heads // kv_heads, head_size)
    return fmha.memory_efficient_attention_forward(q, k, v, attn_bias=bias, scale=spec.scale).reshape(q_TNH.shape)


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


def _first_key(query_len: int, seq_len: int, spec: AttentionSpec) -> int:
    """Return the lowest position that a chunk's first query sees."""
    return max(0, seq_len - query_len + 1 - spec.window) if spec.window else 0


def _lengths_of(query_start_R1: Tensor, seq_lens_R: Tensor) -> HostLengths:
    query_lens = tuple(end - begin for begin, end in pairwise(query_start_R1.tolist()))
    return HostLengths(query_lens=query_lens, seq_lens=tuple(seq_lens_R.tolist()))
