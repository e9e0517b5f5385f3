"""Kernels that hand rows over to the host tier and take results from it, in page-locked memory and with flags.

The host tier's threads and the device share the memory while both work: who writes a row writes a number behind it,
with release order at system scope, and who reads it looks at the number with acquire order. What is said of arguments
and errors in ``rows.py`` holds here, too.

Legend: T packed tokens, D hidden, N query heads, K KV heads, H head size, S slots, P piggyback seats, W = (N + 2K) * H.
A slot is here what holds one row: where a token may have drafts, a host slot is several of these, side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from omniserve.ops.kernels.rows import check_rows, gather_meant, last_rows, num_warps_of

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

_ACQUIRE_SOME = tl.constexpr("""{
    .reg .pred is_meant;
    setp.ne.s32 is_meant, $2, 0;
    @is_meant ld.acquire.sys.global.b64 $0, [$1];
    @!is_meant mov.b64 $0, 0;
}""")
"""Load from $1 where $2 is not 0, and see all that the processor which released this value has written before."""

_RELEASE_SOME = tl.constexpr("""{
    .reg .pred is_meant;
    setp.ne.s32 is_meant, $3, 0;
    @is_meant st.release.sys.global.b64 [$1], $2;
    mov.b32 $0, 0;
}""")
"""Store $2 to $1, released to the whole system, where $3 is not 0."""


@triton.jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b)


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
    is_late = is_planned & (flag > 0)  # a seat whose result is there need not wait for the bus
    if INTERPRETED:
        found = tl.load(places, mask=is_late, other=0)
    else:
        found = tl.inline_asm_elementwise(
            _ACQUIRE_SOME, "=l,l,r", [places, is_late.to(tl.int32)], tl.int64, is_pure=False, pack=1
        )
    is_here = is_planned & ((flag == 0) | (found == flag))
    # A seat with -1 does as the seat before it: the largest of these numbers, up to a seat, is that of the last seat
    # that decides for itself.
    decided = tl.where(flag >= 0, 2 * seat + is_here.to(tl.int32), 0)
    is_here = is_planned & (tl.associative_scan(decided, 0, _larger) % 2 != 0)
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


def piggyback_receive(
    slots_P: Tensor,
    wanted_P: Tensor,
    as_one_1: Tensor,
    step_1: Tensor,
    result_flags_S: Tensor,
    host_results_SD: Tensor,
    results_SD: Tensor,
    skips_S: Tensor,
    joined_P: Tensor,
) -> None:
    """Find out which late joins of a layer have their results by now, and fetch these.

    A seat with ``wanted`` > 0 is a late join: its result is there if ``result_flags[slot] == wanted``. It is then
    copied from ``host_results`` to ``results``. A seat with -1, a draft's, does as the seat before it. With ``as_one``
    != 0 a seat whose result is not there keeps all others away, too. ``joined`` becomes the slots of the seats that
    join, -1 elsewhere, and ``skips[slot] = step`` is written for each other slot that is not -1, with release order at
    system scope. Each flag is looked at once, with acquire order. ``result_flags``, ``host_results`` and ``skips`` are
    pinned CPU memory.
    Paper: omniserve 3.2.3.
    """
    (num_slots, width), (num_seats,) = results_SD.shape, slots_P.shape
    check_rows("host_results", host_results_SD, (num_slots, width), results_SD.dtype)
    check_rows("results", results_SD, (num_slots, width), results_SD.dtype)
    for name, index, size in (
        ("slots", slots_P, num_seats),
        ("wanted", wanted_P, num_seats),
        ("joined", joined_P, num_seats),
        ("as_one", as_one_1, 1),
        ("step", step_1, 1),
        ("result_flags", result_flags_S, num_slots),
        ("skips", skips_S, num_slots),
    ):
        check_rows(name, index, (size,), torch.int64)
    if not num_seats:
        return
    tile = max(32, triton.next_power_of_2(num_seats))  # a warp, so that no two threads have the same seat
    with torch.cuda.device_of(results_SD):
        _receive_kernel[(1,)](
            slots_P,
            wanted_P,
            as_one_1,
            step_1,
            result_flags_S,
            skips_S,
            joined_P,
            num_seats,
            num_slots,
            TILE=tile,
            INTERPRETED=triton.knobs.runtime.interpret,
            num_warps=1,
            sanitize_overflow=False,
        )
    gather_meant(host_results_SD, joined_P, wanted_P, results_SD)


def piggyback_send(
    hidden_TD: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    slots_P: Tensor,
    residuals_SD: Tensor,
    mailbox_SW: Tensor,
    flags_S: Tensor,
    step_1: Tensor,
) -> None:
    """Send the last P rows to the host tier: residuals to the store, q|k|v to the mailbox, then the step to the flags.

    ``flags[slots] = step`` is written with release order at system scope, so a CPU thread that reads the step with
    acquire order finds the whole row of the mailbox. A slot of -1 leaves a seat out, and no other slot may come twice.
    All rows have one dtype and are contiguous in the last dimension. Mailbox and flags are pinned CPU memory.
    Paper: omniserve 4.
    """
    num_slots, width = residuals_SD.shape
    (num_tokens, num_heads, head_size), kv_heads = q_TNH.shape, k_TKH.shape[1]
    dtype = hidden_TD.dtype
    rows_PD = last_rows(hidden_TD, slots_P)
    num_seats = len(slots_P)
    check_rows("hidden", hidden_TD, (num_tokens, width), dtype)
    check_rows("q", q_TNH, (num_tokens, num_heads, head_size), dtype)
    for name, rows in (("k", k_TKH), ("v", v_TKH)):
        check_rows(name, rows, (num_tokens, kv_heads, head_size), dtype)
    check_rows("residuals", residuals_SD, (num_slots, width), dtype)
    check_rows("mailbox", mailbox_SW, (num_slots, (num_heads + 2 * kv_heads) * head_size), dtype)
    check_rows("flags", flags_S, (num_slots,), torch.int64)
    check_rows("step", step_1, (1,), torch.int64)
    if not num_seats:
        return
    tiles = [triton.next_power_of_2(max(1, size)) for size in (width, num_heads * head_size, kv_heads * head_size)]
    q_PNH, k_PKH, v_PKH = (rows[num_tokens - num_seats :] for rows in (q_TNH, k_TKH, v_TKH))
    with torch.cuda.device_of(hidden_TD):
        _piggyback_send_kernel[(num_seats,)](
            rows_PD,
            q_PNH,
            k_PKH,
            v_PKH,
            slots_P,
            residuals_SD,
            mailbox_SW,
            flags_S,
            step_1,
            num_slots,
            rows_PD.stride(0),
            *q_PNH.stride()[:2],
            *k_PKH.stride()[:2],
            *v_PKH.stride()[:2],
            residuals_SD.stride(0),
            mailbox_SW.stride(0),
            D=width,
            N=num_heads,
            K=kv_heads,
            H=head_size,
            D_TILE=tiles[0],
            Q_TILE=tiles[1],
            KV_TILE=tiles[2],
            INTERPRETED=triton.knobs.runtime.interpret,
            num_warps=num_warps_of(max(tiles), dtype),
            sanitize_overflow=False,
        )
