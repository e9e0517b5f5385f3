"""Keeps an engine process running: after a death another one is started, with growing pauses, up to a limit."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable

from omniserve.core.errors import EngineStopped
from omniserve.core.load import EngineLoad
from omniserve.server.engines.client import EngineClient
from omniserve.server.engines.messages import EngineInfo
from omniserve.server.errors import ApiError

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# An engine that ran this long before it died is no part of a row of failures.
_WELL_AFTER_S = 600.0


class EngineSupervisor:
    """The engine process that there is now, and those that come after it.

    A failure of the first start is the caller's: settings that do not work today will not work in a second. An engine
    that ``begin`` was called for may come at any time.

    Args:
        new_client: Makes the client of a process that is not started yet.
        name: What the log calls the engine.
        max_restarts: Starts in a row after a death, each of which may fail or be short; 0 for none, infinity for no
            limit. An engine that ran for ten minutes begins a new row.
        longest_pause_s: Seconds between two starts at most.
        on_progress: Told how starts go on.
        on_death: Called when an engine that took requests has died.
        check: Raises EngineStopped if an engine does not fit the others.
    """

    def __init__(
        self,
        new_client: Callable[[], EngineClient],
        *,
        name: str = "the engine",
        max_restarts: float = 3,
        longest_pause_s: float = _LONGEST_PAUSE_S,
        on_progress: Callable[[str], None] = lambda text: None,
        on_death: Callable[[], None] = lambda: None,
        check: Callable[[EngineInfo], None] = lambda info: None,
    ) -> None:
        self._new_client, self._name = new_client, name
        self._max_restarts, self._longest_pause_s, self._on_death = max_restarts, longest_pause_s, on_death
        self._on_progress, self._check = on_progress, check
        self.client = self._new_client()
        """The process that takes requests, or the dead one while another is not ready yet."""
        self._open: EngineClient | None = None  # whose process and sockets are there: the client's or its successor's
        self._watch: asyncio.Task[None] | None = None
        self._kept_down = asyncio.Event()
        self._start_s = 0.0
        self._start_failure: str | None = None
        self._expected_back_s = 0.0
        self._told: str | None = None
        self.on_restart: Callable[[EngineClient], Awaitable[None]] | None = None
        """Called with an engine that was started again, before it takes requests."""
        self.num_restarts = 0
        """Engines that were ready again after a death."""
        self.info: EngineInfo | None = None
        """What the last engine that was ready said of itself; None: none was yet."""
        self.ready = asyncio.Event()
        """Set when an engine was ready for the first time."""
        self.stopped = asyncio.Event()
        """Set when the engine is dead for good."""

    async def start(self) -> EngineInfo:
        """Start the engine; return when it is ready.

        Raises:
            EngineStopped: It could not start; the message says why.
        """
        info = await self._start(self.client)
        self.ready.set()
        self._watch_it()
        return info

    def begin(self) -> None:
        """Start the engine, or find it, again and again until it is ready."""
        self.client.failure = "it is not there yet"
        self.client.stopped.set()
        self._watch_it()

    @property
    def newest(self) -> EngineClient:
        """The process that is started in the place of a dead one, else the client."""
        return self._open or self.client

    def hear_load(self, on_load: Callable[[EngineLoad], None]) -> None:
        """Have the engine tell its load from now on, and one that is being started in its place."""
        for client in {self.client, self.newest}:
            client.hear_load(on_load)

    @property
    def failure(self) -> str | None:
        """The reason why the engine is not there now; None while it is well."""
        death = self.client.failure
        if not self.ready.is_set() and self._start_failure is not None:
            return self._start_failure
        if death is None or self._start_failure is None:
            return death
        return f"{death}; and it could not start again: {self._start_failure}"

    @property
    def retry_after_s(self) -> float | None:
        """Seconds until the engine is expected back; None if it is dead for good."""
        return None if self.stopped.is_set() else max(1.0, self._expected_back_s - time.monotonic())

    def keep_down(self) -> None:
        """Start no engine from now on: the server is about to stop."""
        self._kept_down.set()

    def kill(self) -> None:
        """End the process at once."""
        if self._open is not None:
            self._open.kill()

    async def close(self) -> None:
        """End the process; requests that still run get EngineStopped."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._close_open()

    def _watch_it(self) -> None:
        self._watch = asyncio.create_task(self._keep_running())
        self._watch.add_done_callback(self._on_end_of_watch)

    def _on_end_of_watch(self, watch: asyncio.Task[None]) -> None:
        """Tell that nobody keeps the engine running any more, and why."""
        if not watch.cancelled() and (error := watch.exception()) is not None:
            logger.error("%s is not started again, because of a bug", self._name, exc_info=error)
            self.stopped.set()

    async def _start(self, client: EngineClient) -> EngineInfo:
        started_s = time.monotonic()
        self._open = client
        info = await client.start(self._on_progress)
        self._check(info)
        self.info, self._start_s = info, time.monotonic() - started_s
        return info

    async def _keep_running(self) -> None:
        num_starts = 0
        while True:
            ready_s = time.monotonic()
            await self.client.stopped.wait()
            is_first = not self.ready.is_set()
            if not is_first:
                self._on_death()
            if time.monotonic() - ready_s >= _WELL_AFTER_S:
                num_starts = 0
            while self.client.failure is not None:
                if num_starts - is_first >= self._max_restarts or self._kept_down.is_set():
                    self.stopped.set()
                    return
                pause_s = min(pause_before(num_starts), self._longest_pause_s)
                if is_first and not num_starts:
                    pause_s = 0.0
                else:
                    self._tell(num_starts + 1, pause_s)
                num_starts += 1
                self._expected_back_s = time.monotonic() + pause_s + self._start_s
                await self._close_open()
                if await self._is_kept_down_within(pause_s):
                    continue
                successor = self._new_client()
                try:
                    await self._start(successor)
                    if self.on_restart is not None:
                        await self.on_restart(successor)
                except (EngineStopped, ApiError) as error:
                    self._start_failure = str(error)
                    continue
                self.client, self._start_failure = successor, None
                self.num_restarts += not is_first
                self.ready.set()
                logger.warning("%s: ready%s after %.1f s", self._name, "" if is_first else " again", self._start_s)

    def _tell(self, number: int, pause_s: float) -> None:
        """Log that the engine is not there, and of starts without end only those that fail for another reason."""
        if math.isfinite(self._max_restarts):
            text = "%s has stopped: %s; start %d of %d in %g s"
            logger.error(text, self._name, self.failure, number, self._max_restarts, pause_s)
        elif self.failure != self._told:
            logger.error("%s is not there: %s; it is tried again until it is", self._name, self.failure)
            self._told = self.failure

    async def _is_kept_down_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._kept_down.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def _close_open(self) -> None:
        if self._open is not None:
            await self._open.close()
            self._open = None


def pause_before(num_starts: int) -> float:
    """Return the seconds to wait before a start after ``num_starts`` in a row: 1, 2, 4 and so on, up to a minute."""
    return min(_FIRST_PAUSE_S * 2**num_starts, _LONGEST_PAUSE_S)
