"""Figures and tables that page templates take out of records: medians over rounds, a table of policies.

Each takes a row of a record as ``benchmarks/pages.py`` gives it to templates.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.common.terminal import table_of
from benchmarks.common.timing import median_ratio
from benchmarks.coserving import rows_of
from benchmarks.peers.report import floor_of, of_case, speed_table


def peer(row: Any, phase: str, case: str, contender: str, figure: str) -> float:
    """Return the median over the rounds of a server's figure in the comparison with other engines."""
    values = [found[figure] for found in of_case(row.results, phase, case, contender).values()]
    if not values:
        raise ValueError(f"{row} has no {figure} of {contender} in {phase}, {case}")
    return float(statistics.median(values))


def peer_rounds(row: Any, phase: str) -> int:
    """Return how many rounds of a phase all servers have done."""
    rounds: dict[str, set[int]] = {}
    for sample in row.results["samples"]:
        if sample["phase"] == phase:
            rounds.setdefault(sample["contender"], set()).add(sample["round"])
    return min(map(len, rounds.values()))


def peer_floor(row: Any, phase: str, case: str, figure: str) -> float:
    """Return the median over the rounds of what the machine takes at least."""
    return float(statistics.median(floor_of(row.results, phase, case, figure).values()))


def gain(row: Any, phase: str, case: str, other: str, figure: str, ours: str = "OmniServe") -> float:
    """Return how many times another server's figure ours is, the median over the rounds."""
    one, two = (of_case(row.results, phase, case, contender) for contender in (ours, other))
    both = sorted(one.keys() & two.keys())
    return median_ratio([one[n][figure] for n in both], [two[n][figure] for n in both])


def peer_table(row: Any) -> str:
    """Return the table of what servers do alone, as ``benchmarks.peers`` prints it, without what they do when idle."""
    return speed_table(row.results | {"idle_cores": {}})


def policies(row: Any) -> dict[str, dict[str, Any]]:
    """Return the figures of each policy on the load of ``benchmarks.coserve``, medians over the repeats, best first.

    The order is that of the LS requests that met their objectives, then of the BE tokens.
    """
    middle, _ = rows_of(row.results["runs"])
    ordered = sorted(middle, key=lambda each: (-each["attained_of_all"], -each["be_tokens_per_s_beside_ls"]))
    return {each["policy"]: each for each in ordered}


def by_figure(row: Any, trial: str, figures: Mapping[str, tuple[str, float, int]]) -> str:
    """Return a table of one trial of a case (``benchmarks/common/cases.py``): a line for each figure.

    Brackets: the median of the ratios to the first arm.

    Args:
        row: The case's row.
        trial: The label of the trial.
        figures: By name: what the table calls it, the factor to that unit, and how many decimals it has.
    """
    found = row.results[trial]
    lines = []
    for name, (title, factor, digits) in figures.items():
        line = {trial: title}
        for arm in found["medians"]:
            line[arm] = _cell(found, arm, name, factor, digits)
        lines.append(line)
    return table_of(lines)


def by_trial(
    row: Any, figure: str, factor: float = 1.0, digits: int = 0, *, head: str = "", brackets: bool = True
) -> str:
    """Return a table of one figure of a case: a line for each trial that has it, a column for each arm.

    Brackets: the median of the ratios to the first arm.
    """
    lines = []
    for trial, found in row.results.items():
        if any(figure in values for values in found["medians"].values()):
            cells = {arm: _cell(found, arm, figure, factor, digits, brackets) for arm in found["medians"]}
            lines.append({head: trial, **cells})
    if not lines:
        raise ValueError(f"{row} has no figure {figure}")
    return table_of(lines)


