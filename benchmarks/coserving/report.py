"""Table and plots of policies that serve one load: attainment, BE throughput, and the frontier between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.tables import table
from omniserve.simulate.report import require_matplotlib

Row = Mapping[str, Any]
"""Figures of ``summarize_co_serving`` (medians, or one run's), and ``policy``, ``rate`` (LS requests a second) and
``scale`` (factor of the objectives that they were compared with)."""

ATTAINED, BE_RATE = "attained_of_all", "be_tokens_per_s_beside_ls"
"""The frontier's two figures: rejected requests are misses; both are of the time in which LS requests come."""

SHARES = (-0.04, 1.08)
"""Limits of an axis for shares: points at 0 and 1 are drawn whole."""


def pareto_optimal(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Return for each point if no other is at least as good in both figures and better in one."""
    return [
        not any(other != point and other[0] >= point[0] and other[1] >= point[1] for other in points)
        for point in points
    ]


def frontier_of(rows: Iterable[Row], rate: float, scale: float) -> list[tuple[Row, bool]]:
    """Return the rows of one rate and scale that have both figures, each with whether it is Pareto-optimal."""
    group = [row for row in rows if (row["rate"], row["scale"]) == (rate, scale) and ATTAINED in row and BE_RATE in row]
    return list(zip(group, pareto_optimal([(row[ATTAINED], row[BE_RATE]) for row in group]), strict=True))


def coordinates(rows: Iterable[Row], name: str) -> list[float]:
    """Return the values of ``rate`` or ``scale``, ascending."""
    return sorted({row[name] for row in rows})


def markdown_table(rows: Sequence[Row]) -> str:
    """Return a Markdown table, also readable as it is, by rate, scale and the order of the rows."""
    best = [id(row) for r, s in _groups(rows) for row, is_best in frontier_of(rows, r, s) if is_best]
    lines = [["policy", "LS/s", "SLO x", "attained of all", "attained", "TTFT", "TPOT", "rejected",
              "TTFT p50 / p99 ms", "TPOT p50 / p99 ms", "LS met/s", "BE tok/s beside LS", "BE tok/s in all",
              "on host", "preempted", "recomputed", "others busy", "frontier"]]  # fmt: skip
    for row in sorted(rows, key=lambda row: (row["rate"], row["scale"])):
        bound = ">" if row.get("ls_unfinished") else ""
        cut_off = "" if row.get("be_finished", True) else " (cut off)"
        lines.append([
            row["policy"], f"{row['rate']:.3g}", f"{row['scale']:g}",
            *(_form(row, name, ".1%") for name in (ATTAINED, "attained")),
            *(_form(row, name, ".0%") for name in ("ttft_attained", "tpot_attained")),
            f"{row['rejected']:g} of {row['ls_requests']:g}" if "rejected" in row else "",
            _pair(row, "ttft", ".0f", bound), _pair(row, "tpot", ".1f"),
            _form(row, "goodput_per_s", ".2f"), _form(row, BE_RATE, ".0f"),
            _form(row, "be_tokens_per_s", ".0f") + cut_off, _host(row),
            _form(row, "preemptions", "g"), _form(row, "recomputed_tokens", "g"),
            _form(row, "others_busy_cores", ".1f"), "*" if id(row) in best else "",
        ])  # fmt: skip
    return table(lines, numbers=True)


def plot(rows: Sequence[Row], runs: Sequence[Row], path: Path) -> None:
    """Draw one line of panels a scale: attainment and BE tokens/s against the rate, and each rate's frontier.

    Without a second rate there is nothing to draw against it, and the frontier stands alone. On it, rows are full where
    nothing is better in both figures; small dots are single runs.

    Args:
        rows: Medians.
        runs: The repeats that they come from.
        path: File to write, .png, .svg or .pdf.

    Raises:
        RuntimeError: Matplotlib is not installed.
        ValueError: No row has both figures.
    """
    groups = [(rate, scale) for rate, scale in _groups(rows) if frontier_of(rows, rate, scale)]
    if not groups:
        raise ValueError("there is nothing to draw: no run has both LS requests and BE work")
    pyplot = require_matplotlib()
    rates, scales = (list(dict.fromkeys(group[place] for group in groups)) for place in (0, 1))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    map_ = pyplot.get_cmap("tab20")
    colours = {policy: map_(2 * number % 20 + 2 * number // 20 % 2) for number, policy in enumerate(policies)}
    against = [(ATTAINED, "LS requests that met their objectives"), (BE_RATE, "BE tokens/s beside LS")]
    if len(rates) == 1:
        against = []
    columns = len(against) + len(rates)
    figure, axes = pyplot.subplots(
        len(scales), columns, figsize=(5 * columns + 1, 4.2 * len(scales) + 0.6), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for line, scale in zip(axes, scales, strict=True):
        for panel, (name, label) in zip(line, against, strict=False):
            for policy in policies:
                own = [row for row in rows if row["policy"] == policy and row["scale"] == scale and name in row]
                own.sort(key=lambda row: row["rate"])
                panel.plot([r["rate"] for r in own], [r[name] for r in own], "o-", color=colours[policy], markersize=4)
            panel.set(xlabel="LS requests/s", ylabel=label, title=f"objectives x {scale:g}")
            panel.set_ylim(SHARES if name == ATTAINED else (0, None))
        for panel, rate in zip(line[len(against) :], rates, strict=True):
            _draw_frontier(panel, frontier_of(rows, rate, scale), frontier_of(runs, rate, scale), colours)
            panel.set_title(f"{rate:.3g} LS requests/s, objectives x {scale:g}")
    handles = [pyplot.Line2D([], [], marker="o", color=colours[policy], label=policy) for policy in policies]
    figure.legend(handles=handles, ncols=3 * columns, loc="outside lower center", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_frontier(
    panel: Any, rows: Sequence[tuple[Row, bool]], runs: Sequence[tuple[Row, bool]], colours: Mapping[str, Any]
) -> None:
    best = sorted((row[BE_RATE], row[ATTAINED]) for row, is_best in rows if is_best)
    panel.plot(*zip(*best, strict=True), color="grey", linewidth=0.8, linestyle="--", zorder=1)
    for row, _ in runs:
        panel.plot(row[BE_RATE], row[ATTAINED], ".", color=colours[row["policy"]], markersize=3, alpha=0.6)
    most = best[-1][0]
    labelled: list[tuple[float, float]] = []
    for row, is_best in rows:
        x, y = row[BE_RATE], row[ATTAINED]
        colour = colours[row["policy"]]
        face = colour if is_best else "none"
        panel.plot(x, y, "o", markeredgecolor=colour, markerfacecolor=face, markersize=8)
        # Labels of points that lie close to each other are stacked, towards the middle, in their points' colours.
        before = sum(abs(x - other[0]) < 0.25 * most and abs(y - other[1]) < 0.04 * len(rows) for other in labelled)
        labelled.append((x, y))
        shift, side = (-6, "right") if x > most / 2 else (6, "left")
        panel.annotate(
            row["policy"],
            (x, y),
            (shift, 4 + 8 * before if y < 0.5 else -4 - 8 * before),
            textcoords="offset points",
            ha=side,
            fontsize=7,
            color=colour,
        )
    panel.set(xlabel="BE tokens/s beside LS", ylabel="LS requests that met their objectives", ylim=SHARES)
    panel.set_xlim(left=0)
    panel.margins(x=0.15)


def _groups(rows: Sequence[Row]) -> list[tuple[float, float]]:
    return [(rate, scale) for scale in coordinates(rows, "scale") for rate in coordinates(rows, "rate")]


def _form(row: Row, name: str, form: str, factor: float = 1.0) -> str:
    value = row.get(name)
    return "" if value is None else format(factor * value, form)


def _host(row: Row) -> str:
    tokens, share = _form(row, "host_tokens", "g"), _form(row, "host_share", ".0%")
    return f"{tokens} ({share})" if tokens and share else share


def _pair(row: Row, name: str, form: str, bound: str = "") -> str:
    values = [_form(row, f"{name}_{percentile}_s", form, 1e3) for percentile in ("p50", "p99")]
    return " / ".join(bound + value for value in values) if all(values) else ""
