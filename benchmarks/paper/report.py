"""Tables of reproduced figures: a row for each x, a column for each system; in Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from omniserve.core.request import SLO
from omniserve.simulate.engine import StepRecord
from omniserve.simulate.results import RequestResult, Result, percentile

Figures = dict[str, Any]


class TokenGaps:
    """Times between two tokens (TBT) of LS requests: what each step with LS decodes takes, once for each of them.

    Args:
        begin_s: Steps before it do not count.
    """

    def __init__(self, begin_s: float = 0.0) -> None:
        self._begin_s = begin_s
        self._steps: list[tuple[float, int]] = []

    def note(self, step: StepRecord) -> None:
        """Take note of a step."""
        decodes = (c for c in step.plan.chunks if c.samples and len(c.token_ids) == 1 and c.start > 0)
        count = sum(chunk.request_id.startswith("LS-") for chunk in decodes)
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


def figures_of(result: Result, slo: SLO) -> Figures:
    """Return what is kept of one simulation: plain numbers, None where there is none.

    ``attainment`` and its parts are of all LS requests that came; ``admitted_ttft`` is of those that were not rejected.
    """
    ls, be = result.classes["LS"], result.classes["BE"]
    group = [request for request in result.requests if request.service_class == "LS"]
    admitted = [request for request in group if not request.rejected]
    tpots = sorted(request.tpot_s for request in group if request.tpot_s is not None)
    found = {
        "ls_requests": ls.num_requests,
        "ls_unfinished": ls.num_requests - ls.num_finished - ls.num_rejected,
        "rejected": ls.num_rejected,
        "attainment": ls.attainment,
        "ttft_attainment": ls.ttft_attainment,
        "tpot_attainment": ls.tpot_attainment,
        "admitted_ttft": sum(r.meets_ttft(slo) for r in admitted) / len(admitted) if admitted else math.nan,
        "ttft_p50_s": ls.ttft_p50_s,
        "ttft_p99_s": ls.ttft_p99_s,
        "tpot_p50_s": ls.tpot_p50_s,
        "tpot_p99_s": ls.tpot_p99_s,
        "tpot_max_s": percentile(tpots, 100),
        "normalized_s": _normalized_s(group),
        "be_normalized_s": _normalized_s(r for r in result.requests if r.service_class == "BE"),
        "ls_output_per_s": ls.output_tokens_per_s,
        "be_output_per_s": be.output_tokens_per_s,
        "be_prompt_per_s": be.prompt_tokens_per_s,
        "be_tokens_per_s": be.output_tokens_per_s + be.prompt_tokens_per_s,
        "be_finished_per_s": be.num_finished / result.duration_s,
        "host_share": result.host_share,
        "host_busy": result.host_tier_busy,
        "preemptions": result.preemptions,
        "swaps_out": result.swaps_out,
        "too_long": result.num_too_long,
        "steps": result.num_steps,
        "wall_s": result.wall_s,
    }
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in found.items()
    }


def _number(value: float | None, digits: int = 0, scale: float = 1.0) -> str:
    return "-" if value is None else f"{scale * value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _co_serving(f: Figures) -> str:
    be = f"{_number(f['be_output_per_s'])} out {_number(f['be_prompt_per_s'])} in"
    return (
        f"{_percent(f['attainment'])}; {_number(f['tpot_p50_s'], 0, 1e3)}; {be}; {_number(f['host_share'], 0, 100)} %"
    )


def _admission(f: Figures) -> str:
    return (
        f"{_percent(f['admitted_ttft'])}; {_percent(f['attainment'])}; {f['rejected']}/{f['ls_requests']}; "
        f"{_number(f['ls_output_per_s'])}"
    )


def _offline(f: Figures) -> str:
    total = f["be_output_per_s"]
    return f"{_number(total, 0)} ({_number(f['host_share'], 0, 100)} % host)"


def _harvest(f: Figures) -> str:
    return f"{_number(f['ttft_p99_s'], 0, 1e3)}; {_number(f['tbt_p99_s'], 0, 1e3)}; {_number(f['be_tokens_per_s'])}"


def _scales(f: Figures) -> str:
    return f"{_percent(f['ttft_attainment'])}; {_percent(f['tbt_attainment'])}; {_number(f['be_tokens_per_s'])}"


def _more_hosts(f: Figures) -> str:
    tpots = f"{_number(f['tpot_p50_s'], 0, 1e3)}, {_number(f['tpot_max_s'], 0, 1e3)}"
    hosts = f"{_number(f['host_share'], 0, 100)} %, {_number(f['host_busy'], 1, 100)} %"
    return f"{_percent(f['attainment'])}; {tpots}; {_number(f['be_output_per_s'])}; {hosts}"


def _per_token(f: Figures) -> str:
    return f"{_number(f['be_normalized_s'], 0, 1e3)} ({_number(f['host_share'], 0, 100)} % host)"


def _alone(f: Figures) -> str:
    return f"{_number(f['normalized_s'], 0, 1e3)}; {_number(f['ls_output_per_s'])}"


def _hybrid(f: Figures) -> str:
    return (
        f"{_number(f['normalized_s'], 0, 1e3)}; {_percent(f['ttft_attainment'])}; {_percent(f['tpot_attainment'])}; "
        f"{_number(f['be_finished_per_s'], 2)}"
    )


CELLS: dict[str, tuple[str, Callable[[Figures], str]]] = {
    "co-serving": ("LS in SLO; TPOT p50 ms; BE tokens/s out, in; of those out with host attention", _co_serving),
    "more-hosts": (
        "LS in SLO; TPOT p50, largest, ms; BE tokens/s out; of those with host attention; hosts busy",
        _more_hosts,
    ),
    "admission": ("TTFT attained by the admitted; SLO by all that came; rejected; LS tokens/s", _admission),
    "offline": ("output tokens/s (with host attention)", _offline),
    "per-token": ("mean latency per output token, ms (output with host attention)", _per_token),
    "harvest": ("P99 TTFT ms; P99 TBT ms; offline tokens/s, in and out", _harvest),
    "scales": ("TTFT attained; tokens within the TBT objective; offline tokens/s, in and out", _scales),
    "alone": ("normalized latency ms/token; LS tokens/s", _alone),
    "hybrid": ("normalized latency ms/token; TTFT attained; TPOT attained; BE requests/s", _hybrid),
}
"""Name -> (what a cell says, from its figures)."""


def markdown(experiment: Mapping[str, Any], *, legend: bool = True) -> str:
    """Return the table of one experiment of a record, with or without what its cells are."""
    says, cell = CELLS[experiment["cell"]]
    rows: Sequence[Mapping[str, Any]] = experiment["rows"]
    columns = list(dict.fromkeys(row["column"] for row in rows))
    found = {(row["x"], row["column"]): cell(row["figures"]) for row in rows}
    lines = [
        f"| {experiment['x_name']} | {' | '.join(columns)} |",
        "|---" * (1 + len(columns)) + "|",
        *(
            f"| {x} | {' | '.join(found.get((x, column), '') for column in columns)} |"
            for x in dict.fromkeys(row["x"] for row in rows)
        ),
    ]
    unfinished = sum(row["figures"]["ls_unfinished"] for row in rows)
    if unfinished:
        lines.append(f"| {unfinished} LS requests were cut off by the end, and count as missed |")
    if legend:
        lines += ["", f"Cells: {says}. {experiment['minutes']:g} simulated minutes, seed {experiment['seed']}."]
    return "\n".join(lines)
