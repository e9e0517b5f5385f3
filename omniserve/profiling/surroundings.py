"""Surroundings: what else the machine did while something was measured."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omniserve.latency.profile import Conditions


class Surroundings:
    """Looks at the machine from its construction on; ``conditions`` says what it saw. For the measuring thread.

    What the operating system does not tell (this is Linux's ``/proc``) counts as nothing.

    Args:
        num_threads: Threads that measure at a time, at most.
    """

    def __init__(self, num_threads: int) -> None:
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
        self._num_threads = num_threads
        self._began_s = time.perf_counter()
        self._busy_s, self._own_s, self._waited_s = self._read()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """See nothing of what goes on in here: compiling in other processes, say."""
        before = (time.perf_counter(), *self._read())
        try:
            yield
        finally:
            now = (time.perf_counter(), *self._read())
            began = (self._began_s, self._busy_s, self._own_s, self._waited_s)
            moved = (start + end - first for start, first, end in zip(began, before, now, strict=True))
            self._began_s, self._busy_s, self._own_s, self._waited_s = moved

    def conditions(self, spread: float) -> Conditions:
        """Return what the machine was like since the construction.

        Args:
            spread: See ``Conditions``.
        """
        seconds = time.perf_counter() - self._began_s
        busy_s, own_s, waited_s = self._read()
        others_s = (busy_s - self._busy_s) - (own_s - self._own_s)
        return Conditions(
            spread=spread,
            waited=max(0.0, waited_s - self._waited_s) / seconds,
            others_cores=max(0.0, others_s) / seconds,
            spare_cores=max(0, len(self._cores) - self._num_threads),
        )

    def _read(self) -> tuple[float, float, float]:
        """Return seconds that our cores were busy or stolen, those of this process, those that this thread waited."""
        busy_s = sum(_busy_s(line.split()) for line in _lines("/proc/stat") if _core(line) in self._cores)
        ready = next(iter(_lines("/proc/thread-self/schedstat")), "0 0 0").split()
        return busy_s, time.process_time() if busy_s else 0.0, 1e-9 * int(ready[1])


def _core(line: str) -> int | None:
    """Return the core of a line of ``/proc/stat``; None for all others, the sum of the cores among them."""
    name = line.split(maxsplit=1)[0] if line.strip() else ""
    return int(name[3:]) if name.startswith("cpu") and name[3:].isdecimal() else None


def _busy_s(fields: list[str]) -> float:
    _, user, nice, system, _, _, irq, softirq, steal, *_ = fields
    return sum(map(int, (user, nice, system, irq, softirq, steal))) / os.sysconf("SC_CLK_TCK")


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []
