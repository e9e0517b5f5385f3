"""Surroundings: what else the machine did while something was measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from omniserve.host.cores import cores_allowed, lines_of, read_core_seconds
from omniserve.latency.profile import Conditions


class Surroundings:
    """Looks at the machine from its construction on; ``conditions`` says what it saw. For the measuring thread.

    What the operating system does not tell (this is Linux's ``/proc``) counts as nothing.

    Args:
        num_threads: Threads that measure at a time, at most.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_cores = len(cores_allowed())
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
            spare_cores=max(0, self._num_cores - self._num_threads),
        )

    def _read(self) -> tuple[float, float, float]:
        """Return seconds that our cores were busy or stolen, those of this process, those that this thread waited."""
        ready = next(iter(lines_of("/proc/thread-self/schedstat")), "0 0 0").split()
        return *read_core_seconds(), 1e-9 * int(ready[1])
