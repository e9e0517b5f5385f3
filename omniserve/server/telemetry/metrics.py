"""Prometheus metrics: what clients saw, timed in the API process; ``engine_metrics`` adds what the engine tells."""

from __future__ import annotations

import bisect
import functools
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from omniserve.core.request import SLO, ClassSpec, FinishReason
from omniserve.core.stats import EngineStats
from omniserve.server.errors import ApiError
from omniserve.server.telemetry.engine_metrics import EngineCollector
from omniserve.server.telemetry.scaling import ScalingWatch
from omniserve.server.telemetry.vllm_metrics import Served, VllmMetrics

if TYPE_CHECKING:
    from omniserve.server.choice import Choice
    from omniserve.server.engines.fleet import Fleet

_TTFT_BUCKETS_S = (
    0.01,
    0.015,
    0.025,
    0.035,
    0.05,
    0.07,
    0.1,
    0.15,
    0.25,
    0.35,
    0.5,
    0.7,
    1,
    1.5,
    2,
    3,
    4,
    6,
    8,
    12,
    16,
    32,
    64,
)
_TTFT_ERROR_BUCKETS_S = (-4, -1, -0.5, -0.25, -0.1, -0.05, -0.02, 0, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 4, 16)
_TPOT_BUCKETS_S = (
    0.002,
    0.003,
    0.004,
    0.005,
    0.006,
    0.008,
    0.01,
    0.015,
    0.02,
    0.025,
    0.03,
    0.035,
    0.04,
    0.05,
    0.06,
    0.07,
    0.08,
    0.1,
    0.12,
    0.15,
    0.2,
    0.25,
    0.3,
    0.4,
    0.6,
    0.8,
    1.6,
    5,
)
_ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.4, 0.8, 1.6, 5, 20)
_E2E_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Counts:
    """What the metrics of one process have counted."""

    rows: Sequence[tuple[str, dict[str, str], float]]
    """The increases of counters: name, labels, increase."""
    values: Sequence[tuple[str, str, Sequence[int], float]]
    """The values of histograms: name, class, number of them in each bucket, sum."""


