"""The papers' figures as figures: their axes, our curves over several seeds, and the numbers that they print.

    python -m benchmarks.figures --record benchmarks/results/figures.json      # all; hours on two cores
    python -m benchmarks.figures omniserve-10-15-yi --record FILE              # one, or those whose names begin so
    python -m benchmarks.figures --plot benchmarks/results/figures             # draws what the record has

Each point is simulated as ``benchmarks.reproduction`` simulates it. The record is written after each point: a run that
was stopped goes on where it was, if the code, seeds and minutes are the same. A line is the median over the seeds, its
band their least and most.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.common.record import read_rows, write_record
from benchmarks.common.terminal import argument_parser, table_of
from benchmarks.measurements import RESULTS, state_of
from benchmarks.paper.figures import FIGURES, PaperFigure
from benchmarks.reproduction import EXPERIMENTS, Unit, units_of
from omniserve.simulate.report import require_matplotlib

RECORD = RESULTS / "figures.json"
Point = dict[str, Any]
"""A point of a curve: ``x``, ``column``, ``seed`` and ``figures``, the panels' by name."""


def chosen(names: Sequence[str]) -> list[PaperFigure]:
    """Return the figures whose names begin with one of ``names``; all if there is none.

    Raises:
        ValueError: No figure's name begins so.
    """
    for start in names:
        if not any(name.startswith(start) for name in FIGURES):
            raise ValueError(f"no figure is named {start}...; there are: {', '.join(FIGURES)}")
    return [each for each in FIGURES.values() if not names or any(each.name.startswith(start) for start in names)]


def units(figure: PaperFigure, *, minutes: float, seeds: int, trace_dir: Path | None) -> list[Unit]:
    """Return what is simulated for a figure, one seed after another."""
    experiment = figure.experiment_of(EXPERIMENTS[figure.experiment])
    return [
        unit
        for seed in range(seeds)
        for unit in units_of(experiment, minutes=minutes, seed=seed, trace_dir=trace_dir)
    ]  # fmt: skip


def points_of(unit: Unit, rows: Iterable[Mapping[str, Any]]) -> list[Point]:
    """Return the points of a simulated unit, with what the panels of its figure show."""
    shown = [panel.figure for panel in FIGURES[unit.experiment.name].panels]
    return [
        {
            "x": row["x"], "column": row["column"], "seed": unit.seed,
            "figures": {name: row["figures"][name] for name in shown},
        }
        for row in rows
    ]  # fmt: skip


def done_before(record: Path | None, name: str, config: Mapping[str, Any]) -> list[Point]:
    """Return the points of an earlier run that was stopped: of the same code, with the same settings."""
    if record is None or not record.exists():
        return []
    for row in read_rows(record):
        change = state_of("figures", row).change
        if row["case"] == name and row["config"] == config and change.lines and not change.changed_lines:
            points: list[Point] = row["results"]["points"]
            return points
    return []


def run(figure: PaperFigure, args: argparse.Namespace, bar: tqdm[Any]) -> list[Point]:
    """Simulate what is missing of a figure, writing the record after each unit; return all points."""
    config = {"simulated": True, "minutes": args.minutes, "seeds": args.seeds, "traces": args.trace_dir is not None}
    points = done_before(args.record, figure.name, config)
    have = {(point["x"], point["column"], point["seed"]) for point in points}
    todo = []
    for unit in units(figure, minutes=args.minutes, seeds=args.seeds, trace_dir=args.trace_dir):
        if any((case.x, case.column, unit.seed) not in have for case in unit.cases):
            todo.append(unit)
        else:
            bar.update(len(unit.cases))
    if not todo:
        return points
    again = {(case.x, case.column, unit.seed) for unit in todo for case in unit.cases}
    points = [point for point in points if (point["x"], point["column"], point["seed"]) not in again]
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for unit, rows in zip(todo, pool.map(Unit.run, todo), strict=True):
            points += points_of(unit, rows)
            if args.record is not None:
                results = {"title": figure.title, "x_label": figure.x_label, "points": points}
                write_record(args.record, name="figures", case=figure.name, config=config, seed=0, results=results)
            bar.update(len(unit.cases))
    return points


def curves(points: Sequence[Point], figure: str, factor: float) -> dict[str, list[tuple[float, float, float, float]]]:
    """Return each column's curve: (x, median, least, most) over the seeds, without points that have no figure."""
    found: dict[str, dict[float, list[float]]] = {}
    for point in points:
        if (value := point["figures"][figure]) is not None:
            found.setdefault(point["column"], {}).setdefault(float(point["x"]), []).append(factor * value)
    return {
        column: [(x, statistics.median(ys), min(ys), max(ys)) for x, ys in sorted(by_x.items())]
        for column, by_x in found.items()
    }  # fmt: skip


