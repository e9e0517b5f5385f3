"""Decode attention over an arena: what is computed, ours and torch's way to do it, and what is right.

Every candidate sees the same bytes through its own layout, so that what one of them touches is as cold and in the same
pages as for the others. Legend: R requests, N query heads, K KV heads, H head size, S block size, B blocks of a layer,
M blocks of the longest request, T tokens of one request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

import omniserve.ops  # noqa: F401  loads torch.ops.omniserve
from benchmarks.attention.bandwidth import Arena


@dataclass(frozen=True, kw_only=True)
class Work:
    """One decode step of one layer: a query token for each request."""

    num_heads: int
    kv_heads: int
    head_size: int
    context_lens: tuple[int, ...]
    dtype: torch.dtype
    """Of queries, and of K and V unless a candidate stores them otherwise."""

    @property
    def num_tokens(self) -> int:
        return sum(self.context_lens)

    @property
    def num_bytes(self) -> int:
        """K and V, in the work's dtype."""
        return self.num_tokens * self.kv_heads * 2 * self.head_size * self.dtype.itemsize

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_size)

    def queries(self, seed: int) -> torch.Tensor:
        """Return N(0, 1) queries ``[R, N, H]``."""
        generator = torch.Generator().manual_seed(seed)
        shape = (len(self.context_lens), self.num_heads, self.head_size)
        return torch.randn(shape, generator=generator).to(self.dtype)


