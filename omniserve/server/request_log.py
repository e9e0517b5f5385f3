"""What is around each request: an id, which its answer and all lines logged about it name; a log line and a trace."""

from __future__ import annotations

import re
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omniserve.server.logs import access_logger, request_id
from omniserve.server.traces import TRACED_PATHS, FinishedCall, Traces

HEADER = "x-request-id"
# What may stand in a header and in a log line without harm; anything else is replaced.
_GIVEN = re.compile(rb"[\w.:/+=-]{1,128}", re.ASCII)


class RequestLog:
    """ASGI middleware: takes a request's ``x-request-id`` or makes one, and records the request when it is answered.

    What is behind it leaves ``caller``, ``refusal`` and ``outputs`` in the request's state.

    Args:
        app: What is behind it.
        traces: Told of each completion and chat that is over.
    """

    def __init__(self, app: ASGIApp, traces: Traces | None = None) -> None:
        self._app = app
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"  # the server has neither websockets nor a lifespan
        began_s = time.monotonic()
        given = dict(scope["headers"]).get(HEADER.encode(), b"")
        name = given.decode() if _GIVEN.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        request_id.set(name)  # for good: this task is the request's, and what goes wrong is logged last
        status = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._record(scope, name, status, began_s)

    def _record(self, scope: Scope, name: str, status: int | None, began_s: float) -> None:
        ended_s = time.monotonic()
        method, path, state = scope["method"], scope["path"], scope.get("state", {})
        caller, outputs = state.get("caller"), state.get("outputs")
        if self._traces is not None and path in TRACED_PATHS and method == "POST":
            self._traces.record(
                FinishedCall(
                    path=path,
                    headers={key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]},
                    request_id=name,
                    began_s=began_s,
                    ended_s=ended_s,
                    status=status,
                    refusal=state.get("refusal"),
                    outputs=outputs,
                )
            )
        access_logger.info(
            "%s %s: %s",
            method, path, status,
            extra={
                "method": method,
                "path": path,
                "status": status,
                "seconds": round(ended_s - began_s, 6),
                "key": None if caller is None else caller.name,
                "call_id": None if outputs is None else outputs.job.call_id,
            },
        )  # fmt: skip
