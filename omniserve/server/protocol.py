"""What a request to /v1/completions and /v1/chat/completions may hold. Each field is checked, none silently ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from omniserve.core.request import SLO, ClassSpec, ServiceClass
from omniserve.sampling.grammar import json_grammar
from omniserve.server.errors import ApiError
from omniserve.server.fields import read_fields, refuse_unsupported, validate
from omniserve.server.messages import MAX_MESSAGES, Message, NamedTool, StrictModel, TextContent, Tool, ToolChoice
from omniserve.server.tool_calls import CALL_END, calls_grammar

TIERS = ("auto", "default", "priority", "fast", "scale", "flex")
"""OpenAI's, beside which every class's name is one."""


def class_of_tier(tier: str, classes: Sequence[ClassSpec]) -> ClassSpec:
    """Return the class that a request with this ``service_tier`` is of.

    A class's own name always means that class. ``priority``, ``fast`` and ``scale`` are the first latency-sensitive
    class, ``default`` and ``auto`` the one named LS or else the last such class, ``flex`` the one named BE or else the
    first best-effort class.

    The classes are the engine's, highest priority first, and at least one of each kind.

    Raises:
        ApiError: There is no such tier; the message lists them all.
    """
    by_name = {spec.name: spec for spec in classes}
    sensitive, best_effort = ([s for s in classes if s.kind == kind] for kind in (ServiceClass.LS, ServiceClass.BE))
    if tier in by_name:
        return by_name[tier]
    if tier in ("priority", "fast", "scale"):
        return sensitive[0]
    if tier in ("default", "auto"):
        return by_name.get(ServiceClass.LS, sensitive[-1])
    if tier == "flex":
        return by_name.get(ServiceClass.BE, best_effort[0])
    known = ", ".join(repr(name) for name in dict.fromkeys((*TIERS, *by_name)))
    raise ApiError(f"service_tier: must be one of {known}; got {tier!r}", param="service_tier", code="invalid_value")


MAX_CHOICES = 128
MAX_PROMPTS = 2048
MAX_TOOLS = 128
# What a request keeps while it waits, once for each of its choices, is small, whatever the size of bodies.
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 1024
MAX_BIASED_TOKENS = 1024
MAX_GRAMMAR_CHARACTERS = 128 << 10

# For /openapi.json: what clients may send where a validator makes one form of several.
_Text = Annotated[str, Field(min_length=1)]
_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


def _stop_strings(value: Any) -> Any:
    stop = [value] if isinstance(value, str) else value
    if not isinstance(stop, list) or len(stop) > MAX_STOP_STRINGS or any(not isinstance(s, str) or not s for s in stop):
        raise ValueError(f"must be a non-empty string or a list of at most {MAX_STOP_STRINGS} of them")
    if max(map(len, stop), default=0) > MAX_STOP_CHARACTERS:
        raise ValueError(f"a string is longer than {MAX_STOP_CHARACTERS} characters; shorten it")
    return stop


def _prompts(value: Any) -> Any:
    """Return a list of prompts, each a string or a list of token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [value]
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"has {len(value)} prompts, of at most {MAX_PROMPTS}; send several requests")
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


class JsonSchemaFormat(StrictModel):
    """The schema of a ``json_schema`` format."""

    name: str
    """A note for people, which the model does not see."""
    description: str | None = None
    """The same."""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Accepted and without effect: the schema is kept in any case."""


class ResponseFormat(StrictModel):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_a_schema_if_it_needs_one(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type 'json_schema', and only to it")
        return self

    @property
    def grammar(self) -> str | None:
        """Return ``SamplingParams.grammar`` for this format; None if it allows any text."""
        if self.type == "text":
            return None
        return json_grammar({"type": "object"} if self.json_schema is None else self.json_schema.schema_)


class StreamOptions(StrictModel):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted and without effect: it only pads events."""


class Prediction(StrictModel):
    """OpenAI's ``prediction``: what the output will be, about."""

    type: Literal["content"]
    content: TextContent

    @property
    def text(self) -> str:
        """Its text."""
        return "".join(part.text for part in self.content)


class SloFields(StrictModel):
    """The request's own latency objectives, in seconds."""

    ttft_s: float | None = Field(None, gt=0)
    tpot_s: float | None = Field(None, gt=0)


