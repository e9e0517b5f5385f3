"""Tables and a plot of the CPU attention benchmark, from what its record holds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.tables import table, table_of
from omniserve.simulate.report import require_matplotlib


def limits_table(limits: Mapping[str, Any]) -> str:
    """Return one line a number of threads: its fastest reading, and the plain one beside it."""
    lines = [["read limit", "GB/s", "with", "one plain stream"]]
    for group, per_reading in limits.items():
        if isinstance(per_reading, dict):
            rates = {name: statistics.median(samples) for name, samples in per_reading.items()}
            best = max(rates, key=rates.__getitem__)
            lines.append([group, f"{rates[best]:.1f}", best, f"{next(iter(rates.values())):.1f}"])
    size = f"{limits['bytes'] / 2**30:.2f} GiB, {limits['share_in_huge_pages']:.0%} in 2 MiB pages"
    return f"{table(lines, numbers=True)}\n{size}"


def shares_table(rows: Mapping[str, Any]) -> str:
    """Return one line a row; what a candidate has no result for is marked."""
    names = candidate_names(rows)
    lines = [["share of the read limit (smallest-largest), RMS error", "GB/s", "busy", *names]]
    for name, row in rows.items():
        cells, limits = [], []
        for candidate in names:
            result = row["candidates"].get(candidate)
            if result is None:
                cells.append("not found")
                continue
            limits += [sample["limit_before"] for sample in result["samples"]]
            shares = shares_of(result)
            cells.append(f"{result['share']:.2f} ({min(shares):.2f}-{max(shares):.2f}) {result['error']:.0e}")
        lines.append([name, f"{statistics.median(limits):.1f}", f"{row['others_busy_cores']:.1f}", *cells])
    return table(lines, numbers=True)


def shares_of(result: Mapping[str, Any]) -> list[float]:
    """Return a candidate's samples as shares of the limits that they were taken between."""
    return [2 * one["gb_per_s"] / (one["limit_before"] + one["limit_after"]) for one in result["samples"]]


def candidate_names(rows: Mapping[str, Any]) -> list[str]:
    """Return the names of all rows' candidates, in their order."""
    return list(dict.fromkeys(name for row in rows.values() for name in row["candidates"]))


def busy_table(teams: Mapping[str, Any]) -> str:
    """Return one line a team: what attention and dense work do alone and together."""
    lines = []
    for name, team in teams.items():
        line = {"attention + torch threads": name, "busy": f"{team['others_busy_cores']:.1f}"}
        for side in ("alone", "together"):
            attention, dense = team["attention"][side], team["dense"][side]
            line[f"GB/s {side}"] = f"{attention['gb_per_s']:.3g}"
            line[f"share {side}"] = f"{attention['share']:.3g}"
            line[f"dense steps/s {side}"] = f"{dense['steps_per_s']:.3g}"
            line[f"p50 / p99 ms {side}"] = f"{1e3 * dense['p50_s']:.3g} / {1e3 * dense['p99_s']:.3g}"
        lines.append(line)
    return table_of(lines)


def prefill_table(shapes: Mapping[str, Any]) -> str:
    """Return one line a shape: GFLOP/s, and how many times faster ours is."""
    names = candidate_names(shapes)
    lines = [["prefill, GFLOP/s (ours is so many times faster)", "busy", *names]]
    for shape, result in shapes.items():
        found = [result["candidates"][name] for name in names]
        cells = [f"{one['gflop_per_s']:.1f} ({one['speed_of_ours']:.2f})" for one in found]
        lines.append([shape, f"{result['others_busy_cores']:.1f}", *cells])
    return table(lines, numbers=True)


def engine_table(engines: Mapping[str, Any]) -> str:
    """Return one column an engine: the share of the limit, and what the host threads do with the time."""
    medians = [engine["medians"] for engine in engines.values()]
    lines = [[key, *(f"{median[key]:.4g}" for median in medians)] for key in medians[0]]
    return table([["host tier in the engine, steady state", *engines], *lines], numbers=True)


def plot_shares(rows: Mapping[str, Any], path: Path) -> None:
    """Write bars of the share of the read limit, by row and candidate; whiskers reach the extreme samples.

    Raises:
        RuntimeError: Matplotlib is not installed.
    """
    pyplot = require_matplotlib()
    names = candidate_names(rows)
    figure, axes = pyplot.subplots(figsize=(max(6.0, 0.35 * len(names) * len(rows) + 2), 4.5), layout="constrained")
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        places, shares, below, above = [], [], [], []
        for place, row in enumerate(rows.values()):
            result = row["candidates"].get(name)
            if result is None:
                continue
            samples = shares_of(result)
            places.append(place + (number - (len(names) - 1) / 2) * width)
            shares.append(result["share"])
            below.append(result["share"] - min(samples))
            above.append(max(samples) - result["share"])
        axes.bar(places, shares, width, yerr=(below, above), label=name, error_kw={"linewidth": 0.8})
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(rows)), rows, rotation=30, ha="right", fontsize=8)
    axes.set_ylabel("share of the read limit")
    axes.set_title("Decode attention on the CPU")
    figure.legend(ncols=len(names), loc="outside lower center", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
