"""Figures of a load as a client saw it: latencies, attainment of objectives, BE throughput."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.client import BE_TIER, LS_TIER, RequestRecord
from omniserve.simulate.results import percentile


@dataclass(frozen=True, kw_only=True)
class LatencySummary:
    """Latencies of a group of requests, in seconds."""

    num_requests: int
    num_started: int
    """Requests that got a first token; if fewer than all, the TTFT figures are lower bounds."""
    num_finished: int
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float


def summarize(records: Iterable[RequestRecord], end_s: float) -> LatencySummary:
    """Summarize the latencies of ``records``.

    A request without a first token at ``end_s`` counts with the time it had waited by then: a lower bound, but leaving
    it out would make the server that serves the fewest look the fastest.
    """
    group = list(records)
    ttfts = [
        (record.first_token_s if record.first_token_s is not None else end_s) - record.send_at_s for record in group
    ]
    tpots = [record.tpot_s for record in group if record.tpot_s is not None]
    return LatencySummary(
        num_requests=len(group), num_started=sum(record.first_token_s is not None for record in group),
        num_finished=sum(record.finished for record in group), ttft_p50_s=percentile(ttfts, 50),
        ttft_p99_s=percentile(ttfts, 99), tpot_p50_s=percentile(tpots, 50), tpot_p99_s=percentile(tpots, 99),
    )  # fmt: skip


def summarize_co_serving(
    records: Sequence[RequestRecord], slo: tuple[float, float] | None, *, end_s: float, stream_s: float | None = None
) -> dict[str, Any]:
    """Return the figures of one load, without those that it has nothing for.

    LS requests are those that were sent before the BE work was over; a load without BE work counts all. The objectives
    are compared with the time to the first token since the request was due, and with the mean time per token after
    it. A request that was cut off without a first token, or without a last one, missed; latencies count its waiting
    time until then, a lower bound, and no time per token. Rejected requests are left out of ``attained`` and of the
    latencies; to ``attained_of_all`` they are misses.

    BE tokens are prompts, from their first output token on, and outputs: ``be_tokens_per_s`` until the last token of
    the last request (``be_finished`` says if that was before ``end_s``), ``be_tokens_per_s_beside_ls`` during the
    first ``stream_s`` seconds of that time, in which the LS requests come.

    Args:
        records: LS and BE requests, told apart by their tier.
        slo: TTFT and TPOT in seconds to compare with, whatever the server was told; None: no LS figures.
        end_s: When the load ended.
        stream_s: How long LS requests came; None: no figure for it.
    """
    result: dict[str, Any] = {}
    be = [record for record in records if record.service_tier == BE_TIER and not record.rejected]
    be_end_s = math.inf
    if be:
        finished = all(record.finished for record in be)
        per_chunk = _tokens_per_chunk([record for record in be if record.finished])
        be_end_s = max(record.last_token_s or 0.0 for record in be) if finished else end_s
        tokens = sum(_tokens_until(record, end_s, per_chunk) for record in be)
        result |= {"be_tokens_per_s": tokens / be_end_s, "be_end_s": be_end_s, "be_finished": finished}
        if stream_s is not None:
            window_s = min(stream_s, be_end_s)
            beside = sum(_tokens_until(record, window_s, per_chunk) for record in be)
            result["be_tokens_per_s_beside_ls"] = beside / window_s
    ls = [record for record in records if record.service_tier == LS_TIER and record.send_at_s < be_end_s]
    if not ls or slo is None:
        return result
    admitted = [record for record in ls if not record.rejected]
    result |= {"ls_requests": len(ls), "rejected": len(ls) - len(admitted), "attained_of_all": 0.0}
    if not admitted:
        return result
    met_ttft = [
        record.first_token_s is not None and record.first_token_s - record.send_at_s <= slo[0] for record in admitted
    ]
    met_tpot = [record.finished and (record.tpot_s or 0.0) <= slo[1] for record in admitted]
    met = sum(ttft and tpot for ttft, tpot in zip(met_ttft, met_tpot, strict=True))
    latencies = summarize(admitted, end_s)
    return result | {
        "attained_of_all": met / len(ls),
        "attained": met / len(admitted),
        "ttft_attained": sum(met_ttft) / len(admitted),
        "tpot_attained": sum(met_tpot) / len(admitted),
        "goodput_per_s": met / max((record.last_token_s for record in admitted if record.last_token_s), default=end_s),
        "ls_unfinished": latencies.num_requests - latencies.num_finished,
        "ttft_p50_s": latencies.ttft_p50_s,
        "ttft_p99_s": latencies.ttft_p99_s,
        "tpot_p50_s": None if math.isnan(latencies.tpot_p50_s) else latencies.tpot_p50_s,
        "tpot_p99_s": None if math.isnan(latencies.tpot_p99_s) else latencies.tpot_p99_s,
    }


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return what a table shows of the figures of ``summarize_co_serving``: milliseconds and tokens a second."""

    def form(key: str, spec: str, factor: float = 1.0) -> str:
        return "" if row.get(key) is None else format(factor * row[key], spec)

    def pair(name: str, spec: str, mark: str = "") -> str:
        times_ms = [form(f"{name}_{percent}_s", spec, 1e3) for percent in ("p50", "p99")]
        return " / ".join(mark + time_ms for time_ms in times_ms) if all(times_ms) else ""

    return {
        "of all": form("attained_of_all", ".1%"), "attained": form("attained", ".1%"),
        "TTFT": form("ttft_attained", ".0%"), "TPOT": form("tpot_attained", ".0%"),
        "rejected": f"{row['rejected']:g} of {row['ls_requests']:g}" if "rejected" in row else "",
        "TTFT p50 / p99 ms": pair("ttft", ".0f", ">" if row.get("ls_unfinished") else ""),
        "TPOT p50 / p99 ms": pair("tpot", ".1f"), "BE tok/s beside LS": form("be_tokens_per_s_beside_ls", ".0f"),
        "BE tok/s in all": form("be_tokens_per_s", ".0f") + ("" if row.get("be_finished", True) else " (cut off)"),
    }  # fmt: skip


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the medians of all figures that every repeat has; what is true or false is true if it always was."""
    return {
        key: all(run[key] for run in runs) if isinstance(value, bool) else statistics.median(run[key] for run in runs)
        for key, value in runs[0].items()
        if all(isinstance(run.get(key), (int, float)) for run in runs)
    }


def without_samples(results: Any, *names: str) -> tuple[Any, Any]:
    """Return results without the entries of these names, and these entries alone, at the same places.

    The first are for a record, the second for the file of single samples beside it.

    Args:
        results: Of dictionaries, lists, and what has no such entries; a list without any has an empty one for its own.
        *names: Keys of dictionaries.
    """
    if isinstance(results, Mapping):
        pairs = {key: without_samples(value, *names) for key, value in results.items() if key not in names}
        raw = {key: value for key, value in results.items() if key in names}
        raw |= {key: samples for key, (_, samples) in pairs.items() if samples}
        return {key: kept for key, (kept, _) in pairs.items()}, raw
    if isinstance(results, list):
        parts = [without_samples(value, *names) for value in results]
        samples = [samples for _, samples in parts]
        return [kept for kept, _ in parts], samples if any(samples) else []
    return results, {}


def _tokens_until(record: RequestRecord, at_s: float, others_per_chunk: float) -> float:
    """Return the prompt and output tokens that a request had brought by then.

    A chunk may carry several tokens: the usage of a finished request is spread evenly over its chunks. One that did not
    finish has no usage: its chunks have as many as those of the ones that did, or one.
    """
    if record.first_token_s is None or record.first_token_s > at_s:
        return 0.0
    chunks = sum(time_s <= at_s for time_s in record.token_times_s)
    per_chunk = _tokens_per_chunk([record]) if record.finished else others_per_chunk
    return record.num_prompt_tokens + chunks * per_chunk


def _tokens_per_chunk(finished: Sequence[RequestRecord]) -> float:
    chunks = sum(len(record.token_times_s) for record in finished)
    return sum(record.num_output_tokens for record in finished) / chunks if chunks else 1.0
