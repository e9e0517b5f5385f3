"""Tables and a plot of the comparison, from its record."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.summary import cells, medians
from benchmarks.common.terminal import table_of
from benchmarks.common.timing import median_ratio
from benchmarks.peers.engines import OBJECTIVES
from benchmarks.peers.weights import DENSE_LABELS, OMNISERVE
from omniserve.simulate.report import require_matplotlib

Results = Mapping[str, Any]
FIGURES: dict[str, tuple[tuple[str, str, float, bool], ...]] = {
    "decode": (("tokens_per_s", "tokens/s", 1.0, True),),
    "prefill": (("ttft_s", "TTFT, ms", 1e3, False),),
    "ls": (
        ("ttft_p50_s", "TTFT p50, ms", 1e3, False), ("ttft_p99_s", "TTFT p99, ms", 1e3, False),
        ("tpot_p50_s", "TPOT p50, ms", 1e3, False), ("tpot_p99_s", "TPOT p99, ms", 1e3, False),
    ),
    "be": (("be_tokens_per_s", "tokens/s in and out", 1.0, True),),
    "shared": (("be_tokens_per_s", "tokens/s in and out", 1.0, True),),
    "start": (("cold_s", "cold, s", 1.0, False), ("warm_s", "warm, s", 1.0, False)),
}  # fmt: skip
"""Figures of each phase: their names, how they are shown, the factor to that unit, and whether more is better."""
CO_SERVING = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "attained_of_all", "be_tokens_per_s")
"""The figures of LS and BE together that are printed as they come."""


def line(sample: Mapping[str, Any]) -> str:
    """Return a line of text for a sample."""
    keys = [*(spec[0] for spec in FIGURES.get(sample["phase"], ())), *CO_SERVING, "others_busy_cores"]
    shown = {key: sample["figures"][key] for key in dict.fromkeys(keys) if sample["figures"].get(key) is not None}
    about = f"{sample['phase']}, {sample['case']}, round {sample['round']}, {sample['contender']}: "
    return about + ", ".join(f"{key} {value:.4g}" for key, value in shown.items())


def of_case(results: Results, phase: str, case: str, contender: str) -> dict[int, dict[str, Any]]:
    """Return a contender's figures of a case by round."""
    return {
        sample["round"]: sample["figures"]
        for sample in results["samples"]
        if (sample["phase"], sample["case"], sample["contender"]) == (phase, case, contender)
    }


def names(results: Results, key: str, **where: str) -> list[str]:
    """Return the different values of a key in the samples that have these values, in order of their first."""
    chosen = [s for s in results["samples"] if all(s[name] == value for name, value in where.items())]
    return list(dict.fromkeys(sample[key] for sample in chosen))


def floor_of(results: Results, phase: str, case: str, figure: str) -> dict[int, float]:
    """Return the machine's floor for a figure by round; empty if it has none."""
    return {
        speed["round"]: speed["floor"][figure]
        for speed in results["speeds"]
        if (speed["phase"], speed["case"]) == (phase, case) and figure in speed["floor"]
    }


def gain(ours: Mapping[int, float], theirs: Mapping[int, float], *, more_is_better: bool) -> float | None:
    """Return the median over the rounds that both have of how many times as good ours is; None without such rounds."""
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        return None
    pair = [ours[number] for number in both], [theirs[number] for number in both]
    return median_ratio(*(pair if more_is_better else pair[::-1]))


def dense_case(results: Results, phase: str, case: str) -> str | None:
    """Return the same load with dense weights, of a load that is named after other weights; None if there is none."""
    load, _, label = case.rpartition(", ")
    found = [f"{load}, {dense}" for dense in DENSE_LABELS.values() if dense != label]
    return next((name for name in found if name in names(results, "case", phase=phase)), None)


def speed_table(results: Results) -> str:
    """Return a table of what each engine does alone; brackets: how many times as long as the machine's floor takes.

    With weights in several forms the last column has how many times as good OmniServe is as with dense ones.
    """
    rows = []
    engines = [name for name in names(results, "contender") if "," not in name]
    for phase, figures in FIGURES.items():
        for case in names(results, "case", phase=phase):
            for figure, unit, factor, more_is_better in figures:
                floor = floor_of(results, phase, case, figure)
                row = {"": f"{phase}, {case}: {unit}"}
                values = {
                    engine: {n: found[figure] for n, found in of_case(results, phase, case, engine).items()}
                    for engine in engines
                }
                for engine, by_round in values.items():
                    row[engine] = _number(factor * statistics.median(by_round.values())) if by_round else "-"
                    times = gain(floor, by_round, more_is_better=more_is_better)
                    row[engine] += f" ({times:.1f}x)" if times is not None else ""
                row["floor"] = _number(factor * statistics.median(floor.values())) if floor else ""
                for engine in engines:
                    if engine != OMNISERVE and OMNISERVE in engines:
                        times = gain(values[OMNISERVE], values[engine], more_is_better=more_is_better)
                        row[f"{OMNISERVE} / {engine}"] = "" if times is None else f"{times:.2f}"
                if dense := dense_case(results, phase, case):
                    other = {n: found[figure] for n, found in of_case(results, phase, dense, OMNISERVE).items()}
                    times = gain(values.get(OMNISERVE, {}), other, more_is_better=more_is_better)
                    row[f"{OMNISERVE} / dense"] = "" if times is None else f"{times:.2f}"
                rows.append(row)
    idle: dict[str, dict[str, str]] = {}
    for name, cores in results.get("idle_cores", {}).items():
        engine, _, label = name.partition(", ")
        title = ", ".join(filter(None, ("idle", label))) + ": cores in use"
        idle.setdefault(label, {"": title})[engine] = f"{cores:.2f}"
    rows += idle.values()
    return table_of(rows) if rows else "(nothing was measured alone)"


