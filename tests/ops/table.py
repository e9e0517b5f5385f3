"""OPS: every operator with its reference and its samples. A test fails for an operator that is missing here.

Samples are small, cover empty and odd sizes, and hold NaN where an operator must not read: in blocks without an owner,
behind a sequence's end, before its window.

Legend: T packed tokens, D hidden, N query heads, K KV heads, H head size, B blocks, S block size or slots, P seats, R
requests, M blocks per request, W a slot's q, k and v side by side, I and O input and output features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from omniserve import ops  # noqa: F401  registers torch.ops.omniserve
from omniserve.core.spec import SCALE_BYTES, AttentionSpec
from tests.ops import reference as references
from tests.ops.host_layout import pack_blocks, quantize_blocks, quantize_cache


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Arguments of one call."""

    label: str
    """The property that this sample has and others lack."""
    args: tuple[Any, ...]
    """Arguments in the schema's order. Clone them before a mutating operator, which changes them in place."""

    def clone(self) -> tuple[Any, ...]:
        """Return the arguments with every tensor copied, strides kept."""
        return tuple(_copy(arg) if isinstance(arg, Tensor) else arg for arg in self.args)


def _copy(tensor: Tensor) -> Tensor:
    # Tensor.clone makes a slice contiguous.
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach())


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """An operator with its reference and samples."""

    name: str
    """The operator's name in ``torch.ops.omniserve``."""
    reference: Callable[..., Tensor | None]
    """A slow and plain function with the same arguments, which mutates the same ones."""
    samples: Callable[[torch.device, torch.dtype], Iterator[Sample]]
    """(device, dtype) -> samples."""


@dataclass(frozen=True)
class AttentionShape:
    """A sample of attention."""

    label: str
    chunks: tuple[tuple[int, int], ...]
    """(query tokens, context tokens before them) of each request."""
    heads: tuple[int, int, int]
    """N, K, H."""
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    strided: bool = False
    directed: bool = False
    """Some blocks run from the right."""
    chunk: int = 0
    sinks: bool = False
    alibi: bool = False


_MIXED = ((1, 40), (5, 0), (0, 7), (17, 30), (1, 0))
_TILES = ((150, 70), (1, 300))
_FEW_TILES = ((40, 65), (1, 150))  # with more queries than the window of 33
_MIXED_SHAPES = (
    AttentionShape("no request", (), (2, 1, 16)),
    AttentionShape("requests without a query", ((0, 9), (0, 0)), (2, 2, 16)),
    AttentionShape("mixed, group 3, head size 64", _MIXED, (9, 3, 64), block_size=32),
    AttentionShape("mixed, group 1, head size 8", _MIXED, (3, 3, 8), block_size=4),
    AttentionShape("mixed, group 2, head size 24, window", _MIXED, (4, 2, 24), block_size=8, window=9),
    AttentionShape("mixed, group 7, head size 40, strided q", _MIXED, (7, 1, 40), strided=True),
    AttentionShape("mixed, softcap", _MIXED, (4, 2, 80), softcap=5.0),
    AttentionShape("mixed, head size 256, softcap and window", _MIXED, (2, 1, 256), window=20, softcap=9.0),
    AttentionShape("mixed, head size 512", _MIXED, (4, 1, 512), block_size=32),
    AttentionShape("several tiles, head size 512, window, softcap", _TILES, (2, 1, 512), 32, 90, softcap=9.0),
    AttentionShape("mixed, head size 328, directed", _MIXED, (4, 2, 328), directed=True),
    AttentionShape("several tiles of queries and keys", _TILES, (8, 4, 16), block_size=64),
    AttentionShape("window inside a long chunk", _TILES[:1], (2, 2, 16), block_size=1, window=33),
    AttentionShape("no request, directed", (), (2, 1, 16), directed=True),
    AttentionShape("directed, head size 64", _MIXED, (9, 3, 64), block_size=16, directed=True),
    AttentionShape("directed, several tiles, window", _TILES, (8, 4, 32), block_size=64, window=99, directed=True),
    AttentionShape(
        "directed, large odd blocks, softcap", _MIXED, (4, 2, 24), block_size=73, softcap=5.0, directed=True
    ),
    AttentionShape("mixed, sinks", _MIXED, (4, 2, 64), sinks=True),
    AttentionShape("directed, ALiBi", _MIXED, (6, 2, 24), block_size=8, alibi=True, directed=True),
    AttentionShape("several tiles, chunks that no tile ends with", _TILES, (8, 4, 32), block_size=64, chunk=50),
    AttentionShape(
        "sinks, ALiBi, chunks, window, softcap", _TILES, (8, 4, 16), 16, 40, 5.0, chunk=90, sinks=True, alibi=True
    ),
)
_DECODES = ((1, 0), (1, 31), (1, 128), (1, 300))
_DECODE_SHAPES = (
    AttentionShape("no request", (), (2, 1, 16)),
    AttentionShape("decode, group 3, head size 64", _DECODES, (9, 3, 64), block_size=32),
    AttentionShape("decode, group 1, head size 8", _DECODES, (2, 2, 8), block_size=4),
    AttentionShape("decode, group 2, head size 72, window", _DECODES, (4, 2, 72), window=100),
    AttentionShape("decode, group 7, head size 128, strided q", _DECODES, (7, 1, 128), strided=True),
    AttentionShape("decode, head size 256, softcap", _DECODES, (4, 2, 256), softcap=5.0),
    AttentionShape("decode, group 8, head size 512", _DECODES, (8, 1, 512), block_size=32),
    AttentionShape("decode, group 20, head size 576", _DECODES, (20, 1, 576), block_size=32),
    AttentionShape("decode, group 20, head size 488, sinks", _DECODES, (20, 1, 488), block_size=64, sinks=True),
    AttentionShape("decode, group 5, head size 128, window that cuts a pair", _DECODES, (5, 1, 128), window=64),
    AttentionShape("decode, group 4, head size 80, odd blocks", _DECODES, (8, 2, 80), block_size=5),
    AttentionShape("decode, group 12, head size 96", _DECODES, (24, 2, 96), block_size=64),
    AttentionShape("decode, window of one, softcap", _DECODES, (5, 1, 24), window=1, softcap=9.0),
    AttentionShape("decode, sinks", _DECODES, (9, 3, 64), block_size=32, sinks=True),
    AttentionShape("decode, group 12, ALiBi", _DECODES, (24, 2, 96), block_size=64, alibi=True),
    AttentionShape("decode, chunks", _DECODES, (4, 2, 64), block_size=32, chunk=77),
    AttentionShape(
        "decode, sinks, ALiBi, chunks, window", _DECODES, (4, 2, 72), window=100, chunk=150, sinks=True, alibi=True
    ),
)


