"""Memory that is as large and as fast as a benchmark needs, and how fast this machine reads it.

The readers run on the OpenMP threads of the calling thread, the ones that torch and the operators use as well.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
import random
import statistics
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.record import ROOT

HUGE_PAGE_BYTES = 2 << 20
SOURCE = ROOT / "benchmarks" / "csrc" / "read_bandwidth.cpp"
TILE_BYTES = 16 << 20


@functools.cache
def library() -> ctypes.CDLL:
    """Build (once per source and compiler call) and load the readers."""
    command = [os.environ.get("CXX", "c++"), "-O3", "-std=c++17", "-fopenmp", "-fPIC", "-shared", str(SOURCE)]
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(command).encode()).hexdigest()[:12]
    path = ROOT / ".cache" / "benchmarks" / f"read_bandwidth-{digest}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stderr}")
        unfinished.rename(path)
    loaded = ctypes.CDLL(str(path))
    pointer, size, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    loaded.read_pieces.argtypes = [pointer, pointer, size, size, integer, size, integer]
    loaded.read_pieces.restype = ctypes.c_uint64
    loaded.fill.argtypes = [pointer, size, pointer, size, integer]
    loaded.fill.restype = None
    loaded.pin_team.argtypes = [pointer, integer]
    loaded.pin_team.restype = integer
    return loaded


def pin_team(cpus: Sequence[int]) -> None:
    """Pin the calling thread's OpenMP team of ``len(cpus)`` threads, itself first, to one CPU each.

    libgomp ends and starts threads whenever the size of a team changes: pin again after any call that may have.
    """
    error = library().pin_team((ctypes.c_int * len(cpus))(*cpus), len(cpus))
    if error:
        raise OSError(error, f"cannot pin {len(cpus)} threads to CPUs {list(cpus)}: {os.strerror(error)}")


class Arena:
    """Anonymous memory in 2 MiB pages, aligned to 2 MiB.

    ``bytes`` is a flat uint8 tensor over it; it stays mapped as long as any tensor views it.

    Args:
        num_bytes: Size; rounded up to whole huge pages.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        mapping = mmap.mmap(-1, self.num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        start = -whole.data_ptr() % HUGE_PAGE_BYTES
        self.bytes = whole[start : start + self.num_bytes]

    def share_in_huge_pages(self) -> float:
        """Return the part of the memory that the kernel backs with huge pages now, in [0, 1]."""
        first, inside, huge_kib = self.bytes.data_ptr(), False, 0
        for line in Path("/proc/self/smaps").read_text().splitlines():
            word = line.split()[0]
            if "-" in word and not word.endswith(":"):
                begin, end = (int(address, 16) for address in word.split("-"))
                inside = begin < first + self.num_bytes and end > first
            elif inside and word == "AnonHugePages:":
                huge_kib += int(line.split()[1])
        return min(1.0, huge_kib * 1024 / self.num_bytes)


def fill(memory: torch.Tensor, tile: torch.Tensor, num_threads: int) -> None:
    """Fill a tensor with copies of another (both contiguous, of any dtype), each thread touching its own slice."""
    if not (memory.is_contiguous() and tile.is_contiguous()):
        raise ValueError("the memory and the tile must be contiguous")
    library().fill(memory.data_ptr(), memory.nbytes, tile.data_ptr(), tile.nbytes, num_threads)


def normal_tile(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return ``TILE_BYTES`` of N(0, 1) values of ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TILE_BYTES // dtype.itemsize, generator=generator).to(dtype)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A way to read an arena once."""

    name: str
    offsets: torch.Tensor
    """Offsets of the pieces, ``[num_pieces]`` int64 bytes; thread t takes the t-th contiguous share of the list."""
    piece_bytes: int
    ways: int
    """Pieces that a thread reads at a time, in turns of 256 bytes."""
    ahead_bytes: int
    """Software prefetch distance; 0: none."""

    def gb_per_s(self, arena: Arena, num_threads: int) -> float:
        """Read every piece once and return 1e9 bytes per second."""
        began_s = time.perf_counter()
        library().read_pieces(
            arena.bytes.data_ptr(), self.offsets.data_ptr(), len(self.offsets), self.piece_bytes, self.ways,
            self.ahead_bytes, num_threads,
        )  # fmt: skip
        return len(self.offsets) * self.piece_bytes / (time.perf_counter() - began_s) / 1e9


def sequential_readings(num_bytes: int, num_threads: int) -> list[Reading]:
    """Return the candidates for the read limit: 1 to 8 streams a thread, with and without software prefetch."""
    readings = []
    for ways in (1, 2, 4, 8):
        piece = num_bytes // (ways * num_threads) // 256 * 256
        offsets = torch.arange(ways * num_threads) * piece
        for ahead in (0, 1024, 4096):
            name = f"{ways} streams a thread" + (f", prefetch {ahead} B" if ahead else "")
            readings.append(Reading(name=name, offsets=offsets, piece_bytes=piece, ways=ways, ahead_bytes=ahead))
    return readings


def allowed_cpus() -> list[int]:
    """Return the CPUs that this process may run on; call it before anything is pinned."""
    return sorted(os.sched_getaffinity(0))


def available_bytes(lines: Iterable[str] | None = None, *, group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return what the kernel says can be allocated without swapping, within the control group's limit if it has one."""
    for line in lines or Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            break
    else:
        raise RuntimeError("/proc/meminfo has no MemAvailable")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and used.exists() and (most := limit.read_text().strip()) != "max":
        available = min(available, int(most) - int(used.read_text()))
    return available


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A timing between two of the read limit, in GB/s."""

    gb_per_s: float
    limit_before: float
    limit_after: float

    @property
    def limit(self) -> float:
        return (self.limit_before + self.limit_after) / 2

    @property
    def share(self) -> float:
        return self.gb_per_s / self.limit


class ReadLimit:
    """An arena, and how fast threads read it: the limit of so many threads is the fastest of the sequential readings.

    Args:
        num_bytes: Bytes of the arena, which is filled with N(0, 1) in bf16.
        cpus: Thread i of a team is pinned to the i-th.
        repeats: Samples of each reading.
        seed: Seed of the arena's content and of the order of samples.
    """

    def __init__(self, num_bytes: int, cpus: Sequence[int], *, repeats: int, seed: int) -> None:
        self.cpus = tuple(cpus)
        self.rng = random.Random(seed)
        self._repeats = repeats
        self._readings: dict[int, Reading] = {}
        if num_bytes > 0.9 * (available := available_bytes()):
            raise ValueError(f"the arena needs {num_bytes} bytes, but {available} are available: take a smaller one")
        self.arena = Arena(num_bytes)
        pin_team(self.cpus)
        fill(self.arena.bytes, normal_tile(torch.bfloat16, seed), len(self.cpus))

    def use_threads(self, count: int) -> None:
        """Let torch and every OpenMP team of the calling thread use ``count`` pinned threads, the caller's the first.

        Threads that the caller starts from here on inherit its one CPU: see `everywhere`.
        """
        torch.set_num_threads(count)
        pin_team(self.cpus[:count])

    def everywhere(self) -> None:
        """Let the calling thread, and those that it starts from here on, run on all CPUs again."""
        os.sched_setaffinity(0, self.cpus)

    def gb_per_s(self, threads: int) -> float:
        """Read the arena once with ``threads`` pinned threads, in the fastest way, which is found at the first use."""
        if threads not in self._readings:
            self.measure(threads)
        self.use_threads(threads)
        return self._readings[threads].gb_per_s(self.arena, threads)

    def measure(self, threads: int) -> dict[str, list[float]]:
        """Return samples of all readings with so many threads; the fastest is the limit from now on."""
        readings = sequential_readings(self.arena.num_bytes, threads)
        samples: dict[str, list[float]] = {reading.name: [] for reading in readings}
        pin_team(self.cpus[:threads])
        for _ in range(self._repeats):
            for reading in self.rng.sample(readings, len(readings)):
                samples[reading.name].append(reading.gb_per_s(self.arena, threads))
        self._readings[threads] = max(readings, key=lambda reading: statistics.median(samples[reading.name]))
        return samples

    def measure_all(self, threads: Sequence[int]) -> dict[str, Any]:
        """Return samples of all readings by thread count."""
        sizes = {"share_in_huge_pages": self.arena.share_in_huge_pages(), "bytes": self.arena.num_bytes}
        return sizes | {f"sequential, {count} threads": self.measure(count) for count in threads}
