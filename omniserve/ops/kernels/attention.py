"""Attention over the paged cache, in Triton: chunks and decodes in one launch, split over the keys where rows are few.

One program attends one tile: BLOCK_M rows, which are (query, head of the group) pairs of one request and one KV head,
so a group reads K and V once. The grid follows from shapes alone. Tile i belongs to the request r with the largest
``query_start[r] // BLOCK_Q + r <= i`` (BLOCK_Q queries a tile): that leaves each request enough tiles, and some unused
ones, which return at once. With splits, program (tile, head, s) takes the s-th part of *its* tile's keys, and a second
kernel adds the parts (flash-decoding). Keys that are too few for all parts leave the last ones empty.

No row of the cache is read but those that some query of the tile sees: what else a block holds may be NaN.

A block id outside of the cache is read from wherever it points: a check of each would cost time. Set ``TRITON_DEBUG=1``
in the environment before triton is imported, and each id is asserted on the device; a bad one ends the process's use of
CUDA with "block_table is out of range". The tests' interpreter always asserts.

Legend: T packed tokens, N query heads, K KV heads, G = N / K, H head size, B blocks, S block size, R requests,
M blocks per request, P parts of the keys.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from omniserve.ops.kernels.attention_launch import MAX_REGISTERS, Device, Tuning, choose_launch

_LOG2_E = tl.constexpr(1.4426950408889634)


def paged_attention(
    q_TNH: Tensor,
    k_cache_BKSH: Tensor,
    v_cache_BKSH: Tensor,
    block_table_RM: Tensor,
    query_start_R1: Tensor,
    seq_lens_R: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    chunk: int = 0,
    sinks_N: Tensor | None = None,
    alibi_slopes_N: Tensor | None = None,
    reversed_RM: Tensor | None = None,
    one_query_each: bool = False,
    num_splits: int | None = None,
    tuning: Tuning | None = None,
    device: Device | None = None,
) -> Tensor:
    """Attend each request's chunk over its cached keys, the chunk's own included.

    Waits for nothing and allocates by shape: with ``one_query_each`` the call can be captured in a CUDA graph.

    Args:
        q_TNH: ``[T, N, H]``, fp32, bf16 or fp16; rows of a fused QKV will do (H contiguous).
        k_cache_BKSH: ``[B, K, S, H]``, dtype of q; H contiguous.
        v_cache_BKSH: The same, strides of K.
        block_table_RM: ``[R, M]`` int32; not read where no query sees a key.
        query_start_R1: ``[R + 1]`` int32 prefix sums; not read with ``one_query_each``.
        seq_lens_R: ``[R]`` int32; 0 gives zeros.
        scale: Multiplies q.k.
        window: The query at position p sees keys at (p - window, p]; 0: at [0, p].
        softcap: Scores become softcap * tanh(score / softcap); 0 leaves them.
        chunk: The query at position p sees keys at [p - p % chunk, p]; 0: at [0, p].
        sinks_N: ``[N]`` fp32: logits that join the softmax's denominator and have no value.
        alibi_slopes_N: ``[N]`` fp32: slope * (key position - query position) is added to a score.
        reversed_RM: ``[R, M]`` bool: blocks that run from the right. Paper: bros 6.
        one_query_each: T == R, one query each.
        num_splits: Parts of the keys, a power of two; None chooses.
        tuning: Constants of the choice; None: those for the device.
        device: What tiles are chosen for; None: where q is.

    Returns:
        ``[T, N, H]``, contiguous, dtype of q.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit together.
    """
    (num_tokens, num_heads, head_size), (_, kv_heads, block_size, _) = q_TNH.shape, k_cache_BKSH.shape
    num_requests, table_width = block_table_RM.shape
    _check(q_TNH, k_cache_BKSH, v_cache_BKSH, block_table_RM, query_start_R1, seq_lens_R, reversed_RM)
    _check_per_head(num_heads, sinks_N=sinks_N, alibi_slopes_N=alibi_slopes_N)
    if one_query_each and num_tokens != num_requests:
        raise ValueError(f"one_query_each: {num_tokens} query tokens for {num_requests} requests; expected as many")
    out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    if not num_tokens:
        return out_TNH
    launch = choose_launch(
        num_tokens=num_tokens,
        num_requests=num_requests,
        num_heads=num_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        block_size=block_size,
        table_width=table_width,
        itemsize=q_TNH.element_size(),
        one_query_each=one_query_each,
        device=device or describe(q_TNH.device),
        tuning=tuning,
    )
    full_splits = num_splits or launch.full_splits
    num_splits = num_splits or launch.num_splits
    partial = lse = out_TNH
    if num_splits > 1:
        shape = (num_tokens, num_heads, num_splits)
        partial = torch.empty((*shape, head_size), dtype=torch.float32, device=q_TNH.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q_TNH.device)
    table = block_table_RM if block_table_RM.numel() else query_start_R1[None]  # triton takes no pointer to nothing
    directions = reversed_RM.view(torch.uint8) if reversed_RM is not None else table
    # Triton takes no None, either; these are not read.
    sinks = sinks_N if sinks_N is not None else seq_lens_R
    slopes = alibi_slopes_N if alibi_slopes_N is not None else seq_lens_R
    padded_head = max(16, triton.next_power_of_2(head_size))
    with torch.cuda.device_of(q_TNH):
        _attend[(*launch.grid[:2], num_splits)](
            q_TNH,
            k_cache_BKSH,
            v_cache_BKSH,
            partial,
            lse,
            table,
            directions,
            query_start_R1,
            seq_lens_R,
            sinks,
            slopes,
            num_requests,
            k_cache_BKSH.shape[0],
            full_splits,
            launch.max_split_keys,
            scale,
            *q_TNH.stride()[:2],
            *k_cache_BKSH.stride()[:3],
            table.stride(0),
            directions.stride(0),
            H=head_size,
            H_PAD=padded_head,
            S=block_size,
            GROUP=num_heads // kv_heads,
            BLOCK_M=launch.tile.block_m,
            BLOCK_N=launch.block_n,
            NUM_SPLITS=num_splits,
            WINDOW=window,
            SOFTCAP=softcap,
            CHUNK=chunk,
            HAS_SINKS=sinks_N is not None and num_splits == 1,
            HAS_SLOPES=alibi_slopes_N is not None,
            IS_DIRECTED=reversed_RM is not None,
            ONE_QUERY_EACH=one_query_each,
            # The interpreter keeps bf16 as integers, and would multiply those.
            DOT_IN_FP32=q_TNH.dtype == torch.bfloat16 and triton.knobs.runtime.interpret,
            num_warps=launch.tile.num_warps,
            num_stages=launch.tile.num_stages,
            maxnreg=MAX_REGISTERS,
        )
        if num_splits > 1:
            _combine[(num_tokens * num_heads,)](
                partial,
                lse,
                sinks,
                out_TNH,
                num_heads,
                H=head_size,
                H_PAD=padded_head,
                NUM_SPLITS=num_splits,
                HAS_SINKS=sinks_N is not None,
                num_warps=1 if num_splits * padded_head <= 2048 else 4,
            )
    return out_TNH


@functools.cache
def describe(device: torch.device) -> Device:
    """Return the properties of a device on which launches depend; the defaults if it is not a CUDA device."""
    if device.type != "cuda":
        return Device()
    properties = torch.cuda.get_device_properties(device)
    return Device(
        shared_bytes=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]  # not in its stub
        multiprocessors=properties.multi_processor_count,
        has_wide_tensor_cores=properties.major in (9, 10),
    )


def _check(
    q_TNH: Tensor,
    k_cache_BKSH: Tensor,
    v_cache_BKSH: Tensor,
    block_table_RM: Tensor,
    query_start_R1: Tensor,
    seq_lens_R: Tensor,
    reversed_RM: Tensor | None,
) -> None:
    (_, num_heads, head_size), (_, kv_heads, _, cache_head) = q_TNH.shape, k_cache_BKSH.shape
    if head_size != cache_head or num_heads % kv_heads:
        raise ValueError(f"queries {tuple(q_TNH.shape)} do not fit a cache {tuple(k_cache_BKSH.shape)} [B, K, S, H]")
    if not q_TNH.dtype == k_cache_BKSH.dtype == v_cache_BKSH.dtype:
        raise ValueError(f"q is {q_TNH.dtype}, K {k_cache_BKSH.dtype}, V {v_cache_BKSH.dtype}; expected one dtype")
    if q_TNH.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"q is {q_TNH.dtype}; expected float32, bfloat16 or float16")
    if k_cache_BKSH.shape != v_cache_BKSH.shape or k_cache_BKSH.stride() != v_cache_BKSH.stride():
        raise ValueError("K and V caches differ in shape or strides; expected two tensors of one layout")
    if q_TNH.stride(2) != 1 or k_cache_BKSH.stride(3) != 1:
        raise ValueError("the elements of a head must be neighbours in memory, in q and in the cache")
    num_requests = block_table_RM.shape[0]
    for name, index, length in (
        ("block_table", block_table_RM, num_requests),
        ("query_start", query_start_R1, num_requests + 1),
        ("seq_lens", seq_lens_R, num_requests),
    ):
        if index.dtype != torch.int32 or index.shape[0] != length or index.stride(-1) != 1:
            raise ValueError(
                f"{name} is {index.dtype} {tuple(index.shape)}; expected int32, {length} contiguous entries or rows"
            )
    if reversed_RM is not None and (reversed_RM.dtype != torch.bool or reversed_RM.shape != block_table_RM.shape):
        raise ValueError(f"reversed is {reversed_RM.dtype} {tuple(reversed_RM.shape)}; expected bool, as block_table")


def _check_per_head(num_heads: int, **values: Tensor | None) -> None:
    for name, tensor in values.items():
        if tensor is not None and (tensor.dtype != torch.float32 or tensor.shape != (num_heads,)):
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected float32, {num_heads} entries")


# What varies between launches is not specialized: else they compile again and again.
@triton.jit(
    do_not_specialize=["num_requests", "num_blocks", "full_splits", "max_split_keys", "table_stride", "reversed_stride"]
)
def _attend(  # type: ignore[no-untyped-def]  # triton gives the arguments their types
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    table_ptr,
    reversed_ptr,
    query_start_ptr,
    seq_lens_ptr,
    sinks_ptr,
    slopes_ptr,
    num_requests,
    num_blocks,
    full_splits,
    max_split_keys,
    scale,
    q_stride_t,
    q_stride_n,
    stride_b,
    stride_k,
    stride_s,
    table_stride,
    reversed_stride,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    S: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    IS_DIRECTED: tl.constexpr,
    ONE_QUERY_EACH: tl.constexpr,
    DOT_IN_FP32: tl.constexpr,
):
    """Attend one tile of one KV head over one part of its keys.

    Writes ``out[T, N, H]``; with parts, fp32 ``out[T, N, P, H]`` and ``lse[T, N, P]``, the base-2 logarithm of the sum
    of the part's weights: -inf, and no row of out, where there is no key.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP

    # Which request, and which of its queries.
    if ONE_QUERY_EACH:
        request = tile
        query_begin = tile
        query_len = 1
        first_query = 0
    else:
        low = 0
        high = num_requests
        while low < high:  # ends with the first request whose tiles begin after this one
            middle = (low + high) // 2
            if tl.load(query_start_ptr + middle) // BLOCK_Q + middle <= tile:
                low = middle + 1
            else:
                high = middle
        request = low - 1
        query_begin = tl.load(query_start_ptr + request)
        query_len = tl.load(query_start_ptr + request + 1) - query_begin
        first_query = (tile - query_begin // BLOCK_Q - request) * BLOCK_Q
        if first_query >= query_len:
            return
    seq_len = tl.load(seq_lens_ptr + request)
    context_len = seq_len - query_len

    row = tl.arange(0, BLOCK_M)
    query = first_query + row // GROUP
    is_row = (row < BLOCK_Q * GROUP) & (query < query_len)
    head = kv_head * GROUP + row % GROUP
    column = tl.arange(0, H_PAD)
    is_column = column < H
    token = (query_begin + query).to(tl.int64)
    out_row = (token * (GROUP * tl.num_programs(1)) + head) * NUM_SPLITS + split

    # Keys that some query of the tile sees: [first_key, end_key). This part's: [begin, end), from whole tiles on.
    end_key = tl.minimum(seq_len, context_len + first_query + BLOCK_Q)
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(0, context_len + first_query + 1 - WINDOW)
    if CHUNK > 0:
        first_key = tl.maximum(first_key, (context_len + first_query) // CHUNK * CHUNK)
    begin = first_key // BLOCK_N * BLOCK_N
    end = end_key
    if NUM_SPLITS > 1:
        num_tiles = tl.cdiv(end_key - begin, BLOCK_N)
        few_parts = tl.minimum(tl.cdiv(num_tiles, full_splits), tl.cdiv(max_split_keys, BLOCK_N))
        part = tl.maximum(tl.cdiv(num_tiles, NUM_SPLITS), few_parts) * BLOCK_N
        begin += split * part
        end = tl.minimum(end_key, begin + part)
        if begin >= end:
            tl.store(lse_ptr + out_row, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=is_row)
            return

    q = tl.load(
        q_ptr + token[:, None] * q_stride_t + head[:, None] * q_stride_n + column[None, :],
        mask=is_row[:, None] & is_column[None, :],
        other=0.0,
    )
    if DOT_IN_FP32:
        q = q.to(tl.float32)
    k_ptr += kv_head.to(tl.int64) * stride_k
    v_ptr += kv_head.to(tl.int64) * stride_k
    table_ptr += request.to(tl.int64) * table_stride
    reversed_ptr += request.to(tl.int64) * reversed_stride
    query_pos = context_len + query

    if HAS_SINKS:  # the softmax begins with them
        top = tl.load(sinks_ptr + head) * _LOG2_E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes_ptr + head)
    acc = tl.zeros([BLOCK_M, H_PAD], tl.float32)
    for first in tl.range(begin, end, BLOCK_N):
        key_pos = first + tl.arange(0, BLOCK_N)
        is_key = (key_pos >= first_key) & (key_pos < end)  # of some key, at least
        offset = key_pos % S
        if S % BLOCK_N == 0:  # the tile lies in one block
            block = tl.load(table_ptr + first // S).to(tl.int64)
            tl.device_assert((block >= 0) & (block < num_blocks), "block_table is out of range")
            if IS_DIRECTED:
                offset = tl.where(tl.load(reversed_ptr + first // S) != 0, S - 1 - offset, offset)
        else:
            block = tl.load(table_ptr + key_pos // S, mask=is_key, other=0).to(tl.int64)
            tl.device_assert((block >= 0) & (block < num_blocks), "block_table is out of range", mask=is_key)
            if IS_DIRECTED:
                is_reversed = tl.load(reversed_ptr + key_pos // S, mask=is_key, other=0) != 0
                offset = tl.where(is_reversed, S - 1 - offset, offset)
        places = (block * stride_b + offset * stride_s)[:, None] + column[None, :]
        is_element = is_key[:, None] & is_column[None, :]
        k = tl.load(k_ptr + places, mask=is_element, other=0.0)
        v = tl.load(v_ptr + places, mask=is_element, other=0.0)
        if DOT_IN_FP32:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP > 0:
            # tanh(x) = 1 - 2 / (1 + e^2x)
            scores = SOFTCAP - 2 * SOFTCAP / (1 + tl.exp2(scores * (2 * _LOG2_E / SOFTCAP)))
        if HAS_SLOPES:
            scores += slope[:, None] * (key_pos[None, :] - query_pos[:, None]).to(tl.float32)
        scores *= _LOG2_E
        is_seen = is_key[None, :] & (key_pos[None, :] <= query_pos[:, None])
        if WINDOW > 0:
            is_seen &= key_pos[None, :] > query_pos[:, None] - WINDOW
        if CHUNK > 0:
            is_seen &= key_pos[None, :] >= query_pos[:, None] // CHUNK * CHUNK
        scores = tl.where(is_seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        weights = weights.to(v.dtype)
        if DOT_IN_FP32:
            weights = weights.to(tl.float32)
            v = v.to(tl.float32)
        acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")
        top = new_top

    total = tl.where(total == 0, 1.0, total)  # no key: zeros
    out = acc / total[:, None]
    tl.store(
        out_ptr + out_row[:, None] * H + column[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )
    if NUM_SPLITS > 1:
        tl.store(lse_ptr + out_row, top + tl.log2(total), mask=is_row)


@triton.jit(do_not_specialize=["num_heads"])
def _combine(  # type: ignore[no-untyped-def]
    partial_ptr,
    lse_ptr,
    sinks_ptr,
    out_ptr,
    num_heads,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Add the parts of one (token, head): ``out[T, N, H]`` from ``partial[T, N, P, H]`` and ``lse[T, N, P]``.

    A sink is counted here, once for all parts.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, NUM_SPLITS)
    column = tl.arange(0, H_PAD)
    lse = tl.load(lse_ptr + row * NUM_SPLITS + split)
    top = tl.max(lse, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + row % num_heads) * _LOG2_E
        top = tl.maximum(top, sink)
    weights = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    partial = tl.load(
        partial_ptr + (row * NUM_SPLITS + split)[:, None] * H + column[None, :],
        mask=(lse != float("-inf"))[:, None] & (column < H)[None, :],
        other=0.0,
    )
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    out = tl.sum(weights[:, None] * partial, 0) / tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + row * H + column, out.to(out_ptr.dtype.element_ty), mask=column < H)
