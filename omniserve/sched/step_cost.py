"""StepCost: what a step consists of while a policy puts it together, and how long it would take."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from omniserve.latency import BatchFeatures, HostSpeed, ModelShape, Predictor, StepRows
from omniserve.latency.profile import Profile

_SEARCH_ROUNDS = 6
_CLOSE_ENOUGH = 0.02  # of the bound: a chunk that fills the step to 98 % is not searched further


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a policy asks for latencies."""

    predictor: Predictor
    shape: ModelShape
    host_has_own_cores: bool = False
    """The host tier's threads take nothing from the device tier."""
    host: HostSpeed | None = None
    """What the host tier's attention takes; None: there is no host tier."""

    @classmethod
    def of_profile(cls, profile: Profile, predictor: Predictor) -> Self:
        """Return the forecast of a profiled machine by one of the models that were fitted to its profile."""
        return cls(
            predictor,
            profile.shape,
            host_has_own_cores=profile.fingerprint.host_has_own_cores,
            host=HostSpeed.from_profile(profile),
        )

    def step(self, *, host_works: bool = False) -> StepCost:
        """Return an empty step."""
        return StepCost(self.predictor, self.shape, BatchFeatures(host_works=host_works))


class StepCost(StepRows):
    """A step as it grows, and the latency that is predicted for it (omniserve 3.3.1)."""

    __slots__ = ("_predictor",)

    def __init__(self, predictor: Predictor, shape: ModelShape, features: BatchFeatures) -> None:
        super().__init__(shape, features)
        self._predictor = predictor

    def copy(self) -> StepCost:
        """Return an independent copy."""
        return StepCost(self._predictor, self.shape, copy.copy(self.features))

    def seconds(self) -> float:
        """Return the predicted seconds of the step as it is; 0 for nothing."""
        return 0.0 if self.features.is_empty else self._predictor.step_s(self.features)

    def seconds_with(self, start: int, count: int, *, samples: int) -> float:
        """Return the seconds with one more chunk."""
        return self.seconds_after(lambda step: step.add_chunk(start, count, samples=samples))

    def seconds_after(self, add: Callable[[StepCost], object]) -> float:
        """Return the seconds with what ``add`` puts into a copy."""
        trial = self.copy()
        add(trial)
        return trial.seconds()

    def largest_chunk(self, start: int, most: int, bound_s: float, *, samples: Callable[[int, int], int]) -> int:
        """Return the most tokens, up to ``most`` >= 1, that a chunk may have within the bound; 0 if none (3.3.4).

        ``samples`` tells how many rows of a chunk, by its start and count, become logits.
        """
        return largest(lambda n: self.seconds_with(start, n, samples=samples(start, n)), most, bound_s)


def largest(seconds: Callable[[int], float], most: int, bound_s: float) -> int:
    """Return the largest count in ``[0, most]`` (to within 2 % of the bound) with seconds within the bound.

    Latency does not fall with the count, and is nearly linear, so the next guess is interpolated. What is returned was
    evaluated, unless it is 0. ``most`` is at least 1.
    """
    at_most = seconds(most)
    if at_most <= bound_s:
        return most
    low, high, at_low, at_high = 0, most, 0.0, at_most
    for round_ in range(_SEARCH_ROUNDS + most.bit_length()):
        if high - low <= 1 or (low and at_low >= (1 - _CLOSE_ENOUGH) * bound_s):
            break
        if low == 0 and round_ == 0:
            guess = 1  # what one costs is the other end of the line
        elif round_ < _SEARCH_ROUNDS and at_high > at_low:
            guess = low + int((high - low) * (bound_s - at_low) / (at_high - at_low))
        else:
            guess = (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
        at_guess = seconds(guess)
        if at_guess <= bound_s:
            low, at_low = guess, at_guess
        else:
            high, at_high = guess, at_guess
    return low
