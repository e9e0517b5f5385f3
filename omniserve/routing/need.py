"""How many engines a load needs: from what came and was kept of late, what more would be admitted, and batch deadlines.

Engines are taken for equal. ``Need`` says what the load needs at a moment, as a number of engines with a fraction;
``Wanted`` makes of that a number that does not follow every burst. Free of clocks and of sockets.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

_MOST_AT_ONCE = 4.0
"""A load is said to need so many times the engines that there are, at most: what is overloaded measures badly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The latency-sensitive load of a class over the last seconds."""

    offered_per_s: float
    """Requests a second that came, refused ones included."""
    kept_per_s: float
    """Requests a second of these that were admitted and predicted to keep their TTFT objective."""
    admittable_per_s: float
    """Requests a second that admission would let in now beside those that are there."""

    @property
    def predicted_attainment(self) -> float:
        """Share of the requests that were predicted to keep their objective; 1 without any."""
        return self.kept_per_s / self.offered_per_s if self.offered_per_s else 1.0

    @property
    def use(self) -> float:
        """What came, as a share of what the engines can keep; above 1, more came than they can."""
        if not self.offered_per_s:
            return 0.0
        room = self.kept_per_s + self.admittable_per_s
        return min(self.offered_per_s / room, _MOST_AT_ONCE) if room else _MOST_AT_ONCE


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """The engines that a load needs at a moment, with a fraction."""

    latency_sensitive: float
    """For what came of late, with a reserve."""
    batches: float
    """For batches that are to end within their windows, beside the latency-sensitive load."""

    @property
    def engines(self) -> float:
        """The larger of both: best-effort work is done in what the latency-sensitive load leaves."""
        return max(self.latency_sensitive, self.batches)

    @classmethod
    def of(
        cls, num_engines: int, demands: Mapping[str, Demand], batch_pressure: float, *, target_use: float = 0.7
    ) -> Need:
        """Return what a load needs.

        Args:
            num_engines: Engines that have it now, at least 1.
            demands: By latency-sensitive class with a TTFT objective.
            batch_pressure: The speed that batches need to end in time, over the one that they have; 0 without any.
            target_use: Share of what the engines can keep that is to be in use; the rest is for bursts.
        """
        use = max((demand.use for demand in demands.values()), default=0.0)
        busy = num_engines * min(use, 1.0)
        spare = max(num_engines - busy, num_engines / 16)  # no batch would need any number of engines
        return cls(
            latency_sensitive=num_engines * use / target_use,
            batches=busy + spare * min(batch_pressure, _MOST_AT_ONCE) if batch_pressure else 0.0,
        )


class Wanted:
    """Makes of a need that changes each second the number of engines to have.

    More are wanted when the need was above the number for ``up_s``; fewer when it was below for ``down_s``, by
    ``slack`` of an engine. Each time, the number goes only as far as the need was for all of that time.

    Args:
        up_s, down_s: Seconds.
        slack: In engines, so that a need that stays about a whole number changes nothing.
        least: The number is never lower.
    """

    def __init__(self, *, up_s: float = 15.0, down_s: float = 300.0, slack: float = 0.25, least: int = 1) -> None:
        if not 0 <= up_s <= down_s:
            raise ValueError(f"up_s must be within [0, down_s], got {up_s} and {down_s}")
        self._up_s, self._down_s, self._slack, self._least = up_s, down_s, slack, least
        self._needs: deque[tuple[float, float]] = deque()
        self._since_s: float | None = None
        self.number: int | None = None
        """The engines that are wanted; None before the first need."""

    def note(self, now_s: float, need: float, num_engines: int) -> int:
        """Note a need, and return the number that is wanted; at first it is that of the engines that are there."""
        if self.number is None:
            self.number, self._since_s = max(num_engines, self._least), now_s
        assert self._since_s is not None
        self._needs.append((now_s, need))
        while self._needs[0][0] < now_s - self._down_s:
            self._needs.popleft()
        if now_s - self._since_s >= self._up_s:
            lowest = min(each for at_s, each in self._needs if at_s >= now_s - self._up_s)
            self.number = max(self.number, math.ceil(lowest))
        if now_s - self._since_s >= self._down_s:
            highest = max(each for _, each in self._needs)
            self.number = min(self.number, max(math.ceil(highest + self._slack), self._least))
        return self.number
