"""Calibration: what a trace of a server's steps says about a machine: how fast it is, and how steadily.

A profile, or a data sheet, says what steps take on an idle machine with nothing but the engine on it. A server's own
steps say what they take beside its clients and whatever else runs there, and how they vary. What was traced need not be
the load that is simulated, nor under the same scheduler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Self

from omniserve.latency import BatchFeatures, Predictor, ScaledModel
from omniserve.latency.profile import StepSample
from omniserve.latency.trace import read_steps
from omniserve.simulate.machine import Machine
from omniserve.simulate.spread import Spread

LEAST_STEPS = 100
"""Fewer say little of a step in a hundred."""
COMPILED = 10.0
"""Factor over the other steps' ratio to their predictions from which on a step compiled something, and is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The factors of a calibration; ``apply`` puts them into a machine."""

    factors: tuple[float, ...]
    """Factors for the terms of the machine's device."""
    spread: Spread
    """The spread of measured times around the prediction that has these factors."""
    ratio: float
    """The sum of all measured times over the sum of those that the machine's device predicts."""
    num_steps: int
    num_left_out: int
    """Measured steps left out, because they compiled something."""

    @classmethod
    def fitted(cls, device: Predictor, samples: Sequence[StepSample]) -> Self:
        """Fit the factors of a machine's device to measured steps, in the order in which they ran.

        Raises:
            ValueError: There are too few steps, or they are of a model with another number of layers.
        """
        if len(samples) < LEAST_STEPS:
            raise ValueError(
                f"a calibration needs at least {LEAST_STEPS} steps, got {len(samples)}: trace the server for longer"
            )
        for features in (sample.features for sample in samples):
            if features.device_rows and features.dense_layers != device.num_layers:
                raise ValueError(
                    f"the traced steps are of a model with {features.dense_layers:.0f} layers, not of this one with "
                    f"{device.num_layers}"
                )
        ratios = [sample.seconds / device.step_s(sample.features) for sample in samples]
        longest = COMPILED * median(ratios)
        kept = [sample for sample, ratio in zip(samples, ratios, strict=True) if ratio <= longest]
        model = ScaledModel.fitted(device, kept)
        measured_s = [sample.seconds for sample in kept]
        return cls(
            factors=model.factors,
            spread=Spread([model.step_s(sample.features) for sample in kept], measured_s),
            ratio=sum(measured_s) / sum(device.step_s(sample.features) for sample in kept),
            num_steps=len(samples),
            num_left_out=len(samples) - len(kept),
        )

    def apply(self, machine: Machine) -> Machine:
        """Return the machine with steps that take, and vary, as the measured ones did.

        What the scheduler believes stays as it is: a server too begins with its profile, and learns.
        """
        return dataclasses.replace(machine, device=ScaledModel(machine.device, self.factors), spread=self.spread)

    def __str__(self) -> str:
        low, high = self.spread.percentile(5), self.spread.percentile(95)
        return (
            f"{self.num_steps} steps took {self.ratio:.2f} times what was predicted; then 9 of 10 are {low:.2f} to "
            f"{high:.2f} times what is" + (f" ({self.num_left_out} left out)" if self.num_left_out else "")
        )


def read_samples(path: Path | str) -> list[StepSample]:
    """Read the steps of a trace (``--trace-steps``), but for those that rows left or entered between two layers.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no trace of steps that this version knows.
    """
    steps = read_steps(path).steps
    try:
        return [
            StepSample(features=BatchFeatures(**step.features), seconds=step.measured_s)  # type: ignore[arg-type]
            for step in steps
            if step.is_whole
        ]
    except TypeError as error:
        raise ValueError(f"the steps were traced by another version of OmniServe: {error}") from error
