"""Budget: how long capturing graphs may take, and how much memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager


class Budget:
    """Counts what capturing has taken since the budget was made, and expects of a graph what the last of its kind took.

    So the budget is exceeded by the first graph of a kind only, or by one that takes more than the one before it.

    Args:
        limit_s: Seconds; 0 admits nothing.
        limit_bytes: Device memory; 0 admits nothing.
        used_bytes: Returns how much of the device's memory is in use, by any process.
        clock: Monotonic seconds.
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
        """Return seconds and bytes."""
        return self._clock() - self._began_s, self._used_bytes() - self._bytes_before

    def admits(self, kind: Hashable) -> bool:
        """Tell whether another graph of a kind may be captured."""
        seconds, num_bytes = self.spent()
        last_s, last_bytes = self._last.get(kind, (0.0, 0))
        return seconds + last_s < self._limit_s and num_bytes + last_bytes < self._limit_bytes

    @contextmanager
    def spending(self, kind: Hashable) -> Iterator[None]:
        """Capture a graph of a kind here."""
        seconds, num_bytes = self.spent()
        yield
        now_s, now_bytes = self.spent()
        self._last[kind] = now_s - seconds, now_bytes - num_bytes
