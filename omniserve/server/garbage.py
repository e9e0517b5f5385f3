"""Python's garbage collector, kept from stopping a process that serves."""

from __future__ import annotations

import atexit
import gc
import time
from collections.abc import Callable

# New objects between two collections of the young ones; such collections between two of the middle-aged.
_YOUNG, _MIDDLE_AGED = 10_000, 10
_NEVER = 2**31 - 1
# Full collections: the least time between two, and the share of time that they may take where there is always work.
_LEAST_S = 10.0
_SHARE = 0.01


class GarbageCollector:
    """Collects a process's garbage, from now on, as it serves: the old objects when there is nothing else to do.

    What there is now is left out for good. torch and transformers are half a million objects: a full collection of them
    takes a third of a second in which no request gets a token. They stay until the process ends, so there is nothing to
    be found. (Then they are let go: some libraries print what is left of them.)

    Of the rest, Python would look at all of it each time that it grew by a quarter: in a flood, with thousands of
    connections, again and again.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)
        gc.set_threshold(_YOUNG, _MIDDLE_AGED, _NEVER)
        self._clock = clock
        self._due_s = self._overdue_s = clock() + _LEAST_S

    def collect(self, *, is_idle: bool) -> bool:
        """Collect what is old, if it is time to; return whether it was. To be called often.

        Args:
            is_idle: No request waits for this process.
        """
        now_s = self._clock()
        if now_s < (self._due_s if is_idle else self._overdue_s):
            return False
        gc.collect()
        ended_s = self._clock()
        self._due_s = ended_s + _LEAST_S
        self._overdue_s = ended_s + max(_LEAST_S, (ended_s - now_s) / _SHARE)
        return True
