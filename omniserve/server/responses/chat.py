"""A request to /v1/responses as a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import PrivateAttr

from omniserve.server.completions.constraints import Constraint, with_format_of
from omniserve.server.completions.protocol import ChatRequest, check_combinations
from omniserve.server.errors import ApiError
from omniserve.server.fields import UnknownFields, validate
from omniserve.server.responses.fields import (
    INCLUDE_LOGPROBS,
    PASSED_ON,
    AllowedToolsChoice,
    ChosenTool,
    ResponseCustomTool,
    ResponseFields,
    ResponseFunction,
    ResponseHostedTool,
    TextFormat,
)
from omniserve.server.responses.items import CUSTOM_INPUT, Item, messages_of, skipped, stored_form

_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
"""Fields of chats -> those of responses that mean the same."""


class ResponsesRequest(ChatRequest):
    """A chat that is answered as a response."""

    prompt_field = "input"

    _asked: ResponseFields = PrivateAttr()
    _caller: str | None = PrivateAttr(None)

    @property
    def asked(self) -> ResponseFields:
        """The request as it came."""
        return self._asked

    @property
    def caller(self) -> str | None:
        """The name of the request's API key."""
        return self._caller

    @property
    def stored_input(self) -> str:
        """The items of the request's input, as they are stored; empty if they are not."""
        return json.dumps(stored_form(self.asked.input)) if self.asked.store else ""

    @property
    def custom_tools(self) -> frozenset[str]:
        """Names of the tools whose input is text."""
        return frozenset(tool.name for tool in self.asked.tools if isinstance(tool, ResponseCustomTool))

    @property
    def constraint(self) -> Constraint | None:
        return with_format_of(super().constraint, "text.format")


def chat_of(
    asked: ResponseFields,
    raw: Mapping[str, Any],
    history: Sequence[Item],
    *,
    caller: str | None = None,
    defaults: Mapping[str, Any],
    unknown: UnknownFields,
) -> ResponsesRequest:
    """Return the chat that a request asks for.

    Args:
        asked: The request.
        raw: Its fields as they came; those that chats have, too, are taken from here.
        history: All items of the chat; references have been replaced by what they refer to.
        caller: The name of the request's API key.
        defaults: Values of the chat's fields that the request does not say.
        unknown: What becomes of fields that no API documents.

    Raises:
        ApiError: As ``protocol.parse``.
    """
    messages = messages_of(history, asked.instructions)
    if not messages:
        raise ApiError("input is missing; send a text, or items", param="input", code="missing_required_parameter")
    offered = [tool for tool in asked.tools if not isinstance(tool, ResponseHostedTool)]
    text, reasoning = asked.text, asked.reasoning
    with_logprobs = INCLUDE_LOGPROBS in asked.include or bool(asked.top_logprobs)
    fields: dict[str, Any] = {
        **{name: raw[name] for name in PASSED_ON if name in raw},
        **{name: getattr(asked, name) for name in _SAME},
        "messages": messages,
        "max_completion_tokens": asked.max_output_tokens,
        "tools": [_tool(tool) for tool in offered],
        "tool_choice": _tool_choice(asked.tool_choice, offered),
        "response_format": None if text is None or text.format is None else _format(text.format),
        "verbosity": None if text is None else text.verbosity,
        "reasoning_effort": None if reasoning is None else reasoning.effort,
        "logprobs": with_logprobs,
        "top_logprobs": asked.top_logprobs if with_logprobs else None,
    }
    said = {name: value for name, value in fields.items() if value is not None}
    try:
        request = validate(ResponsesRequest, {**defaults, **said}, unknown)
        request._asked, request._caller = asked, caller
        check_combinations(request)
    except ApiError as error:
        raise _renamed(error) from None
    more = [f"tools.{tool.type}" for tool in asked.tools if isinstance(tool, ResponseHostedTool)]
    more += ["tools.format" for tool in offered if isinstance(tool, ResponseCustomTool) and _has_grammar(tool)]
    names = (*asked.ignored_fields, *request.ignored_fields, *more, *skipped(history))
    request._ignored_fields = tuple(dict.fromkeys(names))
    return request


_SAME = (
    *("model", "stream", "parallel_tool_calls", "temperature", "top_p", "service_tier", "user", "metadata"),
    *("safety_identifier", "prompt_cache_key"),
)


def _tool(tool: ResponseFunction | ResponseCustomTool) -> dict[str, Any]:
    if isinstance(tool, ResponseFunction):
        names = ("name", "description", "parameters", "strict")
        return {"type": "function", "function": {name: getattr(tool, name) for name in names}}
    description = tool.description or ""
    if tool.format is not None and _has_grammar(tool):
        description += f"\n\nThe input keeps this {tool.format.syntax or ''} grammar:\n{tool.format.definition}"
    parameters = {
        "type": "object",
        "properties": {CUSTOM_INPUT: {"type": "string", "description": "The input of the tool, as text."}},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
    function = {"name": tool.name, "description": description.strip() or None, "parameters": parameters}
    return {"type": "function", "function": function}


def _has_grammar(tool: ResponseCustomTool) -> bool:
    return tool.format is not None and tool.format.type == "grammar"


def _tool_choice(choice: Any, offered: Sequence[ResponseFunction | ResponseCustomTool]) -> Any:
    if isinstance(choice, ChosenTool):
        return _named(choice)
    if not isinstance(choice, AllowedToolsChoice):
        return choice
    of_clients = [tool for tool in choice.tools if tool.type in ("function", "custom")]
    if not of_clients and choice.mode == "auto":
        return "none"
    tools = [_named(tool) for tool in of_clients or choice.tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}


def _named(tool: ChosenTool) -> dict[str, Any]:
    if tool.type not in ("function", "custom"):
        raise ApiError(
            f"tool_choice asks for {tool.type!r}, which this server does not run; choose a function",
            param="tool_choice",
            code="unsupported_parameter",
        )
    if tool.name is None:
        raise ApiError("tool_choice has no name; give that of a tool", param="tool_choice", code="invalid_value")
    return {"type": "function", "function": {"name": tool.name}}


def _format(form: TextFormat) -> dict[str, Any]:
    if form.schema_ is None:
        return {"type": form.type}
    return {"type": form.type, "json_schema": {"name": form.name, "schema": form.schema_}}


def _renamed(error: ApiError) -> ApiError:
    """Return an error about a chat as one about the request that it was made of."""
    if error.param is None:
        return error
    head, dot, rest = error.param.partition(".")
    name = _NAMES.get(head, head)
    message = error.message.replace(head, name) if name != head else error.message
    return ApiError(message, status=error.status, param=f"{name}{dot}{rest}", code=error.code)
