"""Limits: what one server takes at most, so that no client can make it grow without bound."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from starlette.requests import Request

from omniserve.server.errors import ApiError

MIB = 1 << 20
# Largest bodies that may be in memory at a time.
_BODIES_AT_A_TIME = 8
# Weight of the newest request in the mean of how long they waited.
_NEWEST = 0.1
_LONGEST_RETRY_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """See ``server_flags`` for what happens beyond each."""

    max_body_bytes: int = 32 * MIB
    """Of one request to generate something."""
    max_queued_requests: int = 4096
    """Of each class, waiting for their first token."""
    max_unread_tokens: int = 8192
    """Per choice of a stream, waiting for its reader."""
    stall_timeout_s: float = 60.0
    """A client that takes nothing of its stream for so long is taken for gone; a body has so long to arrive, and so has
    the head of a request on an open connection."""
    max_connections: int | None = None
    """At a time; None: as the limit of open files allows, up to 10,000."""


class Backlog:
    """Counts requests from the moment they are sent to the engine until their first token.

    Args:
        class_names: The engine's classes.
        most: Requests of one class that may wait at a time, >= 1.
    """

    def __init__(self, class_names: Iterable[str], most: int) -> None:
        self._most = most
        self.num_waiting = dict.fromkeys(class_names, 0)
        self._waited_s = dict.fromkeys(self.num_waiting, 0.0)

    def enter(self, service_class: str, number: int) -> None:
        """Count requests that are about to wait.

        Raises:
            ApiError: There are too many of their class already: 429, or 400 if there could never be so many.
        """
        if number > self._most:
            raise ApiError(
                f"the call is {number} requests (prompts times n), but only {self._most} of a class may wait "
                "(--max-queued-requests); send several calls"
            )
        if self.num_waiting[service_class] + number > self._most:
            raise ApiError(
                f"{self.num_waiting[service_class]} requests of class {service_class!r} wait already, of at most "
                f"{self._most}; send the request again later",
                status=429,
                code="queue_full",
                retry_after_s=min(self._waited_s[service_class], _LONGEST_RETRY_S),
            )
        self.num_waiting[service_class] += number

    def leave(self, service_class: str, waited_s: float) -> None:
        """Count one request that had its first token, or that ended before."""
        self.num_waiting[service_class] -= 1
        self._waited_s[service_class] += _NEWEST * (waited_s - self._waited_s[service_class])


class BodyReader:
    """Reads bodies of requests: each up to a size, and all that are held at a time up to a few times that.

    Args:
        max_bytes: Of one.
        timeout_s: How long one may take to arrive.
    """

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._left = _BODIES_AT_A_TIME * max_bytes

    @contextlib.asynccontextmanager
    async def hold(self, request: Request) -> AsyncIterator[bytes]:
        """Read the body, which counts as held until the block ends: until it is parsed and its text encoded, say.

        Raises:
            ClientDisconnect: The client left before its end.
            ApiError: 413: it is too large. 408: it takes too long. 503: too much is held at this moment.
        """
        parts, size = [], 0
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    async for part in request.stream():
                        size += len(part)
                        self._left -= len(part)
                        self._check(size)
                        parts.append(part)
            except TimeoutError:
                raise ApiError(
                    f"the body did not arrive within {self._timeout_s:g} s (--stall-timeout); send less, or faster",
                    status=408,
                    code="request_timeout",
                ) from None
            body = b"".join(parts)
            parts.clear()
            yield body
        finally:
            self._left += size

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            raise ApiError(
                f"the body is larger than {self._max_bytes / MIB:g} MiB (--max-body-mib); send less",
                status=413,
                code="request_too_large",
            )
        if self._left < 0:
            raise ApiError(
                "too many large requests arrive at this moment; send the request again later",
                status=503,
                code="overloaded",
                retry_after_s=1,
            )