class ServerMetrics:
    """The metrics of one server, in a registry of its own.

    Histograms have a bucket that ends at each objective, so that quantiles are on the right side of it. With ``served``
    there are series under vLLM's names, too.
    """

    def __init__(
        self,
        class_names: Sequence[str],
        objectives: Sequence[SLO] = (),
        served: Served | None = None,
        classes: Sequence[ClassSpec] = (),
    ) -> None:
        registry = self._registry = CollectorRegistry()
        self._histograms: dict[str, QuickHistogram] = {}
        self._told: dict[tuple[str, ...], float] = {}
        """What ``take_counts`` has told, by counter and labels."""
        by_class = ["service_class"]
        self._requests = Counter(
            "omniserve_requests", "Requests that ended", [*by_class, "finish_reason"], registry=registry
        )
        self._rejected = Counter(
            "omniserve_requests_rejected", "Requests refused because of load", by_class, registry=registry
        )
        self._fallbacks = Counter(
            "omniserve_requests_downgraded",
            "Calls that admission control refused in this class and that were served as best effort instead",
            by_class,
            registry=registry,
        )
        ttft_buckets = _with_bounds(_TTFT_BUCKETS_S, [slo.ttft_s for slo in objectives])
        tpot_buckets = _with_bounds(_TPOT_BUCKETS_S, [slo.tpot_s for slo in objectives])

        def histogram(name: str, help_text: str, bounds: Sequence[float]) -> QuickHistogram:
            made = self._histograms[name] = QuickHistogram(f"omniserve_{name}_seconds", help_text, bounds, class_names)
            registry.register(made)
            return made

        self._ttft = histogram("ttft", "HTTP request to first token", ttft_buckets)
        self._predicted_ttft = histogram(
            "ttft_predicted", "What admission control predicted for HTTP request to first token", ttft_buckets
        )
        self._ttft_error = histogram(
            "ttft_prediction_error", "Time to first token minus its prediction", _TTFT_ERROR_BUCKETS_S
        )
        self._tpot = histogram("tpot", "Time per output token after the first", tpot_buckets)
        self._itl = histogram("itl", "Between two outputs of a request", _ITL_BUCKETS_S)
        self._e2e = histogram("e2e", "HTTP request to last token", _E2E_BUCKETS_S)
        self._slo = Counter(
            "omniserve_slo",
            "Requests with an objective that ended by themselves",
            [*by_class, "objective", "met"],
            registry=registry,
        )
        self._scaled = Counter(
            "omniserve_scaled_objectives",
            "Objectives of a class that a request could not keep alone and that were scaled to what it takes alone",
            [*by_class, "objective"],
            registry=registry,
        )
        self._queued = Gauge(
            "omniserve_requests_queued", "Requests that wait for their first token", by_class, registry=registry
        )
        self._errors = Counter(
            "omniserve_http_errors", "Answers other than success", ["status", "code"], registry=registry
        )
        self._counters = (
            self._requests, self._rejected, self._fallbacks, self._slo, self._scaled, self._errors
        )  # fmt: skip
        for service_class in class_names:
            self._begin_at_zero(service_class)
        self._engine = EngineCollector()
        registry.register(self._engine)
        self.scaling = ScalingWatch(classes)
        """The engines that the load needs."""
        registry.register(self.scaling)
        self._as_vllm: VllmMetrics | None = None
        if served is not None:
            histograms = {
                "time_to_first_token_seconds": self._ttft,
                "inter_token_latency_seconds": self._itl,
                "time_per_output_token_seconds": self._itl,  # its name before 0.11
                "request_time_per_output_token_seconds": self._tpot,
                "e2e_request_latency_seconds": self._e2e,
            }
            self._as_vllm = VllmMetrics(served, self._requests, histograms)
            registry.register(self._as_vllm)

    def _begin_at_zero(self, service_class: str) -> None:
        """Have the series of a class from the start, when they are 0."""
        self._rejected.labels(service_class)
        self._fallbacks.labels(service_class)
        for objective in ("ttft", "tpot", "deadline"):
            if objective != "deadline":
                self._scaled.labels(service_class, objective)
            for met in ("true", "false"):
                self._slo.labels(service_class, objective, met)
        for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.TIMEOUT):
            self._requests.labels(service_class, reason)

    def show_backlog(self, num_waiting: Mapping[str, int]) -> None:
        """Show, from now on, how many requests of each class wait for their first token."""
        for service_class in num_waiting:
            self._queued.labels(service_class).set_function(functools.partial(num_waiting.__getitem__, service_class))

    def rejected(self, service_class: str) -> None:
        """Count a request that was refused because of load."""
        self._rejected.labels(service_class).inc()

    def fell_back(self, service_class: str) -> None:
        """Count a call of a class that is served as best effort instead of being refused."""
        self._fallbacks.labels(service_class).inc()

    def scaled(self, service_class: str, slo: SLO, scaled: SLO) -> None:
        """Count the objectives of a request that were scaled."""
        for objective, before_s, now_s in (("ttft", slo.ttft_s, scaled.ttft_s), ("tpot", slo.tpot_s, scaled.tpot_s)):
            if before_s != now_s:
                self._scaled.labels(service_class, objective).inc()

    def gap(self, service_class: str, seconds: float) -> None:
        """Count the time between two outputs of a request."""
        self._itl.observe(service_class, seconds)

    def refused(self, error: ApiError) -> None:
        """Count an answer other than success."""
        self._errors.labels(error.status, error.code or "").inc()

    def finished(self, choice: Choice) -> None:
        """Count and time a request that ended for whatever reason."""
        service_class, times, slo = choice.request.service_class, choice.times, choice.slo
        assert choice.finish_reason is not None
        self._requests.labels(service_class, choice.finish_reason).inc()
        ttft_s, tpot_s = times.ttft_s, times.tpot_s
        if ttft_s is None or times.last_token_s is None:
            return
        self._ttft.observe(service_class, ttft_s)
        if choice.predicted_ttft_s is not None:
            self._predicted_ttft.observe(service_class, choice.predicted_ttft_s)
            self._ttft_error.observe(service_class, ttft_s - choice.predicted_ttft_s)
        if tpot_s is not None:
            self._tpot.observe(service_class, tpot_s)
        if choice.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        whole_s = times.last_token_s - times.arrival_s
        self._e2e.observe(service_class, whole_s)
        for objective, value_s, limit_s in (
            ("ttft", ttft_s, slo.ttft_s),
            ("tpot", tpot_s, slo.tpot_s),
            ("deadline", whole_s, choice.request.deadline_s),
        ):
            if value_s is not None and limit_s is not None:
                self._slo.labels(service_class, objective, str(value_s <= limit_s).lower()).inc()

    def take_counts(self) -> Counts:
        """Return what was counted since the last call, for ``add_counts`` of another process."""
        rows = list[tuple[str, dict[str, str], float]]()
        for counter in self._counters:
            (family,) = counter.collect()
            for sample in family.samples:
                if not sample.name.endswith("_total"):
                    continue
                key = family.name, *sample.labels.values()
                if (more := sample.value - self._told.get(key, 0.0)) > 0:
                    self._told[key] = sample.value
                    rows.append((family.name, sample.labels, more))
        values = [(name, *row) for name, histogram in self._histograms.items() for row in histogram.take()]
        return Counts(rows, values)

    def add_counts(self, counts: Counts) -> None:
        """Count what another process has counted."""
        counters = {next(iter(counter.collect())).name: counter for counter in self._counters}
        for name, labels, value in counts.rows:
            counters[name].labels(**labels).inc(value)
        for name, service_class, buckets, total in counts.values:
            self._histograms[name].add(service_class, buckets, total)

    def render(self, stats: EngineStats | None, engine: Fleet | None = None) -> bytes:
        """Return everything in Prometheus' text format.

        Args:
            stats: The engine's own; None while there is no engine: its series are absent then.
            engine: The engine, or engines, that they are of.
        """
        self._take(stats, engine)
        return generate_latest(self._registry)

    def collect(self, stats: EngineStats | None, engine: Fleet | None = None) -> list[Metric]:
        """Return what ``render`` shows, as objects; the arguments are the same."""
        self._take(stats, engine)
        return list(self._registry.collect())

    def _take(self, stats: EngineStats | None, engine: Fleet | None) -> None:
        self._engine.stats, self._engine.fleet = stats, engine
        if self._as_vllm is not None:
            self._as_vllm.stats = stats


