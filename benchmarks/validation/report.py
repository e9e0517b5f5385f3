"""What a case came to on the engine and on the simulator, and how far the two are apart."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from omniserve import EngineConfig
from omniserve.simulate import Load
from omniserve.simulate.results import ClassResult

FIGURES = {"TTFT p50": "ttft_p50_s", "p99": "ttft_p99_s", "TPOT p50": "tpot_p50_s", "p99 ": "tpot_p99_s"}
"""Heading -> figure of the latency-sensitive class; then comes the best-effort class's throughput."""
GOAL = 0.05
_WIDTH = 9


@dataclass(slots=True)
class Case:
    """A load under a scheduler, and what came of it."""

    name: str
    config: EngineConfig
    load: Load
    runs: list[dict[str, Any]] = field(default_factory=list)
    """The engine's, one a repeat."""
    twins: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """The simulator's."""


def figures_of(ls: ClassResult, be: ClassResult) -> list[float]:
    """Return the figures that are compared: seconds, and best-effort tokens a second (prompts and outputs)."""
    return [*(getattr(ls, name) for name in FIGURES.values()), be.output_tokens_per_s + be.prompt_tokens_per_s]


def medians(runs: Sequence[dict[str, Any]]) -> list[float]:
    """Return the median of each figure over runs."""
    return [statistics.median(values) for values in zip(*(run["figures"] for run in runs), strict=True)]


def ratios(case: Case) -> dict[str, list[float]]:
    """Return each twin's figures over the engine's, medians both; and ``again``: the largest between two runs."""
    truth = medians(case.runs)
    found = {name: [a / b for a, b in zip(medians(runs), truth, strict=True)] for name, runs in case.twins.items()}
    if len(case.runs) > 1:
        columns = zip(*(run["figures"] for run in case.runs), strict=True)
        found["again"] = [max(values) / min(values) for values in columns]
    return found


def table(case: Case) -> str:
    """Return the lines of a case: the engine's figures (milliseconds; tokens/s), then ratios to them."""
    *times_s, throughput = medians(case.runs)
    cells = [f"{1e3 * value:.1f}" for value in times_s] + [f"{throughput:.0f}"]
    share = statistics.median(run["host_share"] for run in case.runs)
    lines = [line(case.name, "engine", cells) + f"   host {share:.0%}"]
    lines += [line("", who, [f"x{value:.2f}" for value in values]) for who, values in ratios(case).items()]
    return "\n".join(lines)


def summary(found: Sequence[Case]) -> dict[str, list[dict[str, float]]]:
    """Return for each twin and figure how far the cases are off: median, largest, and the share within the goal.

    Being off is the ratio to the engine, or its inverse if that is larger, less 1. ``again`` sums up each pair of runs.
    """
    off: dict[str, list[list[float]]] = {}
    for case in found:
        for who, values in ratios(case).items():
            if who != "again":
                off.setdefault(who, []).append([_off(value) for value in values])
        for one, other in itertools.combinations(case.runs, 2):
            pair = zip(one["figures"], other["figures"], strict=True)
            off.setdefault("again", []).append([_off(a / b) for a, b in pair])
    return {
        who: [
            {
                "median": statistics.median(column),
                "largest": max(column),
                "within_goal": sum(value <= GOAL for value in column) / len(column),
            }
            for column in zip(*rows, strict=True)
        ]
        for who, rows in off.items()
    }


def summary_table(found: Sequence[Case]) -> str:
    lines = []
    for who, columns in summary(found).items():
        for what, form in (("median", ".1%"), ("largest", ".0%"), ("within_goal", ".0%")):
            label = f"within {GOAL:.0%}" if what == "within_goal" else f"off by, {what}"
            lines.append(line(label, who, [format(column[what], form) for column in columns]))
    return "\n".join(lines)


def _off(ratio: float) -> float:
    return math.expm1(abs(math.log(ratio)))


def line(label: str, who: str, cells: Sequence[str]) -> str:
    return f"{label:26s}{who:11s}" + "".join(cell.rjust(_WIDTH) for cell in cells)