class GenerationRequest(StrictModel):
    """Fields that both endpoints have."""

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
    stop: Annotated[
        list[str],
        BeforeValidator(
            _stop_strings,
            json_schema_input_type=_StopString | Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS)],
        ),
    ] = Field([])
    logit_bias: Annotated[
        list[tuple[int, Annotated[float, Field(ge=-100, le=100)]]],
        BeforeValidator(
            _token_bias,
            json_schema_input_type=Annotated[
                dict[Annotated[str, Field(pattern="^[0-9]+$")], Annotated[float, Field(ge=-100, le=100)]],
                Field(max_length=MAX_BIASED_TOKENS),
            ],
        ),
    ] = Field([])  # fmt: skip
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    service_tier: str = "auto"
    """Names a class of requests (see ``class_of_tier``)."""

    # Not OpenAI's, but what other open servers take through extra_body.
    top_k: int = Field(0, ge=-1, le=2**31 - 1)
    """0 and -1 keep all tokens."""
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    ignore_eos: bool = False
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field([], max_length=MAX_STOP_TOKENS)
    slo: SloFields | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    """The prefix cache keeps requests of different salts apart."""
    speculation: bool | None = None
    """Guess the next tokens from the text, and check several at once; the output is the same. None: as the class has
    it, but yes if there is a prediction."""

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
        """The format to which the output is constrained."""
        return None if self.response_format is None else self.response_format.grammar

    @property
    def stop_strings(self) -> list[str]:
        """Strings that end the text."""
        return self.stop

    @property
    def offered_tools(self) -> list[Tool]:
        """Tools that are shown to the model."""
        return []

    @property
    def num_samples(self) -> int:
        """Outputs per prompt, of which the answer has the best ``n``."""
        return self.n


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    prompt: Annotated[
        list[Any],
        BeforeValidator(
            _prompts,
            json_schema_input_type=_Text
            | _TokenIds
            | Annotated[list[_Text] | list[_TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)],
        ),
    ]
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


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] = Field([], max_length=MAX_TOOLS)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    """False: an answer ends with its first call."""

    @property
    def offered_tools(self) -> list[Tool]:
        """Tools that are shown to the model."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def grammar(self) -> str | None:
        tools, choice = self.offered_tools, self.tool_choice
        if isinstance(choice, NamedTool):
            named = [tool for tool in tools if tool.function.name == choice.function.name]
            return calls_grammar(named, free_text=False, several=False)
        if choice == "required" or any(tool.function.strict for tool in tools):
            return calls_grammar(tools, free_text=choice != "required", several=self.parallel_tool_calls)
        return super().grammar

    @property
    def stop_strings(self) -> list[str]:
        return [*self.stop, CALL_END] if self.offered_tools and not self.parallel_tool_calls else self.stop

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


R = TypeVar("R", bound=GenerationRequest)
_NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})


def parse(
    kind: type[R], body: bytes, *, default_tier: str | None = None, defaults: Mapping[str, Any] = _NO_DEFAULTS
) -> R:
    """Return what a request's body asks for.

    ``default_tier`` is the ``service_tier`` of one that brings none, ``defaults`` are values of other fields that it
    may leave out.

    Raises:
        ApiError: It is no JSON object, or a field is unknown, missing, ill-typed, out of range or unsupported; the
            message names the field and what to do.
    """
    fields = read_fields(body)
    refuse_unsupported(fields)
    if default_tier is not None:
        fields.setdefault("service_tier", default_tier)
    fields = {**defaults, **fields}
    request = validate(kind, fields)
    _check_combinations(request)
    return request


def _check_tools(request: ChatRequest) -> None:
    names = [tool.function.name for tool in request.tools]
    if len(set(names)) < len(names):
        raise ApiError("two tools have the same name; rename one", param="tools")
    choice = request.tool_choice
    if not names and choice not in ("none", "auto"):
        raise ApiError("tool_choice asks for a call, but there are no tools; give some", param="tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise ApiError(f"tool_choice names {choice.function.name!r}, which is none of the tools", param="tool_choice")
    if request.offered_tools and request.response_format is not None and request.response_format.type != "text":
        raise ApiError(
            "response_format would keep the model from calling tools; drop one, or set tool_choice to 'none'",
            param="response_format",
        )


def _check_combinations(request: GenerationRequest) -> None:
    if isinstance(request, ChatRequest):
        _check_tools(request)
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
    if request.grammar is not None and len(request.grammar) > MAX_GRAMMAR_CHARACTERS:
        raise ApiError(
            f"the JSON schemas that the answer has to keep come to {len(request.grammar)} characters, of at most "
            f"{MAX_GRAMMAR_CHARACTERS}; make them smaller",
            param="response_format" if request.response_format is not None else "tools",
        )
    if request.grammar is not None and request.ignore_eos:
        raise ApiError("ignore_eos contradicts a format that the answer has to keep; drop one", param="ignore_eos")
    if request.num_samples < request.n:
        raise ApiError(f"best_of must be at least n, which is {request.n}", param="best_of")
    if request.num_samples > request.n and request.stream:
        raise ApiError(
            "best_of above n cannot be streamed: which are best is known at the end; drop one", param="best_of"
        )
