"""What gateways read of a server, under the names that vLLM gives it.

The scheduler of the Gateway API Inference Extension and llm-d reads the gauges of queue, running requests and KV, the
block size and LoRA adapters; the router of vLLM's production stack the older names of some; autoscalers and
dashboards the rest.

Gauges and latencies are those of latency-sensitive requests: best-effort work gives way to them, so a server full of it
is not full for a gateway. Counters are of all requests.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from omniserve.core.stats import EngineStats

_LABELS = ("model_name",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """The model that the series are labelled with, and its classes."""

    model_name: str
    latency_sensitive: Collection[str]
    """Names of the latency-sensitive classes."""


class VllmMetrics(Collector):
    """Shows a server's metrics under vLLM's names.

    Args:
        requests: Counts requests that ended, by class and ``finish_reason``.
        histograms: Name without ``vllm:`` -> histogram by class that is shown under it.
    """

    def __init__(self, served: Served, requests: Counter, histograms: Mapping[str, Collector]) -> None:
        self._served = served
        self._requests, self._histograms = requests, histograms
        self.stats: EngineStats | None = None
        """The engine's own numbers; None: there is no engine, and its series are absent."""

    def collect(self) -> Iterator[Metric]:
        for name, histogram in self._histograms.items():
            yield self._histogram(name, histogram)
        success = CounterMetricFamily(
            "vllm:request_success", "Requests that ended", labels=[*_LABELS, "finished_reason"]
        )
        for reason, count in self._ended().items():
            success.add_metric([self._served.model_name, reason], count)
        yield success
        if self.stats is not None:
            yield from self._of_engine(self.stats)

    def _of_engine(self, stats: EngineStats) -> Iterator[Metric]:
        sched, kv = stats.scheduler, stats.kv
        held, total = self._sensitive(sched.device_blocks_by_class), kv.device_total
        usage = min(1.0, held / total) if total else 0.0
        of_ls = "of latency-sensitive requests"
        gauges = {
            "num_requests_running": (f"Number {of_ls} with KV", self._sensitive(sched.running)),
            "num_requests_waiting": (f"Number {of_ls} that wait", self._sensitive(sched.waiting)),
            "kv_cache_usage_perc": (f"Share of the device's KV blocks {of_ls}, in [0, 1]", usage),
            "gpu_cache_usage_perc": ("The same; its name before 0.10", usage),
        }
        for name, (help_text, value) in gauges.items():
            yield self._with_value(GaugeMetricFamily(f"vllm:{name}", help_text, labels=_LABELS), value)
        prompt_tokens, cached_tokens = sum(sched.prompt_tokens.values()), sum(sched.cached_tokens.values())
        counters = {
            "prefix_cache_queries": ("Prompt tokens that were looked up in the prefix cache", prompt_tokens),
            "prefix_cache_hits": ("Those of them that it had", cached_tokens),
            "gpu_prefix_cache_queries": ("As prefix_cache_queries; its name before 0.10", prompt_tokens),
            "gpu_prefix_cache_hits": ("As prefix_cache_hits; its name before 0.10", cached_tokens),
            "num_preemptions": ("Requests whose memory was taken back", sched.preemptions),
            "prompt_tokens": ("Prompt tokens", prompt_tokens),
            "generation_tokens": ("Output tokens", sum(sched.output_tokens.values())),
        }
        for name, (help_text, value) in counters.items():
            yield self._with_value(CounterMetricFamily(f"vllm:{name}", help_text, labels=_LABELS), value)
        labels = {"block_size": str(stats.block_size), "num_gpu_blocks": str(total)}
        yield self._info("cache_config_info", "The KV blocks of the device, as labels", labels, 1)
        if stats.max_loras:
            labels = {
                "max_lora": str(stats.max_loras),
                "running_lora_adapters": ",".join(sched.running_loras),
                "waiting_lora_adapters": ",".join(sched.waiting_loras),
            }
            yield self._info("lora_requests_info", "Adapters of requests; the value is the time", labels, time.time())

    def _sensitive(self, by_class: Mapping[str, int]) -> int:
        return sum(by_class.get(name, 0) for name in self._served.latency_sensitive)

    def _with_value(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric([self._served.model_name], value)
        return family

    def _info(self, name: str, help_text: str, labels: Mapping[str, str], value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", help_text, labels=[*_LABELS, *labels])
        family.add_metric([self._served.model_name, *labels.values()], value)
        return family

    def _ended(self) -> Mapping[str, float]:
        counts = defaultdict[str, float](float)
        for sample in next(iter(self._requests.collect())).samples:
            if sample.name.endswith("_total"):
                counts[sample.labels["finish_reason"]] += sample.value
        return counts

    def _histogram(self, name: str, histogram: Collector) -> Metric:
        """Return the sum of a histogram over the latency-sensitive classes."""
        buckets, total_s = defaultdict[str, float](float), 0.0
        collected = next(iter(histogram.collect()))
        for sample in collected.samples:
            if sample.labels.get("service_class") not in self._served.latency_sensitive:
                continue
            if sample.name.endswith("_bucket"):
                buckets[sample.labels["le"]] += sample.value
            elif sample.name.endswith("_sum"):
                total_s += sample.value
        help_text = f"{collected.documentation}, of latency-sensitive requests"
        family = HistogramMetricFamily(f"vllm:{name}", help_text, labels=_LABELS)
        family.add_metric([self._served.model_name], buckets=[*buckets.items()], sum_value=total_s)
        return family
