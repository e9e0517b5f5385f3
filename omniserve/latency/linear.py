"""``conserve`` and ``bros``: models that are linear in a few quantities of a step. Paper: conserve 4.2, bros 4.1."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

from omniserve.latency.base import LATENCY_MODELS, LatencyModel
from omniserve.latency.features import AlphaBeta, BatchFeatures
from omniserve.latency.fitting import fit_terms
from omniserve.latency.profile import Profile, StepSample


class LinearModel(LatencyModel):
    """The sum of a step's quantities, each times a coefficient in seconds.

    Args:
        coefficients: One for each quantity; none before ``fit``.
    """

    layer_terms = slice(None)  # it knows of no layers: an even share of all

    def __init__(self, coefficients: Sequence[float], num_layers: int) -> None:
        self._coefficients = tuple(coefficients)
        self.num_layers = num_layers

    @classmethod
    def from_profile(cls, profile: Profile) -> Self:
        return cls((), profile.shape.num_layers).fit(profile.steps)

    def fit(self, samples: Sequence[StepSample]) -> Self:
        return type(self)(self._fit(samples), self.num_layers)

    def _fit(self, samples: Sequence[StepSample]) -> list[float]:
        return fit_terms([self._quantities(s.features) for s in samples], [s.seconds for s in samples])

    def terms(self, features: BatchFeatures) -> tuple[float, ...]:
        return tuple([k * x for k, x in zip(self._coefficients, self._quantities(features), strict=True)])

    @staticmethod
    @abstractmethod
    def _quantities(features: BatchFeatures) -> tuple[float, ...]:
        """Return what the coefficients multiply."""


@LATENCY_MODELS.register("conserve")
class ConServeModel(LinearModel):
    """``(k1 + k3) P + k2 P (P + C) + k4 (P + C) + k5`` with P rows to compute and C tokens in the KV cache.

    The paper's linear-compute and communication terms, k1 P and k3 P, are one here: no measurement of whole steps can
    tell them apart. So the coefficients are k1 + k3, k2, k4, k5.
    """

    term_names = ("linear", "attention", "memory", "constant")
    attention_terms = (1, 2)

    @staticmethod
    def _quantities(features: BatchFeatures) -> tuple[float, float, float, float]:
        rows = features.rows + features.second_rows
        tokens = features.rows + features.prefill_context + features.decode_context + features.pipelined_load
        return float(rows), float(rows * tokens), float(tokens), 1.0


@LATENCY_MODELS.register("bros")
class BROSModel(LinearModel):
    """``max(t_prefill + t_decode, t_swap)``, each t_exec ``a0 L^n + a1 L^n L^a + b``, t_swap linear in bytes.

    L^n is the number of rows, L^a the context with them. In the paper L^a = L^n for prefill, as prompts are never
    cut; with chunked prefill it is the context that the chunks see. What exceeds t_exec in t_swap is the last term.
    The coefficients are a0, a1, b of prefill, then of decode.
    """

    term_names = (
        "prefill rows",
        "prefill attention",
        "prefill constant",
        "decode rows",
        "decode attention",
        "decode constant",
        "swap wait",
    )
    attention_terms = (1, 4)

    def __init__(self, coefficients: Sequence[float], num_layers: int, swap: AlphaBeta) -> None:
        super().__init__(coefficients, num_layers)
        self._swap = swap

    @classmethod
    def from_profile(cls, profile: Profile) -> Self:
        return cls((), profile.shape.num_layers, profile.copy_to_device).fit(profile.steps)

    def fit(self, samples: Sequence[StepSample]) -> Self:
        # A step that waited for a swap says nothing about execution.
        ran = [s for s in samples if s.seconds > self._swap(s.features.swap_bytes)]
        return type(self)(self._fit(ran), self.num_layers, self._swap)

    def terms(self, features: BatchFeatures) -> tuple[float, ...]:
        execution = super().terms(features)
        if not features.swap_bytes:
            return (*execution, 0.0)
        return (*execution, max(0.0, self._swap(features.swap_bytes) - sum(execution)))

    @staticmethod
    def _quantities(features: BatchFeatures) -> tuple[float, ...]:
        prefill = features.prefill_tokens
        decode = features.decode_requests + features.seats + features.pipelined_rows
        return (
            prefill,
            prefill * (prefill + features.prefill_context),
            1.0 if prefill else 0.0,
            decode,
            decode * (decode + features.decode_context + features.pipelined_load),
            1.0 if decode else 0.0,
        )
