"""ScaledModel: a predictor with its terms multiplied by factors."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Self

from omniserve.latency.base import BatchFeatures, Predictor
from omniserve.latency.profile import StepSample
from omniserve.latency.regression import fit_terms

# That all terms have one factor is worth so many steps, and holds where steps say little of a term: a step is off by
# 13 % or so, and a factor is expected within 10 % of the common one. (0.13 / 0.1)^2
_PRIOR_STEPS = 2.0


class ScaledModel(Predictor):
    """``sum(factor_i * term_i)`` of another predictor."""

    def __init__(self, model: Predictor, factors: Sequence[float]) -> None:
        if len(factors) != len(model.term_names):
            raise ValueError(f"the model has {len(model.term_names)} terms, got {len(factors)} factors")
        self.model = model
        self.factors = tuple(factors)
        self.term_names, self.layer_terms, self.num_layers = model.term_names, model.layer_terms, model.num_layers
        self.attention_terms = model.attention_terms

    @classmethod
    def fitted(cls, model: Predictor, samples: Sequence[StepSample]) -> Self:
        """Return the model scaled so that half of the steps took longer than it says, whatever they consist of.

        First all terms get one factor, then each may differ from that, as far as the steps tell them apart.

        Raises:
            ValueError: There are no samples.
        """
        if not samples:
            raise ValueError("fitting needs measured steps, got none")
        rows = [model.terms(sample.features) for sample in samples]
        seconds = [sample.seconds for sample in samples]
        common = median(measured / sum(row) for measured, row in zip(seconds, rows, strict=True))
        return cls(model, fit_terms(rows, seconds, prior=[common] * len(rows[0]), prior_weight=_PRIOR_STEPS))

    def terms(self, features: BatchFeatures) -> tuple[float, ...]:
        return tuple([factor * term for factor, term in zip(self.factors, self.model.terms(features), strict=True)])
