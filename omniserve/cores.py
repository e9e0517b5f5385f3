"""CoreSplit: how the two tiers share the CPU's cores on a machine without a GPU.

Threads of both tiers on one core disturb each other badly (a spinning OpenMP thread keeps a host thread off the core,
and the other way round), so the device tier has all cores until the host tier attends, and leaves it its share while
it does. Copies take a moment and have to do with what they get. The switch is made at a step's boundary.
"""

from __future__ import annotations

import os

import torch


def available_cores() -> int:
    """Return the number of cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def default_host_threads(device: torch.device) -> int:
    """Return the host tier's default size: half the cores without a GPU, all but two beside one."""
    cores = available_cores()
    return max(1, cores // 2) if device.type == "cpu" else max(1, cores - 2)


class CoreSplit:
    """Sets torch's thread count at step boundaries.

    Args:
        device: With a GPU nothing is split: torch's CPU threads have little to do.
        device_threads: Threads of the device tier while the host tier is idle; None: all cores.
        host_threads: Threads of the host tier; 0: none.
    """

    def __init__(self, *, device: torch.device, device_threads: int | None, host_threads: int) -> None:
        alone = device_threads if device_threads is not None else available_cores()
        self.threads_alone = alone
        self.threads_shared = max(1, alone - host_threads) if device.type == "cpu" else alone
        self._current = torch.get_num_threads()

    def apply(self, *, host_works: bool) -> None:
        """Take the number of threads for the coming step."""
        wanted = self.threads_shared if host_works else self.threads_alone
        if wanted != self._current:
            torch.set_num_threads(wanted)
            self._current = wanted
