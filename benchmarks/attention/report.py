"""Tables and a plot of the CPU attention benchmark, from what its record holds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.terminal import table_of
from omniserve.simulate.report import require_matplotlib


def limits_table(limits: Mapping[str, Any]) -> str:
    """Return one line a number of threads: its fastest reading, and the plain one beside it."""
    lines = []
    for group, samples in limits.items():
        if isinstance(samples, dict):
            rates = {name: statistics.median(each) for name, each in samples.items()}
            best = max(rates, key=rates.__getitem__)
            plain = next(iter(rates.values()))
            lines.append({"read limit": group, "GB/s": f"{rates[best]:.1f}", "with": best, "plain": f"{plain:.1f}"})
    size = f"{limits['bytes'] / 2**30:.2f} GiB, {limits['share_in_huge_pages']:.0%} in 2 MiB pages"
    return f"{table_of(lines)}\n{size}"


def shares_table(rows: Mapping[str, Any]) -> str:
    """Return one line a row."""
    lines = []
    for name, row in rows.items():
        line = {"share of the read limit (smallest-largest), RMS error": name, "GB/s": ""}
        line["busy"], limits = f"{row['others_busy_cores']:.1f}", []
        for candidate, result in row["candidates"].items():
            limits += [sample["limit_before"] for sample in result["samples"]]
            shares = shares_of(result)
            line[candidate] = f"{result['share']:.2f} ({min(shares):.2f}-{max(shares):.2f}) {result['error']:.0e}"
        lines.append(line | {"GB/s": f"{statistics.median(limits):.1f}"})
    return table_of(lines)


def shares_of(result: Mapping[str, Any]) -> list[float]:
    """Return a candidate's samples as shares of the limits that they were taken between."""
    return [2 * one["gb_per_s"] / (one["limit_before"] + one["limit_after"]) for one in result["samples"]]


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
    lines = []
    for shape, result in shapes.items():
        line = {"prefill, GFLOP/s (ours is so many times faster)": shape, "busy": f"{result['others_busy_cores']:.1f}"}
        for name, found in result["candidates"].items():
            line[name] = f"{found['gflop_per_s']:.1f} ({found['speed_of_ours']:.2f})"
        lines.append(line)
    return table_of(lines)


def engine_table(engines: Mapping[str, Any]) -> str:
    """Return one column an engine: the share of the limit, and what the host threads do with the time."""
    keys = next(iter(engines.values()))["medians"]
    return table_of([
        {"host tier in the engine, steady state": key}
        | {name: f"{engine['medians'][key]:.4g}" for name, engine in engines.items()}
        for key in keys
    ])  # fmt: skip


def plot_shares(rows: Mapping[str, Any], path: Path) -> None:
    """Write bars of the share of the read limit, by row and candidate; whiskers reach the extreme samples."""
    pyplot = require_matplotlib()
    names = list(dict.fromkeys(name for row in rows.values() for name in row["candidates"]))
    figure, axes = pyplot.subplots(figsize=(max(6.0, 0.35 * len(names) * len(rows) + 2), 4.5), layout="constrained")
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        found = {place: row["candidates"].get(name) for place, row in enumerate(rows.values())}
        bars = [(place, result["share"], shares_of(result)) for place, result in found.items() if result is not None]
        places = [place + (number - (len(names) - 1) / 2) * width for place, _, _ in bars]
        whiskers = ([share - min(each) for _, share, each in bars], [max(each) - share for _, share, each in bars])
        axes.bar(places, [share for _, share, _ in bars], width, yerr=whiskers, label=name)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(rows)), rows, rotation=30, ha="right", fontsize=8)
    axes.set(ylabel="share of the read limit", title="Decode attention on the CPU")
    figure.legend(ncols=len(names), loc="outside lower center", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
