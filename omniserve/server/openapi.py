"""/openapi.json: what the routes take and answer.

The routes check bodies by hand, so that errors are OpenAI's; here the models that they check with are shown. What
answers look like is here alone, and tests hold the answers to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field
from starlette.routing import BaseRoute

from omniserve.server.anthropic.openapi import MessagesError


class ErrorObject(BaseModel):
    """The error of a refused request; refusals under load have more fields, such as ``predicted_ttft_ms``."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """The body of every answer that is no success."""

    error: ErrorObject


class CompletionTokensDetails(BaseModel):
    """Tokens of the output that are reasoning, and guesses of the next tokens that were computed: those that are in the
    output, and the others; each is absent if there were none."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class PromptTokensDetails(BaseModel):
    """Tokens of the prompt that were not computed, as the prefix cache had them."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    """Absent if there was no reasoning and nothing was guessed."""


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
    token_ids: list[int] = []
    """Absent without ``return_token_ids``, as the next one."""
    prompt_token_ids: list[int] = []


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
    reasoning_content: str = ""
    """Absent if there is none, as the next one, which is the same."""
    reasoning: str = ""
    tool_calls: list[AnsweredCall] = []


class ChatChoice(BaseModel):
    """A choice of a chat completion."""

    index: int
    message: AnsweredMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] = []
    """Absent without ``return_token_ids``."""


class ChatCompletion(_Answer):
    """Answer of /v1/chat/completions; streamed ones come as ``chat.completion.chunk``."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] = []
    """Absent without ``return_token_ids``."""


class ResponseError(BaseModel):
    """The error of a response that failed."""

    code: str
    message: str


class ResponseUsage(BaseModel):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: dict[Literal["cached_tokens", "cache_write_tokens"], int]
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int]
    total_tokens: int


class ResponseObject(BaseModel):
    """Answer of /v1/responses, with the other fields of the request; streamed ones come as events that build it."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: dict[Literal["reason"], str] | None
    model: str
    output: list[dict[str, Any]]
    """Items: ``message``, ``reasoning``, ``function_call``, ``custom_tool_call``."""
    usage: ResponseUsage | None
    store: bool
    omniserve: dict[str, Any] = {}
    """``ignored_fields``: what was dropped from the request; ``not_stored``: why it was not. Absent without either."""


class DeletedResponse(BaseModel):
    """Answer of DELETE /v1/responses/{response_id}."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(BaseModel):
    """Answer of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class Model(BaseModel):
    """The model that is served, or a LoRA adapter of it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str | None = None
    """The folder of an adapter."""
    parent: str | None = None
    """The model of an adapter."""


class ModelList(BaseModel):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: list[Model]


class TierCounts(BaseModel):
    """A count for each tier."""

    device: int
    host: int
    disk: int


class CacheCleared(BaseModel):
    """Answer of /v1/cache/clear; what is on two tiers counts on both."""

    object: Literal["cache.cleared"]
    prompt_cache_key: str | None
    freed_blocks: TierCounts
    freed_tokens: TierCounts


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


class ItemPage(_Page):
    """A page of the items of a response's input."""

    data: list[dict[str, Any]]


class Upload(BaseModel):
    """Form of POST /v1/files; also ``expires_after[anchor]`` and ``expires_after[seconds]``."""

    file: str = Field(json_schema_extra={"format": "binary"})
    purpose: Literal["batch"]


_JSON = "application/json"
_EVENTS: Mapping[type[BaseModel], str] = {
    Error: "Events whose data is a chunk; the last is [DONE].",
    MessagesError: "Anthropic's events, from message_start to message_stop or error.",
}
_ERRORS = {
    400: "The request is wrong; the message says what to change.",
    401: "There is no key, or a wrong one.",
    403: "The key may not do this, or the server does not take it.",
    404: "There is no such model, file, batch or response.",
    408: "The body, or the reader of the answer, is too slow.",
    409: "The file is in use, or the batch has already ended.",
    413: "The body is too large.",
    429: "Too much work, or too many calls; see Retry-After.",
    500: "The server or its engine failed.",
    503: "Not now; see Retry-After.",
    529: "Not now; see Retry-After.",
}
GENERATION_ERRORS = (400, 404, 408, 413, 429, 500, 503)
MESSAGES_ERRORS = (400, 404, 408, 413, 429, 500, 529)
STORAGE_ERRORS = (400, 404, 500, 503)


def takes(kind: type[BaseModel], media_type: str = _JSON) -> dict[str, Any]:
    """Return a route's ``openapi_extra``: its body is ``kind``."""
    return {"requestBody": {"required": True, "content": {media_type: {"schema": _schema(kind)}}}}


def asks(kind: type[BaseModel]) -> dict[str, Any]:
    """Return a route's ``openapi_extra``: its query is ``kind``, whose fields are scalars."""
    fields = kind.model_json_schema()["properties"]
    return {"parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in fields.items()]}


def answers(
    kind: type[BaseModel] | None,
    *errors: int,
    media_type: str = _JSON,
    streams: bool = False,
    error: type[BaseModel] = Error,
) -> dict[int | str, dict[str, Any]]:
    """Return a route's ``responses``.

    Args:
        kind: Model of a success; None: bytes.
        errors: Statuses of errors.
        media_type: Media type of a success.
        streams: A success may be server-sent events, too.
        error: Model of errors.
    """
    content: dict[str, Any] = {media_type: {"schema": {"type": "string"} if kind is None else _schema(kind)}}
    if streams:
        # Without a type: some take this schema for that of the whole text, some for that of an event.
        content["text/event-stream"] = {"schema": {"description": _EVENTS[error]}}
    described: dict[int | str, dict[str, Any]] = {200: {"description": "Success", "content": content}}
    for status in errors:
        described[status] = {"description": _ERRORS[status], "content": {_JSON: {"schema": _schema(error)}}}
    return described


def document(routes: Iterable[BaseRoute], *, version: str, is_guarded: Callable[[str], bool]) -> dict[str, Any]:
    """Return the document of an application's routes; ``is_guarded`` tells the paths that ask for a key."""
    found = get_openapi(title="OmniServe", version=version, routes=list(routes))
    schemas: dict[str, Any] = {}
    for path, operations in found["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own, which no route here answers
            if is_guarded(path):
                error = MessagesError if path.startswith("/v1/messages") else Error
                operation["security"] = [{"key": []}, {"x-api-key": []}]
                operation["responses"]["401"] = answers(None, 401, error=error)[401]
            described = [operation.get("requestBody", {}), *operation["responses"].values()]
            for content in (part for item in described for part in item.get("content", {}).values()):
                schemas |= content["schema"].pop("$defs", {})
    ways = {
        "key": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    found["components"] = {"schemas": schemas, "securitySchemes": ways}
    return found


@functools.cache  # a start asks some hundred times for few kinds
def _schema(kind: type[BaseModel]) -> dict[str, Any]:
    return kind.model_json_schema(ref_template="#/components/schemas/{model}")
