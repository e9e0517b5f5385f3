"""Request ids: each request has one, its answer and every line that is logged about it name it."""

from __future__ import annotations

import re
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omniserve.server.logs import access_logger, request_id

HEADER = "x-request-id"
# What may stand in a header and in a log line without harm; anything else is replaced.
_GIVEN = re.compile(rb"[\w.:/+=-]{1,128}", re.ASCII)


class RequestIds:
    """ASGI middleware: takes a request's ``x-request-id`` or makes one, and logs the request when it is answered.

    Args:
        app: What is behind it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"  # the server has neither websockets nor a lifespan
        started_s = time.monotonic()
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
            state = scope.get("state", {})
            caller, outputs = state.get("caller"), state.get("outputs")
            access_logger.info(
                "%s %s: %s",
                scope["method"], scope["path"], status,
                extra={
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "seconds": round(time.monotonic() - started_s, 6),
                    "key": None if caller is None else caller.name,
                    "call_id": None if outputs is None else outputs.job.call_id,
                },
            )  # fmt: skip
