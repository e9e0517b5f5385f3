"""Fits models to measurements: the points at which to measure a curve, a regression, and the accuracy of
predictions."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omniserve.latency.base import Predictor
from omniserve.latency.profile import StepSample

# An interval counts as straight if two points inside it lie on its line, up to this share of their value.
STRAIGHT_TOLERANCE = 0.03
_SECOND_PROBE = 0.3  # not a half or a quarter: ladders have steps at powers of two


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


_ROUNDS = 4
_LEAST_PULL = 1e-6  # makes the solution unique
_SMALL_ERROR = 0.01  # relative errors below this, or below the median, all weigh alike


def fit_terms(
    rows: Sequence[Sequence[float]],
    targets: Sequence[float],
    *,
    prior: Sequence[float] | None = None,
    prior_weight: float = 0.0,
    ridge: float = 0.0,
) -> list[float]:
    """Return non-negative coefficients c with ``rows @ c`` close to the targets.

    The error that counts is |prediction - target| / target: reweighted least squares (scikit-learn's LinearRegression
    with ``positive=True``). Coefficients that cannot be negative keep predictions monotone in every term.

    Args:
        rows: One row of terms a sample, all of the same length; not negative.
        targets: Seconds, > 0.
        prior: Coefficients to stay near to; 0 where none is known. They hold where samples say little.
        prior_weight: How many samples a prior is worth.
        ridge: How many samples it is worth that terms without a prior are 0: what several of them explain alike is
            then shared among them.

    Raises:
        ValueError: No samples, rows of different lengths, or a target that is not positive.
    """
    if not rows or len(rows) != len(targets):
        raise ValueError(f"fitting needs a target for each sample, got {len(rows)} rows and {len(targets)} targets")
    width = len(rows[0])
    if any(len(row) != width for row in rows) or min(targets) <= 0:
        raise ValueError("fitting needs rows of one length and targets above 0")
    import numpy as np
    from sklearn.linear_model import LinearRegression  # takes a second to import, and predicting does not need it

    target = np.asarray(targets, float)
    relative = np.asarray(rows, float) / target[:, None]
    # Columns of one size: a coefficient is then the share of a step that its term explains.
    known = np.asarray(prior if prior is not None else [0.0] * width, float)
    largest = np.abs(relative).max(axis=0)
    scale = np.where(known > 0, known, np.divide(1.0, largest, out=np.zeros(width), where=largest > 0))
    scaled = relative * scale
    pull = np.where(known > 0, prior_weight, max(ridge, _LEAST_PULL))
    weights = np.ones(len(target))
    share = np.zeros(width)
    for _ in range(_ROUNDS):
        model = LinearRegression(positive=True, fit_intercept=False)
        model.fit(
            np.vstack([scaled * weights[:, None], np.diag(np.sqrt(pull))]),
            np.concatenate([weights, np.sqrt(pull) * (known > 0)]),
        )
        share = model.coef_
        error = np.abs(scaled @ share - 1.0)
        usual = max(_SMALL_ERROR, float(np.median(error)))
        weights = np.sqrt(usual / np.maximum(error, usual))
    return [float(value) for value in share * scale]


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """Accuracies of predictions, one minus |predicted - measured| / measured; 1 is perfect."""

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
