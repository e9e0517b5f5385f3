"""Decode attention over an arena: what is computed; our, torch's and vLLM's way to do it; and what is right.

Every candidate sees the same bytes through its own layout, so that what one of them touches is as cold and in the same
pages as for the others. Legend: R requests, N query heads, K KV heads, H head size, S block size, B blocks of a layer,
M blocks of the longest request, T tokens of one request.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F

import omniserve.ops  # noqa: F401  loads torch.ops.omniserve
from benchmarks.common.bandwidth import Arena

BLOCK_SIZE, PEER_BLOCK_SIZE = 64, 128
"""Tokens in a block of our pool, and of vLLM's, whose own choice on CPUs this is."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A decode step of one layer: a query token for each request, queries and KV in bf16."""

    num_heads: int
    kv_heads: int
    head_size: int
    context_lens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.context_lens)

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V."""
        return self.num_tokens * self.kv_heads * 2 * self.head_size * 2

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_size)

    def queries(self, seed: int) -> torch.Tensor:
        """Return N(0, 1) queries ``[R, N, H]``."""
        generator = torch.Generator().manual_seed(seed)
        shape = (len(self.context_lens), self.num_heads, self.head_size)
        return torch.randn(shape, generator=generator).bfloat16()


class Candidate(Protocol):
    """A way to compute a layer's decode attention over an arena."""

    name: str
    num_layers: int
    """Layers that fit into the arena; walking all of them is a cold pass over it."""
    layer_bytes: int
    """K and V that one layer's attention has to read."""

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
    """Return as many tensors of ``shape`` as fit into the arena, one behind the other."""
    layer_bytes = math.prod(shape) * dtype.itemsize
    count = arena.num_bytes // layer_bytes
    if count == 0:
        raise ValueError(f"one layer has {layer_bytes} bytes, the arena {arena.num_bytes}")
    return list(arena.bytes[: count * layer_bytes].view(dtype).view(count, *shape).unbind())


