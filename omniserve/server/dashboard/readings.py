"""A reading of all metrics: the values that /metrics shows at one moment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric

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
