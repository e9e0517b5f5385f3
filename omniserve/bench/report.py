"""Figures of a load: percentiles of its times, rates, and how many requests met their objectives."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from omniserve.bench.client import Seen
from omniserve.bench.load import Outcome

METRICS = {"ttft": "time to first token", "tpot": "time per output token", "itl": "between events", "e2el": "whole"}
"""Times of a request, by their names in flags and results."""


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile of values, between two of them linearly; nan without values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def times_of(requests: Sequence[Seen], metric: str) -> list[float]:
    """Return a time of all complete requests, in seconds; those that do not have it are left out."""
    done = [seen for seen in requests if seen.is_complete]
    if metric == "itl":
        return [seconds for seen in done for seconds in seen.itl_s]
    values = [getattr(seen, f"{metric}_s") for seen in done]
    return [value for value in values if value is not None]


def is_good(seen: Seen, goodput_s: Mapping[str, float]) -> bool:
    """Tell whether a complete request has kept all objectives, in seconds by metric."""
    values = ((getattr(seen, f"{metric}_s"), limit_s) for metric, limit_s in goodput_s.items())
    return all(value is None or value <= limit_s for value, limit_s in values)


def figures(
    outcome: Outcome, *, metrics: Sequence[str], percentiles: Sequence[float], goodput_s: Mapping[str, float]
) -> dict[str, Any]:
    """Return all figures, under the names that ``vllm bench serve`` saves them with.

    ``background_`` is the work beside. Times are in ms. Tokens of the background count as far as they had come when the
    timed requests ended.
    """
    done = [seen for seen in outcome.requests if seen.is_complete]
    seconds = outcome.seconds
    num_in, num_out = (sum(getattr(s, name) for s in done) for name in ("num_prompt_tokens", "num_output_tokens"))
    found: dict[str, Any] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(outcome.requests) - len(done),
        "total_input_tokens": num_in,
        "total_cached_tokens": sum(seen.num_cached_tokens for seen in done),
        "total_output_tokens": num_out,
        "request_throughput": len(done) / seconds,
        "output_throughput": num_out / seconds,
        "total_token_throughput": (num_in + num_out) / seconds,
    }
    if goodput_s:
        num_good = sum(is_good(seen, goodput_s) for seen in done)
        found |= {"request_goodput": num_good / seconds, "good_share": num_good / max(1, len(outcome.requests))}
    for metric in metrics:
        ms = [1e3 * value for value in times_of(outcome.requests, metric)]
        found |= {
            f"mean_{metric}_ms": statistics.fmean(ms) if ms else math.nan,
            f"median_{metric}_ms": percentile(ms, 50),
            f"std_{metric}_ms": statistics.pstdev(ms) if ms else math.nan,
            **{f"p{percent:g}_{metric}_ms": percentile(ms, percent) for percent in percentiles},
        }
    if outcome.background:
        some = [seen for seen in outcome.background if seen.error is None]
        tokens = sum(seen.num_prompt_tokens + seen.num_output_tokens for seen in some)
        found |= {
            "background_completed": sum(seen.is_complete for seen in some),
            "background_failed": len(outcome.background) - len(some),
            "background_token_throughput": tokens / seconds,
        }
    errors = [seen.error for seen in (*outcome.requests, *outcome.background) if seen.error is not None]
    return found | {"errors": sorted(set(errors))[:10]}


def table(found: Mapping[str, Any]) -> str:
    """Return figures as text, one a line."""
    lines = []
    for name, value in found.items():
        if name != "errors":
            text = f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
            lines.append(f"{name:<30} {text:>14}")
    return "\n".join([*lines, *(f"error: {error}" for error in found["errors"])])