class Candidate(Protocol):
    """Something that computes a layer's decode attention over an arena."""

    name: str
    num_layers: int
    """Layers that fit into the arena; walking all of them is a cold pass over it."""
    layer_bytes: int
    """K and V (and scales) that one layer's attention has to read."""

    def store(self, request: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        """Put a request's whole context into layer 0."""

    def run(self, layer: int) -> torch.Tensor:
        """Return ``[R, N, H]``."""


class Paging:
    """A block table over all of a layer's blocks in random order, and what follows from it."""

    def __init__(self, context_lens: Sequence[int], block_size: int, seed: int) -> None:
        self.block_size = block_size
        counts = [-(-length // block_size) for length in context_lens]
        self.num_blocks = sum(counts)
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
        self.table_RM = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, blocks in zip(self.table_RM, order.split(counts), strict=True):
            row[: len(blocks)] = blocks
        self.seq_lens_R = torch.tensor(context_lens, dtype=torch.int32)

    def slots(self, request: int) -> torch.Tensor:
        """Return the slot of each token of a request, ``[T]`` int64."""
        positions = torch.arange(int(self.seq_lens_R[request]))
        return self.table_RM[request, positions // self.block_size].long() * self.block_size + (
            positions % self.block_size
        )


def arena_layers(arena: Arena, dtype: torch.dtype, shape: Sequence[int]) -> list[torch.Tensor]:
    """Return as many tensors of ``shape`` as fit into the arena, one behind the other.

    Raises:
        ValueError: Not even one does.
    """
    layer_bytes = math.prod(shape) * dtype.itemsize
    count = arena.num_bytes // layer_bytes
    if count == 0:
        raise ValueError(f"one layer has {layer_bytes} bytes, the arena {arena.num_bytes}")
    return list(arena.bytes[: count * layer_bytes].view(dtype).view(count, *shape).unbind())


class OmniServe:
    """``torch.ops.omniserve.cpu_attention`` over the host pool ``[L, B, K, 2, S, H]``.

    Args:
        kv_dtype: What the pool holds: the work's dtype, or int8 with a scale per token, KV head and plane.
    """

    def __init__(
        self, work: Work, arena: Arena, num_threads: int, *, block_size: int, kv_dtype: torch.dtype, seed: int
    ) -> None:
        self.name = "ours" if kv_dtype == work.dtype else f"ours {str(kv_dtype).removeprefix('torch.')}"
        self._work, self._threads = work, num_threads
        self._paging = Paging(work.context_lens, block_size, seed)
        shape = (self._paging.num_blocks, work.kv_heads, 2, block_size, work.head_size)
        self._pools = arena_layers(arena, kv_dtype, shape)
        self.num_layers = len(self._pools)
        row_bytes = work.head_size * kv_dtype.itemsize
        self._scales: list[torch.Tensor | None] = [None] * self.num_layers
        if kv_dtype == torch.int8:
            row_bytes += 4
            self._scales = list(torch.full((self.num_layers, *shape[:-1]), 1 / 64).unbind())
        self.layer_bytes = work.num_tokens * work.kv_heads * 2 * row_bytes
        self._queries = work.queries(seed)

    def store(self, request: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        slots = self._paging.slots(request)
        torch.ops.omniserve.store_host_kv(k_TKH, v_TKH, self._pools[0], self._scales[0], slots)

    def run(self, layer: int) -> torch.Tensor:
        paging = self._paging
        return torch.ops.omniserve.cpu_attention(
            self._queries, self._pools[layer], self._scales[layer], paging.table_RM, paging.seq_lens_R,
            self._work.scale, 0, 0.0, self._threads,
        )  # fmt: skip


class TorchSDPA:
    """``scaled_dot_product_attention``, one call a request, K and V of each request contiguous ``[K, T, H]``.

    Args:
        grouped: Pass the query heads of a KV head as that head's query rows, ``[1, K, N/K, H]``, instead of
            ``enable_gqa``: the same result (there is no mask), but K and V are read once for the group.
    """

    def __init__(self, work: Work, arena: Arena, *, grouped: bool, seed: int) -> None:
        self.name = "SDPA grouped" if grouped else "SDPA"
        self._work, self._enable_gqa = work, not grouped
        self.layer_bytes = work.num_bytes
        elements = self.layer_bytes // work.dtype.itemsize
        self._layers = [self._split(flat) for flat in arena_layers(arena, work.dtype, (elements,))]
        self.num_layers = len(self._layers)
        heads = (work.kv_heads, -1) if grouped else (work.num_heads, 1)
        self._queries = work.queries(seed).unflatten(1, heads)[:, None]  # [R, 1, K, N/K, H] or [R, 1, N, 1, H]

    def _split(self, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        work = self._work
        per_token = work.kv_heads * work.head_size
        parts = iter(flat.split([length * per_token for length in work.context_lens for _ in "kv"]))
        return [
            (
                next(parts).view(1, work.kv_heads, length, work.head_size),
                next(parts).view(1, work.kv_heads, length, work.head_size),
            )
            for length in work.context_lens
        ]

    def store(self, request: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        k, v = self._layers[0][request]
        k[0] = k_TKH.transpose(0, 1)
        v[0] = v_TKH.transpose(0, 1)

    def run(self, layer: int) -> torch.Tensor:
        return torch.stack(
            [
                F.scaled_dot_product_attention(q, k, v, scale=self._work.scale, enable_gqa=self._enable_gqa).flatten(
                    0, 2
                )
                for q, (k, v) in zip(self._queries, self._layers[layer], strict=True)
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """Distance from the float64 result, as root mean square relative to the result's."""

    error: float
    past_rounding: float
    """From the result rounded to the output's dtype: what is left is the kernel's own error, as elements that it
    rounds to the other neighbour."""


def check(candidate: Candidate, work: Work, seed: int) -> Deviation:
    """Compare layer 0's result for the shortest, a middle and the longest request with float64.

    Raises:
        RuntimeError: The result is not attention's.
    """
    by_length = sorted(range(len(work.context_lens)), key=work.context_lens.__getitem__)
    requests = sorted({by_length[0], by_length[len(by_length) // 2], by_length[-1]})
    contexts = [_context(work, request, seed) for request in requests]
    for request, (k_TKH, v_TKH) in zip(requests, contexts, strict=True):
        candidate.store(request, k_TKH, v_TKH)
    got = candidate.run(0)[requests]
    queries = work.queries(seed)
    expected = torch.stack(
        [reference(queries[request], k, v, work.scale) for request, (k, v) in zip(requests, contexts, strict=True)]
    )
    deviation = Deviation(
        error=_distance(got, expected), past_rounding=_distance(got, expected.to(work.dtype).double())
    )
    if not deviation.error < 0.05:
        raise RuntimeError(f"{candidate.name}: RMS error {deviation.error:.3g} relative to float64 attention")
    return deviation


def _context(work: Work, request: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + 1 + request)
    shape = (2, work.context_lens[request], work.kv_heads, work.head_size)
    k_TKH, v_TKH = torch.randn(shape, generator=generator).to(work.dtype)
    return k_TKH, v_TKH


def reference(q_NH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, scale: float) -> torch.Tensor:
    """Return one request's attention ``[N, H]`` in float64."""
    kv_heads = k_TKH.shape[1]
    q_KGH = q_NH.double().unflatten(0, (kv_heads, -1))
    weights_KGT = torch.einsum("kgh,tkh->kgt", q_KGH, k_TKH.double()).mul_(scale).softmax(-1)
    return torch.einsum("kgt,tkh->kgh", weights_KGT, v_TKH.double()).flatten(0, 1)


def _distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    difference = got.double() - expected
    return float(difference.pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())


def endless_layers(candidate: Candidate) -> Iterator[int]:
    """Yield layers 0 .. num_layers - 1 again and again: nothing is read again before the whole arena was."""
    while True:
        yield from range(candidate.num_layers)
