"""What a request to /v1/completions and /v1/chat/completions may hold. Each field is checked, none silently ignored."""

from __future__ import annotations

import difflib
import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from omniserve.request import SLO
from omniserve.server.errors import ApiError
from omniserve.server.formats import ResponseFormat
from omniserve.server.refused import refuse_unsupported

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_BIASED_TOKENS = 1024

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _stop_strings(value: Any) -> Any:
    stop = [value] if isinstance(value, str) else value
    if not isinstance(stop, list) or len(stop) > MAX_STOP_STRINGS or any(not isinstance(s, str) or not s for s in stop):
        raise ValueError(f"must be a non-empty string or a list of at most {MAX_STOP_STRINGS} of them")
    return stop


def _prompts(value: Any) -> Any:
    """Return a list of prompts, each a string or a list of token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and all(type(i) is int for i in item) for item in value):
            return value
    raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists, and not empty")


def _token_bias(value: Any) -> Any:
    """Return pairs of token ids, which JSON has as strings, and their bias."""
    if not isinstance(value, dict) or len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"must be an object of at most {MAX_BIASED_TOKENS} token ids with their bias")
    wrong = next((key for key in value if not (key.isascii() and key.isdecimal())), None)
    if wrong is not None:
        raise ValueError(f'its keys must be token ids in decimal, such as "5" (see /tokenize); one is {wrong!r}')
    return [(int(key), bias) for key, bias in value.items()]


class StreamOptions(BaseModel):
    """How to stream."""

    model_config = _STRICT

    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted and without effect: it only pads events."""


class SloFields(BaseModel):
    """The request's own latency objectives, in seconds."""

    model_config = _STRICT

    ttft_s: float | None = Field(None, gt=0)
    tpot_s: float | None = Field(None, gt=0)


class GenerationRequest(BaseModel):
    """Fields that both endpoints have."""

    model_config = _STRICT

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=0)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Annotated[list[str], BeforeValidator(_stop_strings)] = []
    logit_bias: Annotated[
        list[tuple[int, Annotated[float, Field(ge=-100, le=100)]]], BeforeValidator(_token_bias)
    ] = []  # fmt: skip
    response_format: ResponseFormat | None = None
    service_tier: str = "auto"
    """Names a class of requests (see ``class_of_tier``)."""

    # Not OpenAI's, but what other open servers take through extra_body.
    top_k: int = Field(0, ge=-1)
    """0 and -1 keep all tokens."""
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    ignore_eos: bool = False
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    slo: SloFields | None = None

    # Accepted and without effect on the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def answered_tier(self) -> str:
        """The tier that the answer names: the one that was used, never ``auto``."""
        return "default" if self.service_tier == "auto" else self.service_tier

    @property
    def slo_or_none(self) -> SLO | None:
        return None if self.slo is None else SLO(ttft_s=self.slo.ttft_s, tpot_s=self.slo.tpot_s)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def output_limit(self) -> int | None:
        """Most output tokens; None when the request does not say."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token; None when no log-probabilities were asked for."""
        raise NotImplementedError

    @property
    def echoes(self) -> bool:
        """The answer begins with the prompt, its log-probabilities with the prompt's."""
        return False

    @property
    def grammar(self) -> str | None:
        """What the output is constrained to."""
        return None if self.response_format is None else self.response_format.grammar

    @property
    def num_samples(self) -> int:
        """Outputs per prompt, of which the answer has the best ``n``."""
        return self.n


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    prompt: Annotated[list[Any], BeforeValidator(_prompts)]
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    """The likeliest ``n`` of so many outputs, by the mean log-probability of their tokens."""
    echo: bool = False
    """With ``logprobs`` and ``max_tokens=0`` or 1: how evaluations score texts."""

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return self.echo

    @property
    def num_samples(self) -> int:
        return self.n if self.best_of is None else self.best_of


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

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_text_parts)]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """Return the message as chat templates take it."""
        message = {
            "role": "system" if self.role == "developer" else self.role,
            "content": "".join(part.text for part in self.content),
        }
        return message if self.name is None else message | {"name": self.name}


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    parallel_tool_calls: bool = True
    """Accepted and without effect: there are no tools."""

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


R = TypeVar("R", bound=GenerationRequest)
M = TypeVar("M", bound=BaseModel)


def parse(kind: type[R], body: bytes) -> R:
    """Check a request's body.

    Raises:
        ApiError: It is no JSON object, or a field is unknown, missing, ill-typed, out of range or unsupported; the
            message names the field and what to do.
    """
    fields = read_fields(body)
    refuse_unsupported(fields)
    request = validate(kind, fields)
    _check_combinations(request)
    return request


def read_fields(body: bytes) -> dict[str, Any]:
    """Return the fields of a request's body, without nulls.

    Raises:
        ApiError: It is no JSON object.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(f"the body must be a JSON object, got {_short(fields)}", code="invalid_json")
    return _without_nulls(fields)


def validate(kind: type[M], fields: dict[str, Any]) -> M:
    """Return the fields as a model.

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


def _check_combinations(request: GenerationRequest) -> None:
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise ApiError("max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
    if request.output_limit == 0 and not request.echoes:
        raise ApiError(
            "max_tokens must be at least 1; it may be 0 with echo=true (/v1/completions)", param="max_tokens"
        )
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options needs stream=true; drop it or stream", param="stream_options")
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise ApiError("top_logprobs needs logprobs=true", param="top_logprobs")
    if request.grammar is not None and request.ignore_eos:
        raise ApiError("ignore_eos contradicts a format that the answer has to keep; drop one", param="ignore_eos")
    if request.num_samples < request.n:
        raise ApiError(f"best_of must be at least n, which is {request.n}", param="best_of")
    if request.num_samples > request.n and request.stream:
        raise ApiError(
            "best_of above n cannot be streamed: which are best is known at the end; drop one", param="best_of"
        )


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
