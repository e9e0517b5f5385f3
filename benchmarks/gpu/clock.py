"""Time on a device: CUDA events around work, the wall clock without a GPU; graphs for what is short; its memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch


def wait_for(device: torch.device) -> None:
    """Wait until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reclaim_memory(device: torch.device) -> None:
    """Give back what nobody uses any more: an engine that was closed is part of a cycle, and holds its pools until now.

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
