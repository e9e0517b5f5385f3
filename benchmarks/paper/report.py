"""Figures of a simulation, their tables (a row for each x, a column for each system), and the page of them.

The page's template, docs/pages/reproduction.md.jinja, names a number by experiment, row, column and figure, so that
none can be left over from an older record; one that the record lacks is an error.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from string import Formatter
from typing import Any

from omniserve.core.request import SLO
from omniserve.simulate.results import RequestResult, Result, percentile
from omniserve.simulate.runner import StepRecord

Figures = dict[str, Any]


class TokenGaps:
    """Times between two tokens (TBT) of LS requests: what each step with LS decodes takes, once for each of them.

    Steps before ``begin_s`` do not count.
    """

    def __init__(self, begin_s: float = 0.0) -> None:
        self._begin_s = begin_s
        self._steps: list[tuple[float, int]] = []

    def note(self, step: StepRecord) -> None:
        """Take note of a step."""
        decodes = (c for c in step.plan.chunks if c.samples and len(c.token_ids) == 1 and c.start > 0)
        count = sum(row.request_id.startswith("LS-") for row in (*decodes, *step.plan.pipelined))
        if count and step.start_s >= self._begin_s:
            self._steps.append((step.seconds, count))

    def percentile(self, percent: float) -> float | None:
        """Return the gap that so many percent of the tokens do not exceed; None without tokens."""
        left = sum(count for _, count in self._steps) * percent / 100
        for seconds, count in sorted(self._steps):
            left -= count
            if left <= 0:
                return seconds
        return None

    def share_within(self, seconds: float | None) -> float | None:
        """Return the share of the tokens whose gap is at most so long; None without tokens or without a limit."""
        total = sum(count for _, count in self._steps)
        if not total or seconds is None:
            return None
        return sum(count for gap_s, count in self._steps if gap_s <= seconds) / total


def _normalized_s(group: Iterable[RequestResult]) -> float:
    """Return the mean of the seconds per output token of those that finished (bros 7.1, apex 5.3); NaN for none."""
    each = [
        (request.finished_s - request.arrival_s) / request.num_output_tokens
        for request in group
        if request.finished_s is not None and request.num_output_tokens
    ]
    return statistics.fmean(each) if each else math.nan


def figures_of(result: Result, slo: SLO, *, num_shares: int = 1) -> Figures:
    """Return what is kept of one simulation: plain numbers, None where there is none.

    What is done a second (``..._per_s``) is divided by ``num_shares``; other figures are of the whole simulation.
    ``attainment`` and its parts are of all LS requests that came; ``admitted_ttft`` is of those that were not rejected.
    """
    ls, be = result.classes["LS"], result.classes["BE"]
    group = [request for request in result.requests if request.service_class == "LS"]
    admitted = [request for request in group if not request.rejected]
    tpots = sorted(request.tpot_s for request in group if request.tpot_s is not None)
    same = ("attainment", "ttft_attainment", "tpot_attainment", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")
    found = {
        "ls_requests": ls.num_requests,
        "ls_unfinished": ls.num_requests - ls.num_finished - ls.num_rejected,
        "rejected": ls.num_rejected,
        **{name: getattr(ls, name) for name in same},
        "admitted_ttft": sum(r.meets_ttft(slo) for r in admitted) / len(admitted) if admitted else math.nan,
        "tpot_max_s": percentile(tpots, 100),
        "normalized_s": _normalized_s(group),
        "be_normalized_s": _normalized_s(r for r in result.requests if r.service_class == "BE"),
        "ls_output_per_s": ls.output_tokens_per_s,
        "be_output_per_s": be.output_tokens_per_s,
        "be_prompt_per_s": be.prompt_tokens_per_s,
        "be_tokens_per_s": be.output_tokens_per_s + be.prompt_tokens_per_s,
        "be_output_before": result.warm_up_output_tokens,
        "be_output": be.output_tokens_per_s * result.duration_s + result.warm_up_output_tokens,
        "be_finished_per_s": be.num_finished / result.duration_s,
        "host_share": result.host_share, "host_busy": result.host_tier_busy,
        "host_steps_per_layer": result.host_steps_per_layer, "preemptions": result.preemptions,
        "swaps_out": result.swaps_out, "too_long": result.num_too_long, "steps": result.num_steps,
        "wall_s": result.wall_s,
    }  # fmt: skip
    found |= {name: value / num_shares for name, value in found.items() if name.endswith("_per_s")}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in found.items()
    }


class _Cell(Formatter):
    """Formats figures: ``n2`` a number with two digits, ``%1`` times 100, ``ms`` times 1,000, ``share`` in percent."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None or not format_spec:
            return "-" if value is None else str(value)
        if format_spec == "share":
            return f"{100 * value:.1f} %"
        factor, digits = (1e3, 0) if format_spec == "ms" else (100 if format_spec[0] == "%" else 1, format_spec[1:])
        return f"{factor * value:,.{digits}f}"


