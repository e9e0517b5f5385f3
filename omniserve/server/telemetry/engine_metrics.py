"""What the engine tells about itself, as Prometheus metrics."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from omniserve.core.stats import EngineStats, TenantStats

if TYPE_CHECKING:
    from omniserve.routing.books import EngineBooks
    from omniserve.server.engines.fleet import Fleet

F = TypeVar("F", bound=GaugeMetricFamily | CounterMetricFamily)

MOST_TENANTS, OTHER_TENANTS = 64, "(others)"
"""Tenants with a label of their own, and the label of all that came later."""


class EngineCollector(Collector):
    """Shows a snapshot of the engine's own numbers."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None
        self.fleet: Fleet | None = None
        self._labelled: set[str] = set()
        """Tenants with a label of their own."""

    def collect(self) -> Iterator[Metric]:
        restarts = 0 if self.fleet is None else self.fleet.num_restarts
        yield _gauge("engine_up", "1 while the engine takes requests", int(self.stats is not None))
        yield _counter("engine_restarts", "Engines started after another's death", restarts)
        yield from _replicas([] if self.fleet is None else self.fleet.replicas)
        if self.stats is None:
            return
        s, sched = self.stats, self.stats.scheduler
        by_class, by_tier = ["service_class"], ["tier"]
        blocks_used = {"device": s.kv.device_used, "host": s.kv.host_used}
        blocks = {"device": s.kv.device_total, "host": s.kv.host_total}
        if s.disk.blocks_total:
            blocks_used["disk"], blocks["disk"] = s.disk.blocks_used, s.disk.blocks_total
        by_tier_and_class = {"device": sched.device_blocks_by_class, "host": sched.host_blocks_by_class}
        held = {(tier, name): n for tier, counts in by_tier_and_class.items() for name, n in counts.items()}
        yield _gauge("requests_waiting", "Requests not scheduled yet, or preempted", sched.waiting, by_class)
        yield _gauge("requests_running", "Requests that hold KV on a tier", sched.running, by_class)
        help_text = "Requests like those of late that admission would let in a second now, beside those that are there"
        yield _gauge("admittable_requests_per_second", help_text, s.admittable_per_s, by_class)
        yield _gauge("kv_blocks_used", "KV blocks in use", blocks_used, by_tier)
        yield _gauge("kv_blocks", "KV blocks in all", blocks, by_tier)
        yield _gauge("kv_blocks_held", "KV blocks that requests hold", held, [*by_tier, *by_class])
        yield _gauge("host_requests", "Requests whose KV is on the host tier", sched.host_requests)
        yield _gauge("state_slots_used", "Requests that hold recurrent states", sched.state_slots_used)
        yield _gauge("state_slots", "Requests that can hold recurrent states", sched.state_slots_total)
        yield _gauge(
            "host_healthy", "1 while the host tier has a living thread and gets on with its work", int(s.host.healthy)
        )
        if s.cpu_hosts:
            of_host, hosts = ["cpu_host"], s.cpu_hosts.items()
            connected = {name: int(host.is_connected) for name, host in hosts}
            yield _gauge("cpu_host_connected", "1 while a CPU host on the network is used", connected, of_host)
            for name, help_text, values in (
                ("cpu_host_losses", "Times that a CPU host was lost", {n: host.times_lost for n, host in hosts}),
                ("cpu_host_tasks", "Attention tasks sent to a CPU host", {n: host.tasks for n, host in hosts}),
                ("cpu_host_row_bytes", "Rows and results to and from a CPU host", {n: h.row_bytes for n, h in hosts}),
                ("cpu_host_moved_bytes", "KV moved to and from a CPU host", {n: h.moved_bytes for n, h in hosts}),
            ):
                yield _counter(name, help_text, values, of_host)
        if s.prefill_engines:
            of_engine, engines = ["prefill_engine"], s.prefill_engines.items()
            connected = {name: int(each.is_connected) for name, each in engines}
            yield _gauge("prefill_engine_connected", "1 while a prefill engine can be asked", connected, of_engine)
            for name, help_text, values in (
                (
                    "prefill_engine_losses",
                    "Times that a prefill engine was lost",
                    {n: e.times_lost for n, e in engines},
                ),
                ("prefill_engine_prompts", "Prompts that it was asked for", {n: e.prompts for n, e in engines}),
                ("prefill_engine_failures", "Of these, those that did not come", {n: e.failed for n, e in engines}),
            ):
                yield _counter(name, help_text, values, of_engine)
        yield from self._tenants(sched.tenants)
        yield _gauge("latency_error", "Mean |predicted - measured| / measured of steps", s.latency.error)
        yield _gauge("latency_drift", "Measured over predicted time of steps, uncorrected", s.latency.drift)
        yield _gauge(
            "latency_profile_coarse",
            "1 while the latency profile is coarse and a margin is kept, until it is refined",
            int(s.latency.is_coarse),
        )
        yield _counter("output_tokens", "Output tokens", sched.output_tokens, by_class)
        yield _counter("prompt_tokens", "Prompt tokens", sched.prompt_tokens, by_class)
        yield _counter("cached_tokens", "Prompt tokens that the prefix cache had", sched.cached_tokens, by_class)
        help_text = "Tokens of prefixes whose KV was copied back from the host"
        yield _counter("restored_tokens", help_text, sched.restored_tokens, by_class)
        help_text = "Tokens of prefixes whose KV was read from disk"
        yield _counter("disk_tokens", help_text, sched.loaded_from("disk"), by_class)
        help_text = "Tokens of prompts whose KV has come from prefill engines"
        yield _counter("prefilled_tokens", help_text, sched.loaded_from("prefilled"), by_class)
        yield _counter(
            "swaps", "Requests whose KV moved", {"out": sched.swaps_out, "in": sched.swaps_in}, ["direction"]
        )
        by_threads = {str(num_threads): num_steps for num_threads, num_steps in sorted(s.steps_by_threads.items())}
        yield _counter("steps_by_threads", "Steps by the device tier's CPU threads", by_threads, ["threads"])
        for name, help_text, value in (
            ("steps", "Steps", s.steps),
            ("step_seconds", "Time spent in steps", s.step_seconds),
            ("device_tokens", "Device rows computed", s.device_tokens),
            ("piggyback_rows", "Piggyback rows that joined, over all layers", s.piggyback_rows),
            ("accepted_drafts", "Output tokens that were guessed right", sched.accepted_drafts),
            ("rejected_drafts", "Guessed tokens that were computed and are not in an output", sched.rejected_drafts),
            ("host_output_tokens", "Output tokens whose attention the host tier computed", sched.host_output_tokens),
            ("ls_host_output_tokens", "Tokens of latency-sensitive requests among these", sched.ls_host_output_tokens),
            ("preemptions", "Requests whose memory was taken back, to be resumed", sched.preemptions),
            ("preempted_tokens", "Tokens that preempted requests had computed", sched.preempted_tokens),
            ("layer_preemptions", "Chunks that left a step between two layers", sched.layer_preemptions),
            ("checkpoints", "KV blocks of running requests copied to the host tier", sched.checkpoints),
            ("resumed_tokens", "Tokens of preempted requests that were not recomputed", sched.resumed_tokens),
            ("host_kv_read_bytes", "K and V bytes that host attention went through", s.host.kv_bytes_read),
            ("host_busy_seconds", "Time of host threads at work, attention and copies", s.host.busy_seconds),
            ("host_failures", "Host attention tasks and moves that failed", s.host.failures),
            ("disk_read_bytes", "Bytes of KV read from disk", s.disk.bytes_read),
            ("disk_written_bytes", "Bytes of KV written to disk", s.disk.bytes_written),
            ("disk_failures", "Copies from and to disk that failed, of damaged blocks among them", s.disk.failures),
        ):
            yield _counter(name, help_text, value)

    def _tenants(self, tenants: Mapping[str, Mapping[str, TenantStats]]) -> Iterator[Metric]:
        """Yield what tenants have of each class; those that came after the first ``MOST_TENANTS`` count together."""
        if not tenants:
            return
        of_label: dict[tuple[str, str], list[TenantStats]] = defaultdict(list)
        for name, by_tenant in tenants.items():
            for tenant, each in by_tenant.items():
                if len(self._labelled) < MOST_TENANTS:
                    self._labelled.add(tenant)
                of_label[name, tenant if tenant in self._labelled else OTHER_TENANTS].append(each)
        labels, alone = ["service_class", "tenant"], {at: each for at, (each, *_) in of_label.items()}
        for kind, name, help_text in (
            (_gauge, "waiting", "Requests of a tenant not scheduled yet, or preempted"),
            (_gauge, "running", "Requests of a tenant that hold KV on a tier"),
            (_counter, "prompt_tokens", "Prompt tokens computed for a tenant, for those of admitted requests"),
            (_counter, "output_tokens", "Output tokens of a tenant"),
        ):
            totals = {at: sum(getattr(one, name) for one in each) for at, each in of_label.items()}
            metric = name if kind is _counter else f"requests_{name}"
            yield kind(f"tenant_{metric}", help_text, totals, labels)
        times = {at: each.virtual_time for at, each in alone.items() if at[1] != OTHER_TENANTS}
        yield _gauge(
            "tenant_virtual_time", "Cost of a tenant's tokens over its weight; the least is next", times, labels
        )


