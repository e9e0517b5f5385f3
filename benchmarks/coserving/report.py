"""Table and plots of policies that serve one load: attainment, BE throughput, and the frontier between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.summary import cells
from benchmarks.common.terminal import table_of
from omniserve.simulate.report import require_matplotlib

Row = Mapping[str, Any]
"""Figures of ``summarize_co_serving`` (medians, or one run's), and ``policy``, ``rate`` (LS requests a second) and
``scale`` (factor of the objectives that they were compared with)."""

ATTAINED, BE_RATE = "attained_of_all", "be_tokens_per_s_beside_ls"
"""The frontier's two figures: rejected requests are misses; both are of the time in which LS requests come."""
LABELS = {ATTAINED: "LS requests that met their objectives", BE_RATE: "BE tokens/s beside LS"}


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


def markdown_table(rows: Sequence[Row]) -> str:
    """Return a Markdown table by rate, scale and the order of the rows."""
    best = [id(row) for place in _places(rows) for row, is_best in frontier_of(rows, *place) if is_best]
    lines = []
    for row in sorted(rows, key=lambda row: (row["rate"], row["scale"])):
        line = {"policy": row["policy"], "LS/s": f"{row['rate']:.3g}", "SLO x": f"{row['scale']:g}", **cells(row)}
        for name, key, form in (
            ("on host", "host_tokens", "g"), ("of BE", "host_share", ".0%"), ("preempted", "preemptions", "g"),
            ("recomputed", "recomputed_tokens", "g"), ("others busy", "others_busy_cores", ".1f"),
        ):  # fmt: skip
            if key in row:
                line[name] = format(row[key], form)
        lines.append(line | {"frontier": "*" if id(row) in best else ""})
    return table_of(lines)


def plot(rows: Sequence[Row], runs: Sequence[Row], path: Path) -> None:
    """Draw one line of panels a scale: attainment and BE tokens/s against the rate, and each rate's frontier.

    Without a second rate there is nothing to draw against it, and the frontier stands alone. On it, rows are full where
    nothing is better in both figures; small dots are the single ``runs`` that ``rows`` are the medians of.
    """
    places = [place for place in _places(rows) if frontier_of(rows, *place)]
    if not places:
        raise ValueError("there is nothing to draw: no run has both LS requests and BE work")
    pyplot = require_matplotlib()
    rates, scales = (list(dict.fromkeys(place[i] for place in places)) for i in (0, 1))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    colours = {policy: pyplot.get_cmap("tab20")(number % 20) for number, policy in enumerate(policies)}
    against = LABELS if len(rates) > 1 else {}
    columns = len(against) + len(rates)
    figure, axes = pyplot.subplots(
        len(scales), columns, figsize=(5 * columns + 1, 4.2 * len(scales) + 0.6), squeeze=False, layout="constrained"
    )
    for line, scale in zip(axes, scales, strict=True):
        for panel, (name, label) in zip(line, against.items(), strict=False):
            for policy in policies:
                own = [row for row in rows if row["policy"] == policy and row["scale"] == scale and name in row]
                own.sort(key=lambda row: row["rate"])
                panel.plot([r["rate"] for r in own], [r[name] for r in own], "o-", color=colours[policy], markersize=4)
            panel.set(xlabel="LS requests/s", ylabel=label, title=f"objectives x {scale:g}", ylim=(0, None))
        for panel, rate in zip(line[len(against) :], rates, strict=True):
            for row, _ in frontier_of(runs, rate, scale):
                panel.plot(row[BE_RATE], row[ATTAINED], ".", color=colours[row["policy"]], markersize=3, alpha=0.6)
            for row, is_best in frontier_of(rows, rate, scale):
                colour = colours[row["policy"]]
                face = colour if is_best else "none"
                panel.plot(row[BE_RATE], row[ATTAINED], "o", markeredgecolor=colour, markerfacecolor=face, markersize=8)
            panel.set(xlabel=LABELS[BE_RATE], ylabel=LABELS[ATTAINED], ylim=(-0.04, 1.08), xlim=(0, None))
            panel.set_title(f"{rate:.3g} LS requests/s, objectives x {scale:g}")
    handles = [pyplot.Line2D([], [], marker="o", color=colours[policy], label=policy) for policy in policies]
    figure.legend(handles=handles, ncols=3 * columns, loc="outside lower center", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _places(rows: Iterable[Row]) -> list[tuple[float, float]]:
    """Return the pairs of rate and scale, by scale."""
    return sorted({(row["rate"], row["scale"]) for row in rows}, key=lambda place: place[::-1])