CELLS: dict[str, tuple[str, str]] = {
    "co-serving": (
        "LS in SLO; TPOT p50 ms; BE tokens/s out, in; of those out with host attention",
        "{attainment:share}; {tpot_p50_s:ms}; {be_output_per_s:n0} out {be_prompt_per_s:n0} in; {host_share:%0} %",
    ),
    "more-hosts": (
        "LS in SLO; TPOT p50, largest, ms; BE tokens/s out; of those with host attention; hosts busy",
        "{attainment:share}; {tpot_p50_s:ms}, {tpot_max_s:ms}; {be_output_per_s:n0}; {host_share:%0} %, "
        "{host_busy:share}",
    ),
    "stock": (
        "LS in SLO; BE tokens out beside LS; of those with host attention; before LS came; in all; steps a layer",
        "{attainment:share}; {be_output_per_s:n1}/s; {host_share:%0} %; {be_output_before:n0}; {be_output:n0}; "
        "{host_steps_per_layer:n2}",
    ),
    "admission": (
        "TTFT attained by the admitted; SLO by all that came; rejected; LS tokens/s",
        "{admitted_ttft:share}; {attainment:share}; {rejected}/{ls_requests}; {ls_output_per_s:n0}",
    ),
    "offline": ("output tokens/s (with host attention)", "{be_output_per_s:n0} ({host_share:%0} % host)"),
    "best-effort": ("BE tokens/s out, in", "{be_output_per_s:n1} out {be_prompt_per_s:n0} in"),
    "per-token": (
        "mean latency per output token, ms (output with host attention)",
        "{be_normalized_s:ms} ({host_share:%0} % host)",
    ),
    "harvest": (
        "P99 TTFT ms; P99 TBT ms; offline tokens/s, in and out",
        "{ttft_p99_s:ms}; {tbt_p99_s:ms}; {be_tokens_per_s:n0}",
    ),
    "scales": (
        "TTFT attained; tokens within the TBT objective; offline tokens/s, in and out",
        "{ttft_attainment:share}; {tbt_attainment:share}; {be_tokens_per_s:n0}",
    ),
    "alone": ("normalized latency ms/token; LS tokens/s", "{normalized_s:ms}; {ls_output_per_s:n0}"),
    "hybrid": (
        "normalized latency ms/token; TTFT attained; TPOT attained; BE requests/s",
        "{normalized_s:ms}; {ttft_attainment:share}; {tpot_attainment:share}; {be_finished_per_s:n2}",
    ),
}
"""Name -> what a cell says, and its form over the figures."""


