"""Seconds of calls, on the CPU or on a device, and of several that take turns; what others did meanwhile."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil  # comes with accelerate
import torch

Result = TypeVar("Result")
CPU = torch.device("cpu")


def wait_for(device: torch.device) -> None:
    """Wait until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], object], device: torch.device = CPU) -> float:
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


def in_turn(calls: Mapping[str, Callable[[], Result]], repeats: int, *, warm_up: int = 1) -> dict[str, list[Result]]:
    """Make calls turn and turn about, so that a change of the machine's speed is in all; return what they returned."""
    results: dict[str, list[Result]] = {name: [] for name in calls}
    for repeat in range(warm_up + repeats):
        for name, call in calls.items():
            result = call()
            if repeat >= warm_up:
                results[name].append(result)
    return results


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios of pairs that were measured next to each other."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def _cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and of the children that it has waited for; 0 if it is gone."""
    try:
        return sum(process.cpu_times()[:4])
    except psutil.NoSuchProcess:
        return 0.0


class OtherLoad:
    """CPU time of all other processes since this was made; steal time counts as theirs.

    This process's children and theirs are no others, as long as they run, and if they were waited for.
    """

    def __init__(self) -> None:
        self._began_s, self._others_s = time.perf_counter(), self._others_so_far_s()

    @staticmethod
    def _others_so_far_s() -> float:
        user, nice, system, _, _, irq, softirq, steal, *_ = Path("/proc/stat").read_text().split("\n")[0].split()[1:]
        busy = sum(map(int, (user, nice, system, irq, softirq, steal))) / os.sysconf("SC_CLK_TCK")
        descendants = psutil.Process().children(recursive=True)
        return busy - sum(os.times()[:4]) - sum(map(_cpu_s, descendants))

    def cores(self) -> float:
        """Return the mean number of cores that others kept busy."""
        return max(0.0, (self._others_so_far_s() - self._others_s) / (time.perf_counter() - self._began_s))
