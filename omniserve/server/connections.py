"""Connections, limited in number and in how long one may be without a request; and the log line of each request.

uvicorn does not limit the time in which the head of a request arrives. Once its limit of connections is reached, it
answers no request, although most of the connections may be idle.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import resource
import time
import uuid
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from omniserve.core.logs import access_logger, request_id
from omniserve.server.errors import ApiError
from omniserve.server.telemetry.calls import TRACED_PATHS, FinishedCall

if TYPE_CHECKING:
    from omniserve.server.telemetry.otlp import OtlpTraces

logger = logging.getLogger(__name__)

_MOST = 10_000
# For all that is no connection: the listener, the engine's sockets, files of batches, libraries that are loaded late.
_OTHER_FILES = 128
_WANTED_FILES = 65536
# How long a refused client may take to read why, before the connection is cut.
_GOODBYE_S = 1.0
# So many refused clients may be reading it at a time; others are cut at once. With those below they stay well within
# the files that are kept back for other uses.
_MOST_REFUSED = 32
ACCEPTED_AT_ONCE = 8
"""Connections that are taken from the kernel before the first of them is seen here, to be refused perhaps."""
_RETRY_S = 1.0
# The parser has no limit of its own. Counted are the reads behind the one that the head began in.
_MAX_HEAD_BYTES = 1 << 16


def allow_connections(wanted: int | None, *, files_each: int = 1) -> int:
    """Raise this process's limit of open files as far as it may be (often it is 1024); return how many connections fit.

    That is the number that is wanted, or up to 10,000 if that is None. A connection needs ``files_each`` open files.

    Raises:
        ValueError: The limit of open files has no room for that many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if files > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    files = max(files, soft)
    room = (files - _OTHER_FILES) // files_each
    if room < 1 or (wanted is not None and wanted > room):
        raise ValueError(
            f"max_connections: {wanted or 1} connections need {(wanted or 1) * files_each + _OTHER_FILES} open files, "
            "but the "
            f"process may have {files}; raise that limit (ulimit -n, LimitNOFILE), or ask for fewer"
        )
    return min(room, _MOST) if wanted is None else wanted


class Connections:
    """The connections of one server.

    If there are too many, the connection that has been idle longest is closed for a new one. If all are at work, the
    new one is refused; if many are refused at a time, without an answer.

    Args:
        most: Most connections at a time.
        patience_s: How long a connection may stay without a request; the head of a request has as long to arrive.
    """

    def __init__(self, most: int, patience_s: float) -> None:
        self._most = most
        self._patience_s = patience_s
        self._open: set[_Connection] = set()
        self._idle: dict[_Connection, float] = {}  # since when, longest first
        self._refused: set[_Connection] = set()
        self._num_refused = 0
        self._due_s = -math.inf  # at the last look, connections that were idle since then or longer were to be closed

    def protocol(self, **uvicorns: Any) -> asyncio.Protocol:
        """Return the protocol of a new connection; for uvicorn's setting ``http``."""
        return _Connection(self, **uvicorns)

    def close_idle(self) -> None:
        """Close connections that had been idle for too long at the last call already; call it now and then.

        After a long callback the event loop may call this before it reads what has come meanwhile. To close such a
        connection would cut off its request.
        """
        due_s, self._due_s = self._due_s, time.monotonic() - self._patience_s
        while self._idle and next(iter(self._idle.values())) <= due_s:
            connection = next(iter(self._idle))
            del self._idle[connection]
            connection.transport.close()

    def enter(self, connection: _Connection) -> bool:
        """Return whether a new connection may stay."""
        if len(self._open) >= self._most and not self._make_room():
            return False
        self._open.add(connection)
        self.note(connection, is_idle=True)
        return True

    def note(self, connection: _Connection, *, is_idle: bool) -> None:
        """Note whether a connection is idle; one that is already keeps the time at which it became idle."""
        if is_idle and connection in self._open:
            self._idle.setdefault(connection, time.monotonic())
        else:
            self._idle.pop(connection, None)

    def leave(self, connection: _Connection) -> None:
        """Forget a connection."""
        self._open.discard(connection)
        self._refused.discard(connection)
        self._idle.pop(connection, None)

    def refuse(self, connection: _Connection) -> ApiError | None:
        """Return the answer for a connection without room; None if too many are being answered already."""
        self._num_refused += 1
        if self._num_refused & (self._num_refused - 1) == 0:  # 1, 2, 4, 8 and so on: no flood of lines
            logger.warning(
                "%d connections are at work (--limit max_connections): refused %d", self._most, self._num_refused
            )
        if len(self._refused) >= _MOST_REFUSED:
            return None
        self._refused.add(connection)
        return ApiError(
            "the server has too many connections; send the request again later",
            status=503,
            code="overloaded",
            retry_after_s=_RETRY_S,
        )

    def _make_room(self) -> bool:
        # A client that has not read all of an answer is not idle.
        for connection in self._idle:
            if not connection.transport.get_write_buffer_size():
                self.leave(connection)
                connection.transport.abort()
                return True
        return False


