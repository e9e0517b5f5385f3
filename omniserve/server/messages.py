"""The messages of a chat, and the tools that its model may call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import from_json

from omniserve.server.errors import ApiError

MAX_MESSAGES = 4096

_NAME = r"^[A-Za-z0-9_.-]{1,64}$"


class StrictModel(BaseModel):
    """Base of what clients send: no field is unknown, and none is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Function(StrictModel):
    """A function that the model may call."""

    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of its arguments; None: it takes none."""
    strict: bool | None = None
    """Calls keep the schema, whatever the model would say. Calls that must be made always do."""


class Tool(StrictModel):
    """An entry of ``tools``."""

    type: Literal["function"]
    function: Function


class NamedFunction(StrictModel):
    """The function of a ``tool_choice``."""

    name: str


class NamedTool(StrictModel):
    """``tool_choice`` as an object: the tool to call."""

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


class FunctionCall(StrictModel):
    """The function that an assistant's message calls."""

    name: str
    arguments: str
    """JSON text, as OpenAI has it."""


class ToolCall(StrictModel):
    """A call of an assistant's message."""

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


def _only_text(value: Any) -> Any:
    if isinstance(value, str) and value != "text":
        raise ValueError("must be 'text': this server serves text only, no images, audio or files")
    return value


class TextPart(StrictModel):
    """A part of a message's content."""

    type: Annotated[Literal["text"], BeforeValidator(_only_text, json_schema_input_type=Literal["text"])]
    text: str


def _text_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


TextContent = Annotated[list[TextPart], BeforeValidator(_text_parts, json_schema_input_type=str | list[TextPart])]
"""Text, which clients may send as a string or in parts."""


class Message(StrictModel):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextContent = []
    name: str | None = None
    tool_calls: list[ToolCall] = []
    """The function that an assistant's message calls."""
    tool_call_id: str | None = None
    """The call that a tool's message answers."""

    @model_validator(mode="after")
    def _has_what_its_role_has(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to messages of the role 'assistant'")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id belongs to messages of the role 'tool', and each of them needs it")
        if not self.tool_calls and "content" not in self.model_fields_set:
            raise ValueError("content is missing")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates take it.

        Raises:
            ApiError: The arguments of a call are no JSON object.
        """
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": "".join(part.text for part in self.content),
        }
        message |= {name: getattr(self, name) for name in ("name", "tool_call_id") if getattr(self, name) is not None}
        if self.tool_calls:
            try:
                message["tool_calls"] = [call.for_template() for call in self.tool_calls]
            except ValueError as error:
                raise ApiError(f"tool_calls: {error}", param="messages") from None
        return message
