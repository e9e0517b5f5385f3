"""Kernels that move rows: KV of new tokens, rows that change tiers and their residuals. One launch each.

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

_RELEASE = tl.constexpr("""{
    .reg .b32 thread;
    .reg .pred is_first;
    mov.u32 thread, %tid.x;
    setp.eq.u32 is_first, thread, 0;
    @is_first st.release.sys.global.b64 [$1], $2;
    mov.b32 $0, 0;
}""")
"""Store $2 to $1 from one thread (all threads of a program execute this), released to the whole system. A plain store:
atomics on memory across PCIe need not be supported."""

_ACQUIRE = tl.constexpr("ld.acquire.sys.global.b64 $0, [$1];")
"""Load from $1, and with it all that the processor which released this value has written before."""
_RELEASE_SOME = tl.constexpr("""{
    .reg .pred is_meant;
    setp.ne.s32 is_meant, $3, 0;
    @is_meant st.release.sys.global.b64 [$1], $2;
    mov.b32 $0, 0;
}""")
"""Store $2 to $1, released to the whole system, where $3 is not 0."""

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


@triton.jit(
    debug=True,
    do_not_specialize=["num_seats", "num_slots"],
    do_not_specialize_on_alignment=["slots", "wanted", "as_one", "step", "flags", "skips", "joined"],
)
def _receive_kernel(
    slots: tl.tensor,
    wanted: tl.tensor,
    as_one: tl.tensor,
    step: tl.tensor,
    flags: tl.tensor,
    skips: tl.tensor,
    joined: tl.tensor,
    num_seats: tl.tensor,
    num_slots: tl.tensor,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    # One program, of which each thread has other seats: so each flag is looked at once, and all that follows from it
    # reads what is stored here.
    seat = tl.arange(0, TILE)
    slot = tl.load(slots + seat, mask=seat < num_seats, other=-1)
    tl.device_assert(slot < num_slots, "piggyback_receive: slots are out of range")
    is_planned = slot >= 0
    flag = tl.load(wanted + seat, mask=seat < num_seats, other=0)
    places = flags + tl.where(is_planned, slot, 0)
    if INTERPRETED:
        found = tl.load(places)
    else:
        found = tl.inline_asm_elementwise(_ACQUIRE, "=l,l", [places], tl.int64, is_pure=False, pack=1)
    is_here = is_planned & ((flag == 0) | (found == flag))
    num_away = tl.sum((is_planned & (is_here == 0)).to(tl.int32), 0)
    is_here = is_here & ((num_away == 0) | (tl.load(as_one) == 0))
    is_skipped = is_planned & (is_here == 0)
    tl.store(joined + seat, tl.where(is_here, slot, -1), mask=seat < num_seats)
    skip_places = skips + tl.where(is_planned, slot, 0)
    number = tl.load(step) + tl.zeros_like(slot)
    if INTERPRETED:
        tl.store(skip_places, number, mask=is_skipped)
    else:
        tl.inline_asm_elementwise(
            _RELEASE_SOME, "=r,l,l,r", [skip_places, number, is_skipped.to(tl.int32)], tl.int32, is_pure=False, pack=1
        )


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


@triton.jit(debug=True, do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slots", "step"])
def _piggyback_send_kernel(
    hidden: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    slots: tl.tensor,
    residuals: tl.tensor,
    mailbox: tl.tensor,
    flags: tl.tensor,
    step: tl.tensor,
    num_slots: tl.tensor,
    hidden_stride: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    residuals_stride: tl.tensor,
    mailbox_stride: tl.tensor,
    D: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    D_TILE: tl.constexpr,
    Q_TILE: tl.constexpr,
    KV_TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    seat = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + seat)
    tl.device_assert(slot < num_slots, "piggyback_send: slots are out of range")
    if slot >= 0:
        # All loads before the first store, or each would wait for the one before it: nothing tells the compiler that
        # they do not overlap.
        d = tl.arange(0, D_TILE)
        i = tl.arange(0, Q_TILE)
        j = tl.arange(0, KV_TILE)
        has_d, has_i, has_j = d < D, i < N * H, j < K * H
        number = tl.load(step)
        residual = tl.load(hidden + seat * hidden_stride + d, mask=has_d)
        query = tl.load(q + seat * q_token_stride + i // H * q_head_stride + i % H, mask=has_i)
        key = tl.load(k + seat * k_token_stride + j // H * k_head_stride + j % H, mask=has_j)
        value = tl.load(v + seat * v_token_stride + j // H * v_head_stride + j % H, mask=has_j)
        letter = mailbox + slot * mailbox_stride
        tl.store(letter + i, query, mask=has_i)
        tl.store(letter + N * H + j, key, mask=has_j)
        tl.store(letter + (N + K) * H + j, value, mask=has_j)
        tl.store(residuals + slot * residuals_stride + d, residual, mask=has_d)
        # One program has the whole seat. The barrier synchronizes its threads, so all their stores come before the
        # flag's in causality order. A release is cumulative: an acquire that sees the flag, a CPU's too, sees them all.
        tl.debug_barrier()
        if INTERPRETED:
            tl.store(flags + slot, number)
        else:
            tl.inline_asm_elementwise(_RELEASE, "=r,l,l", [flags + slot, number], tl.int32, is_pure=False, pack=1)


def store_kv(k_TKH: Tensor, v_TKH: Tensor, k_cache_BKSH: Tensor, v_cache_BKSH: Tensor, slot_mapping_T: Tensor) -> None:
    """Write each token's K and V to slot ``block * S + offset`` of the contiguous caches; -1 leaves a token out.

    k and v have the caches' dtype and may be cut from a fused QKV: only the last dimension must be contiguous.
    """
    num_tokens, kv_heads, head_size = k_TKH.shape
    num_blocks, _, block_size, _ = k_cache_BKSH.shape
    for name, rows in (("k", k_TKH), ("v", v_TKH)):
        _check(name, rows, (num_tokens, kv_heads, head_size), k_cache_BKSH.dtype)
    for name, cache in (("k_cache", k_cache_BKSH), ("v_cache", v_cache_BKSH)):
        _check(name, cache, (num_blocks, kv_heads, block_size, head_size), k_cache_BKSH.dtype, is_packed=True)
    _check("slot_mapping", slot_mapping_T, (num_tokens,), torch.int64)
    width = kv_heads * head_size
    if not (num_tokens and width):
        return
    tile, num_tiles, num_warps = _tiling(width, k_TKH)
    with torch.cuda.device_of(k_TKH):
        _store_kv_kernel[num_tokens, num_tiles](
            k_TKH, v_TKH, k_cache_BKSH, v_cache_BKSH, slot_mapping_T, num_blocks * block_size,
            *k_TKH.stride()[:2], *v_TKH.stride()[:2], K=kv_heads, S=block_size, H=head_size, TILE=tile,
            num_warps=num_warps, sanitize_overflow=False,
        )  # fmt: skip


def piggyback_concat(attn_TD: Tensor, results_RD: Tensor, rows_P: Tensor) -> Tensor:
    """Return a new ``[T + P, D]``: attn, then results[rows]; zeros where a row is -1.

    Both are attention rows of the same dtype, of the device and of the host tier, contiguous in the last dimension.
    """
    (num_rows, width), (num_seats,) = attn_TD.shape, rows_P.shape
    _check("attn", attn_TD, (num_rows, width), attn_TD.dtype)
    out_TD = attn_TD.new_empty(num_rows + num_seats, width)
    _concat(attn_TD, "results", results_RD, "rows", rows_P, out_TD)
    return out_TD


def residual_fetch(store_SD: Tensor, slots_P: Tensor, hidden_TD: Tensor) -> None:
    """Write store[slots] to the last P rows of hidden; zeros where a slot is -1.

    Both have the same dtype and are contiguous in the last dimension.
    """
    out_PD = _last_rows(hidden_TD, slots_P)
    _concat(out_PD[:0], "store", store_SD, "slots", slots_P, out_PD)


def gather_rows(source_SD: Tensor, slots_R: Tensor, destination_SD: Tensor) -> None:
    """Write source[slot], in pinned CPU memory, to destination[slot], on the device, for each slot but -1.

    Both have the same dtype and are contiguous in the last dimension. No slot may come twice.
    """
    (num_slots, width), (num_rows,) = destination_SD.shape, slots_R.shape
    _check("source", source_SD, (num_slots, width), destination_SD.dtype)
    _check("destination", destination_SD, (num_slots, width), destination_SD.dtype)
    _check("slots", slots_R, (num_rows,), torch.int64)
    _gather(source_SD, slots_R, None, destination_SD)


def piggyback_receive(
    slots_P: Tensor, wanted_P: Tensor, as_one_1: Tensor, step_1: Tensor, result_flags_S: Tensor,
    host_results_SD: Tensor, results_SD: Tensor, skips_S: Tensor, joined_P: Tensor,
) -> None:  # fmt: skip
    """Find out which late joins of a layer have their results by now, and fetch these.

    A seat with ``wanted`` != 0 is a late join: its result is there if ``result_flags[slot] == wanted``. It is then
    copied from ``host_results`` to ``results``. With ``as_one`` != 0 a seat whose result is not there keeps all others
    away, too. ``joined`` becomes the slots of the seats that join, -1 elsewhere, and ``skips[slot] = step`` is written
    for each other slot that is not -1, with release order at system scope. Each flag is looked at once, with acquire
    order. ``result_flags``, ``host_results`` and ``skips`` are pinned CPU memory.
    Paper: omniserve 3.2.3.
    """
    (num_slots, width), (num_seats,) = results_SD.shape, slots_P.shape
    _check("host_results", host_results_SD, (num_slots, width), results_SD.dtype)
    _check("results", results_SD, (num_slots, width), results_SD.dtype)
    for name, index, size in (
        ("slots", slots_P, num_seats), ("wanted", wanted_P, num_seats), ("joined", joined_P, num_seats),
        ("as_one", as_one_1, 1), ("step", step_1, 1), ("result_flags", result_flags_S, num_slots),
        ("skips", skips_S, num_slots),
    ):  # fmt: skip
        _check(name, index, (size,), torch.int64)
    if not num_seats:
        return
    tile = max(32, triton.next_power_of_2(num_seats))  # a warp, so that no two threads have the same seat
    with torch.cuda.device_of(results_SD):
        _receive_kernel[(1,)](
            slots_P, wanted_P, as_one_1, step_1, result_flags_S, skips_S, joined_P, num_seats, num_slots, TILE=tile,
            INTERPRETED=triton.knobs.runtime.interpret, num_warps=1, sanitize_overflow=False,
        )  # fmt: skip
    _gather(host_results_SD, joined_P, wanted_P, results_SD)


def piggyback_send(
    hidden_TD: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, slots_P: Tensor, residuals_SD: Tensor,
    mailbox_SW: Tensor, flags_S: Tensor, step_1: Tensor,
) -> None:  # fmt: skip
    """Send the last P rows to the host tier: residuals to the store, q|k|v to the mailbox, then the step to the flags.

    ``flags[slots] = step`` is written with release order at system scope, so a CPU thread that reads the step with
    acquire order finds the whole row of the mailbox. A slot of -1 leaves a seat out, and no other slot may come twice.
    All rows have one dtype and are contiguous in the last dimension. Mailbox and flags are pinned CPU memory.
    Paper: omniserve 4.
    """
    num_slots, width = residuals_SD.shape
    (num_tokens, num_heads, head_size), kv_heads = q_TNH.shape, k_TKH.shape[1]
    dtype = hidden_TD.dtype
    rows_PD = _last_rows(hidden_TD, slots_P)
    num_seats = len(slots_P)
    _check("hidden", hidden_TD, (num_tokens, width), dtype)
    _check("q", q_TNH, (num_tokens, num_heads, head_size), dtype)
    for name, rows in (("k", k_TKH), ("v", v_TKH)):
        _check(name, rows, (num_tokens, kv_heads, head_size), dtype)
    _check("residuals", residuals_SD, (num_slots, width), dtype)
    _check("mailbox", mailbox_SW, (num_slots, (num_heads + 2 * kv_heads) * head_size), dtype)
    _check("flags", flags_S, (num_slots,), torch.int64)
    _check("step", step_1, (1,), torch.int64)
    if not num_seats:
        return
    tiles = [triton.next_power_of_2(max(1, size)) for size in (width, num_heads * head_size, kv_heads * head_size)]
    q_PNH, k_PKH, v_PKH = (rows[num_tokens - num_seats :] for rows in (q_TNH, k_TKH, v_TKH))
    with torch.cuda.device_of(hidden_TD):
        _piggyback_send_kernel[(num_seats,)](
            rows_PD, q_PNH, k_PKH, v_PKH, slots_P, residuals_SD, mailbox_SW, flags_S, step_1, num_slots,
            rows_PD.stride(0), *q_PNH.stride()[:2], *k_PKH.stride()[:2], *v_PKH.stride()[:2], residuals_SD.stride(0),
            mailbox_SW.stride(0), D=width, N=num_heads, K=kv_heads, H=head_size,
            D_TILE=tiles[0], Q_TILE=tiles[1], KV_TILE=tiles[2], INTERPRETED=triton.knobs.runtime.interpret,
            num_warps=_num_warps(max(tiles), dtype), sanitize_overflow=False,
        )  # fmt: skip


def _gather(source_SD: Tensor, slots_R: Tensor, wanted_R: Tensor | None, destination_SD: Tensor) -> None:
    """Write source[slot] to destination[slot] for each slot but -1, and but those whose ``wanted`` is 0."""
    (num_slots, width), (num_rows,) = destination_SD.shape, slots_R.shape
    if num_rows and width:
        tile, num_tiles, num_warps = _tiling(width, destination_SD)
        with torch.cuda.device_of(destination_SD):
            _gather_kernel[num_rows, num_tiles](
                source_SD, destination_SD, slots_R, slots_R if wanted_R is None else wanted_R, num_slots,
                source_SD.stride(0), destination_SD.stride(0), D=width, TILE=tile, IS_SOME=wanted_R is not None,
                num_warps=num_warps, sanitize_overflow=False,
            )  # fmt: skip


def _concat(
    rows_TD: Tensor, source_name: str, source_SD: Tensor, slots_name: str, slots_P: Tensor, out_TD: Tensor
) -> None:
    """Write the rows to out, and source[slots] below them; zeros where a slot is -1."""
    (num_rows, width), (num_sources, _), (num_out, _) = rows_TD.shape, source_SD.shape, out_TD.shape
    _check(source_name, source_SD, (num_sources, width), out_TD.dtype)
    _check(slots_name, slots_P, (num_out - num_rows,), torch.int64)
    if out_TD.numel():
        tile, num_tiles, num_warps = _tiling(width, out_TD)
        with torch.cuda.device_of(out_TD):
            _concat_kernel[num_out, num_tiles](
                rows_TD, source_SD, slots_P, out_TD, num_rows, num_sources,
                rows_TD.stride(0), source_SD.stride(0), out_TD.stride(0),
                D=width, TILE=tile, num_warps=num_warps, sanitize_overflow=False,
            )  # fmt: skip


def _last_rows(hidden_TD: Tensor, slots_P: Tensor) -> Tensor:
    """Return the rows of the seats, ``[P, D]``."""
    (num_rows, width), num_seats = hidden_TD.shape, len(slots_P)
    if num_seats > num_rows:
        raise ValueError(f"there are {num_seats} slots but only {num_rows} rows of hidden")
    _check("slots", slots_P, (num_seats,), torch.int64)
    _check("hidden", hidden_TD, (num_rows, width), hidden_TD.dtype)
    return hidden_TD[num_rows - num_seats :]


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, is_packed: bool = False) -> None:
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
    return tile, triton.cdiv(width, tile), _num_warps(tile, rows.dtype)


def _num_warps(tile: int, dtype: torch.dtype) -> int:
    """Return warps for a tile: one vector a thread, at most 16 warps."""
    return min(16, max(1, tile * dtype.itemsize // (_VECTOR_BYTES * 32)))