def markdown(experiment: Mapping[str, Any], *, legend: bool = True) -> str:
    """Return the table of one experiment of a record, with or without what its cells are."""
    says, form = CELLS[experiment["cell"]]
    rows: Sequence[Mapping[str, Any]] = experiment["rows"]
    columns = list(dict.fromkeys(row["column"] for row in rows))
    found = {(row["x"], row["column"]): _Cell().vformat(form, (), row["figures"]) for row in rows}
    lines = [f"| {experiment['x_name']} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for x in dict.fromkeys(row["x"] for row in rows):
        lines.append(f"| {x} | {' | '.join(found.get((x, column), '') for column in columns)} |")
    unfinished = sum(row["figures"]["ls_unfinished"] for row in rows)
    if unfinished:
        lines.append(f"| {unfinished} LS requests were cut off by the end, and count as missed |")
    if legend:
        lines += ["", f"Cells: {says}. {experiment['minutes']:g} simulated minutes, seed {experiment['seed']}."]
    return "\n".join(lines)


class Findings:
    """Looks up numbers of a record's experiments; ValueError: the record has none there."""

    def __init__(self, experiments: Mapping[str, Mapping[str, Any]], sources: Mapping[str, str]) -> None:
        self._experiments, self._sources = experiments, sources
        self.shown: set[str] = set()
        """Experiments whose table was asked for."""

    def table(self, name: str) -> str:
        """Return the table of an experiment, and below it where it is from."""
        self.shown.add(name)
        entry = self._entry(name)
        note = f"; {entry['note']}" if "note" in entry else ""
        return f"{markdown(entry, legend=False)}\n\n({self._sources[name]}{note})"

    def value(self, name: str, x: str, column: str, figure: str) -> float:
        """Return a number."""
        for row in self._entry(name)["rows"]:
            if row["x"] == x and row["column"] == column:
                if (value := row["figures"].get(figure)) is None:
                    raise ValueError(f"the record's {name}, {x}, {column} has no {figure}")
                return float(value)
        raise ValueError(f"the record's {name} has no {column} at {x}: run it anew")

    def ratio(self, name: str, x: str, column: str, other: str, figure: str) -> float:
        """Return what ``column`` has over what ``other`` has."""
        base = self.value(name, x, other, figure)
        if base == 0:
            raise ValueError(f"{figure} of {other} in {name} at {x} is 0: nothing can be a multiple of it")
        return self.value(name, x, column, figure) / base

    def values(self, names: str | Sequence[str], column: str, figure: str) -> list[float]:
        """Return the numbers of a column in all rows of one or more experiments."""
        return [self.value(name, x, column, figure) for name, x in self._rows(names, column)]

    def ratios(self, names: str | Sequence[str], column: str, other: str, figure: str) -> list[float]:
        """Return ``ratio`` in all rows."""
        return [self.ratio(name, x, column, other, figure) for name, x in self._rows(names, column)]

    def across(self, name: str, column: str, of: str, other: str, figure: str) -> list[float]:
        """Return what a column has in its rows of an experiment over what another has there in experiment ``of``."""
        rows = self._rows(name, column)
        return [self.value(name, x, column, figure) / self.value(of, x, other, figure) for _, x in rows]

    def across_best(self, name: str, by: str, of: str, other: str, figure: str) -> list[float]:
        """Return ``across`` of the column that has most of figure ``by`` in its row, for each row."""
        best: dict[str, Mapping[str, Any]] = {}
        for row in self._entry(name)["rows"]:
            if row["x"] not in best or row["figures"][by] > best[row["x"]]["figures"][by]:
                best[row["x"]] = row
        return [
            self.value(name, x, row["column"], figure) / self.value(of, x, other, figure) for x, row in best.items()
        ]

    def gains(self, names: str | Sequence[str], column: str, other: str, figure: str) -> list[float]:
        """Return what ``column`` has more than ``other``, in all rows."""
        rows = self._rows(names, column)
        return [self.value(name, x, column, figure) - self.value(name, x, other, figure) for name, x in rows]

    def _rows(self, names: str | Sequence[str], column: str) -> list[tuple[str, str]]:
        chosen = [names] if isinstance(names, str) else names
        return [(name, row["x"]) for name in chosen for row in self._entry(name)["rows"] if row["column"] == column]

    def _entry(self, name: str) -> Mapping[str, Any]:
        if name not in self._experiments:
            raise ValueError(f"the record has no experiment {name}: run it with --only {name}")
        return self._experiments[name]


def number(value: float, digits: int = 0, scale: float = 1.0) -> str:
    """Return a number with thousands separated."""
    text = f"{scale * value:,.{digits}f}"
    return text.removeprefix("-") if not any(digit in text for digit in "123456789") else text


def span(values: Iterable[float], digits: int = 0, scale: float = 1.0) -> str:
    """Return ``least to most``; one number if they look the same."""
    found = list(values)
    low, high = number(min(found), digits, scale), number(max(found), digits, scale)
    return low if low == high else f"{low} to {high}"


def verdict(*conditions: bool) -> str:
    """Return how a claim fared whose parts are these conditions."""
    return "holds" if all(conditions) else "in part" if any(conditions) else "**does not hold**"


_GROUPS = {
    "Does not hold": "**does not hold**", "Holds in part": "in part", "Holds": "holds",
    "Controls, and what cannot be told": "",
}  # fmt: skip
"""Heading -> the verdict of its claims; the last has all others."""


def negatives_first(text: str) -> str:
    """Return a table of claims as one for each verdict, what does not hold first.

    The last cell of a line is its verdict. A claim that begins with dots goes on from the last one that does not, and
    is given that one's words up to its first colon or bracket.
    """
    head, rule, *lines = [line for line in text.splitlines() if line.strip()]
    groups: dict[str, list[str]] = {heading: [] for heading in _GROUPS}
    before = ""
    for line in lines:
        claim, *cells, found = [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
        if claim.startswith("..."):
            claim = f"{before} {claim}"
        else:
            before = re.split(r"[:(]", claim)[0].strip()
        heading = next((name for name, word in _GROUPS.items() if word and word == found), list(_GROUPS)[-1])
        groups[heading].append(f"| {' | '.join([claim, *cells, found])} |")
    return "\n\n".join(
        "\n".join([f"### {heading} ({len(found)})", "", head, rule, *found])
        for heading, found in groups.items()
        if found
    )


def names_of(findings: Findings) -> dict[str, Any]:
    """Return what the page's template may ask."""
    return {
        "table": findings.table, "v": findings.value, "ratio": findings.ratio, "values": findings.values,
        "ratios": findings.ratios, "gains": findings.gains, "across": findings.across,
        "across_best": findings.across_best, "verdict": verdict, "negatives_first": negatives_first,
        "cells": {name: says for name, (says, _) in CELLS.items()},
    }  # fmt: skip
