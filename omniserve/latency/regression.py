"""Least squares for latencies: coefficients that are not negative, relative errors, few outliers' weight."""

from __future__ import annotations

from collections.abc import Sequence

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
