"""Bodies of requests: each up to a size, and all that are being read at a time up to a few times that."""

from __future__ import annotations

from starlette.requests import Request

from omniserve.server.errors import ApiError
from omniserve.server.limits import MIB

# Largest bodies that may be in memory at a time.
_AT_A_TIME = 8


class BodyReader:
    """Reads bodies.

    Args:
        max_bytes: Of one.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._left = _AT_A_TIME * max_bytes

    async def read(self, request: Request) -> bytes:
        """Return the body; what is over a limit is not kept.

        Raises:
            ClientDisconnect: The client left before its end.
            ApiError: 413: it is too large. 503: too much is being read at this moment.
        """
        parts, size = [], 0
        try:
            async for part in request.stream():
                size += len(part)
                self._left -= len(part)
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
                parts.append(part)
            return b"".join(parts)
        finally:
            self._left += size
