"""Limits: what memory, matrix unit, PCIe, launches and main memory do here, each measured once, when asked for."""

from __future__ import annotations

import functools
import os

import torch

from benchmarks.common.bandwidth import Arena, allowed_cpus, fill, normal_tile, pin_team, sequential_readings
from benchmarks.common.timing import graph_of, median_seconds


class Limits:
    """Rates that other figures are compared with; ``dry``: of tiny sizes."""

    def __init__(self, device: torch.device, *, dry: bool) -> None:
        from omniserve.host.cores import default_host_threads  # loads the extension, which may be what is broken

        self.device, self._dry, self._repeats = device, dry, 3 if dry else 10
        self.host_threads = default_host_threads(device)

    @functools.cached_property
    def copy_bytes_per_s(self) -> float:
        """Bytes read plus bytes written a second by a copy inside the device's memory."""
        source = torch.empty(1 << (20 if self._dry else 32), dtype=torch.uint8, device=self.device).random_(0, 255)
        target = torch.empty_like(source)
        return 2 * len(source) / median_seconds(lambda: target.copy_(source), self.device, repeats=self._repeats)

    @functools.cached_property
    def matmul_flops(self) -> float:
        """Floating-point operations a second of a square bf16 product of random matrices."""
        size = 256 if self._dry else 8192
        a, b = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return 2 * size**3 / median_seconds(lambda: a @ b, self.device, repeats=self._repeats, warm_up=3)

    @functools.cached_property
    def to_device_bytes_per_s(self) -> float:
        """Bytes a second from page-locked memory to the device, in one piece."""
        return self._transfer(to_host=False)

    @functools.cached_property
    def to_host_bytes_per_s(self) -> float:
        """Bytes a second from the device to page-locked memory, in one piece."""
        return self._transfer(to_host=True)

    def _transfer(self, *, to_host: bool) -> float:
        count = 1 << (20 if self._dry else 30)
        host = torch.ones(count, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        device = torch.ones(count, dtype=torch.uint8, device=self.device)
        source, target = (device, host) if to_host else (host, device)
        copy = functools.partial(target.copy_, source, non_blocking=True)
        return count / median_seconds(copy, self.device, repeats=self._repeats)

    def launch_s(self, *, in_graph: bool) -> float:
        """Return the seconds of a small kernel, one after the other, launched from Python or in a CUDA graph."""
        x, count = torch.zeros(1, device=self.device), 200

        def run() -> None:
            for _ in range(count):
                x.add_(1.0)

        timed = graph_of(run, self.device) if in_graph else run
        return median_seconds(timed, self.device, repeats=self._repeats) / count

    @functools.cached_property
    def host_read_bytes_per_s(self) -> float:
        """Bytes a second that as many threads as the host tier has read from main memory."""
        cpus = allowed_cpus()
        threads = min(self.host_threads, len(cpus))
        arena = Arena(1 << (24 if self._dry else 32))
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(threads)
            pin_team(cpus[:threads])
            fill(arena.bytes, normal_tile(torch.bfloat16, 0), threads)
            readings = sequential_readings(arena.num_bytes, threads)
            return 1e9 * max(reading.gb_per_s(arena, threads) for reading in readings for _ in range(2))
        finally:
            os.sched_setaffinity(0, cpus)
            torch.set_num_threads(before)
