"""Gauges and counters of an engine, for metrics, logs and benchmarks. Plain data."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class CPUHostStats:
    """A CPU host on the network. All but the first are counters since the engine began."""

    is_connected: bool = False
    times_lost: int = 0
    tasks: int = 0
    """Attention tasks that were sent."""
    row_bytes: int = 0
    """Bytes of q, k and v, and of results."""
    moved_bytes: int = 0
    """Bytes of KV blocks, both ways."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantStats:
    """What a tenant has of one class; see ``sched/fairness.py``."""

    waiting: int = 0
    """Gauge: requests that have not been scheduled yet, or were preempted."""
    running: int = 0
    """Gauge: requests that hold KV on a tier."""
    prompt_tokens: int = 0
    """Counter: prompt tokens that were computed, or are about to be, for admitted requests."""
    output_tokens: int = 0
    virtual_time: float = 0.0
    """Gauge: cost of its tokens over its weight, raised to that of others when it had nothing waiting. Of several
    engines: the mean of those that have an account of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerStats:
    """Gauges and counters of a scheduler. Counters run from its start."""

    waiting: Mapping[str, int] = field(default_factory=dict)
    """Gauge: requests that have not been scheduled yet, or were preempted."""
    running: Mapping[str, int] = field(default_factory=dict)
    """Gauge: requests that hold KV on a tier."""
    device_blocks_by_class: Mapping[str, int] = field(default_factory=dict)
    """Gauge: device blocks that requests hold; one that two share counts for both."""
    host_blocks_by_class: Mapping[str, int] = field(default_factory=dict)
    """Gauge: host blocks that requests hold, copies ahead of need included; copies that were given up are not."""
    host_requests: int = 0
    """Gauge: requests whose KV is on the host tier."""
    state_slots_used: int = 0
    """Gauge: requests that hold recurrent states."""
    state_slots_total: int = 0
    """Gauge: requests that can; 0 for a model without such states."""
    output_tokens: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    host_output_tokens: int = 0
    """Counter: output tokens whose attention was computed on the host tier."""
    ls_host_output_tokens: int = 0
    """Counter: those of them that are of LS requests, which few policies send there."""
    host_token_steps: int = 0
    """Counter: steps that such tokens took to pass all layers; over tokens and layers: the steps a layer, 1 at best."""
    preemptions: int = 0
    """Counter: requests whose memory was taken back, to be resumed: what was not kept of their KV is recomputed."""
    preempted_tokens: int = 0
    """Counter: tokens that they had computed; less ``resumed_tokens``, what is computed again."""
    layer_preemptions: int = 0
    """Counter: chunks that left a step between two layers."""
    swaps_out: int = 0
    swaps_in: int = 0
    checkpoints: int = 0
    """Counter: copies of full BE blocks to the host tier, ahead of need."""
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    """Counter: prompt tokens whose KV the prefix cache had when their request began."""
    restored_tokens: Mapping[str, int] = field(default_factory=dict)
    """Counter: tokens whose KV was copied back from the host for a request that begins with them."""
    loaded_tokens: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Counter: tokens whose KV has come from a source (``disk``, ``prefilled``), by the source and by the class of the
    request that it came for first."""
    resumed_tokens: int = 0
    """Counter: tokens of preempted requests whose KV was kept, so that they were not recomputed."""
    accepted_drafts: int = 0
    """Counter: output tokens that were guessed right (``Request.speculation``)."""
    rejected_drafts: int = 0
    """Counter: guesses that were computed and are not in an output."""
    rejected: Mapping[str, int] = field(default_factory=dict)
    """Counter: requests refused by admission control, by class."""
    running_loras: tuple[str, ...] = ()
    """Gauge: names of the adapters of requests that hold KV."""
    waiting_loras: tuple[str, ...] = ()
    """Gauge: names of the adapters of requests that wait."""
    tenants: Mapping[str, Mapping[str, TenantStats]] = field(default_factory=dict)
    """What each tenant with a name has of each class, by class and tenant."""

    def loaded_from(self, source: str) -> dict[str, int]:
        """Return the tokens whose KV has come from a source, by class; zeros if there is no such source."""
        return {name: self.loaded_tokens.get(source, {}).get(name, 0) for name in self.waiting}


