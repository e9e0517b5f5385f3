"""The messages of a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from omniserve.server.errors import ApiError
from omniserve.server.tools import ToolCall

MAX_MESSAGES = 4096

_STRICT = ConfigDict(extra="forbid", strict=True)


class TextPart(BaseModel):
    """One part of a message's content."""

    model_config = _STRICT

    type: Literal["text"]
    text: str


def _text_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Message(BaseModel):
    """One message of a chat."""

    model_config = _STRICT

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart], BeforeValidator(_text_parts, json_schema_input_type=str | list[TextPart])] = []
    name: str | None = None
    tool_calls: list[ToolCall] = []
    """What an assistant's message called."""
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