class QuickHistogram(Collector):
    """A histogram by class in which one thread notes values, most of them one a token: without locks, by bisection.

    Args:
        name, help_text: Of the metric.
        bounds: The buckets' upper ends, ascending.
        class_names: Values of its label ``service_class``.
    """

    def __init__(self, name: str, help_text: str, bounds: Sequence[float], class_names: Sequence[str]) -> None:
        self._name, self._help_text, self._bounds = name, help_text, bounds
        self._created_s = time.time()
        self._counts = {name: [0] * (len(bounds) + 1) for name in class_names}
        self._sums = dict.fromkeys(class_names, 0.0)

    def observe(self, service_class: str, value: float) -> None:
        """Count a value."""
        self._counts[service_class][bisect.bisect_left(self._bounds, value)] += 1
        self._sums[service_class] += value

    def add(self, service_class: str, counts: Sequence[int], total: float) -> None:
        """Count values that were noted elsewhere: the number in each bucket, and their sum."""
        own = self._counts[service_class]
        for i, count in enumerate(counts):
            own[i] += count
        self._sums[service_class] += total

    def take(self) -> Iterator[tuple[str, list[int], float]]:
        """Yield the arguments of ``add`` for what was noted since the last call, and forget it."""
        for service_class, counts in self._counts.items():
            if any(counts):
                yield service_class, counts, self._sums[service_class]
                self._counts[service_class], self._sums[service_class] = [0] * len(counts), 0.0

    def collect(self) -> Iterator[Metric]:
        family = Metric(self._name, self._help_text, "histogram")
        ends = [*map(floatToGoString, self._bounds), "+Inf"]
        for service_class, counts in self._counts.items():
            label = {"service_class": service_class}
            for end, count in zip(ends, itertools.accumulate(counts), strict=True):
                family.add_sample(f"{self._name}_bucket", {**label, "le": end}, float(count))
            family.add_sample(f"{self._name}_count", label, float(sum(counts)))
            if self._bounds[0] >= 0:  # as Prometheus has it: a sum that may fall is no counter
                family.add_sample(f"{self._name}_sum", label, self._sums[service_class])
            family.add_sample(f"{self._name}_created", label, self._created_s)
        yield family


def _with_bounds(buckets: tuple[float, ...], bounds: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(sorted({*buckets, *(bound for bound in bounds if bound is not None)}))
