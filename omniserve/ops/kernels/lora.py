"""Kernels that add to a linear's output what each row's LoRA adapter adds: ``y + scale * (x @ A.T) @ B.T``.

The first launch multiplies by A (shrink), the second by B (expand). A program has a tile of rows and takes the adapters
that appear among these one after another; it neither reads nor writes rows of others meanwhile. The grids depend on
shapes alone and nothing here waits for the device, so both launches can be captured in a CUDA graph.

An output depends on its own row and adapter alone, to the bit: each sum has one order, however many rows there are. The
inputs are cut into pieces whose number depends on I. Each piece is added up on its own, and then the pieces in order.
With few rows each piece has a program of its own, and the second launch adds them up; with many, one program does all.
Tiles have fewer than 64 rows, so that every device multiplies all of them with the same instruction (``mma.sync``): the
ones for 64 rows or more (wgmma, tcgen05) may round differently.

Legend: T rows, I and O input and output features, R rank, S adapters, P pieces of the inputs that programs share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from omniserve.ops.kernels.rows import check_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What programs of both launches do. All constants of the choice are reasoned guesses, none is measured yet."""

    rows: int
    """Rows of a tile."""
    block_rows: int
    """Rows that are multiplied, at least 16; those beyond ``rows`` are zeros."""
    block_in: int
    """Inputs that are multiplied at a time."""
    block_rank: int
    """Most of the rank that a program multiplies at a time."""
    block_out: int
    """Output features of a program."""
    piece: int
    """Inputs of a piece."""
    num_pieces: int
    is_split: bool
    """Each piece has a program of its own."""
    lanes: int
    """Programs of the first launch that share the adapters of a tile."""

    @property
    def num_parts(self) -> int:
        """P."""
        return self.num_pieces if self.is_split else 1


_MAX_SPLIT_ROWS = 256
"""Most rows with a program for each piece. With more there are enough tiles, and each program of the second launch
would read the sums of all pieces."""
_SPLIT_TILES, _TILES = 32, 128
"""Numbers of tiles before these have more rows: with a program for each piece, and without. Larger tiles read A and B
for fewer programs; small ones have fewer adapters to take one after another."""
_PIECE, _MAX_PIECES = 512, 8
"""Least inputs of a piece, and most pieces. One multiprocessor reads some 50 GB/s: 64 KiB, which are 512 inputs of
rank 64, take it 1.3 us. The second launch holds the sums of all pieces at once: those of 16 spill registers."""
_MAX_LANES = 8
"""Most programs that share a tile's adapters. Where rows are one prompt's, all but one of these find nothing to do."""


