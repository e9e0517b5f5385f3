"""Errors in OpenAI's shape."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from omniserve.core.errors import EngineStopped, RequestRejected

CLIENT_CLOSED_REQUEST = 499  # as nginx has it; the client is gone


class ApiError(Exception):
    """An answer other than success.

    Args:
        message: What is wrong and what to change.
        status: HTTP status.
        param: The request's field at fault.
        code: OpenAI's machine-readable code.
        retry_after_s: Goes out as the Retry-After header, rounded up to whole seconds.
        details: More fields of the error object, which OpenAI does not have.
        is_final: No retry can succeed, though the status suggests one; OpenAI's clients read ``x-should-retry``.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        details: Mapping[str, Any] | None = None,
        is_final: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.details = details or {}
        self.is_final = is_final

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        kind = {
            401: "authentication_error",
            403: "permission_error",
            404: "not_found_error",
            429: "rate_limit_error",
        }.get(self.status)
        if kind is None:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error | dict(self.details)}

    def response(self) -> Response:
        """Return the HTTP response."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.is_final:
            headers["x-should-retry"] = "false"
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        return Response(json.dumps(self.body()), self.status, headers, media_type="application/json")


class ContextExceeded(ApiError):
    """A prompt that leaves no room for an output.

    Args:
        message: As in ``ApiError``.
        num_tokens: Number of the prompt's tokens, or at least as many.
        max_tokens: Most tokens of a prompt and its output.
        param: As in ``ApiError``.
    """

    def __init__(self, message: str, *, num_tokens: int, max_tokens: int, param: str) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class EngineRemoved(EngineStopped):
    """An engine was removed while it had the request: nothing is wrong with either."""


def from_engine(error: Exception) -> ApiError:
    """Translate what the engine said about one request.

    Raises:
        Exception: ``error`` itself if it is none of the errors that belong to a request.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestRejected):
        details = {
            "predicted_ttft_ms": _milliseconds(error.predicted_ttft_s),
            "required_ttft_ms": _milliseconds(error.required_ttft_s),
        }
        if error.required_s is not None:
            details |= {
                "predicted_ms": _milliseconds(error.predicted_s),
                "required_ms": _milliseconds(error.required_s),
            }
        return ApiError(
            str(error),
            status=429,
            code="rate_limit_exceeded",
            retry_after_s=error.retry_after_s,
            details=details,
            is_final=error.retry_after_s is None,
        )
    if isinstance(error, EngineRemoved):
        return ApiError(f"{error}; send the request again", status=503, code="engine_removed", retry_after_s=1)
    if isinstance(error, EngineStopped):
        message = f"the engine has stopped: {error}; send the request again"
        return ApiError(message, status=500, code="engine_stopped")
    if isinstance(error, ValueError):
        return ApiError(str(error))
    raise error


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def shutting_down() -> ApiError:
    """Return the error of requests that the server's end meets."""
    message = "the server is shutting down; send the request again later"
    # To a proxy's next server, perhaps; this process does not know when it is started again.
    return ApiError(message, status=503, code="shutting_down", retry_after_s=1)


def engine_gone(reason: str, retry_after_s: float | None = None) -> ApiError:
    """Return the error of requests after the engine's death; without ``retry_after_s`` it is not expected back."""
    message = f"the engine has stopped: {reason}"
    if retry_after_s is not None:
        message += "; it is being started again, send the request again later"
    return ApiError(message, status=503, code="engine_stopped", retry_after_s=retry_after_s)
