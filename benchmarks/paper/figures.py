"""The papers' figures as experiments, by name.

Rates are not the papers' axes, which their text does not print; they lie around what the text names.
"""

from __future__ import annotations

from benchmarks.paper import apex, bros, conserve, omniserve
from benchmarks.paper.cases import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment for part in (omniserve, apex, conserve, bros) for experiment in part.EXPERIMENTS
}
"""In the order of the page."""
