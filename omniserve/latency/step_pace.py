"""StepPace: how fast the machine is at this moment, beside what a model predicts."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

WINDOW = 9
"""Steps whose median is the pace. It follows after five like ones, and four odd ones do not move it."""
BOUNDS = (1 / 16, 16.0)


class StepPace:
    """The median of the last steps' ratios, measured over predicted.

    A neighbour that takes a core makes steps several times as long from one to the next, and is gone again as soon: too
    much for a correction that is slow on purpose.
    """

    def __init__(self) -> None:
        self._recent = deque([0.0] * WINDOW)
        self._ordered = [0.0] * WINDOW
        self.value = 1.0
        """What predictions are to be multiplied with, within ``BOUNDS``."""

    def observe(self, ratio: float) -> None:
        """Take a step that took ``ratio`` times what was predicted, > 0."""
        log_ratio = math.log(ratio)
        del self._ordered[bisect_left(self._ordered, self._recent.popleft())]
        self._recent.append(log_ratio)
        insort(self._ordered, log_ratio)
        self.value = min(max(math.exp(self._ordered[WINDOW // 2]), BOUNDS[0]), BOUNDS[1])
