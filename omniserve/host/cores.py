"""CoreSplit: how the two tiers, and other processes, share the CPU's cores on a machine without a GPU.

Threads of both tiers on one core disturb each other badly: a spinning OpenMP thread keeps a host thread off the core,
and the other way round. So the device tier has all cores until the host tier attends, and leaves it its share while it
does. Copies are short and take no share. The number of threads only changes between steps.

A step does not share a core with another process well either, because in each of its many parts all its threads wait
for the slowest one. So a core that others use much is left to them (``python -m benchmarks.costs shared_cores``): of 2
cores, 2 threads are slower than 1 where others use a fifth to two thirds of a core, by the model and the batch, and
take 1.3 to 3.4 times as long where they use all of it. How much others use is read from Linux's ``/proc``. Short bursts
do not count: a client that sends a request, and the server that reads it, are done before a step could make room for
them.

Cores that niced processes use are not left to them.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from omniserve.host.quotas import cpu_quota

# A core is left to others that use more of it than the first number, and taken back when they use less than the second.
_LEFT_ABOVE, _TAKEN_BELOW = 0.4, 0.25
_LOOK_EVERY_S = 0.25
_MEMORY_S = 1.0


def cores_allowed() -> set[int]:
    """Return the cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


_num_sharing = 1  # processes that share the quota of this one


def share_quota(num_processes: int) -> None:
    """Note that ``num_processes``, this one included, work on one task: each takes its part of their CPU quota."""
    global _num_sharing
    _num_sharing = num_processes


def available_cores() -> int:
    """Return the number of cores that this process can keep busy, at least 1.

    That is the smaller of the number that it may run on and its CPU quota, rounded down: with one thread more it would
    stand still for a part of each period.
    """
    quota = cpu_quota()
    allowed = len(cores_allowed())
    return allowed if quota is None else max(1, min(allowed, math.floor(quota / _num_sharing)))


def quota_note() -> str | None:
    """Return what a log should say of a CPU quota that leaves cores unused; None if none does."""
    quota, allowed, available = cpu_quota(), len(cores_allowed()), available_cores()
    if quota is None or available == allowed:
        return None
    sharing = f", shared by {_num_sharing} processes" if _num_sharing > 1 else ""
    return (
        f"the CPU quota of this control group is {quota:g} cores{sharing}: {available} of the {allowed} cores that "
        "this process may run on are used"
    )


def default_host_threads(device: torch.device) -> int:
    """Return the host tier's default number of threads: half the cores without a GPU, all but two beside one."""
    cores = available_cores()
    return max(1, cores // 2) if device.type == "cpu" else max(1, cores - 2)


def lines_of(path: str) -> list[str]:
    """Return the lines of a file; none if it does not exist."""
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []


def read_core_seconds(*, with_niced: bool = True) -> tuple[float, float]:
    """Return the seconds that the allowed cores were busy or stolen so far, and those of this process.

    Both are 0 where the operating system does not tell. ``with_niced`` includes niced processes, which yield to others.
    """
    cores, busy = cores_allowed(), 0
    for line in lines_of("/proc/stat"):
        name, *fields = line.split() or [""]
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cores:
            user, nice, system, _, _, irq, softirq, steal, *_ = map(int, fields)
            busy += user + (nice if with_niced else 0) + system + irq + softirq + steal
    return busy / os.sysconf("SC_CLK_TCK"), time.process_time() if busy else 0.0


def read_competition() -> tuple[float, float]:
    """Return the same without niced processes, which yield to this one unless it is niced itself."""
    return read_core_seconds(with_niced=os.getpriority(os.PRIO_PROCESS, 0) > 0)


class OtherUsers:
    """Measures how many cores other processes and hypervisors use steadily.

    ``read`` returns the seconds that the cores were busy, and how many of these were this process's.

    That is the lower of two figures: the last quarter of a second, and a mean that forgets a second's past to 1/e. So
    a process that takes one core counts as 0.4 cores after half a second, and as none a quarter after it has ended; one
    that is busy for a quarter of a second now and then never counts as more than 0.25. The system's clock counts in
    ticks, so that a quarter of a second alone may be off by 0.15 cores.
    """

    def __init__(
        self, read: Callable[[], tuple[float, float]] = read_competition, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read, self._clock = read, clock
        self._looked_s = clock()
        self._busy_s, self._own_s = read()
        self._lately = self._mean = 0.0

    def cores(self) -> float:
        """Return how many cores they use; frequent calls cost little."""
        now_s = self._clock()
        seconds = now_s - self._looked_s
        if seconds >= _LOOK_EVERY_S:
            busy_s, own_s = self._read()
            self._lately = max(0.0, (busy_s - self._busy_s) - (own_s - self._own_s)) / seconds
            self._mean += (1 - math.exp(-seconds / _MEMORY_S)) * (self._lately - self._mean)
            self._looked_s, self._busy_s, self._own_s = now_s, busy_s, own_s
        return min(self._lately, self._mean)


class CoreSplit:
    """Sets torch's number of threads between steps. With a GPU nothing is split: torch's CPU threads have little to do.

    ``device_threads`` is the device tier's number of threads while the host tier is idle; None takes all cores, or as
    many as a CPU quota allows, less those that ``others`` use. ``host_threads`` is the host tier's number of threads, 0
    without one.
    """

    def __init__(
        self, *, device: torch.device, device_threads: int | None, host_threads: int, others: OtherUsers | None = None
    ) -> None:
        self.threads_alone = device_threads if device_threads is not None else available_cores()
        self.threads_shared = self.threads_alone
        self._num_spare = max(0, len(cores_allowed()) - self.threads_alone)  # others are welcome to these
        self._is_cpu = device.type == "cpu"
        if self._is_cpu:
            self.threads_shared = max(1, self.threads_alone - host_threads)
        self.num_left = 0
        """The number of cores that are left to other processes."""
        self.steps_by_threads = Counter[int]()
        """The number of steps with each number of threads; empty with a GPU."""
        self._others = (others or OtherUsers()) if device_threads is None and self._is_cpu else None

    def apply(self, *, host_works: bool) -> None:
        """Set the number of threads for the coming step."""
        if self._others is not None:
            used = max(0.0, self._others.cores() - self._num_spare)
            least, most = math.floor(used + 1 - _LEFT_ABOVE), math.floor(used + 1 - _TAKEN_BELOW)
            self.num_left = min(max(self.num_left, least), most)
        wanted = max(1, (self.threads_shared if host_works else self.threads_alone) - self.num_left)
        if wanted != torch.get_num_threads():  # which others may have set: a profile is measured between steps
            torch.set_num_threads(wanted)
        if self._is_cpu:
            self.steps_by_threads[wanted] += 1
