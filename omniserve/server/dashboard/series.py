"""Readings of all metrics, and the series of the charts made of them: quantiles of a sliding window, rates, gauges."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric

from omniserve.core.request import ClassSpec, ServiceClass

Key = tuple[str, ...]
"""A sample's full name and its labels' values, in the order in which the metric declares its labels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The values of all metrics at one time."""

    clock_s: float
    """Time of the reading on a monotonic clock, in seconds."""
    time_s: float
    """Time of the reading in seconds since 1970."""
    engine: str
    """``up``, ``busy`` (it did not answer in time: a long step) or why it is not there."""
    values: Mapping[Key, float]
    buckets: Mapping[Key, Mapping[float, float]]
    """The cumulative counts of histograms by upper bound."""

    def total(self, name: str, *labels: str) -> float:
        """Return the sum of the samples of a name whose first labels have these values."""
        chosen = (name, *labels)
        return sum(value for key, value in self.values.items() if key[: len(chosen)] == chosen)


def read(metrics: Iterable[Metric], *, clock_s: float, time_s: float, engine: str) -> Reading:
    """Return the values of metrics."""
    values: dict[Key, float] = {}
    buckets: dict[Key, dict[float, float]] = {}
    for metric in metrics:
        for sample in metric.samples:
            if sample.name.endswith("_bucket"):
                *labels, bound = sample.labels.values()
                buckets.setdefault((metric.name, *labels), {})[float(bound)] = sample.value
            elif not sample.name.endswith("_created"):
                values[sample.name, *sample.labels.values()] = sample.value
    return Reading(clock_s=clock_s, time_s=time_s, engine=engine, values=values, buckets=buckets)


Value = float | None
"""A point of a chart; None if nothing of the kind happened or the engine is not there."""


def chart_values(
    classes: Sequence[ClassSpec], now: Reading, recent: Reading | None, past: Reading | None
) -> dict[str, Value]:
    """Return the value of each series; those of a class are named ``SERIES:CLASS``.

    Args:
        classes: The engine's.
        now: The newest reading.
        recent: One from a few seconds before, for rates; None if there is none yet.
        past: One from the beginning of the sliding window; the same.
    """
    lately, window = _Span(recent, now), _Span(past, now)
    values: dict[str, Value] = {}
    for spec in classes:
        values |= {f"{name}:{spec.name}": value for name, value in _of_class(spec.name, now, lately, window)}
    return values | dict(_of_engine(classes, now, lately))


def _of_class(name: str, now: Reading, lately: _Span, window: _Span) -> Iterator[tuple[str, Value]]:
    for what in ("ttft", "tpot"):
        counts = window.buckets((f"omniserve_{what}_seconds", name))
        yield f"{what}_p50", quantile(0.5, counts)
        yield f"{what}_p99", quantile(0.99, counts)
        met, missed = (window.delta(("omniserve_slo_total", name, what, met)) or 0.0 for met in ("true", "false"))
        yield f"{what}_met", met / (met + missed) if met + missed else None
    yield "ttft_error_p50", quantile(0.5, window.buckets(("omniserve_ttft_prediction_error_seconds", name)))
    yield "rejected", window.delta(("omniserve_requests_rejected_total", name))
    yield "output_rate", lately.rate(("omniserve_output_tokens_total", name))
    yield "prompt_rate", lately.rate(("omniserve_prompt_tokens_total", name))
    yield "waiting", now.values.get(("omniserve_requests_waiting", name))
    yield "running", now.values.get(("omniserve_requests_running", name))


def _of_engine(classes: Sequence[ClassSpec], now: Reading, lately: _Span) -> Iterator[tuple[str, Value]]:
    best_effort = [spec.name for spec in classes if spec.kind == ServiceClass.BE]
    outputs = [lately.rate(("omniserve_output_tokens_total", name)) for name in best_effort]
    prompts = [lately.rate(("omniserve_prompt_tokens_total", name)) for name in best_effort]
    by_host, output = lately.rate(("omniserve_host_output_tokens_total",)), _sum(outputs)
    if by_host is not None and (of_ls := lately.rate(("omniserve_ls_host_output_tokens_total",))) is not None:
        by_host -= of_ls
    yield "be_prompt_rate", _sum(prompts)
    yield "be_host_rate", by_host
    yield "be_device_rate", None if output is None or by_host is None else max(0.0, output - by_host)
    for tier in ("device", "host"):
        used, blocks = (now.values.get((f"omniserve_kv_blocks{what}", tier)) for what in ("_used", ""))
        yield f"kv_{tier}", None if used is None or not blocks else used / blocks
    yield "piggyback_rate", lately.rate(("omniserve_piggyback_rows_total",))
    steps, seconds = (lately.delta((f"omniserve_{what}_total",)) for what in ("steps", "step_seconds"))
    yield "step_time", None if not steps or seconds is None else seconds / steps
    # The engine keeps its last means while it is idle; shown then, an old error would look like one of this moment.
    for what in ("error", "drift"):
        yield f"step_{what}", now.values.get((f"omniserve_latency_{what}",)) if steps else None


class _Span:
    """The difference between two readings. A counter that is lower than before began again at 0."""

    def __init__(self, start: Reading | None, end: Reading) -> None:
        self._start = start
        self._end = end

    def delta(self, key: Key) -> Value:
        end = self._end.values.get(key)
        if end is None or self._start is None:
            return None
        start = self._start.values.get(key, 0.0)
        return end - start if end >= start else end

    def rate(self, key: Key) -> Value:
        delta = self.delta(key)
        if delta is None or self._start is None or self._end.clock_s <= self._start.clock_s:
            return None
        return delta / (self._end.clock_s - self._start.clock_s)

    def buckets(self, key: Key) -> Mapping[float, float]:
        """Return a histogram's cumulative counts by upper bound of what was observed in between."""
        if self._start is None:
            return {}
        start = self._start.buckets.get(key, {})
        return {bound: count - start.get(bound, 0.0) for bound, count in self._end.buckets.get(key, {}).items()}


def quantile(share: float, counts: Mapping[float, float]) -> Value:
    """Return a quantile of a histogram, interpolated in its bucket as Prometheus' ``histogram_quantile`` does.

    Args:
        share: 0 to 1.
        counts: Cumulative, by upper bound, ascending; the last bound is infinite.
    """
    if not counts or not (total := counts[math.inf]):
        return None
    rank = share * total
    low_bound, low_count = None, 0.0
    for bound, count in counts.items():
        if count >= rank and count > low_count:
            if low_bound is None:  # the first bucket has no lower end unless that is 0
                low_bound = min(bound, 0.0)
            if math.isinf(bound):
                return low_bound
            return low_bound + (bound - low_bound) * (rank - low_count) / (count - low_count)
        low_bound, low_count = bound, count
    raise AssertionError(f"no bucket holds rank {rank} of {counts}")


def _sum(values: Sequence[Value]) -> Value:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
