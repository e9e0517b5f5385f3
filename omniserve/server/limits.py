"""Limits: what one server takes at most, so that no client can make it grow without bound."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
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


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Upper bounds of a server.

    Raises:
        ValueError: One is out of its range.
    """

    max_body_mib: float = 32.0
    """Largest body of a request to generate something, in MiB."""
    max_queued_requests: int = 4096
    """Most requests of a class that wait for their first token; more get 429."""
    max_unread_tokens: int = 8192
    """A stream ends with an error if its reader leaves more tokens of a choice unread."""
    stall_timeout_s: float = 60.0
    """A stream ends if its reader takes nothing for so many seconds. A body, or the head of a request on an open
    connection, has so long to arrive."""
    max_connections: int | None = None
    """Most open connections; idle ones give way to new ones, and if there are none, new ones get 503. None: what the
    limit of open files allows, up to 10,000."""
    shutdown_timeout_s: float = 30.0
    """Seconds that running requests may go on after SIGTERM."""
    engine_restarts: int = 3
    """How often in a row an engine that died is started again; 0: its death ends the server."""
    profile_time_limit_s: float = 30.0
    """Seconds that the start may measure if there is no latency profile yet."""
    batch_concurrency: int = 64
    """Most lines of batches that are in work at a time."""
    batch_max_lines: int = 50_000
    """Most lines of one input file."""
    max_file_mib: float = 200.0
    """Largest file that is taken, in MiB."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            may_be_0 = field.name in ("shutdown_timeout_s", "engine_restarts")
            if value is not None and not (math.isfinite(value) and (value > 0 or (may_be_0 and value == 0))):
                raise ValueError(f"{field.name} must be a number {'>=' if may_be_0 else '>'} 0, got {value}")


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
                "(--limit max_queued_requests); send several calls"
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
                    f"the body did not arrive within {self._timeout_s:g} s (--limit stall_timeout_s); "
                    "send less, or faster",
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
                f"the body is larger than {self._max_bytes / MIB:g} MiB (--limit max_body_mib); send less",
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