@dataclass(frozen=True, kw_only=True, slots=True)
class KVUsage:
    """Blocks in use and in all, by tier."""

    device_used: int = 0
    device_total: int = 0
    host_used: int = 0
    host_total: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FreedKV:
    """Blocks of the prefix cache that were freed on request, by tier; one on two tiers counts on both."""

    device: int = 0
    host: int = 0
    disk: int = 0
    block_size: int = 0
    """Tokens of a block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostTierStats:
    """Counters of a host tier since its start, and gauges of its work in hand; all 0 without one."""

    tasks_done: int = 0
    """Counter: attention tasks that gave a result."""
    failures: int = 0
    """Counter: attention tasks and moves that failed; cancelled tasks do not count."""
    threads_alive: int = 0
    tasks_in_hand: int = 0
    """Gauge: attention tasks expected, queued or running."""
    moves_in_hand: int = 0
    busy_seconds: float = 0.0
    """Counter: time that threads spent computing and copying, summed over the threads."""
    kv_bytes_read: int = 0
    """Counter: bytes of K and V that attention read."""
    bytes_moved: int = 0
    """Counter: bytes that moves copied, in the model's dtype."""
    bytes_prefaulted: int = 0
    """Counter: bytes of the pool whose pages an idle-priority thread touched before they were needed. 0 for page-locked
    memory, all of which is touched when it is allocated."""
    pool_bytes: int = 0
    """K and V of the whole pool, without the scales."""
    healthy: bool = True
    """Gauge: at least one worker thread is alive, and the tier is not stalled; True also without a tier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyStats:
    """How well the latency model predicts steps; the defaults are those of an engine without one."""

    error: float = 0.0
    """Gauge: running mean of |predicted - measured| / measured, with the correction."""
    drift: float = 1.0
    """Gauge: measured over predicted time, before correction; 1 for a profile that still holds."""
    is_coarse: bool = False
    """Gauge: the profile is coarse, and is refined while the engine serves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskStats:
    """The disk tier; all 0 without one."""

    blocks_used: int = 0
    blocks_total: int = 0
    """Gauge: slots in the file."""
    bytes_read: int = 0
    bytes_written: int = 0
    failures: int = 0
    """Counter: copies that failed; a copy with a damaged block counts as one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillEngineStats:
    """A prefill engine, as the engine that asks it sees it."""

    is_connected: bool
    times_lost: int
    """Counter."""
    prompts: int
    """Counter: prompts that the engine was asked for."""
    failed: int
    """Counter: prompts whose KV did not come, or in part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """Gauges and counters of an engine: what its parts report, and its own."""

    scheduler: SchedulerStats = SchedulerStats()
    kv: KVUsage = KVUsage()
    host: HostTierStats = HostTierStats()
    latency: LatencyStats = LatencyStats()
    disk: DiskStats = DiskStats()
    cpu_hosts: Mapping[str, CPUHostStats] = field(default_factory=dict)
    """Hosts on the network, by address."""
    prefill_engines: Mapping[str, PrefillEngineStats] = field(default_factory=dict)
    """Prefill engines, by address."""
    admittable_per_s: Mapping[str, float] = field(default_factory=dict)
    """Gauge: requests a second that admission would let in now beside those that are there, by latency-sensitive class
    with a TTFT objective; empty if none is refused for load."""
    block_size: int = 0
    """Tokens of a KV block."""
    max_loras: int = 0
    """LoRA adapters that can be in memory at a time; 0: requests can name none."""
    steps: int = 0
    step_seconds: float = 0.0
    """Counter: time spent in steps."""
    steps_by_threads: Mapping[int, int] = field(default_factory=dict)
    """Counter: steps by the device tier's number of threads; empty with a GPU."""
    device_tokens: int = 0
    """Counter: device rows computed."""
    piggyback_rows: int = 0
    """Counter: piggyback rows that joined, over all layers."""


def total(engines: Sequence[EngineStats]) -> EngineStats:
    """Return the statistics of several engines as one: sums, and means of how well steps are predicted.

    Each engine has virtual times of its own, which order its own queue: a tenant's is the mean over the engines that
    have an account of it, so that those of tenants compare as they do on one engine.
    """
    both: EngineStats = summed(engines)
    errors, drifts = zip(*((each.latency.error, each.latency.drift) for each in engines), strict=True)
    latency = LatencyStats(
        error=sum(errors) / len(engines),
        drift=sum(drifts) / len(engines),
        is_coarse=any(each.latency.is_coarse for each in engines),
    )
    scheduler = dataclasses.replace(both.scheduler, tenants=_tenants_of(engines, both.scheduler.tenants))
    return dataclasses.replace(both, latency=latency, scheduler=scheduler)


def _tenants_of(
    engines: Sequence[EngineStats], sums: Mapping[str, Mapping[str, TenantStats]]
) -> dict[str, dict[str, TenantStats]]:
    """Return what tenants have of several engines, whose virtual times are summed as yet."""
    accounts = Counter(
        (name, tenant) for each in engines for name, of_class in each.scheduler.tenants.items() for tenant in of_class
    )
    return {
        name: {
            tenant: dataclasses.replace(each, virtual_time=each.virtual_time / accounts[name, tenant])
            for tenant, each in of_class.items()
        }
        for name, of_class in sums.items()
    }


def summed(values: Sequence[Any]) -> Any:
    """Return the sum of numbers, of mappings by key, of objects by field.

    Of truth values it is whether all are true, of tuples what is in any of them.
    """
    first = values[0]
    if isinstance(first, bool):
        return all(values)
    if isinstance(first, tuple):
        return tuple(dict.fromkeys(item for each in values for item in each))
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for each in values for key in each)
        return {key: summed([each[key] for each in values if key in each]) for key in keys}
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [each.name for each in dataclasses.fields(first)]
        return type(first)(**{name: summed([getattr(each, name) for each in values]) for name in names})
    return sum(values)
