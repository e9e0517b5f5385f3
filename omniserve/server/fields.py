"""From the body of a request to a checked model of its fields, or an error that names the field."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from omniserve.server.errors import ApiError

M = TypeVar("M", bound=BaseModel)

_USE_TOOLS = "{name} is not supported; use tools and tool_choice"
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "audio output is not supported; remove {name}"),
    "function_call": (("none",), _USE_TOOLS),
    "functions": (([],), _USE_TOOLS),
    "modalities": ((["text"],), "only text is supported; remove {name}"),
    "moderation": ((), "{name} is not supported; remove it"),
    "prompt_cache_retention": ((), "{name} is not supported; remove it"),
    "reasoning_effort": (("none",), "{name} is not supported; remove it"),
    "store": ((False,), "answers are not stored; remove {name} or set it to false"),
    "suffix": (("",), "insertion is not supported; remove {name}"),
    "verbosity": (("medium",), "{name} is not supported; remove it"),
    "web_search_options": ((), "web search is not supported; remove {name}"),
}
"""Fields of OpenAI's that this server cannot honour -> (values that ask for nothing, why others are refused)."""


def read_fields(body: bytes) -> dict[str, Any]:
    """Return the fields of a request's body, without nulls.

    Raises:
        ApiError: It is no JSON object.
    """
    try:
        # Unlike Python's own: a limit to nesting (200), so that nothing behind it runs out of stack, and no half
        # surrogate pairs, which no tokenizer takes.
        fields = from_json(body)
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(f"the body must be a JSON object, got {_short(fields)}", code="invalid_json")
    return _without_nulls(fields)


def refuse_unsupported(fields: dict[str, Any]) -> None:
    """Remove unsupported fields that ask for nothing from a request's body, in place.

    Raises:
        ApiError: A field asks for something that is not supported.
    """
    for name in fields.keys() & REFUSED.keys():
        harmless, message = REFUSED[name]
        if fields[name] not in harmless:
            raise ApiError(message.format(name=name), param=name, code="unsupported_parameter")
        del fields[name]


def validate(kind: type[M], fields: dict[str, Any]) -> M:
    """Return the fields as a model of this kind.

    Raises:
        ApiError: One is unknown, missing, ill-typed or out of range.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _field_error(kind, error) from None


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """Drop nulls: OpenAI takes them for an absent field, also in messages that came out of an earlier answer."""
    fields = {name: value for name, value in fields.items() if value is not None}
    if isinstance(fields.get("messages"), list):
        fields["messages"] = [
            {k: v for k, v in message.items() if v is not None and not (k in ("annotations", "tool_calls") and v == [])}
            if isinstance(message, dict)
            else message
            for message in fields["messages"]
        ]
    return fields


def _field_error(kind: type[BaseModel], error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    location, message = first["loc"], first["msg"].removeprefix("Value error, ")
    path = ".".join(map(str, location))
    if first["type"] == "missing":
        return ApiError(f"{path} is missing", param=path, code="missing_required_parameter")
    if first["type"] == "extra_forbidden":
        hint = ""
        if len(location) == 1:
            close = difflib.get_close_matches(str(location[0]), kind.model_fields, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else f"; known fields: {', '.join(kind.model_fields)}"
        return ApiError(f"unknown field {path!r}: remove it{hint}", param=path, code="unknown_parameter")
    if not location:  # of several fields together
        return ApiError(message, code="invalid_value")
    return ApiError(f"{path}: {message}; got {_short(first['input'])}", param=path, code="invalid_value")


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
