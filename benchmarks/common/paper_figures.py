"""The papers' figures as experiments, by name.

Rates are not the papers' axes, which their text does not print; they lie around what the text names.
"""

from __future__ import annotations

from benchmarks.common import paper_apex, paper_bros, paper_conserve, paper_omniserve
from benchmarks.common.paper_cases import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for part in (paper_omniserve, paper_apex, paper_conserve, paper_bros)
    for experiment in part.EXPERIMENTS
}
"""In the order of the page."""
