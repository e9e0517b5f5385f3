"""How idle a GPU is while something runs, from a profiler's trace of its kernels and copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.bench import Measured, NotHere
from benchmarks.gpu.clock import wait_for


def idle_share(run: Callable[[], object], device: torch.device, *, count: int) -> Measured:
    """Return which share of the time, from the first kernel to the last, the GPU had nothing to do.

    Args:
        run: Called ``count`` times under the profiler, one call after the other.
        device: A GPU.
        count: How often.

    Raises:
        NotHere: The device is no GPU, or the profiler saw no kernel on it.
    """
    if device.type != "cuda":
        raise NotHere("needs a GPU")
    with profile(activities=[ProfilerActivity.CUDA]) as trace:  # to trace the CPU would slow the host down
        for _ in range(count):
            run()
        wait_for(device)
    spans = spans_on(DeviceType.CUDA, trace)
    if not spans:
        raise NotHere("the profiler saw no kernel")
    busy_us = covered(spans)
    whole_us = max(end for _, end in spans) - min(start for start, _ in spans)
    details = {"kernels": len(spans), "busy_us": busy_us, "whole_us": whole_us}
    return Measured(value=1 - busy_us / whole_us, note=f"{len(spans) // count} kernels a step", details=details)


def spans_on(device_type: DeviceType, trace: profile) -> list[tuple[float, float]]:
    """Return (start, end) in microseconds of all that ran on a kind of device."""
    # Not `is`: the profiler makes its own instances.
    events = (event for event in trace.events() or () if event.device_type == device_type)
    return [(event.time_range.start, event.time_range.end) for event in events]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
