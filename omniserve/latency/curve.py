"""Curve: latency over a number of rows, measured at few points. Paper: omniserve 3.3.1, Algorithm 1."""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable

# An interval counts as straight if two points inside it lie on its line, up to this share of their value.
STRAIGHT_TOLERANCE = 0.03
_SECOND_PROBE = 0.3  # not a half or a quarter: ladders have steps at powers of two


class Curve:
    """A non-decreasing function through measured points: linear between them, and on at the end.

    A measurement above one of more rows was disturbed, which only makes it longer: it is lowered to that one. So the
    curve never falls, and a policy may search by bisection.

    Args:
        points: (rows >= 1, seconds), in any order; at least one.

    Raises:
        ValueError: No points, or two at the same place.
    """

    __slots__ = ("_slope", "_xs", "_ys")

    def __init__(self, points: Iterable[tuple[int, float]]) -> None:
        ordered = sorted(points)
        self._xs = [x for x, _ in ordered]
        if not ordered or len(set(self._xs)) < len(self._xs):
            raise ValueError(f"a curve needs points at different places, got {ordered}")
        self._ys = lower_envelope([y for _, y in ordered])
        # The slope beyond the end, from the upper half of the range: two neighbours would be all noise.
        first = min(bisect_right(self._xs, self._xs[-1] / 2), len(self._xs) - 2) if len(ordered) > 1 else 0
        span = self._xs[-1] - self._xs[first]
        self._slope = (self._ys[-1] - self._ys[first]) / span if span else self._ys[-1] / self._xs[-1]

    def __call__(self, x: float) -> float:
        """Return seconds for ``x`` rows; 0 for none."""
        xs, ys = self._xs, self._ys
        if x <= xs[0]:
            return ys[0] if x > 0 else 0.0
        if x >= xs[-1]:
            return ys[-1] + self._slope * (x - xs[-1])
        i = bisect_right(xs, x)
        low = xs[i - 1]
        return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - low) / (xs[i] - low)


def lower_envelope(values: list[float]) -> list[float]:
    """Return the largest non-decreasing sequence that is nowhere above ``values``."""
    return list(itertools.accumulate(reversed(values), min))[::-1]


def explore(
    latency: Callable[[int], float], low: int, high: int, *, go_on: Callable[[], bool] = lambda: True
) -> dict[int, float]:
    """Measure a latency at the places where its curve bends.

    Algorithm 1 halves an interval until its ends differ by no more than latency(16) - latency(1). It was made for
    ladders; on a slope it would measure in proportion to the height. So an interval is also left alone when two points
    inside it lie on its line: O(log n) points per bend. Intervals of greatest difference come first, so that stopping
    early costs least.

    Args:
        go_on: Asked before each split; False ends the exploration.

    Returns:
        Rows -> seconds.
    Paper: omniserve 3.3.1, Algorithm 1.
    """
    if not 1 <= low <= high:
        raise ValueError(f"a range of rows needs 1 <= low <= high, got [{low}, {high}]")
    known: dict[int, float] = {}

    def at(x: int) -> float:
        if x not in known:
            known[x] = latency(x)
        return known[x]

    threshold = max(0.0, at(max(low, min(16, high))) - at(low))
    todo: list[tuple[float, int, int]] = []

    def push(first: int, last: int) -> None:
        heapq.heappush(todo, (-abs(at(last) - at(first)), first, last))

    push(low, high)
    while todo and go_on():
        difference, first, last = heapq.heappop(todo)
        if -difference <= threshold or last - first < 2:
            continue

        def on_line(x: int, first: int = first, last: int = last) -> bool:
            line = known[first] + (known[last] - known[first]) * (x - first) / (last - first)
            return abs(at(x) - line) <= STRAIGHT_TOLERANCE * at(x)

        middle = (first + last) // 2
        if on_line(middle) and on_line(first + max(1, int(_SECOND_PROBE * (last - first)))):
            continue
        push(first, middle)
        push(middle + 1, last)  # not middle: a step may lie just behind it
    return known
