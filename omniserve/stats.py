"""What an engine tells about itself: gauges and counters for metrics, logs and benchmarks. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from omniserve.request import ServiceClass


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """A snapshot. Counters run from the engine's start."""

    waiting: Mapping[ServiceClass, int] = field(default_factory=dict)
    """Gauge: requests that have not been scheduled yet, or were preempted."""
    running: Mapping[ServiceClass, int] = field(default_factory=dict)
    """Gauge: requests that hold KV on a tier."""
    device_blocks_used: int = 0
    device_blocks_total: int = 0
    host_blocks_used: int = 0
    host_blocks_total: int = 0
    host_requests: int = 0
    """Gauge: requests whose KV is on the host tier."""
    steps: int = 0
    step_seconds: float = 0.0
    """Counter: time spent in steps."""
    device_tokens: int = 0
    """Counter: device rows computed."""
    piggyback_rows: int = 0
    """Counter: piggyback rows that joined, over all layers."""
    output_tokens: Mapping[ServiceClass, int] = field(default_factory=dict)
    prompt_tokens: Mapping[ServiceClass, int] = field(default_factory=dict)
    host_output_tokens: int = 0
    """Counter: output tokens whose attention was computed on the host tier."""
    preemptions: int = 0
    """Counter: requests whose KV was dropped, to be recomputed."""
    swaps_out: int = 0
    swaps_in: int = 0
    host_failures: int = 0
    """Counter: host attention tasks and moves that failed."""
    host_healthy: bool = True
    """Gauge: the host tier has a living worker thread (True also without a host tier)."""
