"""The contract of what predicts a step's latency."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

from omniserve.core.registry import Registry
from omniserve.latency.features import BatchFeatures
from omniserve.latency.profile import Profile, StepSample


class Predictor(ABC):
    """Predicts seconds from BatchFeatures, as a sum of terms of which none is negative.

    A prediction is a few microseconds of plain float arithmetic, and it does not fall when load is added.
    """

    term_names: tuple[str, ...]
    """The names of the terms, in the order of ``terms``."""
    layer_terms: slice
    """The terms that the layers share evenly; the others belong to the step as a whole."""
    attention_terms: tuple[int, ...]
    """The layers' terms that are attention on the device; the others are linear in rows."""
    num_layers: int
    """Number of layers of the model."""

    @property
    def pace(self) -> float:
        """The factor by which steps take longer at this moment than as a rule; predictions contain it."""
        return 1.0

    @property
    def at_best(self) -> Predictor:
        """The predictor without what has slowed steps lately: for what the machine can do, not what it does now."""
        return self

    def has_seen(self, num_rows: int) -> bool:
        """Return whether predictions for steps of ``num_rows`` rows are worth a refusal."""
        return True

    def note_prompt(self, num_rows: int) -> None:  # noqa: B027 (most predictors do not ask)
        """Say that a prompt was computed for which steps of so many rows had been predicted."""

    def at(self, now_s: float) -> None:  # noqa: B027 (most predictors learn nothing)
        """Say what time it is: what was learned from steps long ago counts less."""

    @abstractmethod
    def terms(self, features: BatchFeatures) -> tuple[float, ...]:
        """Return the terms of a step in seconds, one for each of ``term_names``."""

    def step_s(self, features: BatchFeatures) -> float:
        """Return the seconds of the step."""
        return sum(self.terms(features))

    def modules_s(self, features: BatchFeatures) -> tuple[float, float]:
        """Return the seconds of one layer of the step apart: linear modules, attention on the device."""
        terms = self.terms(features)
        attention_s = sum(terms[i] for i in self.attention_terms)
        return (sum(terms[self.layer_terms]) - attention_s) / self.num_layers, attention_s / self.num_layers


class LatencyModel(Predictor):
    """A predictor made of measurements. Immutable: ``fit`` returns another one."""

    @classmethod
    @abstractmethod
    def from_profile(cls, profile: Profile) -> Self:
        """Make a model of what was measured."""

    @abstractmethod
    def fit(self, samples: Sequence[StepSample]) -> Self:
        """Return the model fitted to measured steps (a hundred are plenty).

        Raises:
            ValueError: There are no samples.
        """


LATENCY_MODELS: Registry[type[LatencyModel]] = Registry("latency model", package="omniserve.latency")
