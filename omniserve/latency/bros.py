"""``bros``: linear in rows and in rows times context, prefill and decode apart, beside swapping. Paper: bros 4.1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from omniserve.latency.base import LATENCY_MODELS, BatchFeatures, LatencyModel
from omniserve.latency.profile import AlphaBeta, Profile, StepSample
from omniserve.latency.regression import fit_terms


@LATENCY_MODELS.register("bros")
class BROSModel(LatencyModel):
    """``max(t_prefill + t_decode, t_swap)``, each t_exec ``a0 L^n + a1 L^n L^a + b``, t_swap linear in bytes.

    L^n is the number of rows, L^a the context with them. In the paper L^a = L^n for prefill, as prompts are never
    cut; with chunked prefill it is the context that the chunks see. What exceeds t_exec in t_swap is the last term.

    Args:
        coefficients: a0, a1, b of prefill, then of decode, in seconds; None before ``fit``.
    """

    term_names = (
        "prefill rows", "prefill attention", "prefill constant", "decode rows", "decode attention", "decode constant",
        "swap wait",
    )  # fmt: skip
    attention_terms = (1, 4)
    layer_terms = slice(None)  # the model knows of no layers: an even share of all

    def __init__(self, coefficients: Sequence[float] | None, swap: AlphaBeta, num_layers: int) -> None:
        self._coefficients = tuple(coefficients) if coefficients is not None else (0.0,) * 6
        self._swap = swap
        self.num_layers = num_layers

    @classmethod
    def from_profile(cls, profile: Profile) -> Self:
        return cls(None, profile.copy_to_device, profile.shape.num_layers).fit(profile.steps)

    def fit(self, samples: Sequence[StepSample]) -> Self:
        # A step that waited for a swap says nothing about execution.
        ran = [s for s in samples if s.seconds > self._swap(s.features.swap_bytes)]
        rows = [self._quantities(sample.features) for sample in ran]
        return type(self)(fit_terms(rows, [sample.seconds for sample in ran]), self._swap, self.num_layers)

    def terms(self, features: BatchFeatures) -> tuple[float, ...]:
        execution = [k * x for k, x in zip(self._coefficients, self._quantities(features), strict=True)]
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
