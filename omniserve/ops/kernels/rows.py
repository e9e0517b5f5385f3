"""Kernels that move rows: KV of new tokens, rows that join a step and their residuals. One launch each.

Nothing here waits for the device, and a grid depends on shapes alone, so all of it can be captured in a CUDA graph. A
tensor of another shape, dtype or layout than a function says raises ValueError; an index out of range is a device-side
assertion, not an exception. Arguments that are said to be pinned may be on the device too; on a machine without one,
under Triton's interpreter, all are CPU tensors.

Legend: T packed tokens, D hidden, N query heads, K KV heads, H head size, B blocks, S block size or slots, P piggyback
seats, R rows that are moved, W = (N + 2K) * H.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_VECTOR_BYTES = 16  # the widest access of a thread
_TILE_BYTES = 2048  # of a row, to a program: 128 threads

# Kernels are compiled anew for sizes and addresses that are multiples of 16, but not for what varies between steps.


@triton.jit(debug=True, do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slot_mapping"])
def _store_kv_kernel(
    k: tl.tensor,
    v: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    slot_mapping: tl.tensor,
    num_slots: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    K: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    tl.device_assert(slot < num_slots, "store_kv: slot_mapping is out of range")
    if slot >= 0:
        i = tl.program_id(1) * TILE + tl.arange(0, TILE)
        head, column, inside = i // H, i % H, i < K * H
        keys = tl.load(k + token * k_token_stride + head * k_head_stride + column, mask=inside)
        values = tl.load(v + token * v_token_stride + head * v_head_stride + column, mask=inside)
        place = (slot // S * (K * S) + slot % S) * H + head * (S * H) + column
        tl.store(k_cache + place, keys, mask=inside)
        tl.store(v_cache + place, values, mask=inside)


@triton.jit(debug=True, do_not_specialize=["num_rows", "num_sources"], do_not_specialize_on_alignment=["slots"])
def _concat_kernel(
    rows: tl.tensor,
    source: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_sources: tl.tensor,
    rows_stride: tl.tensor,
    source_stride: tl.tensor,
    out_stride: tl.tensor,
    D: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    # out[:num_rows] is rows, out[num_rows:] is source[slots].
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < D
    if row < num_rows:
        values = tl.load(rows + row * rows_stride + column, mask=inside)
    else:
        slot = tl.load(slots + (row - num_rows))
        tl.device_assert(slot < num_sources, "slots are out of range")
        values = tl.load(source + slot * source_stride + column, mask=column < tl.where(slot >= 0, D, 0), other=0)
    tl.store(out + row * out_stride + column, values, mask=inside)


@triton.jit(debug=True, do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slots", "wanted"])
def _gather_kernel(
    source: tl.tensor,
    destination: tl.tensor,
    slots: tl.tensor,
    wanted: tl.tensor,
    num_slots: tl.tensor,
    source_stride: tl.tensor,
    destination_stride: tl.tensor,
    D: tl.constexpr,
    TILE: tl.constexpr,
    IS_SOME: tl.constexpr,
) -> None:
    slot = tl.load(slots + tl.program_id(0))
    tl.device_assert(slot < num_slots, "slots are out of range")
    is_meant = slot >= 0
    if IS_SOME:
        is_meant = is_meant & (tl.load(wanted + tl.program_id(0)) != 0)
    if is_meant:
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = column < D
        values = tl.load(source + slot * source_stride + column, mask=inside)
        tl.store(destination + slot * destination_stride + column, values, mask=inside)


def store_kv(k_TKH: Tensor, v_TKH: Tensor, k_cache_BKSH: Tensor, v_cache_BKSH: Tensor, slot_mapping_T: Tensor) -> None:
    """Write each token's K and V to slot ``block * S + offset`` of the contiguous caches; -1 leaves a token out.

    k and v have the caches' dtype and may be cut from a fused QKV: only the last dimension must be contiguous.
    """
    num_tokens, kv_heads, head_size = k_TKH.shape
    num_blocks, _, block_size, _ = k_cache_BKSH.shape
    for name, rows in (("k", k_TKH), ("v", v_TKH)):
        check_rows(name, rows, (num_tokens, kv_heads, head_size), k_cache_BKSH.dtype)
    for name, cache in (("k_cache", k_cache_BKSH), ("v_cache", v_cache_BKSH)):
        check_rows(name, cache, (num_blocks, kv_heads, block_size, head_size), k_cache_BKSH.dtype, is_packed=True)
    check_rows("slot_mapping", slot_mapping_T, (num_tokens,), torch.int64)
    width = kv_heads * head_size
    if not (num_tokens and width):
        return
    tile, num_tiles, num_warps = _tiling(width, k_TKH)
    with torch.cuda.device_of(k_TKH):
        _store_kv_kernel[num_tokens, num_tiles](
            k_TKH,
            v_TKH,
            k_cache_BKSH,
            v_cache_BKSH,
            slot_mapping_T,
            num_blocks * block_size,
            *k_TKH.stride()[:2],
            *v_TKH.stride()[:2],
            K=kv_heads,
            S=block_size,
            H=head_size,
            TILE=tile,
            num_warps=num_warps,
            sanitize_overflow=False,
        )


def piggyback_concat(attn_TD: Tensor, results_RD: Tensor, rows_P: Tensor) -> Tensor:
    """Return a new ``[T + P, D]``: attn, then results[rows]; zeros where a row is -1.

    Both are attention rows of the same dtype, of the device and of the host tier, contiguous in the last dimension.
    """
    (num_rows, width), (num_seats,) = attn_TD.shape, rows_P.shape
    check_rows("attn", attn_TD, (num_rows, width), attn_TD.dtype)
    out_TD = attn_TD.new_empty(num_rows + num_seats, width)
    _concat(attn_TD, "results", results_RD, "rows", rows_P, out_TD)
    return out_TD


def residual_fetch(store_SD: Tensor, slots_P: Tensor, hidden_TD: Tensor) -> None:
    """Write store[slots] to the last P rows of hidden; zeros where a slot is -1.

    Both have the same dtype and are contiguous in the last dimension.
    """
    out_PD = last_rows(hidden_TD, slots_P)
    _concat(out_PD[:0], "store", store_SD, "slots", slots_P, out_PD)


def gather_rows(source_SD: Tensor, slots_R: Tensor, destination_SD: Tensor) -> None:
    """Write source[slot], in pinned CPU memory, to destination[slot], on the device, for each slot but -1.

    Both have the same dtype and are contiguous in the last dimension. No slot may come twice.
    """
    (num_slots, width), (num_rows,) = destination_SD.shape, slots_R.shape
    check_rows("source", source_SD, (num_slots, width), destination_SD.dtype)
    check_rows("destination", destination_SD, (num_slots, width), destination_SD.dtype)
    check_rows("slots", slots_R, (num_rows,), torch.int64)
    gather_meant(source_SD, slots_R, None, destination_SD)


def gather_meant(source_SD: Tensor, slots_R: Tensor, wanted_R: Tensor | None, destination_SD: Tensor) -> None:
    """Write source[slot] to destination[slot] for each slot but -1, and but those whose ``wanted`` is 0."""
    (num_slots, width), (num_rows,) = destination_SD.shape, slots_R.shape
    if num_rows and width:
        tile, num_tiles, num_warps = _tiling(width, destination_SD)
        with torch.cuda.device_of(destination_SD):
            _gather_kernel[num_rows, num_tiles](
                source_SD,
                destination_SD,
                slots_R,
                slots_R if wanted_R is None else wanted_R,
                num_slots,
                source_SD.stride(0),
                destination_SD.stride(0),
                D=width,
                TILE=tile,
                IS_SOME=wanted_R is not None,
                num_warps=num_warps,
                sanitize_overflow=False,
            )


def _concat(
    rows_TD: Tensor, source_name: str, source_SD: Tensor, slots_name: str, slots_P: Tensor, out_TD: Tensor
) -> None:
    """Write the rows to out, and source[slots] below them; zeros where a slot is -1."""
    (num_rows, width), (num_sources, _), (num_out, _) = rows_TD.shape, source_SD.shape, out_TD.shape
    check_rows(source_name, source_SD, (num_sources, width), out_TD.dtype)
    check_rows(slots_name, slots_P, (num_out - num_rows,), torch.int64)
    if out_TD.numel():
        tile, num_tiles, num_warps = _tiling(width, out_TD)
        with torch.cuda.device_of(out_TD):
            _concat_kernel[num_out, num_tiles](
                rows_TD,
                source_SD,
                slots_P,
                out_TD,
                num_rows,
                num_sources,
                rows_TD.stride(0),
                source_SD.stride(0),
                out_TD.stride(0),
                D=width,
                TILE=tile,
                num_warps=num_warps,
                sanitize_overflow=False,
            )


def last_rows(hidden_TD: Tensor, slots_P: Tensor) -> Tensor:
    """Return the rows of the seats, ``[P, D]``."""
    (num_rows, width), num_seats = hidden_TD.shape, len(slots_P)
    if num_seats > num_rows:
        raise ValueError(f"there are {num_seats} slots but only {num_rows} rows of hidden")
    check_rows("slots", slots_P, (num_seats,), torch.int64)
    check_rows("hidden", hidden_TD, (num_rows, width), hidden_TD.dtype)
    return hidden_TD[num_rows - num_seats :]


def check_rows(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, is_packed: bool = False
) -> None:
    """Raise ValueError unless a tensor has this shape and dtype, with contiguous rows or, if packed, contiguous."""
    is_dense = tensor.is_contiguous() if is_packed else tensor.shape[-1:] < (2,) or tensor.stride(-1) == 1
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or not is_dense:
        raise ValueError(
            f"{name} must be {dtype} of shape {list(shape)}, {'contiguous' if is_packed else 'with contiguous rows'}; "
            f"got {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}"
        )


def _tiling(width: int, rows: Tensor) -> tuple[int, int, int]:
    """Return how many elements of a row are a program's, how many programs that makes, and the warps of each."""
    tile = min(triton.next_power_of_2(width), _TILE_BYTES // rows.itemsize)
    return tile, triton.cdiv(width, tile), num_warps_of(tile, rows.dtype)


def num_warps_of(tile: int, dtype: torch.dtype) -> int:
    """Return warps for a tile: one vector a thread, at most 16 warps."""
    return min(16, max(1, tile * dtype.itemsize // (_VECTOR_BYTES * 32)))
