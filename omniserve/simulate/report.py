"""Tables, plots and records of simulations."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omniserve.core.version import __version__
from omniserve.simulate.results import Result


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of a table: a simulation."""

    scheduler: str
    rate: float
    result: Result
    variant: str = ""
    """The settings that differ from the command line."""


def table(rows: Sequence[Row]) -> str:
    """Return a plain-text table of simulations."""
    cells = []
    has_cache = any(each.cached_share for row in rows for each in row.result.classes.values())
    has_peers = any(each.prefilled_share for row in rows for each in row.result.classes.values())
    for row in rows:
        result, ls, be = row.result, row.result.classes["LS"], row.result.classes["BE"]
        cells.append(
            {
                "scheduler": row.scheduler + (f", {row.variant}" if row.variant else ""),
                "LS/s": f"{row.rate:.3g}",
                "SLO": _share(ls.attainment),
                "TTFT": _share(ls.ttft_attainment),
                "TPOT": _share(ls.tpot_attainment),
                "TTFT p50": _number(ls.ttft_p50_s, 2),
                "p99 s": _number(ls.ttft_p99_s, 2),
                "TPOT p50": _number(1e3 * ls.tpot_p50_s, 1),
                "p99 ms": _number(1e3 * ls.tpot_p99_s, 1),
                "goodput/s": f"{ls.goodput:.2f}",
                "rejected": str(ls.num_rejected),
                "BE out/s": f"{be.output_tokens_per_s:.0f}",
                "BE in/s": f"{be.prompt_tokens_per_s:.0f}",
                "on host": f"{result.host_share:.0%}",
                "hosts busy": f"{result.host_tier_busy:.0%}",
                "preempted": str(result.preemptions),
            }
        )
        if has_cache:
            cells[-1] |= {"LS found": f"{ls.cached_share:.0%}", "BE": f"{be.cached_share:.0%}"}
        if has_peers:
            cells[-1] |= {"LS elsewhere": f"{ls.prefilled_share:.0%}", "BE ": f"{be.prefilled_share:.0%}"}
    lines = [tuple(cells[0]), *(tuple(line.values()) for line in cells)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def write_record(path: Path, *, config: Mapping[str, Any], seed: int, rows: Sequence[Row]) -> None:
    """Write a JSON record: what was simulated, its figures and the times of each request."""
    record = {
        "benchmark": "simulate",
        "simulated": True,
        "environment": {"omniserve": __version__, "python": platform.python_version()},
        "config": dict(config),
        "seed": seed,
        "results": [_without_nan(dataclasses.asdict(row)) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, default=str, allow_nan=False) + "\n")


def require_matplotlib() -> Any:
    """Return ``matplotlib.pyplot``, drawing into files only.

    Raises:
        RuntimeError: It is not installed.
    """
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"--plot needs matplotlib, which the bench extra brings: pip install 'omniserve[bench]' ({error})"
        ) from error


def plot(path: Path, rows: Sequence[Row], *, title: str) -> None:
    """Draw SLO attainment and best-effort throughput over the LS rate, a line for each scheduler.

    Raises:
        RuntimeError: Matplotlib is not installed.
    """
    pyplot = require_matplotlib()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for scheduler in dict.fromkeys(row.scheduler for row in rows):
        group = sorted((row for row in rows if row.scheduler == scheduler), key=lambda row: row.rate)
        rates = [row.rate for row in group]
        left.plot(rates, [row.result.classes["LS"].attainment for row in group], marker="o", label=scheduler)
        right.plot(rates, [row.result.classes["BE"].output_tokens_per_s for row in group], marker="o", label=scheduler)
    for axes, name in ((left, "share of LS requests that met their SLO"), (right, "best-effort output tokens/s")):
        axes.set(xlabel="LS requests/s", ylabel=name, ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"{title} (simulated)")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _without_nan(value: Any) -> Any:
    """Return plain data in which NaN, which JSON lacks, is None."""
    if isinstance(value, dict):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
