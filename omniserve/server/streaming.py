"""Server-sent events, and work that ends when the client goes away."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from omniserve.server.answers import AnswerShape
from omniserve.server.errors import ApiError
from omniserve.server.output_stream import OutputStream

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


async def or_disconnect(
    receive: Receive,
    work: Coroutine[Any, Any, T],
    *,
    patience_s: Callable[[], float | None] = lambda: None,
) -> T:
    """Do ``work`` while the client is there.

    Args:
        receive: The ASGI channel; the request's body has been read.
        work: What to do.
        patience_s: Returns how long to wait for either before it is asked again; none is left (0 or less) for a client
            that is to be taken for gone although the connection stands. None: as long as it takes.

    Raises:
        ClientGone: The client went away; the work was cancelled.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    both: set[asyncio.Future[Any]] = {task, watch}
    try:
        while not task.done():
            left_s = patience_s()
            if watch.done() or (left_s is not None and left_s <= 0):
                raise ClientGone
            await asyncio.wait(both, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        return task.result()
    finally:
        for future in both:
            future.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A streamed answer: every step's chunks go out in one write.

    Args:
        outputs: Started already, so that a refusal had its own status.
        shape: Makes the chunks.
        headers: More of the answer's headers.
        include_usage: Send a last chunk with the token counts.
        stall_timeout_s: A client that takes nothing for so long is taken for gone.
        on_close: Called when the stream is over, however it ended.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        outputs: OutputStream,
        shape: AnswerShape,
        *,
        headers: Mapping[str, str],
        include_usage: bool,
        stall_timeout_s: float,
        on_close: Callable[[], None],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]  # of the empty body that Response was made with
        self._outputs = outputs
        self._shape = shape
        self._include_usage = include_usage
        self._stall_timeout_s = stall_timeout_s
        self._on_close = on_close
        self._sending_since_s: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await or_disconnect(receive, self._stream(send), patience_s=self._patience_s)
        except ClientGone:
            pass  # nobody is left to tell; on_close frees the request
        finally:
            self._on_close()

    async def _stream(self, send: Send) -> None:
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        head = self._shape.chunk_head()
        # OpenAI sends a null usage in the other chunks, if usage was asked for.
        tail = ',"usage":null}\n\n' if self._include_usage else "}\n\n"
        dumps, pieces = json.dumps, self._shape.pieces
        try:
            async for deltas in self._outputs.deltas():
                choices = [choice for delta in deltas for choice in pieces(delta)]
                data = "".join([f'data: {head},"choices":[{dumps(choice)}]{tail}' for choice in choices])
                await self._send(send, {"type": "http.response.body", "body": data.encode(), "more_body": True})
            last = ""
            if self._include_usage:
                last = f'data: {head},"choices":[],"usage":{dumps(self._outputs.usage.as_dict())}}}\n\n'
        except ApiError as error:
            last = f"data: {dumps(error.body())}\n\n"
        last += "data: [DONE]\n\n"
        await self._send(send, {"type": "http.response.body", "body": last.encode(), "more_body": False})

    async def _send(self, send: Send, message: Message) -> None:
        self._sending_since_s = time.monotonic()  # which costs less than a timer for each message
        await send(message)
        self._sending_since_s = None

    def _patience_s(self) -> float:
        """Return the seconds until the client will have stalled, or could have at the soonest."""
        since_s = self._sending_since_s
        return self._stall_timeout_s - (0.0 if since_s is None else time.monotonic() - since_s)
