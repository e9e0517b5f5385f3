"""The messages of a chat, and the tools that its model may call."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import from_json

from omniserve.server.fields import StrictModel, without_nulls

MAX_MESSAGES = 4096

TOOL_NAME = r"^[A-Za-z0-9_./:-]{1,256}$"


class Function(StrictModel):
    """A function that the model may call."""

    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of its arguments; None: it takes none."""
    strict: bool | None = None
    """Calls keep the schema, whatever the model would say. Calls that must be made always do."""


class Tool(StrictModel):
    """An entry of ``tools``."""

    type: Literal["function"] = "function"
    function: Function

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """The schema that its arguments have to keep."""
        return {"type": "object", **(self.function.parameters or {"properties": {}, "additionalProperties": False})}

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates take it."""
        fields = ("name", "description", "parameters", "strict")
        values = {name: getattr(self.function, name) for name in fields}
        return {"type": self.type, "function": without_nulls(values)}


class NamedFunction(StrictModel):
    """The function of a ``tool_choice``."""

    name: str


class NamedTool(StrictModel):
    """``tool_choice`` as an object: the tool to call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(StrictModel):
    """A part of the tools."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class AllowedToolChoice(StrictModel):
    """``tool_choice`` as an object: the tools that may be called, or of which one has to be."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _tool_choice(value: Any) -> Any:
    if value in ("none", "auto", "required"):
        return value
    allows = isinstance(value, dict) and value.get("type") == "allowed_tools"
    try:
        return (AllowedToolChoice if allows else NamedTool).model_validate(value)
    except ValueError:
        message = "must be 'none', 'auto', 'required', {'type': 'function', 'function': {'name': ...}} or "
        message += "{'type': 'allowed_tools', 'allowed_tools': {'mode': 'auto' or 'required', 'tools': [...]}}"
        raise ValueError(message) from None


ToolChoice = Annotated[
    Any,
    BeforeValidator(
        _tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedTool | AllowedToolChoice
    ),
]
"""``none``, ``auto``, ``required``, a NamedTool or an AllowedToolChoice."""


class FunctionCall(StrictModel):
    """The function that an assistant's message calls."""

    name: str
    arguments: str | dict[str, Any] = ""
    """JSON text, as OpenAI has it; some clients send the object."""

    @property
    def for_template(self) -> dict[str, Any] | str:
        """The arguments as an object; what is not the text of one, as it is: the model may have written anything."""
        if isinstance(self.arguments, dict):
            return self.arguments
        try:
            found = from_json(self.arguments.strip() or "{}", allow_inf_nan=False)
            json.dumps(found, allow_nan=False)  # a number that is too large for a float was read as infinity
        except ValueError:
            return self.arguments
        return found if isinstance(found, dict) else self.arguments


class ToolCall(StrictModel):
    """A call of an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        fields = without_nulls(fields)
        if isinstance(fields, dict) and fields.get("type") == "custom" and isinstance(fields.get("custom"), dict):
            # A call of OpenAI's custom tools, whose input is any text.
            custom = fields.pop("custom")
            fields |= {"type": "function", "function": {"name": custom.get("name"), "arguments": custom.get("input")}}
        return fields

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates take it."""
        function = {"name": self.function.name, "arguments": self.function.for_template}
        return without_nulls({"id": self.id, "type": "function", "function": function})


_TEXT_TYPES = ("text", "input_text", "output_text")
_PartType: TypeAlias = Literal[
    "text", "input_text", "output_text", "refusal", "thinking", "reasoning", "redacted_thinking"
]


def _only_text(value: Any) -> Any:
    if isinstance(value, str) and value not in get_args(_PartType):
        raise ValueError("must be 'text': this server serves text only, no images, audio or files")
    return value


def _joined(value: Any) -> Any:
    """Return the text of what is a list of texts or of text parts, as Mistral's clients write a thought."""
    if not isinstance(value, list):
        return value
    texts: list[Any] = [item.get("text") if isinstance(item, dict) else item for item in value]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else value


class ContentPart(StrictModel):
    """A part of a message's content: text, or what an assistant refused to say or thought."""

    type: Annotated[_PartType, BeforeValidator(_only_text, json_schema_input_type=_PartType)]
    text: str | None = None
    refusal: str | None = None
    thinking: Annotated[str | None, BeforeValidator(_joined, json_schema_input_type=str | list[Any])] = None
    reasoning: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        return without_nulls(_null_as_empty(fields, "text", "refusal"))

    @model_validator(mode="after")
    def _has_its_text(self) -> ContentPart:
        field = "text" if self.type in _TEXT_TYPES else self.type
        if field in ("text", "refusal") and getattr(self, field) is None:
            raise ValueError(f"{field} is missing")
        return self

    @property
    def said(self) -> str:
        """The text that the part adds to the content."""
        return (self.text if self.type in _TEXT_TYPES else self.refusal if self.type == "refusal" else None) or ""

    @property
    def thought(self) -> str:
        """The text that the part adds to the reasoning."""
        return {"thinking": self.thinking, "reasoning": self.reasoning or self.text}.get(self.type) or ""


def _null_as_empty(fields: Any, *names: str) -> Any:
    """Return fields in which some may not be absent, but empty."""
    if not isinstance(fields, dict):
        return fields
    return {name: "" if value is None and name in names else value for name, value in fields.items()}


def _some(value: Any) -> Any:
    return [item for item in value if item is not None] if isinstance(value, list) else value


def _parts(value: Any) -> Any:
    if isinstance(value, list):
        return [{"type": "text", "text": item} if isinstance(item, str) else item for item in _some(value)]
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


TextContent = Annotated[
    list[ContentPart], BeforeValidator(_parts, json_schema_input_type=str | list[ContentPart | str])
]
"""Text, which clients may send as a string or in parts."""


def text_of(content: list[ContentPart]) -> str:
    """Return the text of a content."""
    return "".join(part.said for part in content)


class Message(StrictModel):
    """A message of a chat: whatever a server may have written as an answer is taken back."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: TextContent = Field([])
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], BeforeValidator(_some, json_schema_input_type=list[ToolCall])] = Field([])
    """The functions that an assistant's message calls."""
    function_call: FunctionCall | None = None
    """Former name of a single call, which a message of the role ``function`` answers."""
    tool_call_id: str | None = None
    """The call that a tool's message answers."""
    refusal: str | None = None
    """The assistant's refusal, in the place of a content."""
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    """An assistant's reasoning before the content, under any of three names."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        return without_nulls(_null_as_empty(fields, "content"))

    @model_validator(mode="after")
    def _has_what_its_role_has(self) -> Message:
        if (self.tool_calls or self.function_call is not None) and self.role != "assistant":
            raise ValueError("tool_calls belong to messages of the role 'assistant'")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id belongs to messages of the role 'tool', and each of them needs it")
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise ValueError("content is missing")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates take it."""
        message: dict[str, Any] = {
            "role": {"developer": "system", "function": "tool"}.get(self.role, self.role),
            "content": text_of(self.content) or self.refusal or "",
        }
        message |= without_nulls({"name": self.name, "tool_call_id": self.tool_call_id})
        thoughts = "".join(part.thought for part in self.content)
        if thought := self.reasoning_content or self.reasoning or self.thinking or thoughts:
            # Templates know it by one of these names; transformers adds gpt-oss's.
            message |= {"reasoning_content": thought, "reasoning": thought}
        calls = [call.for_template() for call in self.tool_calls]
        if self.function_call is not None:
            calls.append(ToolCall(function=self.function_call).for_template())
        if calls:
            message["tool_calls"] = calls
        return message
