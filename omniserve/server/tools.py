"""Tools: what a chat request says of them, and the grammar of calls that must be made.

The one way of writing a call that is known is Hermes', which Qwen's models share: a line ``<tool_call>``, a line with a
JSON object of ``name`` and ``arguments``, a line ``</tool_call>``; any number of them, with or without text before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import from_json

from omniserve.sampling.grammar import json_value

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"

_STRICT = ConfigDict(extra="forbid", strict=True)
_NAME = r"^[A-Za-z0-9_.-]{1,64}$"


class Function(BaseModel):
    """A function that the model may call."""

    model_config = _STRICT

    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of its arguments; None: it takes none."""
    strict: bool | None = None
    """Calls keep the schema, whatever the model would say. Calls that must be made always do."""


class Tool(BaseModel):
    """One of ``tools``."""

    model_config = _STRICT

    type: Literal["function"]
    function: Function


class NamedFunction(BaseModel):
    """The function of a ``tool_choice``."""

    model_config = _STRICT

    name: str


class NamedTool(BaseModel):
    """``tool_choice`` as an object: the tool to call."""

    model_config = _STRICT

    type: Literal["function"]
    function: NamedFunction


def _tool_choice(value: Any) -> Any:
    if value in ("none", "auto", "required"):
        return value
    try:
        return NamedTool.model_validate(value)
    except ValueError:
        message = "must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"
        raise ValueError(message) from None


ToolChoice = Annotated[
    Any,
    BeforeValidator(_tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedTool),
]
"""``none``, ``auto``, ``required`` or a NamedTool."""


class FunctionCall(BaseModel):
    """What an assistant's message called."""

    model_config = _STRICT

    name: str
    arguments: str
    """JSON text, as OpenAI has it."""


class ToolCall(BaseModel):
    """One call of an assistant's message."""

    model_config = _STRICT

    id: str
    type: Literal["function"]
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates take it: with its arguments as an object.

        Raises:
            ValueError: They are no JSON object.
        """
        try:
            arguments = from_json(self.function.arguments or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise ValueError(f"arguments of the call {self.id!r} must be the text of a JSON object")
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


def calls_grammar(tools: Sequence[Tool], *, free_text: bool, several: bool) -> str:
    """Return the grammar of an answer that calls tools, each with arguments of its schema.

    Args:
        tools: Those that may be called, with different names.
        free_text: There may be text around the calls, and no call at all; else there is at least one, and nothing else.
        several: There may be more than one call; with free text there may in any case.
    """
    # One rule a tool, because references inside a schema are relative to its own root.
    calls = " | ".join(f"call_{i}" for i in range(len(tools)))
    if free_text:
        # Lazy, so that the first CALL_BEGIN is one, and no text.
        rules = ["start: (head call)* TEXT", f'head[lazy]: TEXT "{CALL_BEGIN}"', r"TEXT: /(.|\n)*/"]
        begin = "\n"
    else:
        rules = [r'start: call ("\n" call)*' if several else "start: call"]
        begin = f"{CALL_BEGIN}\n"
    rules.append(f"call: {calls}")
    for i, tool in enumerate(tools):
        head = json.dumps(f'{begin}{{"name": "{tool.function.name}", "arguments": ')
        tail = json.dumps(f"}}\n{CALL_END}")
        must_keep = not free_text or tool.function.strict
        schema = (tool.function.parameters or {"properties": {}, "additionalProperties": False}) if must_keep else {}
        rules.append(f"call_{i}: {head} args_{i} {tail}")
        rules.append(f"args_{i}: {json_value({'type': 'object', **schema})}")
    return "\n".join(rules)
