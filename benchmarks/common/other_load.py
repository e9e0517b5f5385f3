"""What the rest of the machine did during a measurement."""

from __future__ import annotations

import os
import time
from pathlib import Path


class OtherLoad:
    """CPU time of all other processes since this was made; steal time counts as theirs.

    Children are others as long as they run; those that were waited for are not.
    """

    def __init__(self) -> None:
        self._began_s, self._others_s = time.perf_counter(), self._others_so_far_s()

    @staticmethod
    def _others_so_far_s() -> float:
        user, nice, system, _, _, irq, softirq, steal, *_ = Path("/proc/stat").read_text().split("\n")[0].split()[1:]
        busy = sum(map(int, (user, nice, system, irq, softirq, steal))) / os.sysconf("SC_CLK_TCK")
        return busy - sum(os.times()[:4])

    def cores(self) -> float:
        """Return the mean number of cores that others kept busy."""
        return max(0.0, (self._others_so_far_s() - self._others_s) / (time.perf_counter() - self._began_s))
