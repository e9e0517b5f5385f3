"""Bodies of requests: each up to a size, and all that are held at a time up to a few times that."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.requests import Request

from omniserve.server.errors import ApiError
from omniserve.server.limits import MIB

# Largest bodies that may be in memory at a time.
_AT_A_TIME = 8


class BodyReader:
    """Reads bodies.

    Args:
        max_bytes: Of one.
        timeout_s: How long one may take to arrive.
    """

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._left = _AT_A_TIME * max_bytes

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
