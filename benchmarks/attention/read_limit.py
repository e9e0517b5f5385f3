"""The read limit that CPU benchmarks compare with, sampled around everything that they measure."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from benchmarks.attention.bandwidth import (
    Arena,
    Reading,
    available_bytes,
    fill,
    measure_readings,
    normal_tile,
    pin_team,
    sequential_readings,
)

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One timing between two of the read limit, in GB/s."""

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
        num_bytes: Of the arena.
        dtype: What the arena is filled with (N(0, 1)).
        cpus: Thread i of a team is pinned to the i-th.
        repeats: Samples of each reading.
        seed: Of the arena's content and of the order of samples.

    Raises:
        ValueError: There is not enough memory.
    """

    def __init__(self, num_bytes: int, dtype: torch.dtype, cpus: Sequence[int], *, repeats: int, seed: int) -> None:
        self.cpus = tuple(cpus)
        self.rng = random.Random(seed)
        self._repeats = repeats
        self._readings: dict[int, Reading] = {}
        if num_bytes > 0.9 * (available := available_bytes()):
            raise ValueError(f"the arena needs {num_bytes} bytes, but {available} are available: take a smaller one")
        self.arena = Arena(num_bytes)
        pin_team(self.cpus)
        fill(self.arena.bytes, normal_tile(dtype, seed), len(self.cpus))

    def use_threads(self, count: int) -> None:
        """Let torch and every OpenMP team of the calling thread use ``count`` pinned threads, the caller's the first.

        Threads that the caller starts from here on inherit its one CPU: see `everywhere`.
        """
        torch.set_num_threads(count)
        pin_team(self.cpus[:count])

    def everywhere(self) -> None:
        """Let the calling thread, and those that it starts from here on, run on all CPUs again."""
        os.sched_setaffinity(0, self.cpus)

    def reading(self, threads: int) -> Reading:
        """Return the fastest way to read the arena, found at the first use."""
        if threads not in self._readings:
            self.measure(threads)
        return self._readings[threads]

    def gb_per_s(self, threads: int) -> float:
        """Read the arena once with ``threads`` pinned threads."""
        reading = self.reading(threads)
        self.use_threads(threads)
        return reading.gb_per_s(self.arena, threads)

    def bracket(self, threads: int, measure: Callable[[], tuple[float, Result]]) -> tuple[Sample, Result]:
        """Measure between two samples of the limit; ``measure`` returns GB/s and anything else."""
        before = self.gb_per_s(threads)
        rate, result = measure()
        return Sample(gb_per_s=rate, limit_before=before, limit_after=self.gb_per_s(threads)), result

    def measure(self, threads: int) -> dict[str, list[float]]:
        """Return samples of all readings with so many threads; the fastest is the limit from now on."""
        readings = sequential_readings(self.arena.num_bytes, threads)
        samples = measure_readings(readings, self.arena, self.cpus[:threads], self._repeats, self.rng)
        self._readings[threads] = max(readings, key=lambda reading: statistics.median(samples[reading.name]))
        return samples

    def measure_all(self, threads: Sequence[int]) -> dict[str, Any]:
        """Return samples of all readings by thread count."""
        sizes = {"share_in_huge_pages": self.arena.share_in_huge_pages(), "bytes": self.arena.num_bytes}
        return sizes | {f"sequential, {count} threads": self.measure(count) for count in threads}
