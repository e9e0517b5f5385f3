"""``conserve``: a polynomial in the rows that a step computes and the context that it reads. Paper: conserve 4.2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from omniserve.latency.base import LATENCY_MODELS, BatchFeatures, LatencyModel
from omniserve.latency.profile import Profile, StepSample
from omniserve.latency.regression import fit_terms


@LATENCY_MODELS.register("conserve")
class ConServeModel(LatencyModel):
    """``(k1 + k3) P + k2 P (P + C) + k4 (P + C) + k5`` with P rows to compute and C tokens in the KV cache.

    The paper's linear-compute and communication terms, k1 P and k3 P, are one here: no measurement of whole steps can
    tell them apart.

    Args:
        coefficients: k1 + k3, k2, k4, k5 in seconds; None before ``fit``.
    """

    term_names = ("linear", "attention", "memory", "constant")
    attention_terms = (1, 2)
    layer_terms = slice(None)  # the polynomial knows of no layers: an even share of all

    def __init__(self, coefficients: Sequence[float] | None, num_layers: int) -> None:
        self._coefficients = tuple(coefficients) if coefficients is not None else (0.0,) * 4
        self.num_layers = num_layers

    @classmethod
    def from_profile(cls, profile: Profile) -> Self:
        return cls(None, profile.shape.num_layers).fit(profile.steps)

    def fit(self, samples: Sequence[StepSample]) -> Self:
        rows = [self._quantities(sample.features) for sample in samples]
        return type(self)(fit_terms(rows, [sample.seconds for sample in samples]), self.num_layers)

    def terms(self, features: BatchFeatures) -> tuple[float, ...]:
        linear, attention, memory, constant = self._quantities(features)
        k13, k2, k4, k5 = self._coefficients
        return k13 * linear, k2 * attention, k4 * memory, k5 * constant

    @staticmethod
    def _quantities(features: BatchFeatures) -> tuple[float, float, float, float]:
        rows = features.rows + features.pipelined_rows
        tokens = features.rows + features.prefill_context + features.decode_context + features.pipelined_load
        return float(rows), float(rows * tokens), float(tokens), 1.0
