"""When a batch will miss its window, and how many of its lines have to hurry."""

from __future__ import annotations

import math
from collections import deque

# A rate is that of at least so many seconds and so many lines.
_MIN_SPAN_S = 60.0
_MIN_LINES = 20
# Share of the time that is left within which all lines are to be done.
_USABLE = 0.9


class Pace:
    """How fast the lines of one batch get done, whoever runs them."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, now_s: float, num_done: int) -> None:
        """Take note of how many lines are done now."""
        samples = self._samples
        if not samples or samples[-1][1] != num_done:
            samples.append((now_s, num_done))
        while len(samples) > 2 and now_s - samples[1][0] >= _MIN_SPAN_S and num_done - samples[1][1] >= _MIN_LINES:
            samples.popleft()

    def remaining_s(self, now_s: float, num_open: int) -> float:
        """Predict how long the open lines take. While none was seen to be done, one is taken to be done by now."""
        started_s, num_before = self._samples[0]
        num_done = max(1, self._samples[-1][1] - num_before)
        return num_open * (now_s - started_s) / num_done


def num_urgent(remaining_s: float, left_s: float, concurrency: int) -> int:
    """Return how many lines of a batch are to run as latency-sensitive requests at a time.

    The share of the concurrency that is missing: none if the prediction is within the window, all if that is over.

    Args:
        remaining_s: What was predicted.
        left_s: Of the window.
        concurrency: Lines that run at a time.
    """
    usable_s = _USABLE * left_s
    if remaining_s <= usable_s:
        return 0
    return math.ceil(concurrency * (1 - max(0.0, usable_s) / remaining_s))
