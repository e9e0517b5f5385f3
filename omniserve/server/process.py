"""What each of the two processes sets up for itself: its logs, its garbage collection, and what torch reads."""

from __future__ import annotations

import atexit
import contextvars
import datetime
import gc
import json
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

# Fields that an ``extra`` of ours may have; the others of a LogRecord are the logging module's own.
_EXTRA = ("method", "path", "status", "seconds", "key", "call_id", "engine_request_id")

access_logger = logging.getLogger("omniserve.access")
request_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)
"""The id of the request that the running code works for."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and what is known of the request.

    Args:
        names: For each engine request the ``x-request-id`` of the call that it belongs to, of which a call may have
            several. It is read for each line that has an ``engine_request_id``.
    """

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._names = {} if names is None else names

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields: dict[str, Any] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": self._names.get(getattr(record, "engine_request_id", "")) or request_id.get(),
        }
        fields |= {name: getattr(record, name, None) for name in _EXTRA}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in fields.items() if value is not None})


def set_up_logs(
    level: str, log_format: str, *, text: str = "%(levelname)s %(message)s", names: Mapping[str, str] | None = None
) -> None:
    """Log to standard error, as lines for people in the format ``text``, or as JSON.

    With JSON each request has a line when it is answered, too.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(names) if log_format == "json" else logging.Formatter(text))
    access_logger.disabled = log_format != "json"
    logging.basicConfig(level=level.upper(), handlers=[handler])


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