def choose_launch(num_rows: int, num_in: int, rank: int, num_adapters: int, itemsize: int) -> Launch:
    """Return the launch for these shapes (T, I, R, S) and bytes of an element.

    What decides on the order of a sum, which is ``block_in``, ``block_rank``, ``piece`` and ``num_pieces``, does not
    depend on the number of rows.
    """
    is_half = itemsize == 2  # fp32 is multiplied without tensor cores: operands and sums share the registers
    block_in = 128 if is_half else 32
    piece = triton.cdiv(triton.cdiv(num_in, max(1, min(_MAX_PIECES, num_in // _PIECE))), block_in) * block_in
    is_split = num_rows <= _MAX_SPLIT_ROWS
    rows = triton.next_power_of_2(triton.cdiv(num_rows, _SPLIT_TILES if is_split else _TILES))
    rows = min(rows, 32 if is_half else 16)
    return Launch(
        rows=rows,
        block_rows=max(16, rows),
        block_in=block_in,
        block_rank=max(16, min(64 if is_half else 32, triton.next_power_of_2(rank))),
        block_out=128 if rows > 16 else 64,
        piece=piece,
        num_pieces=triton.cdiv(num_in, piece),
        is_split=is_split,
        lanes=min(rows, num_adapters, _MAX_LANES),
    )


def add_lora(y: Tensor, x: Tensor, slots_T: Tensor, a_SRI: Tensor, b_SOR: Tensor, scales_S: Tensor) -> Tensor:
    """Return ``y + scale * (x @ A.T) @ B.T``, contiguous, row by row with the adapter of the row's slot.

    The sums of both products are fp32 and rounded to x's dtype.

    Args:
        y: ``[*, O]``, dtype of x; need not be contiguous.
        x: ``[*, I]``, fp32, bf16 or fp16; need not be contiguous.
        slots_T: int32, one for each row, from 1 on. Anything else than 1..S: no adapter, and the row is y's.
        a_SRI: A of each adapter, contiguous, dtype of x.
        b_SOR: B of each adapter, contiguous, dtype of x.
        scales_S: fp32.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit together.
    """
    _check(y, x, slots_T, a_SRI, b_SOR, scales_S)
    num_rows, (num_adapters, rank, num_in), num_out = len(slots_T), a_SRI.shape, b_SOR.shape[1]
    out = torch.empty_like(y, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    if not a_SRI.numel():
        return out.copy_(y)
    x_TI, y_TO = (_with_contiguous_rows(tensor.reshape(num_rows, tensor.shape[-1])) for tensor in (x, y))
    launch = choose_launch(num_rows, num_in, rank, num_adapters, x.itemsize)
    num_parts, num_tiles = launch.num_parts, triton.cdiv(num_rows, launch.rows)
    low_PTR = torch.empty(num_parts, num_rows, rank, dtype=torch.float32, device=x.device)
    # The interpreter keeps bf16 as integers, and would multiply those.
    dot_in_fp32 = x.dtype == torch.bfloat16 and triton.knobs.runtime.interpret
    with torch.cuda.device_of(x):
        _shrink_kernel[triton.cdiv(rank, launch.block_rank) * num_parts, num_tiles, launch.lanes](
            x_TI,
            slots_T,
            a_SRI,
            low_PTR,
            num_rows,
            num_adapters,
            launch.rows,
            x_TI.stride(0),
            NUM_IN=num_in,
            RANK=rank,
            PARTS=num_parts,
            PIECE=launch.piece,
            PIECES=launch.num_pieces,
            BLOCK_ROWS=launch.block_rows,
            BLOCK_IN=launch.block_in,
            BLOCK_RANK=launch.block_rank,
            DOT_IN_FP32=dot_in_fp32,
            num_warps=4,
            num_stages=4,
        )
        _expand_kernel[triton.cdiv(num_out, launch.block_out), num_tiles](
            y_TO,
            slots_T,
            b_SOR,
            low_PTR,
            scales_S,
            out,
            num_rows,
            num_adapters,
            launch.rows,
            y_TO.stride(0),
            NUM_OUT=num_out,
            RANK=rank,
            PARTS=num_parts,
            BLOCK_ROWS=launch.block_rows,
            BLOCK_RANK=launch.block_rank,
            BLOCK_OUT=launch.block_out,
            DOT_IN_FP32=dot_in_fp32,
            num_warps=4,
            num_stages=2,
        )
    return out


def _with_contiguous_rows(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _check(y: Tensor, x: Tensor, slots_T: Tensor, a_SRI: Tensor, b_SOR: Tensor, scales_S: Tensor) -> None:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"x is {x.dtype}; expected float32, bfloat16 or float16")
    if y.dtype != x.dtype:
        raise ValueError(f"y is {y.dtype} and x {x.dtype}; expected one dtype")
    if not x.ndim or not y.ndim or slots_T.ndim != 1 or a_SRI.ndim != 3:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (y, x, slots_T, a_SRI))
        raise ValueError(f"y, x, slots and a must be [*, O], [*, I], [T] and [S, R, I]; got {shapes}")
    num_rows, num_adapters, rank = len(slots_T), *a_SRI.shape[:2]
    for name, tensor in (("x", x), ("y", y)):
        if math.prod(tensor.shape[:-1]) != num_rows:
            raise ValueError(f"{name} must have {num_rows} rows, as slots has; got {list(tensor.shape)}")
    check_rows("slots", slots_T, (num_rows,), torch.int32, is_packed=True)
    check_rows("a", a_SRI, (num_adapters, rank, x.shape[-1]), x.dtype, is_packed=True)
    check_rows("b", b_SOR, (num_adapters, y.shape[-1], rank), x.dtype, is_packed=True)
    check_rows("scales", scales_S, (num_adapters,), torch.float32, is_packed=True)


@triton.jit
def _adapters_of(slots: tl.tensor, row: tl.tensor, is_row: tl.tensor, num_adapters: tl.tensor) -> tl.tensor:
    # Each row's adapter, counted from 1; 0: none.
    slot = tl.load(slots + row, mask=is_row, other=0)
    return tl.where((slot > 0) & (slot <= num_adapters), slot, 0)


@triton.jit
def _next_adapter(adapters: tl.tensor, adapter: tl.tensor, count: tl.tensor, num_adapters: tl.tensor) -> tl.tensor:
    # The count-th, by number, of the rows' adapters after this one; num_adapters + 1: there are not that many.
    for _ in range(count):
        adapter = tl.min(tl.where(adapters > adapter, adapters, num_adapters + 1), 0)
    return adapter


# What varies between steps is not specialized: else they compile again and again.


@triton.jit(do_not_specialize=["num_rows", "num_adapters", "tile_rows"], do_not_specialize_on_alignment=["slots"])
def _shrink_kernel(
    x: tl.tensor,
    slots: tl.tensor,
    a: tl.tensor,
    low: tl.tensor,
    num_rows: tl.tensor,
    num_adapters: tl.tensor,
    tile_rows: tl.tensor,
    x_stride: tl.tensor,
    NUM_IN: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    DOT_IN_FP32: tl.constexpr,
) -> None:
    # low[P, T, R] = x @ A.T: the sums of all pieces, or of each.
    RANK_TILES: tl.constexpr = (RANK + BLOCK_RANK - 1) // BLOCK_RANK
    rank = tl.program_id(0) % RANK_TILES * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    part = tl.program_id(0) // RANK_TILES
    i = tl.arange(0, BLOCK_ROWS)
    row = tl.program_id(1) * tile_rows + i
    adapters = _adapters_of(slots, row, (i < tile_rows) & (row < num_rows), num_adapters)
    x_rows = x + row.to(tl.int64)[:, None] * x_stride
    low_rows = low + (part.to(tl.int64) * num_rows + row)[:, None] * RANK + rank[None, :]

    adapter = _next_adapter(adapters, tl.full([], 0, tl.int32), tl.program_id(2) + 1, num_adapters)
    while adapter <= num_adapters:
        is_mine = adapters == adapter
        a_ranks = a + (adapter - 1).to(tl.int64) * (RANK * NUM_IN) + rank[:, None] * NUM_IN
        total = tl.zeros([BLOCK_ROWS, BLOCK_RANK], tl.float32)
        for piece in range(part * (PIECES // PARTS), (part + 1) * (PIECES // PARTS)):
            acc = tl.zeros([BLOCK_ROWS, BLOCK_RANK], tl.float32)
            for first in tl.range(piece * PIECE, tl.minimum((piece + 1) * PIECE, NUM_IN), BLOCK_IN):
                k = first + tl.arange(0, BLOCK_IN)
                inputs = tl.load(x_rows + k[None, :], mask=is_mine[:, None] & (k < NUM_IN)[None, :], other=0.0)
                weights = tl.load(a_ranks + k[None, :], mask=(rank < RANK)[:, None] & (k < NUM_IN)[None, :], other=0.0)
                if DOT_IN_FP32:
                    inputs, weights = inputs.to(tl.float32), weights.to(tl.float32)
                acc = tl.dot(inputs, tl.trans(weights), acc, input_precision="ieee")
            total += acc
        tl.store(low_rows, total, mask=is_mine[:, None] & (rank < RANK)[None, :])
        adapter = _next_adapter(adapters, adapter, tl.num_programs(2), num_adapters)


@triton.jit(do_not_specialize=["num_rows", "num_adapters", "tile_rows"], do_not_specialize_on_alignment=["slots"])
def _expand_kernel(
    y: tl.tensor,
    slots: tl.tensor,
    b: tl.tensor,
    low: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_adapters: tl.tensor,
    tile_rows: tl.tensor,
    y_stride: tl.tensor,
    NUM_OUT: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    DOT_IN_FP32: tl.constexpr,
) -> None:
    # out[T, O] = y + scale * (the sum of low's parts) @ B.T
    i = tl.arange(0, BLOCK_ROWS)
    row = tl.program_id(1) * tile_rows + i
    is_row = (i < tile_rows) & (row < num_rows)
    column = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_column = (column < NUM_OUT)[None, :]
    adapters = _adapters_of(slots, row, is_row, num_adapters)
    row = row.to(tl.int64)[:, None]
    y_tile = y + row * y_stride + column[None, :]
    out_tile = out + row * NUM_OUT + column[None, :]

    is_base = (is_row & (adapters == 0))[:, None] & is_column
    tl.store(out_tile, tl.load(y_tile, mask=is_base), mask=is_base)

    adapter = _next_adapter(adapters, tl.full([], 0, tl.int32), 1, num_adapters)
    while adapter <= num_adapters:
        is_mine = (adapters == adapter)[:, None]
        base = tl.load(y_tile, mask=is_mine & is_column, other=0.0)
        b_columns = b + (adapter - 1).to(tl.int64) * (NUM_OUT * RANK) + column[:, None] * RANK
        acc = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
        for first in range(0, RANK, BLOCK_RANK):
            rank = first + tl.arange(0, BLOCK_RANK)
            is_rank = (rank < RANK)[None, :]
            weights = tl.load(b_columns + rank[None, :], mask=(column < NUM_OUT)[:, None] & is_rank, other=0.0)
            total = tl.zeros([BLOCK_ROWS, BLOCK_RANK], tl.float32)
            for part in tl.static_range(PARTS):
                place = low + part * num_rows.to(tl.int64) * RANK + row * RANK + rank[None, :]
                total += tl.load(place, mask=is_mine & is_rank, other=0.0)
            inputs = total.to(weights.dtype)
            if DOT_IN_FP32:
                inputs, weights = inputs.to(tl.float32), weights.to(tl.float32)
            acc = tl.dot(inputs, tl.trans(weights), acc, input_precision="ieee")
        more = acc.to(base.dtype).to(tl.float32)
        sums = tl.fma(more, tl.load(scales + adapter - 1), base.to(tl.float32))
        tl.store(out_tile, sums.to(out.dtype.element_ty), mask=is_mine & is_column)
        adapter = _next_adapter(adapters, adapter, 1, num_adapters)
