"""SlidingMax: the largest of what was seen in the last seconds."""

from __future__ import annotations

from collections import deque


class SlidingMax:
    """Keeps the maximum over a window of time."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._falling: deque[tuple[float, int]] = deque()

    def push(self, now_s: float, value: int) -> int:
        """Add a value, and return the largest one that is not older than the window. Time does not go back."""
        falling = self._falling
        while falling and falling[-1][1] <= value:
            falling.pop()
        falling.append((now_s, value))
        while falling[0][0] < now_s - self._window_s:
            falling.popleft()
        return falling[0][1]
