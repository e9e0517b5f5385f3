"""Statistics over client-side request times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.common.client import RequestRecord
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
        num_requests=len(group),
        num_started=sum(record.first_token_s is not None for record in group),
        num_finished=sum(record.finished for record in group),
        ttft_p50_s=percentile(ttfts, 50),
        ttft_p99_s=percentile(ttfts, 99),
        tpot_p50_s=percentile(tpots, 50),
        tpot_p99_s=percentile(tpots, 99),
    )
