"""Predictors that multiply another one's terms: by factors found once, or learned from each step."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Sequence
from statistics import median
from typing import Self

from omniserve.core.stats import LatencyStats
from omniserve.latency.base import Predictor
from omniserve.latency.features import BatchFeatures
from omniserve.latency.fitting import fit_terms
from omniserve.latency.profile import StepSample

logger = logging.getLogger(__name__)

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
        """A factor for each of ``term_names``."""
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


BOUNDS = (0.7, 1.5)
"""A term that is off by more than this is not drift: the machine is another one, or has other work."""
_WINDOW = 9
"""Number of steps whose median is the pace. It follows after five like ones, and four odd ones do not move it."""
_PACE_BOUNDS = (1 / 16, 16.0)
_PACE_HALF_LIFE_S = 0.25
"""Half-life of the pace's logarithm, in seconds without steps: after 2 s, 16 has become 1.01."""
_FACTOR_HALF_LIFE_S = 30.0
"""Half-life of the logarithms of the terms' factors, in seconds without steps; they took many steps to learn."""
COARSE_MARGIN = 1.2
"""Factor on the predictions of a coarse profile: bounds and admission are that much tighter."""
FEW_STEPS = 5
"""The number of steps, at least half as large, after which a coarse profile's word on a step counts: the pace follows
by then."""
FEW_PROMPTS = 10
"""Number of first tokens, of prompts for which such steps were predicted, after which that word counts, too."""


class StepPace:
    """The median of the last steps' ratios, measured over predicted.

    A neighbour that takes a core makes steps several times as long from one to the next, and is gone again as soon: too
    much for a correction that is slow on purpose. While there are no steps, nothing tells whether it is still there.
    """

    def __init__(self) -> None:
        self._recent = deque([0.0] * _WINDOW, maxlen=_WINDOW)
        self.value = 1.0
        """The factor for predictions, within ``_PACE_BOUNDS``."""

    def observe(self, ratio: float) -> None:
        """Take a step that took ``ratio`` times what was predicted, > 0."""
        self._recent.append(math.log(ratio))
        self._update()

    def rest(self, seconds: float) -> None:
        """Let the pace return towards 1, as there were no steps for ``seconds``."""
        kept = 0.5 ** (seconds / _PACE_HALF_LIFE_S)
        self._recent = deque([kept * each for each in self._recent], maxlen=_WINDOW)
        self._update()

    def _update(self) -> None:
        self.value = min(max(math.exp(median(self._recent)), _PACE_BOUNDS[0]), _PACE_BOUNDS[1])


