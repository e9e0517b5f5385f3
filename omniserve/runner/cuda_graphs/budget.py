"""Budget: limits the time and the memory that capturing graphs takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager


class Budget:
    """Counts the seconds and bytes of captures since it was made; each graph is expected to take what the last one did.

    So only the first graph of a kind, or one that takes more than the one before it, can exceed the budget. A limit of
    0 admits nothing. ``used_bytes`` returns how much of the device's memory is in use, by any process.
    """

    def __init__(
        self,
        *,
        limit_s: float,
        limit_bytes: int,
        used_bytes: Callable[[], int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._limit_s, self._limit_bytes = limit_s, limit_bytes
        self._used_bytes, self._clock = used_bytes, clock
        self._began_s, self._bytes_before = clock(), used_bytes()
        self._last: dict[Hashable, tuple[float, int]] = {}

    def spent(self) -> tuple[float, int]:
        """Return the seconds and bytes that were spent so far."""
        return self._clock() - self._began_s, self._used_bytes() - self._bytes_before

    def admits(self, kind: Hashable) -> bool:
        """Tell whether another graph of a kind may be captured."""
        seconds, num_bytes = self.spent()
        last_s, last_bytes = self._last.get(kind, (0.0, 0))
        return seconds + last_s < self._limit_s and num_bytes + last_bytes < self._limit_bytes

    @contextmanager
    def spending(self, kind: Hashable) -> Iterator[None]:
        """Note what the capture of a graph inside this context takes."""
        seconds, num_bytes = self.spent()
        yield
        now_s, now_bytes = self.spent()
        self._last[kind] = now_s - seconds, now_bytes - num_bytes