class UnderPath:
    """An ASGI application under a path, which its calls may have or lack: what is inside sees paths without it."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(self._root_path)
        if path.startswith("/"):  # else another path begins alike
            scope = {**scope, "path": path}
        await self._app({**scope, "root_path": self._root_path}, receive, send)


class _Connection(HttpToolsProtocol):
    """A connection, made by uvicorn."""

    def __init__(self, connections: Connections, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._all = connections
        self._is_refused = False
        self._is_in_head = False
        self._num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._all.enter(self):
            self._is_refused = True
            error = self._all.refuse(self)
            if error is None:
                transport.abort()
                return
            self._answer(error)
            if transport.can_write_eof():  # not with TLS
                transport.write_eof()  # and no more: closed with unread bytes, it would take the answer back
            self.loop.call_later(_GOODBYE_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > _MAX_HEAD_BYTES:
                self.send_400_response(f"its head is longer than {_MAX_HEAD_BYTES} bytes")
                return
        super().data_received(data)
        self._note()

    def on_message_begin(self) -> None:
        self._is_in_head, self._num_head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        version, num_hosts = self.parser.get_http_version(), sum(name == b"host" for name, _ in self.headers)
        if version not in ("1.0", "1.1") or num_hosts > 1 or (version == "1.1" and not num_hosts):
            raise ValueError("no request of HTTP/1.0, or of HTTP/1.1 with its one Host")  # the parser takes more
        super().on_headers_complete()
        if self.parser.should_upgrade():  # to what is not here: the parser takes no request behind this one
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def send_400_response(self, msg: str) -> None:
        cycle = self.cycle
        if cycle is not None and not (cycle.response_complete or cycle.more_body):
            self._is_refused = True  # what comes behind a whole request is no reason to answer that otherwise
            cycle.keep_alive = False
            return
        # In the middle of an answer there is nothing to say any more.
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self._answer(ApiError(f"this is no HTTP request: {msg.lower()}", code="invalid_http"))
        self.transport.close()

    def _answer(self, error: ApiError) -> None:
        body = json.dumps(error.body()).encode()
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\nConnection: close\r\n"
        if (after_s := error.response().headers.get("retry-after")) is not None:
            head += f"Retry-After: {after_s}\r\n"
        self.transport.write(f"{head}\r\n".encode() + body)

    def _note(self) -> None:
        cycle = self.cycle
        self._all.note(self, is_idle=cycle is None or cycle.response_complete)


class HeadAsGet:
    """ASGI middleware: answers HEAD as it would GET; the connection sends the head of that alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "method": "GET"} if scope["method"] == "HEAD" else scope, receive, send)


_REQUEST_ID_HEADER = "x-request-id"
# What may stand in a header and in a log line without harm; anything else is replaced.
_GIVEN = re.compile(rb"[\w.:/+=-]{1,128}", re.ASCII)


class RequestLog:
    """ASGI middleware: takes a request's ``x-request-id`` or makes one, and records the request when it is answered.

    The application leaves ``caller``, ``refusal`` and ``outputs`` in the request's state. ``traces`` is told of each
    completion and chat that is over.
    """

    def __init__(self, app: ASGIApp, traces: OtlpTraces | None = None) -> None:
        self._app = app
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"  # the server has neither websockets nor a lifespan
        began_s = time.monotonic()
        given = dict(scope["headers"]).get(_REQUEST_ID_HEADER.encode(), b"")
        name = given.decode() if _GIVEN.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        request_id.set(name)  # for good: this task is the request's, and what goes wrong is logged last
        status = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[_REQUEST_ID_HEADER] = name
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
            method,
            path,
            status,
            extra={
                "method": method,
                "path": path,
                "status": status,
                "seconds": round(ended_s - began_s, 6),
                "key": None if caller is None else caller.name,
                "call_id": None if outputs is None else outputs.job.call_id,
            },
        )
