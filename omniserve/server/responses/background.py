"""Responses that run without a connection: started, followed, asked for and cancelled by their ids."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from omniserve.server.answer_shape import AnswerShape
from omniserve.server.batches.database import StorageError
from omniserve.server.errors import ApiError
from omniserve.server.output_stream import OutputStream
from omniserve.server.responses.shape import ResponseShape
from omniserve.server.responses.store import ResponseStore

logger = logging.getLogger(__name__)

# A server that has not said for so long that it is there counts as dead; it says so that often.
_ALIVE_S, _SAY_EVERY_S = 60.0, 15.0
# Responses that have ended, and whose events can still be read again.
_MAX_ENDED = 64


class BackgroundRun:
    """A response that runs, or has ended of late."""

    def __init__(self, outputs: OutputStream, shape: ResponseShape, store: ResponseStore) -> None:
        self.shape = shape
        self.task: asyncio.Task[None] | None = None
        self.final: dict[str, Any] | None = None
        """The complete response."""
        self._ends = False
        """All is generated, and the answer is about to be stored."""
        self._outputs = outputs
        self._store = store
        self._events: list[str] = []
        self._changed = asyncio.Event()

    def response(self) -> dict[str, Any]:
        """Return the response as it is now."""
        return self.shape.snapshot() if self.final is None else self.final

    async def work(self) -> None:
        """Run to the end, and store the answer."""
        outputs, shape = self._outputs, self.shape
        self._tell(shape.first_events(outputs.usage))
        saying = asyncio.ensure_future(self._say_alive())
        try:
            try:
                async for deltas in outputs.deltas():
                    self._tell(shape.events(deltas))
                await shape.settle((), outputs.usage)
                last = shape.last_events(outputs.usage)
            except ApiError as error:
                last = shape.error_events(error)
            await self._end(shape.new_response.response, last)
        finally:
            saying.cancel()
            if self.final is None:  # cancelled
                self.final = shape.snapshot("cancelled")
            self._changed.set()

    async def cancel(self) -> dict[str, Any]:
        """End the response as it is now, unless it has ended; return it."""
        if self.task is not None and not self.task.done():
            if self._ends:  # what is being stored cannot be taken back
                await asyncio.gather(self.task, return_exceptions=True)
                return self.response()
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
            if self.final is None:  # it had not begun
                self.final = self.shape.snapshot("cancelled")
            await self._store.change(self.shape.call_id, self.response(), alive_s=None)
        return self.response()

    async def events(self, after: int, comment_interval_s: float) -> AsyncIterator[str]:
        """Yield events as they come, from the one behind number ``after`` on; a comment if there is none for long."""
        at = after + 1
        while True:
            self._changed.clear()
            while at < len(self._events):
                yield self._events[at]
                at += 1
            if self.final is not None:
                return
            try:
                async with asyncio.timeout(comment_interval_s or None):
                    await self._changed.wait()
            except TimeoutError:
                yield ": waiting\n\n"

    def _tell(self, events: str) -> None:
        self._events += [f"{event}\n\n" for event in events.split("\n\n") if event]
        self._changed.set()

    async def _end(self, response: Mapping[str, Any], last: str) -> None:
        self._ends = True
        try:
            await self._store.change(self.shape.call_id, response, alive_s=None)
        except StorageError as error:
            logger.error("responses: the end of %s was not stored: %s", self.shape.call_id, error)
        self.final = dict(response)
        self._tell(last)

    async def _say_alive(self) -> None:
        """Say now and then that the response runs; stop if it was cancelled or deleted by another server."""
        while True:
            await asyncio.sleep(_SAY_EVERY_S)
            try:
                runs = await self._store.change(self.shape.call_id, None, alive_s=_ALIVE_S)
            except StorageError as error:
                logger.warning("responses: %s", error)
                continue
            if not runs and self.task is not None and not self._ends:
                self.task.cancel()


class BackgroundRuns:
    """The background responses of one server.

    Args:
        comment_interval_s: As of other streams.
    """

    def __init__(self, comment_interval_s: float) -> None:
        self._comment_interval_s = comment_interval_s
        self._runs: OrderedDict[str, BackgroundRun] = OrderedDict()

    def find(self, response_id: str) -> BackgroundRun | None:
        """Return a response that runs here, or whose events are still here."""
        return self._runs.get(response_id)

    def forget(self, response_id: str) -> None:
        """End a response that was deleted."""
        run = self._runs.pop(response_id, None)
        if run is not None and run.task is not None:
            run.task.cancel()

    async def detach(
        self, outputs: OutputStream, shape: AnswerShape, headers: Mapping[str, str], on_close: Callable[[], None]
    ) -> Response | None:
        """Let outputs run in the background if that was asked for; see ``generate.Detach``."""
        assert isinstance(shape, ResponseShape)
        if not shape.is_background:
            return None
        assert shape.store is not None, "checked when the request was read"
        shape.begin_background()
        await shape.store.put(shape.new_response, alive_s=_ALIVE_S)
        run = BackgroundRun(outputs, shape, shape.store)
        queued = shape.snapshot("queued")
        self._runs[shape.call_id] = run
        run.task = asyncio.create_task(run.work())
        run.task.add_done_callback(lambda task: self._ended(task, on_close))
        return self.stream(run, -1, headers) if shape.is_streamed else JSONResponse(queued, headers=dict(headers))

    def stream(self, run: BackgroundRun, after: int, headers: Mapping[str, str] | None = None) -> Response:
        """Return the events of a response, from the one behind number ``after`` on."""
        more = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})}
        events = run.events(after, self._comment_interval_s)
        return StreamingResponse(events, headers=more, media_type="text/event-stream")

    def _ended(self, task: asyncio.Task[None], on_close: Callable[[], None]) -> None:
        on_close()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("responses: a background response failed", exc_info=error)
        ended = [name for name, run in self._runs.items() if run.final is not None]
        for name in ended[:-_MAX_ENDED]:
            del self._runs[name]
