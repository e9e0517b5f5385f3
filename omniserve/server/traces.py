"""Traces of calls: what is known of a call when it is over, and who is told of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omniserve.core.request import FinishReason
from omniserve.server.errors import CLIENT_CLOSED_REQUEST, ApiError
from omniserve.server.logs import request_id
from omniserve.server.output_stream import OutputStream

TRACED_PATHS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}
"""Path -> what OpenTelemetry calls the operation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedCall:
    """A call that is over, however it ended."""

    path: str
    headers: Mapping[str, str]
    """The request's, names in lower case."""
    request_id: str | None
    """Its ``x-request-id``."""
    began_s: float
    """When the request came; monotonic seconds."""
    ended_s: float
    """When the last byte of the answer was written, or the client was gone."""
    status: int | None
    """Of the answer; None: there was none."""
    refusal: ApiError | None
    """What it was answered with instead of an output."""
    outputs: OutputStream | None
    """Closed; None if the call did not come that far."""

    @property
    def error(self) -> Exception | None:
        """What it ended with instead of an answer, or with a part of one; None: there is nothing to say of that."""
        return self.refusal or (self.outputs.error if self.outputs is not None else None)

    @property
    def was_abandoned(self) -> bool:
        """True if it ended because the client went away."""
        cut = self.outputs is not None and any(
            choice.finish_reason == FinishReason.ABORT for choice in self.outputs.choices
        )
        return self.error is None and (cut or self.status in (None, CLIENT_CLOSED_REQUEST))


class Traces(Protocol):
    """Who is told of calls that are over."""

    def record(self, call: FinishedCall) -> None:
        """Take a call. Must not wait."""

    def close(self) -> None:
        """Send what was not sent yet."""


class TraceCalls:
    """ASGI middleware that tells of each completion and chat when it is over.

    What is behind it leaves ``refusal`` and ``outputs`` in the request's state.

    Args:
        app: What is behind it.
        traces: Told.
    """

    def __init__(self, app: ASGIApp, traces: Traces) -> None:
        self._app = app
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in TRACED_PATHS or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        began_s = time.monotonic()
        status = None

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            state = scope.get("state", {})
            self._traces.record(
                FinishedCall(
                    path=scope["path"],
                    headers={name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]},
                    request_id=request_id.get(),
                    began_s=began_s,
                    ended_s=time.monotonic(),
                    status=status,
                    refusal=state.get("refusal"),
                    outputs=state.get("outputs"),
                )
            )