class OmniServe:
    """``torch.ops.omniserve.cpu_attention`` over the host pool ``[L, B, K, 2, S, H]``."""

    name = "ours"

    def __init__(self, work: Work, arena: Arena, num_threads: int, *, seed: int) -> None:
        self._work, self._threads = work, num_threads
        self._paging = Paging(work.context_lens, BLOCK_SIZE, seed)
        shape = (self._paging.num_blocks, work.kv_heads, 2, BLOCK_SIZE, work.head_size)
        self._pools = arena_layers(arena, torch.bfloat16, shape)
        self.num_layers = len(self._pools)
        self.layer_bytes = work.num_bytes
        self._queries = work.queries(seed)

    def store(self, request: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        slots = self._paging.slots(request)
        torch.ops.omniserve.store_host_kv(k_TKH, v_TKH, self._pools[0], None, slots)

    def run(self, layer: int) -> torch.Tensor:
        paging = self._paging
        return torch.ops.omniserve.cpu_attention(
            self._queries, self._pools[layer], None, paging.table_RM, paging.seq_lens_R,
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
        elements = self.layer_bytes // 2
        self._layers = [self._split(flat) for flat in arena_layers(arena, torch.bfloat16, (elements,))]
        self.num_layers = len(self._layers)
        heads = (work.kv_heads, -1) if grouped else (work.num_heads, 1)
        self._queries = work.queries(seed).unflatten(1, heads)[:, None]  # [R, 1, K, N/K, H] or [R, 1, N, 1, H]

    def _split(self, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        work = self._work
        per_token = work.kv_heads * work.head_size
        parts = iter(flat.split([length * per_token for length in work.context_lens for _ in "kv"]))
        shapes = [(1, work.kv_heads, length, work.head_size) for length in work.context_lens]
        return [(next(parts).view(shape), next(parts).view(shape)) for shape in shapes]

    def store(self, request: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        k, v = self._layers[0][request]
        k[0] = k_TKH.transpose(0, 1)
        v[0] = v_TKH.transpose(0, 1)

    def run(self, layer: int) -> torch.Tensor:
        attend = functools.partial(
            F.scaled_dot_product_attention, scale=self._work.scale, enable_gqa=self._enable_gqa
        )  # fmt: skip
        pairs = zip(self._queries, self._layers[layer], strict=True)
        return torch.stack([attend(q, k, v).flatten(0, 2) for q, (k, v) in pairs])


@dataclass(frozen=True, kw_only=True)
class Peer:
    """vLLM's CPU extension, loaded into this process."""

    version: str
    library: str
    """The library's file name: there is one for each instruction set."""


def load_peer(folder: Path) -> Peer:
    """Load vLLM's CPU operators from a virtual environment, or from a folder with an unpacked wheel.

    Nothing of it is imported: its Python part has dependencies of its own, its operators only want torch.

    Raises:
        RuntimeError: They are not there, or are of another torch.
    """
    folder = next(folder.glob("lib/python*/site-packages"), folder)
    # The choice that vLLM itself makes (vllm/platforms/cpu.py).
    name = "_C_AVX2.abi3.so"
    if torch.cpu._is_avx512_supported():
        name = "_C.abi3.so" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512.abi3.so"
    path = folder / "vllm" / name
    try:
        torch.ops.load_library(path)
        torch.ops._C.cpu_attention_with_kv_cache  # noqa: B018  raises if the library does not have it
    except (OSError, AttributeError) as error:
        raise RuntimeError(
            f"{path} does not give vLLM's CPU attention to torch {torch.__version__}: {error}. A wheel works with the "
            "torch version it was built for, which its METADATA names."
        ) from error
    versions = [d.version for d in importlib.metadata.distributions(path=[str(folder)]) if "vllm" in d.name]
    return Peer(version=versions[0] if versions else "of unknown version", library=name)


class VLLM:
    """vLLM's CPU paged attention, called as its backend calls it (vllm/v1/attention/backends/cpu_attn.py).

    Its scheduler metadata is made once, outside of what is timed: an engine makes it once a step for all layers.
    """

    def __init__(self, work: Work, arena: Arena, peer: Peer, *, seed: int) -> None:
        self.name = f"vLLM {peer.version}"
        self._work = work
        self._paging = Paging(work.context_lens, PEER_BLOCK_SIZE, seed)
        self.isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
        # Cache [B, K, S, 2H], which the backend views as [B, K, 2S, H] and halves.
        shape = (self._paging.num_blocks, work.kv_heads, 2 * PEER_BLOCK_SIZE, work.head_size)
        self._caches = [tuple(layer.chunk(2, dim=2)) for layer in arena_layers(arena, torch.bfloat16, shape)]
        self.num_layers = len(self._caches)
        self.layer_bytes = work.num_bytes
        self._queries = work.queries(seed)
        self._query_starts = torch.arange(len(work.context_lens) + 1, dtype=torch.int32)
        self._metadata = torch.ops._C.get_scheduler_metadata(
            len(work.context_lens), work.num_heads, work.kv_heads, work.head_size, self._paging.seq_lens_R,
            torch.bfloat16, self._query_starts, True, -1, self.isa, True, None, "auto",
        )  # fmt: skip

    def store(self, request: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        k_cache, v_cache = self._caches[0]
        slots = self._paging.slots(request)
        torch.ops._C.cpu_attn_reshape_and_cache(k_TKH, v_TKH, k_cache, v_cache, slots, self.isa, 1.0, 1.0, "auto")

    def run(self, layer: int) -> torch.Tensor:
        k_cache, v_cache = self._caches[layer]
        out = torch.empty_like(self._queries)
        torch.ops._C.cpu_attention_with_kv_cache(
            self._queries, k_cache, v_cache, out, self._query_starts, self._paging.seq_lens_R, self._work.scale, True,
            None, -1, self._paging.table_RM, 0.0, self._metadata, None, None, 1.0, 1.0, "auto",
        )  # fmt: skip
        return out


def check(candidate: Candidate, work: Work, seed: int) -> float:
    """Return the RMS error of layer 0, relative to float64, for the shortest, a middle and the longest request."""
    by_length = sorted(range(len(work.context_lens)), key=work.context_lens.__getitem__)
    requests = sorted({by_length[0], by_length[len(by_length) // 2], by_length[-1]})
    queries, expected = work.queries(seed), []
    for request in requests:
        generator = torch.Generator().manual_seed(seed + 1 + request)
        shape = (2, work.context_lens[request], work.kv_heads, work.head_size)
        k_TKH, v_TKH = torch.randn(shape, generator=generator).bfloat16()
        candidate.store(request, k_TKH, v_TKH)
        expected.append(reference(queries[request], k_TKH, v_TKH, work.scale))
    wanted = torch.stack(expected)
    error = float((candidate.run(0)[requests].double() - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt())
    if not error < 0.05:
        raise RuntimeError(f"{candidate.name}: RMS error {error:.3g} relative to float64 attention")
    return error


def reference(q_NH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, scale: float) -> torch.Tensor:
    """Return one query's attention ``[N, H]`` in float64."""
    q_KGH = q_NH.double().unflatten(0, (k_TKH.shape[1], -1))
    weights_KGT = torch.einsum("kgh,tkh->kgt", q_KGH, k_TKH.double()).mul_(scale).softmax(-1)
    return torch.einsum("kgt,tkh->kgh", weights_KGT, v_TKH.double()).flatten(0, 1)
