"""ScalingWatch: the engines that a server's load needs, from its own metrics, a look a second."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from omniserve.core.request import ClassSpec, ServiceClass
from omniserve.routing.need import Demand, Need, Wanted

if TYPE_CHECKING:
    from omniserve.server.dashboard.series import Reading

_WINDOW_S = 30.0
"""Requests that came within so many seconds are the load of this moment."""


class ScalingWatch(Collector):
    """Watches the load, and shows what it needs.

    Args:
        classes: The engine's.
        wanted: Makes of the need the number of engines to have.
    """

    def __init__(self, classes: Sequence[ClassSpec], wanted: Wanted | None = None) -> None:
        self._objectives = {
            spec.name: spec.slo.ttft_s
            for spec in classes
            if spec.kind == ServiceClass.LS and spec.slo.ttft_s is not None
        }
        self._wanted = wanted or Wanted()
        self._readings: deque[Reading] = deque()
        self._demands: dict[str, Demand] = {}
        self._need: Need | None = None
        self.batch_pressure = 0.0
        """The speed that batches need to end in time, over the one that they have; 0 without any."""

    def note(self, reading: Reading, num_engines: int) -> None:
        """Take a look; one while the engine does not answer is left out."""
        if reading.engine != "up":
            return
        self._readings.append(reading)
        while reading.clock_s - self._readings[0].clock_s > _WINDOW_S:
            self._readings.popleft()
        first = self._readings[0]
        if (seconds := reading.clock_s - first.clock_s) <= 0:
            return
        self._demands = {
            name: demand
            for name, ttft_s in self._objectives.items()
            if (demand := _demand(name, ttft_s, first, reading, seconds)) is not None
        }
        self._need = Need.of(max(num_engines, 1), self._demands, self.batch_pressure)
        self._wanted.note(reading.clock_s, self._need.engines, num_engines)

    def collect(self) -> Iterator[Metric]:
        if self._need is None or self._wanted.number is None:
            return
        wanted = GaugeMetricFamily(
            "omniserve_replicas_wanted", "Engines to have for the load of late, with hysteresis, whole"
        )
        wanted.add_metric([], self._wanted.number)
        yield wanted
        needed = GaugeMetricFamily(
            "omniserve_replicas_needed",
            "Engines that the load needs at this moment, with a fraction, by what it is for; the most is what counts",
            labels=["work"],
        )
        needed.add_metric(["latency_sensitive"], self._need.latency_sensitive)
        needed.add_metric(["batches"], self._need.batches)
        yield needed
        attainment = GaugeMetricFamily(
            "omniserve_predicted_attainment",
            f"Share of the requests of {_WINDOW_S:g} s that were admitted and predicted to keep their TTFT objective",
            labels=["service_class"],
        )
        use = GaugeMetricFamily(
            "omniserve_load_use",
            f"Requests of {_WINDOW_S:g} s over those that would have kept their objectives",
            labels=["service_class"],
        )
        for name, demand in self._demands.items():
            attainment.add_metric([name], demand.predicted_attainment)
            use.add_metric([name], demand.use)
        yield attainment
        yield use
        pressure = GaugeMetricFamily(
            "omniserve_batch_pressure", "Speed that batches need to end within their windows, over the one they have"
        )
        pressure.add_metric([], self.batch_pressure)
        yield pressure


def _demand(name: str, ttft_s: float, first: Reading, now: Reading, seconds: float) -> Demand | None:
    """Return a class's load between two readings; None if admission does not say what it would let in."""
    admittable = now.values.get(("omniserve_admittable_requests_per_second", name))
    if admittable is None:
        return None

    def change(metric: str) -> float:
        return max(0.0, now.total(metric, name) - first.total(metric, name))

    in_work = sum(
        now.total(f"omniserve_requests_{what}", name) - first.total(f"omniserve_requests_{what}", name)
        for what in ("waiting", "running")
    )
    refused = change("omniserve_requests_rejected_total")
    offered = max(0.0, change("omniserve_requests_total") + in_work) + refused
    late = _above(ttft_s, name, first, now)
    kept = max(0.0, offered - refused - late)
    return Demand(offered_per_s=offered / seconds, kept_per_s=kept / seconds, admittable_per_s=admittable)


def _above(ttft_s: float, name: str, first: Reading, now: Reading) -> float:
    """Return how many requests were predicted to take longer than this, one of the histogram's bounds."""
    key = ("omniserve_ttft_predicted_seconds", name)
    before, after = first.buckets.get(key, {}), now.buckets.get(key, {})
    if not after:
        return 0.0
    counts = {bound: count - before.get(bound, 0.0) for bound, count in after.items()}
    within = max((count for bound, count in counts.items() if bound <= ttft_s), default=0.0)
    return max(0.0, max(counts.values()) - within)
