"""The endpoints that generate, such as /v1/chat/completions: from the body to the answer's last byte."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from omniserve.server.access.limits import caller_of, take_body
from omniserve.server.answer_shape import AnswerShape, CallShape
from omniserve.server.anthropic import openapi
from omniserve.server.anthropic.fields import MessagesBody
from omniserve.server.anthropic.shape import MessagesShape
from omniserve.server.completions.answers import ChatShape, CompletionShape
from omniserve.server.completions.protocol import ChatRequest, CompletionRequest
from omniserve.server.errors import CLIENT_CLOSED_REQUEST, ApiError
from omniserve.server.header_fields import HeaderFields
from omniserve.server.openapi import GENERATION_ERRORS, MESSAGES_ERRORS, ChatCompletion, Completion, answers, takes
from omniserve.server.output_stream import OutputStream
from omniserve.server.service import Service, new_call_id

T = TypeVar("T")

_PREDICTED_TTFT_HEADER = "x-omniserve-predicted-ttft-ms"
_SCALED_TTFT_HEADER, _SCALED_TPOT_HEADER = "x-omniserve-scaled-ttft-slo-ms", "x-omniserve-scaled-tpot-slo-ms"


def router(service: Service) -> APIRouter:
    """Return the routes."""
    routes = APIRouter()

    @routes.post(
        "/v1/completions",
        openapi_extra=takes(CompletionRequest),
        responses=answers(Completion, *GENERATION_ERRORS, streams=True),
    )
    async def completions(request: Request) -> Response:
        return await generate(service, request, CompletionShape)

    @routes.post(
        "/v1/chat/completions",
        openapi_extra=takes(ChatRequest),
        responses=answers(ChatCompletion, *GENERATION_ERRORS, streams=True),
    )
    async def chat_completions(request: Request) -> Response:
        return await generate(service, request, ChatShape)

    @routes.post(
        "/v1/messages",
        openapi_extra=takes(MessagesBody),
        responses=answers(openapi.AnsweredMessage, *MESSAGES_ERRORS, streams=True, error=openapi.MessagesError),
    )
    async def messages(request: Request) -> Response:
        return await generate(service, request, MessagesShape)

    return routes


async def _begin(service: Service, http: Request, endpoint: type[CallShape]) -> tuple[OutputStream, CallShape]:
    """Return a call's outputs and the shape of its answer; the request itself, with its texts, is not kept."""
    arrival_s = time.monotonic()
    endpoint.check_open(service)
    async with take_body(http, service.bodies) as body:
        caller = caller_of(http)
        request = await endpoint.read(service, body, caller=caller.name, headers=HeaderFields.of(http.headers))
        request = caller.limited(request, service.info.classes)
        endpoint.check_model(service, request.model)
        call_id = new_call_id(endpoint.id_prefix)
        shape = endpoint(service, request, call_id)
        outputs = await endpoint.outputs(service, request, call_id, arrival_s, caller.name)
        http.state.outputs = outputs
        return outputs, shape


Detach = Callable[[OutputStream, AnswerShape, Mapping[str, str], Callable[[], None]], Awaitable[Response | None]]


async def generate(
    service: Service, http: Request, endpoint: type[CallShape], detach: Detach | None = None
) -> Response:
    """Answer a request of an endpoint.

    Args:
        service: The service that is asked.
        http: The request.
        endpoint: What reads the request and writes the answer.
        detach: Called with outputs that were started, the shape, headers and what is to be called at their end. If it
            returns an answer, the outputs are its own from then on, whatever becomes of the connection.
    """
    outputs, shape = await _begin(service, http, endpoint)
    caller = caller_of(http)

    def end() -> None:
        service.end(outputs)
        caller.use_tokens(outputs.usage.num_output_tokens)

    handed_over = False
    try:
        await or_disconnect(http.receive, outputs.start())
        caller.use_tokens(outputs.usage.num_prompt_tokens)
        if outputs.used_tier is not None:
            shape.use_tier(outputs.used_tier)
        headers = dict(shape.headers) | _headers(outputs)
        if detach is not None:
            assert isinstance(shape, AnswerShape), "only what generates goes on without its connection"
            detached = await detach(outputs, shape, headers, end)
            if detached is not None:
                handed_over = True
                return detached
        if isinstance(shape, AnswerShape) and shape.is_streamed:
            handed_over = True
            return EventStream(
                outputs,
                shape,
                headers=headers,
                stall_timeout_s=service.limits.stall_timeout_s,
                comment_interval_s=service.limits.stream_comment_interval_s,
                on_close=end,
            )
        deltas = await or_disconnect(http.receive, outputs.collect())
        if isinstance(shape, AnswerShape):
            await shape.settle(deltas, outputs.usage)
        answer = await shape.written(deltas, outputs.usage)
        return Response(answer, headers=headers, media_type="application/json")
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        if not handed_over:
            end()


