"""Keeps an engine process running: after a death another one is started, with growing pauses, up to a limit."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable

from omniserve.core.errors import EngineStopped
from omniserve.core.load import EngineLoad
from omniserve.server.engines.client import EngineClient
from omniserve.server.engines.messages import EngineInfo
from omniserve.server.engines.process import EngineMaker
from omniserve.server.errors import ApiError

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# An engine that ran this long before it died is no part of a row of failures.
_WELL_AFTER_S = 600.0


class EngineSupervisor:
    """The engine process that there is now, and those that come after it.

    A failure of the first start is the caller's: settings that do not work today will not work in a second.

    Args:
        make_engine, log_level, log_format, on_load: As ``EngineClient`` takes them.
        max_restarts: Starts in a row after a death, each of which may fail or be short; 0 for none. An engine that
            ran for ten minutes begins a new row.
        on_progress: Told how starts go on.
        on_death: Called when an engine that took requests has died.
    """

    def __init__(
        self,
        make_engine: EngineMaker,
        *,
        log_level: str = "warning",
        log_format: str = "text",
        max_restarts: int = 3,
        on_progress: Callable[[str], None] = lambda text: None,
        on_load: Callable[[EngineLoad], None] | None = None,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self._new_client = functools.partial(
            EngineClient, make_engine, log_level=log_level, log_format=log_format, on_load=on_load
        )
        self._max_restarts, self._on_death = max_restarts, on_death
        self._on_progress = on_progress
        self.client = self._new_client()
        """The process that takes requests, or the dead one while another is not ready yet."""
        self._open: EngineClient | None = None  # whose process and sockets are there: the client's or its successor's
        self._watch: asyncio.Task[None] | None = None
        self._kept_down = asyncio.Event()
        self._start_s = 0.0
        self._start_failure: str | None = None
        self._expected_back_s = 0.0
        self.on_restart: Callable[[EngineClient], Awaitable[None]] | None = None
        """Called with an engine that was started again, before it takes requests."""
        self.num_restarts = 0
        """Engines that were ready again after a death."""
        self.stopped = asyncio.Event()
        """Set when the engine is dead for good."""

    async def start(self) -> EngineInfo:
        """Start the engine; return when it is ready.

        Raises:
            EngineStopped: It could not start; the message says why.
        """
        info = await self._start(self.client)
        self._watch = asyncio.create_task(self._keep_running())
        return info

    @property
    def failure(self) -> str | None:
        """The reason why the engine is not there now; None while it is well."""
        death = self.client.failure
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

    async def _start(self, client: EngineClient) -> EngineInfo:
        started_s = time.monotonic()
        self._open = client
        info = await client.start(self._on_progress)
        self._start_s = time.monotonic() - started_s
        return info

    async def _keep_running(self) -> None:
        num_starts = 0
        while True:
            ready_s = time.monotonic()
            await self.client.stopped.wait()
            self._on_death()
            if time.monotonic() - ready_s >= _WELL_AFTER_S:
                num_starts = 0
            while self.client.failure is not None:
                if num_starts >= self._max_restarts or self._kept_down.is_set():
                    self.stopped.set()
                    return
                pause_s = pause_before(num_starts)
                num_starts += 1
                logger.error(
                    "the engine has stopped: %s; start %d of %d in %g s",
                    self.failure,
                    num_starts,
                    self._max_restarts,
                    pause_s,
                )
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
                self.num_restarts += 1
                logger.warning("engine: ready again after %.1f s", self._start_s)

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