def attention_args(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return paged_attention's arguments for ``shape``: seeded random keys where they are read, NaN elsewhere."""
    generator = torch.Generator().manual_seed(0)
    num_heads, kv_heads, head_size = shape.heads
    query_lens = [query for query, _ in shape.chunks]
    seq_lens = [query + context for query, context in shape.chunks]
    width = max((-(-seq_len // shape.block_size) for seq_len in seq_lens), default=1)
    num_blocks = len(seq_lens) * width + 2
    table = torch.randperm(num_blocks, generator=generator)[: len(seq_lens) * width].view(len(seq_lens), width).int()
    is_reversed = torch.rand(table.shape, generator=generator) < 0.5 if shape.directed else None
    cache = torch.full((2, num_blocks, kv_heads, shape.block_size, head_size), torch.nan)
    for request, (query_len, context_len) in enumerate(shape.chunks):
        first = AttentionSpec(scale=1.0, window=shape.window, chunk=shape.chunk).first_key(context_len)
        position = torch.arange(first, seq_lens[request])
        block, offset = table[request].long()[position // shape.block_size], position % shape.block_size
        if is_reversed is not None:
            offset = torch.where(
                is_reversed[request, position // shape.block_size], shape.block_size - 1 - offset, offset
            )
        cache[:, block, :, offset] = torch.randn(len(position), 2, kv_heads, head_size, generator=generator)
        table[request, : first // shape.block_size] = -1  # a KV manager has freed these
        table[request, -(-seq_lens[request] // shape.block_size) if query_len else 0 :] = -1
    q = torch.randn(sum(query_lens), num_heads * (2 if shape.strided else 1), head_size, generator=generator)
    q = q.to(device, dtype)[:, :num_heads]  # if strided: as cut from a fused QKV
    k_cache, v_cache = cache.to(device, dtype)
    starts = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=device)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    args = (q, k_cache, v_cache, table.to(device), starts, lens, head_size**-0.5, shape.window, shape.softcap)
    sinks = torch.randn(num_heads, generator=generator).mul(3).to(device) if shape.sinks else None
    slopes = torch.rand(num_heads, generator=generator).to(device) if shape.alibi else None
    if slopes is not None:
        slopes[0] = 0
    if shape.chunk or shape.sinks or shape.alibi:
        return (*args, is_reversed if is_reversed is None else is_reversed.to(device), shape.chunk, sinks, slopes)
    return args if is_reversed is None else (*args, is_reversed.to(device))


def attention_options(args: tuple[Any, ...]) -> dict[str, Any]:
    """Return by name those arguments of paged_attention that follow its tensors q to seq_lens."""
    names = ("scale", "window", "softcap", "reversed_RM", "chunk", "sinks_N", "alibi_slopes_N")
    return dict(zip(names, (*args[6:], *(None, 0, None, None)[len(args) - 9 :]), strict=True))


def int8_attention_args(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return paged_attention's arguments for ``shape`` with caches of int8; where nothing is read, scales are NaN."""
    q, k, v, *rest = attention_args(shape, device, dtype)
    return q, quantize_cache(k), quantize_cache(v), *rest


def _paged_attention_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for shape in _MIXED_SHAPES:
        yield Sample(label=shape.label, args=attention_args(shape, device, dtype))
    q, k, _, *others = attention_args(AttentionShape("", _MIXED, (20, 1, 576), block_size=32), device, dtype)
    yield Sample(label="latents, which are keys and values", args=(q, k, k, *others))


def _int8_attention_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for shape in _MIXED_SHAPES:
        yield Sample(label=f"{shape.label}, int8", args=int8_attention_args(shape, torch.device("cpu"), dtype))


def small_attention_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Yield the samples of paged_attention with fewer tokens and heads, for what is slow on a CPU."""
    for shape in _MIXED_SHAPES:
        num_heads, kv_heads, head_size = shape.heads
        few = min(kv_heads, 2)
        count = len(shape.chunks)
        chunks = _FEW_TILES[:count] if shape.chunks == _TILES[:count] else shape.chunks
        heads = (few * (num_heads // kv_heads), few, head_size)
        yield Sample(label=shape.label, args=attention_args(replace(shape, chunks=chunks, heads=heads), device, dtype))


def cpu_attention_args(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype, *, int8: bool = False, num_threads: int = 1
) -> tuple[Any, ...]:
    """Return cpu_attention's arguments for ``shape``, as `attention_args`; ``int8`` quantizes the pool."""
    q, k, v, table, _, lens, *numbers = attention_args(replace(shape, directed=False), device, dtype)
    pool, scales = quantize_blocks(k, v) if int8 else (pack_blocks(k, v), None)
    return q, pool, scales, table, lens, *numbers[:3], num_threads, *numbers[4:]


def _cpu_attention_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for i, shape in enumerate(_DECODE_SHAPES):
        for int8 in (False, True):
            args = cpu_attention_args(shape, device, dtype, int8=int8, num_threads=1 + i % 2)
            yield Sample(label=f"{shape.label}{', int8' if int8 else ''}", args=args)


def _store_host_kv_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for label, slots, block_size, head_size, int8 in (
        ("no token", [], 4, 16, False),
        ("all left out", [-1, -1], 4, 8, False),
        ("both of a pair, one of a pair", [4, 5, -1, 8, 11], 4, 24, False),
        ("rows, for want of pairs", [2, 8, 0], 3, 64, False),
        ("int8", [5, -1, 0, 11], 4, 24, True),
    ):
        kv = torch.randn(len(slots), 6, head_size).to(device, dtype)
        shape = (3, 2, 2, block_size, head_size)
        pool = torch.full(shape, -99 if int8 else torch.nan, dtype=torch.int8 if int8 else dtype, device=device)
        scales = torch.full(shape[:-1], torch.nan, device=device) if int8 else None
        slot_mapping = torch.tensor(slots, dtype=torch.int64, device=device)
        k, v = (kv[:, :2], kv[:, 3:5]) if slots else kv.view(2, 0, 2, head_size)
        yield Sample(label=label, args=(k, v, pool, scales, slot_mapping))


def _store_kv_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for label, slots, head_size in (
        ("no token", [], 16),
        ("all left out", [-1, -1], 8),
        ("some left out, head size 24", [5, -1, 0, 11, -1, 6], 24),
        ("first left out, last slot", [-1, 11, 3], 64),
    ):
        kv = torch.randn(len(slots), 6, head_size).to(device, dtype)
        cache = torch.full((2, 3, 2, 4, head_size), torch.nan).to(device, dtype)
        slot_mapping = torch.tensor(slots, dtype=torch.int64, device=device)
        # As cut from a fused QKV, but for the empty one: opcheck cannot copy a slice of nothing.
        k, v = (kv[:, :2], kv[:, 3:5]) if slots else kv.view(2, 0, 2, head_size)
        yield Sample(label=label, args=(k, v, cache[0], cache[1], slot_mapping))


def _int8_store_kv_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for label, slots, head_size in (
        ("int8, no token", [], 16),
        ("int8, some left out, head size 24", [5, -1, 0, 11, -1, 6], 24),
        ("int8, first left out, last slot", [-1, 11, 3], 64),
    ):
        kv = torch.randn(len(slots), 6, head_size).to(dtype)
        kv[:, 3, 0] = 0
        if slots:
            kv[-1, 1], kv[-1, 4, 2] = 0, torch.inf
        cache = torch.full((2, 3, 2, 4, head_size + SCALE_BYTES), -1, dtype=torch.int8)
        k, v = (kv[:, :2], kv[:, 3:5]) if slots else kv.view(2, 0, 2, head_size)
        yield Sample(label=label, args=(k, v, cache[0], cache[1], torch.tensor(slots, dtype=torch.int64)))


def cpu_samples(name: str, dtype: torch.dtype) -> Iterator[Sample]:
    """Yield an operator's samples on the CPU, those too that no other device takes."""
    yield from OPS[name].samples(torch.device("cpu"), dtype)
    more = {"paged_attention": _int8_attention_samples, "store_kv": _int8_store_kv_samples}
    if name in more:
        yield from more[name](dtype)


def _seat_samples(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Yield (label, rows of the step, rows elsewhere with some that hold NaN, indices of the seats)."""
    for label, num_rows, width, seats in (
        ("no seat", 3, 8, []),
        ("nothing at all", 0, 8, []),
        ("only seats", 2, 5, [3, -1]),
        ("all seats empty", 4, 8, [-1, -1]),
        ("rows and seats, odd width", 5, 7, [4, -1, 0]),
    ):
        here = torch.randn(num_rows, width)
        elsewhere = torch.full((6, width), torch.nan)
        elsewhere[[seat for seat in seats if seat >= 0]] = torch.randn(sum(seat >= 0 for seat in seats), width)
        index = torch.tensor(seats, dtype=torch.int64, device=device)
        yield label, here.to(device, dtype), elsewhere.to(device, dtype), index


def _piggyback_concat_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for label, attn, results, rows in _seat_samples(device, dtype):
        yield Sample(label=label, args=(attn, results, rows))
    attn, results = torch.randn(2, 3, 4).to(device, dtype)
    rows = torch.tensor([-1], dtype=torch.int64, device=device)
    yield Sample(label="no device row, no result", args=(attn[:0], results[:0], rows))


def _residual_store_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for label, *args in _seat_samples(device, dtype):
        yield Sample(label=label, args=tuple(args))


def _residual_fetch_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for label, hidden, store, slots in _seat_samples(device, dtype):
        yield Sample(label=label, args=(store, slots, hidden))


def _piggyback_receive_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    there, other = 2**40 + 1, 2**40 + 2
    for label, seats, wanted, as_one, width in (
        ("no seat", [], [], 0, 8),
        ("all seats empty", [-1, -1], [0, there], 1, 8),
        ("some are there, odd width", [4, -1, 0, 3, 5], [there, there, other, 0, there], 0, 7),
        ("as one, and one is not there", [4, 0, 3], [there, other, 0], 1, 8),
        ("as one, and all are there", [4, 3, -1, 5], [there, 0, 0, there], 1, 2049),
        ("drafts do as their tokens", [4, 5, 3, 2, 0, 1], [there, -1, 0, 0, other, -1], 0, 8),
        ("as one, and a token with drafts is not there", [4, 5, 0, 1], [there, -1, other, -1], 1, 8),
    ):
        index = [torch.tensor(x, dtype=torch.int64, device=device) for x in (seats, wanted, [as_one], [9])]
        flags = torch.tensor([1, there, 0, other, there, there], dtype=torch.int64, device=device)
        host, results = torch.randn(2, 6, width).to(device, dtype)
        skips, joined = (torch.tensor(x, dtype=torch.int64, device=device) for x in ([7] * 6, [5] * len(seats)))
        yield Sample(label=label, args=(*index, flags, host, results, skips, joined))


def _piggyback_send_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for label, num_rows, (num_heads, kv_heads, head_size), seats in (
        ("no seat", 3, (2, 1, 16), []),
        ("nothing at all", 0, (2, 1, 16), []),
        ("only seats", 2, (4, 2, 8), [3, -1]),
        ("all seats empty", 4, (2, 1, 16), [-1, -1]),
        ("rows and seats, odd sizes", 5, (3, 1, 5), [5, -1, 0]),
    ):
        hidden = num_heads * head_size + 2
        width = (num_heads + 2 * kv_heads) * head_size
        rows = torch.full((num_rows, hidden + width), torch.nan)
        seated = [num_rows - len(seats) + seat for seat, slot in enumerate(seats) if slot >= 0]
        rows[seated] = torch.randn(len(seated), hidden + width)
        rows = rows.to(device, dtype)
        hidden_TD, qkv = rows[:, :hidden], rows[:, hidden:].view(num_rows, num_heads + 2 * kv_heads, head_size)
        # q, k and v as cut from a fused QKV, but for the empty ones: opcheck cannot copy a slice of nothing.
        parts = (hidden_TD, *qkv.split([num_heads, kv_heads, kv_heads], 1))
        if not num_rows:
            parts = tuple(part.clone(memory_format=torch.contiguous_format) for part in parts)
        elsewhere = [torch.full((6, size), torch.nan, dtype=dtype, device=device) for size in (hidden, width)]
        index, flags, step = (torch.tensor(x, dtype=torch.int64, device=device) for x in (seats, [7] * 6, [9]))
        yield Sample(label=label, args=(*parts, index, *elsewhere, flags, step))


def linear_args(
    num_rows: int, num_in: int, num_out: int, device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x ``[T, I]``, weight ``[O, I]`` and bias ``[O]``: seeded random, with NaN behind each row of x."""
    generator = torch.Generator().manual_seed(0)
    x = torch.full((num_rows, num_in + 8), torch.nan)
    x[:, :num_in] = torch.randn(num_rows, num_in, generator=generator)
    weight = torch.randn(num_out, num_in, generator=generator) / max(1, num_in) ** 0.5
    bias_O = torch.randn(num_out, generator=generator)
    x_TI = x.to(device, dtype)[:, :num_in]
    # opcheck cannot copy a slice of nothing.
    x_TI = x_TI if x_TI.numel() else x_TI.contiguous()
    return x_TI, weight.to(device, weight_dtype), bias_O.to(device, dtype)


def empty_packed(num_out: int, num_in: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for a packed weight, which holds NaN."""
    at_once = 2 if dtype is torch.bfloat16 else 1
    shape = (-(-num_out // references.PANEL), -(-num_in // at_once), references.PANEL * at_once)
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def packed_weight(weight_OI: Tensor) -> Tensor:
    """Return a weight packed, by the reference."""
    packed = empty_packed(*weight_OI.shape, weight_OI.dtype, weight_OI.device)
    references.pack_linear(weight_OI, packed)
    return packed


_LINEAR_SIZES = (
    ("no row", 0, 32, 8),
    ("no output feature", 2, 32, 0),
    ("no input feature", 3, 0, 5),
    ("one of each", 1, 1, 1),
    ("one row, whole vectors", 1, 96, 64),
    ("two rows, less than a vector", 2, 7, 10),
    ("three rows, rest of a vector", 3, 45, 33),
    ("rest of a block of rows, several threads", 7, 200, 203),
    ("many rows", 33, 72, 50),
    ("several pieces of the inputs", 14, 2120, 40),
    ("several parts of the rows", 250, 40, 70),
)


def _pack_linear_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for label, _, num_in, num_out in _LINEAR_SIZES[1:9]:
        _, weight_OI, _ = linear_args(0, num_in, num_out, device, dtype, dtype)
        yield Sample(label=label, args=(weight_OI, empty_packed(num_out, num_in, dtype, device)))


def _packed_rows_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for label, num_ids, num_in, num_out in (
        ("no row", 0, 32, 8),
        ("no input feature", 3, 0, 5),
        ("one of each", 1, 1, 1),
        ("an odd row", 2, 7, 10),
        ("several threads", 40, 1000, 70),
    ):
        _, weight_OI, _ = linear_args(0, num_in, num_out, device, dtype, dtype)
        ids = torch.randint(num_out, (num_ids,), generator=torch.Generator().manual_seed(0)).to(device)
        yield Sample(label=label, args=(ids, packed_weight(weight_OI), num_in, num_out))
    yield Sample(label="rows of rows", args=(ids.view(4, 10), packed_weight(weight_OI), num_in, num_out))


def _packed_linear_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for label, num_rows, num_in, num_out in _LINEAR_SIZES:
        x_TI, weight_OI, bias_O = linear_args(num_rows, num_in, num_out, device, dtype, dtype)
        yield Sample(label=label, args=(x_TI, packed_weight(weight_OI), None, num_out))
        yield Sample(label=f"{label}, bias", args=(x_TI, packed_weight(weight_OI), bias_O, num_out))
        x_TI, weight_OI, bias_O = linear_args(num_rows, num_in, num_out, device, torch.float32, torch.bfloat16)
        args = (x_TI, packed_weight(weight_OI), bias_O, num_out)
        yield Sample(label=f"{label}, fp32 with a bf16 weight", args=args)
    x_TI, weight_OI, _ = linear_args(12, 40, 70, device, dtype, dtype)
    packed = packed_weight(weight_OI)
    yield Sample(label="rows of rows", args=(x_TI.reshape(3, 4, 40), packed, None, 70))
    yield Sample(label="rows that lie apart", args=(x_TI.reshape(3, 4, 40).transpose(0, 1), packed, None, 70))
    yield Sample(label="inputs that lie apart", args=(x_TI.T.contiguous().T, packed, None, 70))
    yield Sample(label="one row of rows", args=(x_TI[3], packed, None, 70))


def _packed_heads_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def args(num_rows: int, num_heads: int, num_in: int, num_out: int, *dtypes: torch.dtype) -> tuple[Tensor, Tensor]:
        heads = [linear_args(num_rows, num_in, num_out, device, *dtypes) for _ in range(num_heads)]
        packed = [packed_weight(weight_OI * (1 - n / 8)) for n, (_, weight_OI, _) in enumerate(heads)]
        return torch.stack([x_TI + n / 4 for n, (x_TI, _, _) in enumerate(heads)], dim=1), torch.stack(packed)

    for sizes in ((0, 2, 8, 8), (1, 1, 5, 3), (3, 2, 16, 33), (65, 5, 40, 64), (2, 3, 7, 0)):
        label = "{} rows, {} heads, {} to {}".format(*sizes)
        x_TNI, packed = args(*sizes, dtype, dtype)
        yield Sample(label=label, args=(x_TNI, packed, sizes[3]))
        longer_TNI = torch.cat([x_TNI, x_TNI], dim=2)
        yield Sample(label=f"{label}, of longer heads", args=(longer_TNI[..., sizes[2] :], packed, sizes[3]))
        x_TNI, packed = args(*sizes, torch.float32, torch.bfloat16)
        yield Sample(label=f"{label}, fp32 with bf16 weights", args=(x_TNI, packed, sizes[3]))
    x_TNI, packed = args(3, 2, 16, 33, dtype, dtype)
    yield Sample(label="inputs that lie apart", args=(x_TNI.mT.contiguous().mT, packed, 33))


def dense_lora_args(
    slots: tuple[int, ...], num_in: int, num_out: int, rank: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return the arguments of ``add_lora`` on CUDA for three adapters and rows with these slots.

    The results are of about 1.
    """
    generator = torch.Generator().manual_seed(len(slots))

    def random(*shape: int, size: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * size).to(device, dtype)

    a, b = random(3, rank, num_in, size=max(1, num_in) ** -0.5), random(3, num_out, rank, size=max(1, rank) ** -0.5)
    rows = random(len(slots), num_out), random(len(slots), num_in)
    slots_T = torch.tensor(slots, dtype=torch.int32, device=device)
    return *rows, slots_T, a, b, torch.tensor([0.5, 2.0, 0.7], device=device)


def lora_args(
    slots: tuple[int, ...], num_in: int, num_out: int, rank: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return the arguments of ``add_lora``, as `dense_lora_args`, with packed weights."""
    *rows, a_SRI, b_SOR, scales = dense_lora_args(slots, num_in, num_out, rank, device, dtype)
    return *rows, packed_weight(a_SRI.flatten(0, 1)), torch.stack([*map(packed_weight, b_SOR)]), scales


def _add_lora_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for label, slots, num_in, num_out, rank in (
        ("no row", (), 32, 8, 8),
        ("no output feature", (1, 2), 32, 0, 8),
        ("one row", (2,), 96, 64, 8),
        ("no row with an adapter", (0, 0, 0), 40, 50, 8),
        ("slots that are none", (-1, 4, 2**31 - 1, -(2**31), 3), 40, 50, 8),
        ("rows of all", (3, 0, 1, 2, 1, 3, 0), 45, 70, 16),
        ("one adapter of many rows, several parts", (2,) * 250, 40, 70, 16),
        ("turns, several threads", (1, 2, 3, 0) * 9, 200, 300, 40),
        ("several pieces of the inputs", (1, 3, 1), 2120, 40, 8),
        ("panels of several adapters and adapters of several panels", (1, 2, 3, 2, 0, 1), 40, 70, 24),
        ("a high rank", (3, 1), 40, 33, 264),
    ):
        yield Sample(label=label, args=lora_args(slots, num_in, num_out, rank, device, dtype))
    y, x, *others = lora_args((1, 0, 2, 3), 40, 70, 8, device, dtype)
    yield Sample(label="rows of rows", args=(y.view(4, 1, 70), x.view(2, 2, 40), *others))
    yield Sample(label="inputs that lie apart", args=(y.T.contiguous().T, x.T.contiguous().T, *others))


@dataclass(frozen=True)
class CodeForm:
    """A form of codes: the last arguments of ``quantized_linear``."""

    bits: int
    scales: int
    group: int

    @property
    def arguments(self) -> tuple[int, int, int]:
        """What the operators take."""
        return self.bits, self.scales, self.group


CODE_FORMS = (
    CodeForm(4, references.F16, 32),
    CodeForm(5, references.F16, 32),
    CodeForm(8, references.F16, 32),
    CodeForm(4, references.F32, 8),
    CodeForm(8, references.F32, 520),
    CodeForm(4, references.AFFINE16, 32),
    CodeForm(5, references.AFFINE16, 32),
    CodeForm(4, references.AFFINE32, 64),
    CodeForm(8, references.AFFINE32, 128),
    CodeForm(4, references.K_SCALES, 32),
    CodeForm(5, references.K_SCALES, 32),
    CodeForm(6, references.K_SIGNED, 16),
    CodeForm(4, references.F32, 128),
    CodeForm(8, references.F32, 24),
    CodeForm(5, references.AFFINE16, 96),
    CodeForm(4, references.AFFINE32, 40),
)
"""Every pair of bits and scales that the kernels know, and some with other groups."""


def random_codes(form: CodeForm, num_out: int, num_in: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return codes ``[O, I]`` and what a record holds beside them, seeded random; results are of about 1."""
    generator = torch.Generator().manual_seed(0)
    block = references.block_of(form.scales, form.group)
    num_records = -(-num_in // block)
    num_groups = num_records * (block // form.group)
    zero = 2 ** (form.bits - 1)
    size = 1.7 / zero / max(1, num_in) ** 0.5  # the deviation of codes is 0.58 times their zero

    def numbers(count: int, factor: float) -> Tensor:
        return (torch.rand(num_out, count, generator=generator) + 0.5) * factor

    def signed(values: Tensor) -> Tensor:
        return torch.where(torch.rand(values.shape, generator=generator) < 0.5, -values, values)

    def small(low: int, high: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, (num_out, num_groups), generator=generator).to(dtype)

    codes = torch.randint(0, 2**form.bits, (num_out, num_in), generator=generator).to(torch.uint8)
    if form.scales == references.K_SCALES:
        d, e = numbers(num_records, size / 320), numbers(num_records, size * zero / 320)
        return codes, (signed(d).half(), e.half(), small(0, 256, torch.uint8), small(0, 256, torch.uint8))
    if form.scales == references.K_SIGNED:
        return codes, (numbers(num_records, size / 64).half(), small(-128, 128, torch.int8))
    scale = signed(numbers(num_groups, size))
    dtype = torch.float16 if form.scales in (references.F16, references.AFFINE16) else torch.float32
    if form.scales not in references.WITH_OFFSET:
        return codes, (scale.to(dtype),)
    return codes, (scale.to(dtype), (-scale * zero * numbers(num_groups, 1)).to(dtype))


def packed_codes(form: CodeForm, num_out: int, num_in: int) -> Tensor:
    """Return a weight of random codes, packed by the reference."""
    return references.pack_codes(*random_codes(form, num_out, num_in), *form.arguments)


_QUANTIZED_SIZES = (
    ("no row", 0, 64, 8),
    ("no output feature", 2, 64, 0),
    ("no input feature", 3, 0, 5),
    ("one of each", 1, 1, 1),
    ("one row, several threads", 1, 1100, 203),
    ("four rows", 4, 256, 64),
    ("five rows", 5, 264, 65),
    ("eight rows, an odd row", 8, 45, 33),
    ("nine rows, less than a group", 9, 7, 31),
    ("many rows", 33, 520, 50),
    ("several pieces of the inputs", 14, 2120, 40),
    ("several parts of the rows", 270, 72, 70),
)


def _quantized_linear_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for number, form in enumerate(CODE_FORMS):
        # A size of each kind: empty, few rows, some rows, many rows.
        for label, num_rows, num_in, num_out in _QUANTIZED_SIZES[number % 3 :: 3]:
            x_TI, _, bias_O = linear_args(num_rows, num_in, num_out, device, dtype, dtype)
            packed = packed_codes(form, num_out, num_in).to(device)
            args = (x_TI, packed, bias_O if num_rows % 2 else None, num_out, *form.arguments)
            yield Sample(label=f"{label}, {form.arguments}", args=args)
    form = CODE_FORMS[0]
    x_TI, _, _ = linear_args(12, 40, 70, device, dtype, dtype)
    packed = packed_codes(form, 70, 40).to(device)
    yield Sample(label="rows that lie apart", args=(x_TI.reshape(3, 4, 40).transpose(0, 1), packed, None, 70, 4, 0, 32))
    yield Sample(label="inputs that lie apart", args=(x_TI.T.contiguous().T, packed, None, 70, *form.arguments))
    yield Sample(label="one row of rows", args=(x_TI[3], packed, None, 70, *form.arguments))
    order_I = torch.randperm(40, generator=torch.Generator().manual_seed(0)).int().to(device)
    args = (x_TI, packed, None, 70, *form.arguments, order_I)
    yield Sample(label="inputs in another order", args=args)
    yield Sample(label="few rows, inputs in another order", args=(x_TI[:3], *args[1:]))


def int8_weight(num_out: int, num_in: int) -> tuple[Tensor, Tensor]:
    """Return random codes ``[O, I]`` and scales ``[O]``, seeded random; results are of about 1."""
    generator = torch.Generator().manual_seed(0)
    codes_OI = torch.randint(-128, 128, (num_out, num_in), generator=generator).to(torch.int8)
    return codes_OI, (torch.rand(num_out, generator=generator) + 0.5) / 74 / max(1, num_in) ** 0.5


def _int8_linear_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for label, num_rows, num_in, num_out in _QUANTIZED_SIZES:
        x_TI, _, bias_O = linear_args(num_rows, num_in, num_out, device, dtype, dtype)
        packed = references.pack_int8(*int8_weight(num_out, num_in)).to(device)
        fixed, of_rows = torch.tensor([0.02], device=device), torch.full((num_rows, 1), 0.02, device=device)
        of_rows[::3] = 0.0
        for name, x_scale in (("own", None), ("fixed", fixed), ("of rows", of_rows)):
            args = (x_TI, packed, bias_O if num_rows % 2 else None, num_out, x_scale)
            yield Sample(label=f"{label}, {name}", args=args)
    x_TI, _, _ = linear_args(12, 40, 70, device, dtype, dtype)
    packed = references.pack_int8(*int8_weight(70, 40)).to(device)
    yield Sample(label="rows that lie apart", args=(x_TI.reshape(3, 4, 40).transpose(0, 1), packed, None, 70))
    yield Sample(label="inputs that lie apart", args=(x_TI.T.contiguous().T, packed, None, 70))
    yield Sample(
        label="a row of zeros", args=(x_TI * (torch.arange(12, device=device)[:, None] != 5), packed, None, 70)
    )


def _quantized_rows_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(0)
    for form in CODE_FORMS:
        for label, num_ids, num_in, num_out in (
            ("no row", 0, 32, 8),
            ("no input feature", 3, 0, 5),
            ("one of each", 1, 1, 1),
            ("odd rows", 50, 301, 70),
        ):
            ids = torch.randint(num_out, (num_ids,), generator=generator).to(device)
            args = (ids, packed_codes(form, num_out, num_in).to(device), num_in, num_out, *form.arguments)
            yield Sample(label=f"{label}, {form.arguments}", args=args)
    yield Sample(label="rows of rows, several threads", args=(ids.view(5, 10).repeat(1, 2), *args[1:]))


OPS: dict[str, OpSpec] = {
    reference.__name__: OpSpec(name=reference.__name__, reference=reference, samples=samples)
    for reference, samples in (
        (references.store_kv, _store_kv_samples),
        (references.paged_attention, _paged_attention_samples),
        (references.cpu_attention, _cpu_attention_samples),
        (references.store_host_kv, _store_host_kv_samples),
        (references.piggyback_concat, _piggyback_concat_samples),
        (references.residual_store, _residual_store_samples),
        (references.residual_fetch, _residual_fetch_samples),
        (references.piggyback_receive, _piggyback_receive_samples),
        (references.piggyback_send, _piggyback_send_samples),
        (references.pack_linear, _pack_linear_samples),
        (references.packed_linear, _packed_linear_samples),
        (references.packed_heads, _packed_heads_samples),
        (references.packed_rows, _packed_rows_samples),
        (references.add_lora, _add_lora_samples),
        (references.quantized_linear, _quantized_linear_samples),
        (references.int8_linear, _int8_linear_samples),
        (references.quantized_rows, _quantized_rows_samples),
    )
}
