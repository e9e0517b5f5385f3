"""Timer: samples of everything that is measured, and the time that is left; Surroundings: what may disturb them."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from omniserve.core.upkeep import Others
from omniserve.host.cores import cores_allowed, lines_of, read_core_seconds
from omniserve.latency.profile import Conditions
from omniserve.ops.streams import drain

Progress = Callable[[str, float], None]
"""A callback that is told what is being measured, and the share of the time limit that has passed."""
Point = tuple[int, int]
_WRITTEN_BYTES_S = 5e8  # new pages are written so fast at least
_LEAST_REPEATS = 3


class Timer:
    """Times calls and keeps the samples of each point.

    Args:
        device: A GPU is waited for before and after each call.
        limit_s: The time limit of the whole measurement, which begins now.
        counts_preparing: What runs under ``preparing`` counts against the limit.
        while_preparing: Entered around what does not count.
        longest_s: No sample is taken that is predicted to last longer, except the smallest of its kind.
        others: What measuring gives way to; its time does not count.
    """

    def __init__(
        self,
        device: torch.device,
        limit_s: float,
        *,
        counts_preparing: bool = True,
        while_preparing: Callable[[], AbstractContextManager[object]] = nullcontext,
        longest_s: float = math.inf,
        others: Others | None = None,
    ) -> None:
        self.longest_s = longest_s
        self._others = others
        self._device = device
        self._limit_s = limit_s
        self.counts_preparing = counts_preparing
        self._while_preparing = while_preparing
        self._began_s = time.perf_counter()
        self._paused_at_s: float | None = None
        self._samples: defaultdict[tuple[str, Point], list[float]] = defaultdict(list)

    @property
    def seconds(self) -> float:
        """Seconds so far, without those that do not count."""
        now_s = self._paused_at_s if self._paused_at_s is not None else time.perf_counter()
        return now_s - self._began_s

    @property
    def spent(self) -> float:
        """Share of the limit that has passed."""
        return self.seconds / self._limit_s

    @property
    def left_s(self) -> float:
        """Seconds until the limit; 0 after it."""
        return max(0.0, self._limit_s - self.seconds)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Do here what is done once before something can be timed: choosing, compiling and capturing kernels."""
        if self.counts_preparing:
            yield
            return
        with self._uncounted():
            yield

    def most_pool_bytes(self, most: int) -> int:
        """Return how large a KV pool may be, at most ``most`` bytes: to write each of its pages takes a while, too."""
        return most if math.isinf(self.longest_s) else min(most, int(self.longest_s * _WRITTEN_BYTES_S))

    def give_way(self) -> bool:
        """Let the others work, if they have to; return whether they did. To be called before each sample."""
        if self._others is None or not self._others.are_waiting():
            return False
        threads = torch.get_num_threads()
        with self._uncounted():
            self._others.run()
        torch.set_num_threads(threads)
        return True

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        self._paused_at_s = time.perf_counter()
        try:
            with self._while_preparing():
                yield
                self._wait_for_device()
        finally:
            self._began_s += time.perf_counter() - self._paused_at_s
            self._paused_at_s = None

    def time(self, run: Callable[[], object]) -> float:
        """Return the seconds of one call."""
        self._wait_for_device()
        began_s = time.perf_counter()
        run()
        self._wait_for_device()
        return time.perf_counter() - began_s

    def add(self, kind: str, point: Point, seconds: float) -> None:
        """Keep a sample."""
        self._samples[kind, point].append(seconds)

    def typical(self, kind: str, point: Point) -> float:
        """Return the lower quartile of a point's samples, of which there is at least one."""
        return _lower_quartile(self._samples[kind, point])

    def typicals(self, kind: str) -> Iterator[tuple[Point, float]]:
        """Yield each point of a kind with the lower quartile of its samples, points in ascending order."""
        for key in sorted(self._samples):
            if key[0] == kind:
                yield key[1], _lower_quartile(self._samples[key])

    def spread(self) -> float:
        """Return the median over all points that have three samples of their median over the least, less 1; or 0."""
        repeated = [sorted(samples) for samples in self._samples.values() if len(samples) >= _LEAST_REPEATS]
        return statistics.median(s[len(s) // 2] / s[0] - 1 for s in repeated) if repeated else 0.0

    def _wait_for_device(self) -> None:
        drain(self._device, spins=True)


def _lower_quartile(samples: list[float]) -> float:
    """Return the lower quartile: disturbances only make a measurement longer, and may reach the median of few
    samples."""
    return sorted(samples)[(len(samples) - 1) // 4]


class Surroundings:
    """Looks at the machine from its construction on; ``conditions`` says what it saw. For the measuring thread.

    What the operating system does not tell (this is Linux's ``/proc``) counts as nothing.

    Args:
        num_threads: Threads that measure at a time, at most.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_cores = len(cores_allowed())
        self._num_threads = num_threads
        self._began = self._look()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Leave out what goes on in here, such as compiling in other processes."""
        before = self._look()
        try:
            yield
        finally:
            self._began = [a + end - first for a, first, end in zip(self._began, before, self._look(), strict=True)]

    def conditions(self, spread: float) -> Conditions:
        """Return what the machine was like since the construction; ``spread`` is the timer's."""
        seconds, busy_s, own_s, waited_s = (now - a for now, a in zip(self._look(), self._began, strict=True))
        return Conditions(
            spread=spread,
            waited=max(0.0, waited_s) / seconds,
            others_cores=max(0.0, busy_s - own_s) / seconds,
            spare_cores=max(0, self._num_cores - self._num_threads),
        )

    def _look(self) -> list[float]:
        """Return the time, and the seconds of ``_read``."""
        return [time.perf_counter(), *self._read()]

    def _read(self) -> tuple[float, float, float]:
        """Return seconds that our cores were busy or stolen, those of this process, those that this thread waited."""
        ready = next(iter(lines_of("/proc/thread-self/schedstat")), "0 0 0").split()
        return *read_core_seconds(), 1e-9 * int(ready[1])