def tables(figure: PaperFigure, points: Sequence[Point]) -> str:
    """Return a table for each panel: medians over the seeds, with their least and most where these differ."""
    parts = []
    for panel in figure.panels:
        lines: dict[float, dict[str, str]] = {}
        for column, curve in curves(points, panel.figure, panel.factor).items():
            for x, middle, least, most in curve:
                spread = "" if least == most else f" ({least:,.4g} to {most:,.4g})"
                lines.setdefault(x, {figure.x_label: f"{x:g}"})[column] = f"{middle:,.4g}{spread}"
        says = f" (paper: {panel.says})" if panel.says else ""
        parts.append(f"{panel.label}{says}\n{table_of([lines[x] for x in sorted(lines)])}")
    return "\n\n".join(parts)


def plot(figure: PaperFigure, points: Sequence[Point], path: Path) -> None:
    """Draw a figure: a panel beside another, a line for each system, a band for its seeds, the paper's words above.

    Raises:
        RuntimeError: Matplotlib is not installed.
    """
    pyplot = require_matplotlib()
    count = len(figure.panels)
    drawn, axes = pyplot.subplots(1, count, figsize=(max(6.8, 4.4 * count), 4.2), squeeze=False, layout="constrained")
    columns = list(dict.fromkeys(point["column"] for point in points))
    colours = {column: pyplot.get_cmap("tab10")(number % 10) for number, column in enumerate(columns)}
    for axis, panel in zip(axes[0], figure.panels, strict=True):
        for column, curve in curves(points, panel.figure, panel.factor).items():
            xs, middle, least, most = zip(*curve, strict=True)
            axis.plot(xs, middle, marker="o", markersize=3, color=colours[column], label=column)
            axis.fill_between(xs, least, most, color=colours[column], alpha=0.15, linewidth=0)
        axis.set(xlabel=figure.x_label, ylabel=panel.label)
        if panel.is_logarithmic:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        if panel.says:
            axis.set_title(f"paper: {panel.says}", fontsize=8, wrap=True)
    drawn.suptitle(f"{figure.title} (simulated)", fontsize=10)
    handles = [pyplot.Line2D([], [], color=colours[column], marker="o", label=column) for column in columns]
    drawn.legend(
        handles=handles, ncols=min(len(columns), 2 + count), loc="outside lower center", frameon=False, fontsize=8
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=110)
    pyplot.close(drawn)


def plot_record(record: Path, names: Sequence[str], folder: Path) -> list[Path]:
    """Draw the figures that a record has, one file each; return the files."""
    rows = {row["case"]: row["results"]["points"] for row in read_rows(record)}
    made = []
    for figure in chosen(names):
        if figure.name in rows:
            made.append(folder / f"{figure.name}.png")
            plot(figure, rows[figure.name], made[-1])
    return made


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argument_parser(
        __doc__, minutes=(3.0, "simulated, a point"), seeds=(3, "runs of each point"),
        jobs=(len(os.sched_getaffinity(0)), "processes"),
    )  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="NAME", help="figures whose names begin so; none: all")
    parser.add_argument("--trace-dir", type=Path, metavar="FOLDER", help="traces to draw lengths and arrivals from")
    parser.add_argument("--record", type=Path, metavar="FILE", help="add to this record after each point, and go on")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help=f"simulate nothing: draw {RECORD.name} into it")
    args = parser.parse_args(arguments)
    if args.seeds < 1 or args.jobs < 1 or args.minutes <= 0:
        parser.error("--seeds and --jobs must be 1 or more, --minutes more than 0")
    try:
        chosen(args.names)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if args.plot is not None:
        for path in plot_record(args.record or RECORD, args.names, args.plot):
            print(path)
        return 0
    figures = chosen(args.names)
    counted = functools.partial(units, minutes=args.minutes, seeds=args.seeds, trace_dir=args.trace_dir)
    total = sum(len(unit.cases) for figure in figures for unit in counted(figure))
    with tqdm(total=total, disable=None, unit="point") as bar:
        for figure in figures:
            bar.set_description_str(figure.name)
            points = run(figure, args, bar)
            bar.clear()
            print(f"\n{figure.title} (simulated)\n\n{tables(figure, points)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
