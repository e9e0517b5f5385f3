"""A GPU's memory given back, graphs of what is too short to time alone, and its idle share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.timing import wait_for


def reclaim_memory(device: torch.device) -> None:
    """Give back unused memory: a closed engine is part of a cycle, and holds its pools until a garbage collection.

    Page-locked memory that torch keeps for later is given back, too: pools of several sizes would add up.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()


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
