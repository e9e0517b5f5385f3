"""How much other processes use the cores that this process may run on, read from Linux's ``/proc``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_LOOK_EVERY_S = 0.25


def cores_allowed() -> set[int]:
    """Return the cores that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def read_core_seconds(*, with_niced: bool = True) -> tuple[float, float]:
    """Return the seconds that these cores were busy or stolen so far, and those of this process; both 0 if unknown.

    Args:
        with_niced: Processes that let others go first (``nice``) count, too.
    """
    cores = cores_allowed()
    busy_s = sum(_busy_s(line.split(), with_niced) for line in lines_of("/proc/stat") if _core(line) in cores)
    return busy_s, time.process_time() if busy_s else 0.0


def lines_of(path: str) -> list[str]:
    """Return the lines of a file that may not be there."""
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []


def read_competition() -> tuple[float, float]:
    """Return the same without niced processes, which give way to this one, unless it is niced itself."""
    return read_core_seconds(with_niced=os.getpriority(os.PRIO_PROCESS, 0) > 0)


class OtherUsers:
    """How many cores other processes use, and hypervisors take.

    Args:
        read: Returns seconds that the cores were busy, and those of them that were this process's.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        read: Callable[[], tuple[float, float]] = read_competition,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._clock = clock
        self._looked_s = clock()
        self._busy_s, self._own_s = read()
        self._cores = 0.0

    def cores(self) -> float:
        """Return how many they used in the last quarter of a second or so; it costs little to ask often."""
        now_s = self._clock()
        seconds = now_s - self._looked_s
        if seconds >= _LOOK_EVERY_S:
            busy_s, own_s = self._read()
            self._cores = max(0.0, (busy_s - self._busy_s) - (own_s - self._own_s)) / seconds
            self._looked_s, self._busy_s, self._own_s = now_s, busy_s, own_s
        return self._cores


def _core(line: str) -> int | None:
    """Return the core of a line of ``/proc/stat``; None for all others, the sum of the cores among them."""
    name = line.split(maxsplit=1)[0] if line.strip() else ""
    return int(name[3:]) if name.startswith("cpu") and name[3:].isdecimal() else None


def _busy_s(fields: list[str], with_niced: bool) -> float:
    _, user, nice, system, _, _, irq, softirq, steal, *_ = fields
    return sum(map(int, (user, nice if with_niced else 0, system, irq, softirq, steal))) / os.sysconf("SC_CLK_TCK")