def by_rows(row: Any, figure: str, factor: float = 1.0, unit: str = "rows", digits: int = 0) -> str:
    """Return a table of one figure of a case whose trials are ``WHAT, N rows``: a line for each WHAT and arm.

    Trials that count in another ``unit`` are left out; where there is no WHAT, or one arm, a line is named without it.
    """
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for trial, found in row.results.items():
        what, _, count = trial.rpartition(", ")
        number, _, counted = count.partition(" ")
        for arm, values in found["medians"].items() if counted == unit else ():
            name = ", ".join(filter(None, (what, arm if len(found["medians"]) > 1 or not what else "")))
            line = lines.setdefault((what, arm), {"": name})
            line[number] = f"{factor * values[figure]:,.{digits}f}"
    return table_of(list(lines.values()))


def _cell(found: Mapping[str, Any], arm: str, name: str, factor: float, digits: int, brackets: bool = True) -> str:
    value = found["medians"][arm].get(name)
    if value is None:
        return "-"
    ratio = found["ratios"].get(arm, {}).get(name) if brackets else None
    return f"{factor * value:,.{digits}f}" + (f" ({ratio:.2f})" if ratio is not None else "")


def figures_of(row: Any, trial: str) -> dict[str, tuple[str, float, int]]:
    """Return all numbers of a trial under their own names, for ``by_figure``."""
    names = dict.fromkeys(name for values in row.results[trial]["medians"].values() for name in values)
    return {name: (name, 1.0, 2) for name in names}


def accuracy(models: Mapping[str, Any], name: str) -> str:
    """Return 1 - error of a latency model that learns, mean / at P90, in percent."""
    return " / ".join(f"{100 * models[name]['learning'][part]:.1f}" for part in ("mean", "p90"))


def attention_shares(row: Any) -> dict[str, dict[str, float]]:
    """Return decode attention's share of the read rate of memory: by load, and by kernel."""
    return {
        name: {kernel: found["share"] for kernel, found in load["candidates"].items()}
        for name, load in row.results["rows"].items()
    }


def ablations(row: Any) -> str:
    """Return a policy's ablation as a table: a line for each mechanism, a column for each point of a figure.

    A cell has the LS requests that met their objectives with the mechanism and without it, and the ratio of the BE
    tokens without it to those with it (median; smallest to largest of the seeds). Without LS requests: that ratio.
    """
    lines: dict[str, dict[str, str]] = {}
    for found in row.results.values():
        title = f"{found['figure'].partition(':')[0]}, {found['x']}"
        for name, seeds in found["rows"].items():
            with_it = found["rows"][found["beside"][name]]
            line = lines.setdefault(name, {"without": f"*{name}*" if seeds is with_it else name})
            line[title] = _whole_cell(seeds) if seeds is with_it else _without_cell(seeds, with_it)
    return table_of(list(lines.values()))


def _whole_cell(seeds: Sequence[Mapping[str, Any]]) -> str:
    attained = _attained(seeds)
    tokens = f"{statistics.median(one['be_tokens_per_s'] for one in seeds):,.0f} BE tokens/s"
    return tokens if attained is None else f"LS {attained} %, {tokens}"


def _without_cell(seeds: Sequence[Mapping[str, Any]], with_it: Sequence[Mapping[str, Any]]) -> str:
    ratios = [one["be_tokens_per_s"] / other["be_tokens_per_s"] for one, other in zip(seeds, with_it, strict=True)]
    lowest, middle, highest = (f"{find(ratios):.2f}" for find in (min, statistics.median, max))
    text = f"BE {middle}" + ("" if lowest == highest else f" ({lowest} to {highest})")
    before, after = _attained(with_it), _attained(seeds)
    return text if before is None else f"LS {before} to {after} %, {text}"


def _attained(seeds: Sequence[Mapping[str, Any]]) -> str | None:
    values = [one["attainment"] for one in seeds if one["attainment"] is not None]
    return f"{100 * statistics.median(values):.1f}" if values else None


FIGURES_AND_TABLES: Mapping[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        peer, peer_rounds, peer_floor, peer_table, gain, policies, by_figure, by_trial, by_rows, figures_of, accuracy,
        attention_shares, ablations,
    )
}  # fmt: skip
