"""Settings that each of the two processes makes for itself: its garbage collection, and what torch reads."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

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

        A process is idle while no request waits for it.
        """
        now_s = self._clock()
        if now_s < (self._due_s if is_idle else self._overdue_s):
            return False
        gc.collect()
        ended_s = self._clock()
        self._due_s = ended_s + _LEAST_S
        self._overdue_s = ended_s + max(_LEAST_S, (ended_s - now_s) / _SHARE)
        return True


_PRELOADED = "omniserve.launch.preload"
_fork_server_started = False


def start_fork_server() -> None:
    """Start the process from which engine processes are forked.

    It imports torch and transformers meanwhile, which takes seconds, so the engine begins as soon as its settings are
    known, and another one after its death without importing anything. An environment that is set later reaches none.
    """
    global _fork_server_started
    set_engine_environment()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOADED])
    multiprocessing.forkserver.ensure_running()
    _fork_server_started = True


def engine_context() -> ForkServerContext | SpawnContext:
    """Return how engine processes are made: forked, if ``start_fork_server`` was called, else spawned."""
    return multiprocessing.get_context("forkserver") if _fork_server_started else multiprocessing.get_context("spawn")


def set_engine_environment() -> None:
    """Set what torch reads when it is imported; a spawned process inherits it. What is set already stays.

    OpenMP threads spin for a few microseconds between the many short loops of a step, then sleep. Sleeping at once
    costs a wake-up per loop and doubles a small step; spinning for long (the default) takes cores that others need.
    Compiled code is kept between runs, so that only the first start compiles.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache" / "omniserve" / "inductor"))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
