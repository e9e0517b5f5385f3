"""What answers look like: for /openapi.json, and for tests that hold the answers to it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class ErrorObject(BaseModel):
    """What is wrong; refusals under load have more fields, such as ``predicted_ttft_ms``."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """Every answer that is no success."""

    error: ErrorObject


class Usage(BaseModel):
    """Tokens of a call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    service_tier: str
    usage: Usage


class TextChoice(BaseModel):
    """A text of a completion."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class Completion(_Answer):
    """Answer of /v1/completions; streamed ones come in pieces of the same form."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class AnsweredCall(BaseModel):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: dict[Literal["name", "arguments"], str]


class AnsweredMessage(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[AnsweredCall] = []


class ChatChoice(BaseModel):
    """A choice of a chat completion."""

    index: int
    message: AnsweredMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(_Answer):
    """Answer of /v1/chat/completions; streamed ones come as ``chat.completion.chunk``."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Model(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: list[Model]


class Tokens(BaseModel):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(BaseModel):
    """Answer of /detokenize."""

    prompt: str


class Status(BaseModel):
    """Answer of /health."""

    status: Literal["ok"]


class File(BaseModel):
    """An uploaded or written file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]


class DeletedFile(BaseModel):
    """Answer of DELETE /v1/files/{file_id}."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class Batch(BaseModel):
    """A batch, with OpenAI's other fields."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    request_counts: dict[Literal["total", "completed", "failed"], int]


class _Page(BaseModel):
    object: Literal["list"]
    has_more: bool
    first_id: str | None
    last_id: str | None


class FilePage(_Page):
    """A page of files."""

    data: list[File]


class BatchPage(_Page):
    """A page of batches."""

    data: list[Batch]


class Upload(BaseModel):
    """Form of POST /v1/files; also ``expires_after[anchor]`` and ``expires_after[seconds]``."""

    file: str = Field(json_schema_extra={"format": "binary"})
    purpose: Literal["batch"]
