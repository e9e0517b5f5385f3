"""/openapi.json: what the routes take and answer.

The routes check bodies by hand, so that errors are OpenAI's; here the models that they check with are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.routing import BaseRoute

from omniserve.server.answer_models import Error

_JSON = "application/json"
_ERRORS = {
    400: "The request is wrong; the message says what to change.",
    401: "There is no key, or a wrong one.",
    404: "There is no such model, file or batch.",
    408: "The body, or the reader of the answer, is too slow.",
    409: "Not while it is used, or not any more.",
    413: "The body is too large.",
    429: "Too much work, or too many calls; see Retry-After.",
    500: "The server or its engine failed.",
    503: "Not now; see Retry-After.",
}
GENERATION_ERRORS = (400, 404, 408, 413, 429, 500, 503)
STORAGE_ERRORS = (400, 404, 500, 503)


def takes(kind: type[BaseModel], media_type: str = _JSON) -> dict[str, Any]:
    """Return a route's ``openapi_extra``: its body is ``kind``."""
    return {"requestBody": {"required": True, "content": {media_type: {"schema": _schema(kind)}}}}


def asks(kind: type[BaseModel]) -> dict[str, Any]:
    """Return a route's ``openapi_extra``: its query is ``kind``, whose fields are scalars."""
    fields = kind.model_json_schema()["properties"]
    return {"parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in fields.items()]}


def answers(
    kind: type[BaseModel] | None, *errors: int, media_type: str = _JSON, streams: bool = False
) -> dict[int | str, dict[str, Any]]:
    """Return a route's ``responses``.

    Args:
        kind: Of a success; None: bytes.
        errors: Statuses of errors.
        media_type: Of a success.
        streams: It may be server-sent events, too.
    """
    content: dict[str, Any] = {media_type: {"schema": {"type": "string"} if kind is None else _schema(kind)}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    described: dict[int | str, dict[str, Any]] = {200: {"description": "Success", "content": content}}
    for status in errors:
        described[status] = {"description": _ERRORS[status], "content": {_JSON: {"schema": _schema(Error)}}}
    return described


def document(routes: Iterable[BaseRoute], *, version: str, is_guarded: Callable[[str], bool]) -> dict[str, Any]:
    """Return the document.

    Args:
        routes: The application's.
        version: Of the server.
        is_guarded: Whether a key is asked for a path.
    """
    found = get_openapi(title="OmniServe", version=version, routes=list(routes))
    schemas: dict[str, Any] = {}
    for path, operations in found["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own, which no route here answers
            if is_guarded(path):
                operation["security"] = [{"key": []}]
                operation["responses"]["401"] = answers(None, 401)[401]
            described = [operation.get("requestBody", {}), *operation["responses"].values()]
            for content in (part for item in described for part in item.get("content", {}).values()):
                schemas |= content["schema"].pop("$defs", {})
    found["components"] = {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
    return found


def _schema(kind: type[BaseModel]) -> dict[str, Any]:
    return kind.model_json_schema(ref_template="#/components/schemas/{model}")
