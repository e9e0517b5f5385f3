"""Time on a device: CUDA events around work, the wall clock without a GPU; graphs for what is short; its idle share."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def wait_for(device: torch.device) -> None:
    """Wait until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reclaim_memory(device: torch.device) -> None:
    """Give back unused memory: a closed engine is part of a cycle, and holds its pools until a garbage collection.

    Page-locked memory that torch keeps for later is given back, too: pools of several sizes would add up.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the device's seconds from the beginning of ``run`` to the end of all it began, idle time included."""
    wait_for(device)
    if device.type != "cuda":
        began_s = time.perf_counter()
        run()
        return time.perf_counter() - began_s
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def median_seconds(run: Callable[[], object], device: torch.device, *, repeats: int, warm_up: int = 2) -> float:
    """Return the median over ``repeats`` of ``seconds``."""
    for _ in range(warm_up):
        run()
    return statistics.median(seconds(run, device) for _ in range(repeats))


def graph_of(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return what replays ``run``'s kernels as one CUDA graph; without a GPU, ``run`` itself."""
    if device.type != "cuda":
        return run
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # kernels are compiled and memory is found before the capture
        for _ in range(3):
            run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def idle_share(run: Callable[[], object], device: torch.device, *, count: int) -> tuple[float, int]:
    """Return the share of the time, from the first kernel to the last, in which a GPU had nothing to do.

    Args:
        run: Called ``count`` times under the profiler, one call after the other.
        device: A GPU.
        count: How often.

    Returns:
        The share, and the kernels a call.

    Raises:
        RuntimeError: The profiler saw no kernel.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as trace:  # to trace the CPU would slow the host down
        for _ in range(count):
            run()
        wait_for(device)
    spans = spans_on(DeviceType.CUDA, trace)
    if not spans:
        raise RuntimeError("the profiler saw no kernel")
    whole_us = max(end for _, end in spans) - min(start for start, _ in spans)
    return 1 - covered(spans) / whole_us, len(spans) // count


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