def co_serving_table(results: Results) -> str:
    """Return a table of LS and BE together, medians over the rounds."""
    rows = []
    for label in names(results, "contender", phase="coserve"):
        found = of_case(results, "coserve", "LS and BE", label)
        middle = medians(list(found.values()))
        shown = cells(middle)
        alone = {n: f["be_tokens_per_s"] for n, f in of_case(results, "be", "alone", label.split(",")[0]).items()}
        share = gain({n: f["be_tokens_per_s"] for n, f in found.items()}, alone, more_is_better=True)
        row = {
            "": label,
            "TTFT p50 / p99 ms": shown["TTFT p50 / p99 ms"],
            "TPOT p50 / p99 ms": shown["TPOT p50 / p99 ms"],
        }
        for name, (ttft_s, tpot_s) in OBJECTIVES.items():
            attained = middle.get(f"attained_{name}")
            row[f"within {ttft_s:g} s, {tpot_s:g} s"] = "-" if attained is None else f"{attained:.0%}"
        row |= {"rejected": shown["rejected"], "BE tokens/s": f"{middle['be_tokens_per_s']:.0f}"}
        rows.append(row | {"of BE alone": "" if share is None else f"{share:.2f}"})
    return table_of(rows) if rows else "(nothing was co-served)"


def markdown(results: Results) -> str:
    """Return all tables."""
    return f"{speed_table(results)}\n\n{co_serving_table(results)}"


def plot(results: Results, path: Path) -> None:
    """Draw what was measured: a panel of bars for each phase, and LS latency against BE throughput.

    Raises:
        ValueError: Nothing was measured.
        RuntimeError: Matplotlib is not installed.
    """
    pyplot = require_matplotlib()
    phases = [phase for phase in FIGURES if names(results, "case", phase=phase)]
    panels = [*phases, *(("ttft_p99_s", "tpot_p99_s") if names(results, "case", phase="coserve") else ())]
    if not panels:
        raise ValueError("there is nothing to draw: no sample was taken")
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(5.5 * columns, 4 * lines), squeeze=False, layout="constrained"
    )
    every = [axis for line in axes for axis in line]
    labels = names(results, "contender")
    colours = {label: pyplot.get_cmap("tab10")(number % 10) for number, label in enumerate(labels)}
    for axis, panel in zip(every, panels, strict=False):
        if panel in FIGURES:
            _bars(axis, results, panel, colours)
        else:
            _frontier(axis, results, panel, colours)
    for axis in every[len(panels) :]:
        axis.set_visible(False)
    handles = [pyplot.Line2D([], [], marker="s", linestyle="", color=colours[label], label=label) for label in labels]
    handles.append(pyplot.Line2D([], [], color="black", label="floor of this machine"))
    figure.legend(handles=handles, ncols=4, loc="outside lower center", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _bars(axis: Any, results: Results, phase: str, colours: Mapping[str, Any]) -> None:
    """Draw a group of bars for each case and figure, a bar for each engine, single rounds as dots."""
    engines = names(results, "contender", phase=phase)
    groups = [(case, spec) for case in names(results, "case", phase=phase) for spec in FIGURES[phase]]
    width = 0.8 / len(engines)
    for group, (case, (figure, _, factor, _)) in enumerate(groups):
        for number, engine in enumerate(engines):
            values = [factor * found[figure] for found in of_case(results, phase, case, engine).values()]
            at = group + (number - (len(engines) - 1) / 2) * width
            if values:
                axis.bar(at, statistics.median(values), width, color=colours[engine])
                axis.plot([at] * len(values), values, ".", color="black", markersize=3)
        if floor := floor_of(results, phase, case, figure):
            axis.hlines(factor * statistics.median(floor.values()), group - 0.4, group + 0.4, color="black")
    units = {unit for _, unit, _, _ in FIGURES[phase]}
    ticks = [case.replace(", ", "\n") if len(units) == 1 else unit for case, (_, unit, _, _) in groups]
    axis.set_xticks(range(len(groups)), ticks)
    axis.set(title=phase, ylabel=units.pop() if len(units) == 1 else "")


def _frontier(axis: Any, results: Results, figure: str, colours: Mapping[str, Any]) -> None:
    for label in names(results, "contender", phase="coserve"):
        found = list(of_case(results, "coserve", "LS and BE", label).values())
        points = [(f["be_tokens_per_s"], 1e3 * f[figure]) for f in found if f.get(figure) is not None]
        if points:
            axis.plot(*_columns(points), ".", color=colours[label], markersize=4)
            axis.plot(*map(statistics.median, _columns(points)), "s", color=colours[label], markersize=8)
    name = figure.split("_")[0].upper()
    axis.set(title="LS beside BE", xlabel="BE tokens/s", ylabel=f"LS {name} p99, ms", xlim=(0, None), yscale="log")


def _columns(points: Iterable[tuple[float, float]]) -> list[list[float]]:
    return [list(column) for column in zip(*points, strict=True)]


def _number(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"
