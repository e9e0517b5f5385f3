"""The accuracy of a model's predictions of measured steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from omniserve.latency.base import Predictor
from omniserve.latency.profile import StepSample


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """One minus relative errors, |predicted - measured| / measured; 1 is perfect."""

    mean: float
    """1 - the mean error."""
    p90: float
    """1 - the error that nine of ten predictions stay below."""

    def __str__(self) -> str:
        return f"mean {100 * self.mean:.1f} %, P90 {100 * self.p90:.1f} %"


def accuracy_of(model: Predictor, samples: Sequence[StepSample]) -> Accuracy:
    """Compare predictions with measured steps.

    Raises:
        ValueError: There are no samples.
    """
    if not samples:
        raise ValueError("an accuracy needs measured steps, got none")
    return accuracy_of_errors([abs(model.step_s(s.features) - s.seconds) / s.seconds for s in samples])


def accuracy_of_errors(errors: Sequence[float]) -> Accuracy:
    """Return the accuracy of predictions that were off by these relative errors, one at least; P90 is nearest rank."""
    ordered = sorted(errors)
    return Accuracy(mean=1 - sum(ordered) / len(ordered), p90=1 - ordered[math.ceil(0.9 * len(ordered)) - 1])