def _replicas(replicas: Sequence[tuple[bool, EngineBooks]]) -> Iterator[Metric]:
    if not replicas:
        return
    each, books_by_number = ["replica"], {str(books.number): books for _, books in replicas}
    yield _gauge(
        "replica_up",
        "1 while an engine of several takes requests",
        {str(books.number): int(is_open) for is_open, books in replicas},
        each,
    )
    yield _gauge(
        "replica_requests",
        "Requests that an engine of several has",
        {(name, str(kind)): n for name, books in books_by_number.items() for kind, n in books.num_requests.items()},
        [*each, "kind"],
    )
    calls = {name: books.num_routed for name, books in books_by_number.items()}
    yield _counter("replica_calls", "Calls that went to an engine of several", calls, each)


def _family(
    kind: type[F], name: str, help_text: str, values: float | Mapping[Any, float], labels: Sequence[str] = ()
) -> F:
    """Return a metric of one value, or of one for each label or tuple of labels."""
    family = kind(f"omniserve_{name}", help_text, labels=labels)
    by_label: Mapping[Any, float] = values if isinstance(values, Mapping) else {(): values}
    for label, value in by_label.items():
        family.add_metric([label] if isinstance(label, str) else [*label], value)
    return family


_gauge = functools.partial(_family, GaugeMetricFamily)
_counter = functools.partial(_family, CounterMetricFamily)
