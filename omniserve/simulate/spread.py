"""Spread: how measured steps lie around their predictions, and steps drawn to lie like them."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol

from omniserve.simulate.results import percentile

NEIGHBOURS = 40
"""Steps of about one length, which say how steps of that length spread: an interruption of some milliseconds doubles a
short step and is lost in a long one."""
BLOCK = 32
"""Steps that are drawn together, in the order in which they ran: slow spells last, and a request's pace is the mean of
as many steps as it has tokens."""


class StepRatios(Protocol):
    """What steps really take, over what they are predicted to."""

    def draws(self, rng: random.Random) -> Callable[[float], float]:
        """Return a function from a step's predicted seconds to a ratio, to be called once a step."""
        ...


class Spread:
    """Measured over predicted seconds of steps.

    Drawing is a moving-block bootstrap of ranks: a measured step has a rank among the steps that should have taken
    about as long; a drawn step gets the ratio of the same rank among those that should have taken as long as itself.

    Args:
        predicted_s: Seconds that a model says, one for each step, in the order in which they ran, > 0.
        measured_s: Seconds that they took, > 0.

    Raises:
        ValueError: There are no steps, or a number is not positive.
    """

    def __init__(self, predicted_s: Sequence[float], measured_s: Sequence[float]) -> None:
        steps = list(zip(predicted_s, measured_s, strict=True))
        if not steps:
            raise ValueError("a spread needs at least one step: give a trace of a server that computed something")
        if (shortest := min(map(min, steps))) <= 0:
            raise ValueError(f"a step must be predicted, and take, more than 0 seconds, got {shortest}")
        by_length, rng = list(steps), random.Random(0)
        rng.shuffle(by_length)  # of steps of one length, neighbours are any of them
        by_length.sort(key=lambda step: step[0])
        self._predicted_s = [predicted for predicted, _ in by_length]
        ratios = [measured / predicted for predicted, measured in by_length]
        self._width = min(NEIGHBOURS, len(steps))
        self._windows = [sorted(ratios[low : low + self._width]) for low in range(len(steps) - self._width + 1)]
        """Ratios of steps that follow one another by length; ascending."""
        self._ratios = sorted(ratios)
        self._ranks = [self._rank(predicted, measured / predicted, rng) for predicted, measured in steps]
        """The samples in the order in which the steps ran."""

    def percentile(self, percent: float) -> float:
        """Return a percentile of the ratios of all steps."""
        return percentile(self._ratios, percent)

    def draws(self, rng: random.Random) -> Callable[[float], float]:
        """Return a function from a step's predicted seconds to a ratio, to be called once a step."""
        left, place = 0, 0

        def draw(predicted_s: float) -> float:
            nonlocal left, place
            if left == 0:
                left, place = BLOCK, rng.randrange(len(self._ranks))
            rank = self._ranks[place]
            left, place = left - 1, (place + 1) % len(self._ranks)
            return self._window(predicted_s)[rank]

        return draw

    def _rank(self, predicted_s: float, ratio: float, rng: random.Random) -> int:
        """Return the rank of a ratio among those of steps as long, any of them if several are equal."""
        window = self._window(predicted_s)
        low, high = bisect_left(window, ratio), bisect_right(window, ratio)
        return min(rng.randrange(low, max(high, low + 1)), self._width - 1)

    def _window(self, predicted_s: float) -> list[float]:
        middle = (bisect_left(self._predicted_s, predicted_s) + bisect_right(self._predicted_s, predicted_s)) // 2
        return self._windows[max(0, min(middle - self._width // 2, len(self._windows) - 1))]