def _headers(outputs: OutputStream) -> dict[str, str]:
    """Return what admission has to say of a started call."""
    seconds = {_PREDICTED_TTFT_HEADER: outputs.predicted_ttft_s}
    if (scaled := outputs.scaled_slo) is not None:
        slo = outputs.job.slo
        seconds[_SCALED_TTFT_HEADER] = scaled.ttft_s if scaled.ttft_s != slo.ttft_s else None
        seconds[_SCALED_TPOT_HEADER] = scaled.tpot_s if scaled.tpot_s != slo.tpot_s else None
    return {name: str(round(value * 1e3, 3)) for name, value in seconds.items() if value is not None}


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


async def or_disconnect(
    receive: Receive, work: Coroutine[Any, Any, T], *, patience_s: Callable[[], float | None] = lambda: None
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
        outputs: Outputs that were started, so that a refusal had its own status.
        shape: Makes the chunks.
        headers: More headers of the answer.
        stall_timeout_s: Seconds without a taken message after which a client is taken for gone.
        comment_interval_s: Seconds without a message until a comment is sent, which clients skip: proxies, and some
            clients, cut a connection that is silent for a minute or less. 0: none is.
        on_close: Called when the stream is over, however it ended.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        outputs: OutputStream,
        shape: AnswerShape,
        *,
        headers: Mapping[str, str],
        stall_timeout_s: float,
        comment_interval_s: float,
        on_close: Callable[[], None],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]  # of the empty body that Response was made with
        self._outputs = outputs
        self._shape = shape
        self._stall_timeout_s = stall_timeout_s
        self._comment_interval_s = comment_interval_s
        self._on_close = on_close
        self._sending_since_s: float | None = None
        self._sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await or_disconnect(receive, self._stream(send), patience_s=self._patience_s)
        except ClientGone:
            pass  # there is nothing to send any more; on_close frees the request
        finally:
            self._on_close()

    async def _stream(self, send: Send) -> None:
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        shape = self._shape
        commenting = asyncio.ensure_future(self._send_comments(send)) if self._comment_interval_s else None
        try:
            if first := shape.first_events(self._outputs.usage):
                await self._send(send, {"type": "http.response.body", "body": first.encode(), "more_body": True})
            async for deltas in self._outputs.deltas():
                data = shape.events(deltas).encode()
                await self._send(send, {"type": "http.response.body", "body": data, "more_body": True})
            await shape.settle((), self._outputs.usage)
            last = shape.last_events(self._outputs.usage)
        except ApiError as error:
            last = shape.error_events(error)
        finally:
            if commenting is not None:
                commenting.cancel()
        await self._send(send, {"type": "http.response.body", "body": last.encode(), "more_body": False})

    async def _send_comments(self, send: Send) -> None:
        """Send a comment whenever nothing was sent for long, unless the client has yet to take what was sent."""
        interval_s = self._comment_interval_s
        while True:
            left_s = self._sent_s + interval_s - time.monotonic()
            if left_s > 0 or self._sending_since_s is not None:
                await asyncio.sleep(left_s if left_s > 0 else interval_s)
            else:
                comment = self._shape.keep_alive.encode()
                await self._send(send, {"type": "http.response.body", "body": comment, "more_body": True})

    async def _send(self, send: Send, message: Message) -> None:
        self._sent_s = time.monotonic()  # which costs less than a timer for each message
        if self._sending_since_s is None:
            self._sending_since_s = self._sent_s
        await send(message)
        self._sending_since_s = None

    def _patience_s(self) -> float:
        """Return the seconds until the client has stalled, or could have stalled at the earliest."""
        since_s = self._sending_since_s
        return self._stall_timeout_s - (0.0 if since_s is None else time.monotonic() - since_s)
