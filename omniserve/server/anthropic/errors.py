"""Errors in Anthropic's shape, for requests to its paths."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from omniserve.core.logs import request_id
from omniserve.server.errors import ApiError, ContextExceeded

REQUEST_ID_HEADER = "request-id"
"""The name that Anthropic's clients know ``x-request-id`` by."""
VERSION_HEADER = b"anthropic-version"
_OVERLOADED = 529
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def speaks_anthropic(scope: Scope) -> bool:
    """Return whether a request is to be answered in Anthropic's shape: by its path, or by its header for models."""
    path: str = scope["path"]
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return True
    is_models = path == "/v1/models" or path.startswith("/v1/models/")
    return is_models and any(name == VERSION_HEADER for name, _ in scope["headers"])


def error_body(error: ApiError) -> dict[str, Any]:
    """Return Anthropic's error object."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if isinstance(error, ContextExceeded):
        # Anthropic's words come first: Claude Code knows by them that it has to shorten the conversation.
        message = f"prompt is too long: {error.num_tokens} tokens > {error.max_tokens} maximum; {message}"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id.get()}


def error_response(error: ApiError, scope: Scope) -> Response:
    """Return the response to a request: in the shape of the API that it speaks."""
    response = error.response()
    if not speaks_anthropic(scope):
        return response
    body = json.dumps(error_body(error)).encode()
    headers = {name: value for name, value in response.headers.items() if name != "content-length"}
    if (name := request_id.get()) is not None:
        headers[REQUEST_ID_HEADER] = name
    return Response(body, _OVERLOADED if error.status == 503 else error.status, headers)
