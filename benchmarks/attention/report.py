"""Tables and a plot of the CPU attention benchmark, from what its record holds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.attention.prefill_attention import OURS
from omniserve.simulate.report import require_matplotlib

COLUMN = 25


def limits_table(limits: Mapping[str, Any]) -> str:
    """Return one line a group of readings: its fastest, and the first of the group beside it."""
    lines = [
        f"read limits, GB/s ({limits['bytes'] / 2**30:.2f} GiB, {limits['share_in_huge_pages']:.0%} in 2 MiB pages)"
    ]
    for group, per_reading in limits.items():
        if isinstance(per_reading, dict):
            best = max(per_reading, key=lambda name: statistics.median(per_reading[name]))
            plain = next(iter(per_reading))
            lines.append(f"  {group:30s} {statistics.median(per_reading[best]):6.1f}  {best}"
                         f"   ({plain}: {statistics.median(per_reading[plain]):.1f})")  # fmt: skip
    return "\n".join(lines)


def shares_table(rows: Mapping[str, Any]) -> str:
    """Return one line a row; what a candidate has no result for is marked."""
    names = candidate_names(rows)
    lines = [f"{'share of the read limit':24s}{'GB/s':>6}{'busy':>6}" + "".join(f"{name:>{COLUMN}}" for name in names)]
    for name, row in rows.items():
        cells, limits = [], []
        for candidate in names:
            result = row["candidates"].get(candidate)
            if result is None:
                cells.append("not found")
                continue
            limits += [sample["limit_before"] for sample in result["samples"]]
            shares = [
                2 * sample["gb_per_s"] / (sample["limit_before"] + sample["limit_after"])
                for sample in result["samples"]
            ]
            cells.append(f"{result['share']:.2f} ({min(shares):.2f}-{max(shares):.2f}) {result['error']:.0e}")
        lines.append(
            f"{name:24s}{statistics.median(limits):6.1f}{row['others_busy_cores']:6.1f}"
            + "".join(f"{cell:>{COLUMN}}" for cell in cells)
        )
    lines.append("(smallest-largest), then the RMS error relative to float64")
    return "\n".join(lines)


def candidate_names(rows: Mapping[str, Any]) -> list[str]:
    """Return the names of all rows' candidates, in their order."""
    return list(dict.fromkeys(name for row in rows.values() for name in row["candidates"]))


def latency_table(latencies: Mapping[str, Any]) -> str:
    """Return one line a row: microseconds of a call."""
    names = list(next(iter(latencies.values())))
    lines = [f"{'us a call, in cache':24s}" + "".join(f"{name + ' p50/p99':>{COLUMN}}" for name in names)]
    for row, results in latencies.items():
        cells = [f"{1e6 * results[name]['median_s']:.1f} / {1e6 * results[name]['p99_s']:.1f}" for name in names]
        lines.append(f"{row:24s}" + "".join(f"{cell:>{COLUMN}}" for cell in cells))
    return "\n".join(lines)


def busy_table(teams: Mapping[str, Any]) -> str:
    """Return one line a team: what attention and dense work do alone and together, and what is left."""
    lines = [
        f"{'attention + torch threads':28s}{'busy':>6}{'attention GB/s (share)':>34}{'left':>7}"
        f"{'dense steps/s':>20}{'left':>7}{'p50/p99 alone, ms':>20}{'together, ms':>18}"
    ]
    for name, team in teams.items():
        attention, dense = team["attention"], team["dense"]
        alone, together = attention["alone"], attention["together"]
        rates = " -> ".join(f"{side['gb_per_s']:.1f} ({side['share']:.2f})" for side in (alone, together))
        steps = [dense[side]["steps_per_s"] for side in ("alone", "together")]
        tails = [f"{1e3 * dense[side]['p50_s']:.1f} / {1e3 * dense[side]['p99_s']:.1f}" for side in dense]
        lines.append(
            f"{name:28s}{team['others_busy_cores']:6.1f}{rates:>34}{together['share'] / alone['share']:7.2f}"
            f"{f'{steps[0]:.1f} -> {steps[1]:.1f}':>20}{steps[1] / steps[0]:7.2f}{tails[0]:>20}{tails[1]:>18}"
        )
    return "\n".join(lines)


def prefill_table(shapes: Mapping[str, Any]) -> str:
    """Return one line a shape: GFLOP/s, and how many times faster ours is."""
    names = candidate_names(shapes)
    lines = [f"{'prefill, GFLOP/s (x ours)':34s}{'busy':>6}" + "".join(f"{name:>{COLUMN}}" for name in names)]
    for shape, result in shapes.items():
        cells = []
        for name in names:
            candidate = result["candidates"][name]
            cell = f"{candidate['gflop_per_s']:.1f}"
            cells.append(cell if name == OURS else f"{cell} ({candidate['speed_of_ours']:.2f})")
        lines.append(f"{shape:34s}{result['others_busy_cores']:6.1f}" + "".join(f"{cell:>{COLUMN}}" for cell in cells))
    lines.append("(ours is so many times faster)")
    return "\n".join(lines)


def engine_table(engines: Mapping[str, Any]) -> str:
    """Return one column an engine: the share of the limit, and what the host threads and the loop do with the time."""
    medians = [engine["medians"] for engine in engines.values()]

    def line(what: str, form: str, key: str, factor: float = 1.0) -> str:
        return f"  {what:58s}" + "".join(f"{format(factor * median[key], form):>18}" for median in medians)

    return "\n".join(
        [
            f"{'host tier in the engine, steady state':60s}" + "".join(f"{name:>18}" for name in engines),
            line("read limit, GB/s", ".1f", "limit_gb_per_s"),
            line("K and V read, GB/s", ".2f", "gb_per_s"),
            line("share of the limit: host tokens/s x bytes a token / limit", ".2f", "share"),
            line("  while the threads compute", ".2f", "share_while_busy"),
            line("host tokens/s", ".1f", "host_tokens_per_s"),
            line("MB of K and V a token", ".2f", "gb_per_host_token", 1e3),
            line("threads: computing", ".1%", "threads_busy"),
            line("threads: on a core beside that (merging, queues)", ".1%", "threads_on_core_beside"),
            line("threads: waiting for a core", ".1%", "threads_wait_for_core"),
            line("threads: asleep for want of tasks", ".1%", "threads_asleep"),
            line("steps/s", ".1f", "steps_per_s"),
            line("piggyback rows a step, over all layers", ".1f", "rows_per_step"),
            line("attention that a step brings, on all threads, ms", ".2f", "attention_per_step_s", 1e3),
            line("step, mean, ms", ".2f", "step_mean_s", 1e3),
            line("step, median, ms", ".2f", "step_p50_s", 1e3),
            line("step, longest, ms", ".1f", "step_max_s", 1e3),
            line("one task on one thread, ms", ".3f", "task_s", 1e3),
            line("tasks in hand when a step begins", ".1f", "tasks_in_hand_at_step"),
            line("steps that find the tier idle", ".0%", "steps_that_find_tier_idle"),
            line("engine waits for the host tier", ".1%", "loop_waits"),
        ]
    )


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
            samples = [
                2 * sample["gb_per_s"] / (sample["limit_before"] + sample["limit_after"])
                for sample in result["samples"]
            ]
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
