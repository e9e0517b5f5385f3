"""Hands on what is not a worker's own to the owner's application, as HTTP over a Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection

import httpx
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omniserve.server.anthropic.errors import error_response
from omniserve.server.errors import ApiError
from omniserve.server.generate import ClientGone, or_disconnect

OWN_PATHS = frozenset(
    ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize")
)
"""Paths whose POSTs a worker answers itself."""
TEXTS_PATHS = frozenset(("/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/rerank", "/rerank"))
"""These, too, unless there is a second model, whose process is the owner's."""
# Of one connection alone; each side makes its own.
_HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"))


class Forwarding:
    """ASGI middleware: POSTs to some paths go to the application, all others to the owner.

    Args:
        app: The worker's application.
        owner_path: Path of the owner's Unix socket.
        root_path: The path that requests may have in front of theirs.
        own_paths: The paths of the application.
    """

    def __init__(self, app: ASGIApp, owner_path: str, root_path: str, own_paths: Collection[str] = OWN_PATHS) -> None:
        self._app = app
        self._own_paths = own_paths
        self._root_path = root_path
        transport = httpx.AsyncHTTPTransport(uds=owner_path, limits=httpx.Limits(max_connections=None))
        self._client = httpx.AsyncClient(transport=transport, timeout=None, trust_env=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(self._root_path)
        if scope["method"] == "POST" and path in self._own_paths:
            await self._app(scope, receive, send)
            return
        body = _Body(receive)
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        headers = [(name, value) for name, value in scope["headers"] if name not in _HOP_BY_HOP]
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        if not has_body:
            body.without()
        request = httpx.Request(
            scope["method"],
            "http://owner",
            headers=headers,
            content=body.parts() if has_body else None,
            extensions={"target": target},  # as it came: httpx would resolve the dots in "/v1/../admin"
        )
        try:
            try:
                response = await or_disconnect(body.wait_for_end, self._client.send(request, stream=True))
            except httpx.TransportError as error:
                message = f"the server's first process did not answer ({type(error).__name__}); send the request again"
                refusal = ApiError(message, status=503, code="overloaded", retry_after_s=1)
                await error_response(refusal, scope)(scope, receive, send)
                return
            try:
                await or_disconnect(body.wait_for_end, _answer(response, send))
            finally:
                await response.aclose()
        except ClientGone:
            pass  # there is nothing to send any more; the owner has seen its connection end

    async def close(self) -> None:
        """Close the connections to the owner."""
        await self._client.aclose()


class _Body:
    """The body of a request, and afterwards the end of its connection."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._was_read = asyncio.Event()

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body.

        Raises:
            ClientGone: The connection ended before it.
        """
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            more = message.get("more_body", False)
            if part := message.get("body"):
                yield part
        self._was_read.set()

    def without(self) -> None:
        """Note that the request has none."""
        self._was_read.set()

    async def wait_for_end(self) -> Message:
        """Receive what comes behind the body."""
        await self._was_read.wait()
        return await self._receive()


async def _answer(response: httpx.Response, send: Send) -> None:
    headers = [(name.lower(), value) for name, value in response.headers.raw if name.lower() not in _HOP_BY_HOP]
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    async for part in response.aiter_raw():
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