class CorrectedModel(ScaledModel):
    """Multiplies each term of a model by a factor that measured steps move, and all of them by the machine's pace.

    A step's relative error, clipped, is shared among its terms in proportion to their part of the step (normalised
    least mean squares), so what the load consists of is what is corrected. One odd step moves a factor by at most
    ``rate``. What the factors leave is the pace, the median of the last few steps: others use the machine from now on,
    or no longer. What was learned loses its say as time passes without steps (``at``).

    Args:
        is_coarse: The model is made of a coarse profile: predictions are ``COARSE_MARGIN`` times what is expected, and
            ``has_seen`` asks for steps.
        learns: Steps correct the model; False: they only tell how wrong it is (``error``, ``drift``).
        rate: Share of an error that one step takes away, in (0, 1).
        bounds: Smallest and largest factor, around 1.
    """

    MAX_ERROR = 0.3
    """Larger errors count as this: a garbage collection is not a trend."""
    MAX_LOG_RATIO = math.log(3)
    """Largest |log ratio| that counts for ``drift``: a step that compiled something took a hundred times its time."""
    MEMORY = 0.02
    """Weight of a new step in ``drift`` and ``error``."""
    LASTING = 1000
    """Steps in a row with a ``drift`` out of bounds before that is said: a neighbour's work for a moment is none."""

    def __init__(
        self,
        model: Predictor,
        *,
        is_coarse: bool = False,
        learns: bool = True,
        rate: float = 0.02,
        bounds: tuple[float, float] = BOUNDS,
    ) -> None:
        if not 0 < rate < 1:
            raise ValueError(f"rate must be in (0, 1), got {rate}")
        if not 0 < bounds[0] <= 1 <= bounds[1]:
            raise ValueError(f"bounds must be around 1, got {bounds}")
        self._rate, self._learns = rate, learns
        self._low, self._high = bounds
        self.replace(model, is_coarse=is_coarse)

    def replace(self, model: Predictor, *, is_coarse: bool = False) -> None:
        """Predict by another model from now on, and forget what was learned about the one before."""
        super().__init__(model, [1.0] * len(model.term_names))
        self.is_coarse = is_coarse
        """The model is made of a coarse profile."""
        self._log_ratio = 0.0
        self._pace = StepPace()
        self._last_s: float | None = None
        """Time until which idle seconds are accounted for: the last step, or the last call that let factors decay; None
        before."""
        self._sizes: Counter[int] = Counter()
        """Steps since then by the bit length of their rows; a coarse model's."""
        self._prompts: Counter[int] = Counter()
        """Prompts since then by the bit length of the rows that were predicted for their steps; a coarse model's."""
        self._num_steps = 0
        self._num_beyond = 0
        self.error = 0.0
        """Running mean of |predicted - measured| / measured, with the correction."""
        self.has_drifted = False
        """``drift`` has been out of bounds for long, which was logged."""

    def stats(self) -> LatencyStats:
        """Return how well steps are predicted."""
        return LatencyStats(error=self.error, drift=self.drift, is_coarse=self.is_coarse)

    @property
    def pace(self) -> float:
        """The factor by which steps take longer at this moment than the terms' factors say."""
        return self._pace.value

    @property
    def drift(self) -> float:
        """Measured over predicted without correction, a running geometric mean: 1 for a profile that still holds."""
        return math.exp(self._log_ratio)

    def terms(self, features: BatchFeatures) -> tuple[float, ...]:
        """Return the corrected terms, seconds."""
        scale = self._pace.value * (COARSE_MARGIN if self.is_coarse else 1.0)
        return tuple(
            [scale * factor * term for factor, term in zip(self.factors, self.model.terms(features), strict=True)]
        )

    @property
    def at_best(self) -> Predictor:
        """The model by itself, faster where steps have shown that it is, and never slower."""
        return ScaledModel(self.model, [min(1.0, self._pace.value * factor) for factor in self.factors])

    def has_seen(self, num_rows: int) -> bool:
        """Return whether a prediction for steps of ``num_rows`` rows was ever compared with what came.

        What a coarse profile says of sizes that it did not measure may be ten times what such a step takes. So it asks
        for a few steps of at least half the size, or a few prompts for which such steps were predicted.
        """
        least = max(1, num_rows // 2).bit_length()
        return (
            not self.is_coarse
            or sum(self._sizes[size] for size in self._sizes if size >= least) >= FEW_STEPS
            or sum(self._prompts[size] for size in self._prompts if size >= least) >= FEW_PROMPTS
        )

    def note_prompt(self, num_rows: int) -> None:
        """Count a prompt by the rows that were predicted for its steps, which may have been smaller."""
        if self.is_coarse:
            self._prompts[num_rows.bit_length()] += 1

    def at(self, now_s: float) -> None:
        """Let what was learned lose its say if there were no steps lately."""
        if self._last_s is not None and now_s > self._last_s:
            idle_s = now_s - self._last_s
            self._pace.rest(idle_s)
            kept = 0.5 ** (idle_s / _FACTOR_HALF_LIFE_S)
            self.factors = tuple([factor**kept for factor in self.factors])
            self._last_s = now_s

    def observe(self, features: BatchFeatures, seconds: float, now_s: float) -> None:
        """Learn from a step that took ``seconds`` and ended at ``now_s``; a step of 0 seconds says nothing."""
        raw = self.model.terms(features)
        total = sum(raw)
        if total <= 0 or seconds <= 0:
            return
        self.at(now_s - seconds)
        self._last_s = now_s
        if self.is_coarse:
            self._sizes[features.device_rows.bit_length()] += 1
        corrected = [factor * term for factor, term in zip(self.factors, raw, strict=True)]
        predicted = sum(corrected)
        off = abs(self._pace.value * predicted - seconds) / seconds
        if self._learns:
            self._learn(corrected, predicted, seconds)
        self._num_steps += 1
        weight = max(self.MEMORY, 1.0 / self._num_steps)
        self.error += weight * (min(1.0, off) - self.error)
        ratio = max(-self.MAX_LOG_RATIO, min(self.MAX_LOG_RATIO, math.log(seconds / total)))
        self._log_ratio += weight * (ratio - self._log_ratio)
        self._watch()

    def _learn(self, corrected: Sequence[float], predicted: float, seconds: float) -> None:
        """Move the pace, and the factors of the terms of which a step consisted."""
        self._pace.observe(seconds / predicted)
        error = max(-self.MAX_ERROR, min(self.MAX_ERROR, (seconds - predicted) / predicted))
        shares = [term / predicted for term in corrected]
        gain = self._rate * error / sum(share * share for share in shares)
        moves = (1.0 + max(-self._rate, min(self._rate, gain * share)) for share in shares)
        moved = (factor * move for factor, move in zip(self.factors, moves, strict=True))
        self.factors = tuple(max(self._low, min(self._high, factor)) for factor in moved)

    def _watch(self) -> None:
        self._num_beyond = 0 if self._low <= self.drift <= self._high else self._num_beyond + 1
        if self._num_beyond < self.LASTING or self.has_drifted:
            return
        self.has_drifted = True
        logger.warning(
            "steps take %.2f times what the latency profile says, for the last %d steps: predictions follow, but less "
            "exactly; if nothing else uses the machine, make a new profile with `python -m omniserve.profile`",
            self.drift,
            self.LASTING,
        )
