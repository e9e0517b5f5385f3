"""The answers of Anthropic's paths, for /openapi.json."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field


class MessagesErrorObject(BaseModel):
    """The error of a refused request."""

    type: str
    message: str


class MessagesError(BaseModel):
    """The body of every answer that is no success."""

    type: Literal["error"]
    error: MessagesErrorObject
    request_id: str | None


class AnsweredText(BaseModel):
    """A text of the answer."""

    type: Literal["text"]
    text: str
    citations: None


class AnsweredThinking(BaseModel):
    """The thinking of the answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class AnsweredToolUse(BaseModel):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[Literal["type"], Literal["direct"]]


class OutputTokensDetails(BaseModel):
    """Tokens of the answer that are thinking."""

    thinking_tokens: int


class MessageUsage(BaseModel):
    """Tokens of a call: those of its prompt are the sum of ``input_tokens`` and ``cache_read_input_tokens``."""

    input_tokens: int
    """Tokens of the prompt that were computed."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    """Tokens of the prompt that the prefix cache had."""
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    service_tier: Literal["standard", "priority", "batch"]
    """``batch`` is best effort."""
    server_tool_use: None
    cache_creation: None
    inference_geo: None


class AnsweredMessage(BaseModel):
    """Answer of /v1/messages; a streamed one comes as Anthropic's events."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Annotated[AnsweredText | AnsweredThinking | AnsweredToolUse, Field(discriminator="type")]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: MessageUsage


class InputTokens(BaseModel):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int
