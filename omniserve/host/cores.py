"""CoreSplit: how the two tiers, and other processes, share the CPU's cores on a machine without a GPU.

Threads of both tiers on one core disturb each other badly (a spinning OpenMP thread keeps a host thread off the core,
and the other way round), so the device tier has all cores until the host tier attends, and leaves it its share while
it does. Copies take a moment and have to do with what they get. The switch is made at a step's boundary.

Nor does a step share a core with another process well: all its threads wait for the one that does, at each of its many
parts. So a core that others use much is left to them (``python -m benchmarks.shared_cores``): of 2 cores, 2 threads are
slower than 1 where others use a fifth to two thirds of a core, by the model and the batch, and take 1.3 to 3.4 times as
long where they use all of it.
"""

from __future__ import annotations

import math

import torch

from omniserve.host.core_use import OtherUsers, cores_allowed

# A core is left to others that use more than so much of it, and taken back when they use less than this.
_LEFT_ABOVE, _TAKEN_BELOW = 0.4, 0.25


def available_cores() -> int:
    """Return the number of cores this process may run on."""
    return len(cores_allowed())


def default_host_threads(device: torch.device) -> int:
    """Return the host tier's default size: half the cores without a GPU, all but two beside one."""
    cores = available_cores()
    return max(1, cores // 2) if device.type == "cpu" else max(1, cores - 2)


class CoreSplit:
    """Sets torch's thread count at step boundaries.

    Args:
        device: With a GPU nothing is split: torch's CPU threads have little to do.
        device_threads: Threads of the device tier while the host tier is idle; None: all cores, less those that other
            processes use.
        host_threads: Threads of the host tier; 0: none.
        others: How much other processes use each core; None: read from the operating system.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        device_threads: int | None,
        host_threads: int,
        others: OtherUsers | None = None,
    ) -> None:
        alone = device_threads if device_threads is not None else available_cores()
        self.threads_alone = alone
        self.threads_shared = max(1, alone - host_threads) if device.type == "cpu" else alone
        self.num_left = 0
        """Cores that are left to other processes."""
        self._others = (others or OtherUsers()) if device_threads is None and device.type == "cpu" else None
        self._current = torch.get_num_threads()

    def apply(self, *, host_works: bool) -> None:
        """Take the number of threads for the coming step."""
        if self._others is not None:
            self._leave(self._others.cores())
        wanted = max(1, (self.threads_shared if host_works else self.threads_alone) - self.num_left)
        if wanted != self._current:
            torch.set_num_threads(wanted)
            self._current = wanted

    def _leave(self, used: float) -> None:
        least, most = math.floor(used + 1 - _LEFT_ABOVE), math.floor(used + 1 - _TAKEN_BELOW)
        self.num_left = min(max(self.num_left, least), most)
