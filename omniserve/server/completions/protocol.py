"""The fields of a request to /v1/completions and /v1/chat/completions; ``fields`` has what becomes of other fields."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from omniserve.core.request import SLO
from omniserve.server.completions.constraints import (
    MAX_SCHEMA_CHARACTERS,
    BudgetConstraint,
    CallConstraint,
    Constraint,
    FormatConstraint,
)
from omniserve.server.completions.messages import (
    MAX_MESSAGES,
    AllowedToolChoice,
    Message,
    NamedTool,
    TextContent,
    Tool,
    ToolChoice,
    text_of,
)
from omniserve.server.errors import ApiError
from omniserve.server.fields import StrictModel, UnknownFields, read_fields, validate, without_nulls
from omniserve.server.header_fields import NO_HEADERS, HeaderFields

MAX_CHOICES = 128
MAX_PROMPTS = 2048
MAX_TOOLS = 128
# What a request keeps while it waits, once for each of its choices, is small, whatever the size of bodies.
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 1024
MAX_BIASED_TOKENS = 1024

# For /openapi.json: what clients may send where a validator makes one form of several.
_Text = Annotated[str, Field(min_length=1)]
_StopString = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]
_TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


def _stop_strings(value: Any) -> Any:
    stop = [value] if isinstance(value, str) else value
    if not isinstance(stop, list) or len(stop) > MAX_STOP_STRINGS or any(not isinstance(s, str) for s in stop):
        raise ValueError(f"must be a string or a list of at most {MAX_STOP_STRINGS} of them")
    stop = [text for text in stop if text]  # an empty one asks for nothing
    if max(map(len, stop), default=0) > MAX_STOP_CHARACTERS:
        raise ValueError(f"a string is longer than {MAX_STOP_CHARACTERS} characters; shorten it")
    return stop


def prompts_of(value: Any) -> Any:
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


def _choice_logprobs(value: Any) -> Any:
    """Return false for the 0 that asks a chat for no log-probabilities, as completions have a number."""
    return False if value == 0 else value


def _num_logprobs(value: Any) -> Any:
    """Return None for the false that asks a completion for no log-probabilities, as chats have a truth value."""
    return None if value is False else value


class JsonSchemaFormat(StrictModel):
    """The schema of a ``json_schema`` format."""

    name: str | None = None
    """A note for people, which the model does not see."""
    description: str | None = None
    """A note for people, which the model does not see."""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Accepted and without effect: the schema is kept in any case."""


class ResponseFormat(StrictModel):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """The schema, where other open servers have it; of the type ``json_object``, too."""

    @model_validator(mode="after")
    def _has_a_schema_if_it_needs_one(self) -> ResponseFormat:
        if self.json_schema is not None and self.schema_ is not None:
            raise ValueError("json_schema and schema are two schemas; drop one")
        if self.type != "json_schema" and self.json_schema is not None:
            raise ValueError("json_schema belongs to the type 'json_schema', and only to it")
        if self.type == "json_schema" and self.json_schema is None and self.schema_ is None:
            raise ValueError("json_schema belongs to the type 'json_schema', and is missing")
        if self.type == "text" and self.schema_ is not None:
            raise ValueError("schema does not belong to the type 'text'; set type to 'json_schema'")
        return self

    @property
    def constraint(self) -> Constraint | None:
        """The constraint that keeps an output to this format; None if it allows any text."""
        if self.type == "text":
            return None
        schema = self.schema_ if self.json_schema is None else self.json_schema.schema_
        return FormatConstraint({"type": "object"} if schema is None else schema)


class StreamOptions(StrictModel):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Each chunk has the token counts so far, if ``include_usage`` is set."""
    include_obfuscation: bool = False
    """Accepted and without effect: it only pads events."""


class Prediction(StrictModel):
    """OpenAI's ``prediction``: what the output will be, about."""

    type: Literal["content"]
    content: TextContent

    @property
    def text(self) -> str:
        """The predicted text."""
        return text_of(self.content)


class SloFields(StrictModel):
    """The request's own wishes for its latency, in seconds.

    No other server has them, so an unknown field is a misspelt one of these.
    """

    model_config = ConfigDict(extra="forbid")

    ttft_s: float | None = Field(None, gt=0)
    tpot_s: float | None = Field(None, gt=0)
    deadline_s: float | None = Field(None, gt=0)
    """Time from arrival to the end of the answer."""
    max_queue_s: float | None = Field(None, gt=0)
    """Time from arrival after which a request that has not begun is refused."""
    otherwise: Literal["reject", "flex"] = "reject"
    """What becomes of a request that admission would refuse: with ``flex`` it is best effort, without objectives."""

    @property
    def objectives(self) -> SLO | None:
        """The objectives that it has in the place of its class's; None: those of the class hold."""
        is_of_others = not self.model_fields_set.isdisjoint(("deadline_s", "max_queue_s", "otherwise"))
        if is_of_others and self.ttft_s is None and self.tpot_s is None:
            return None
        return SLO(ttft_s=self.ttft_s, tpot_s=self.tpot_s)


class CallRequest(StrictModel):
    """Fields of every request that the engine works on."""

    prompt_field: ClassVar[str] = "prompt"
    """Name of the field that has the prompts, as clients know it."""

    model: str | None = None
    service_tier: str = "auto"
    """Names a class of requests (see ``class_of_tier``)."""
    slo: SloFields | None = None
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    """Number of classes below that of ``service_tier``; see ``prioritised_tier``."""
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    """The prefix cache keeps requests of different salts apart."""
    prompt_cache_key: str | None = None
    """OpenAI's name of a session, of which the prefix cache keeps the newest branch longest."""
    session_id: str | None = None
    """Another name of it, for requests without ``prompt_cache_key``."""
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """How long the session may be unused; None and ``in_memory``: as long as the server says."""
    user: str | None = None
    """Without effect."""

    @property
    def answered_tier(self) -> str:
        """The tier that the answer names: the one that was used, never ``auto``."""
        return "default" if self.service_tier == "auto" else self.service_tier

    @property
    def wishes(self) -> SloFields:
        """What it wishes for its latency."""
        return self.slo or SloFields.model_validate({"otherwise": "reject"})

    @property
    def session_key(self) -> str | None:
        """The name of the session that the request belongs to; None or empty: it names none."""
        return self.prompt_cache_key or self.session_id

    @property
    def session_ttl_s(self) -> float | None:
        """Seconds for which the session may be unused; None: as long as the server says."""
        return 86_400.0 if self.prompt_cache_retention == "24h" else None

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        # Without a session there is nothing whose blocks could be kept.
        is_dropped = self.session_ttl_s is not None and not self.session_key
        return (*super().ignored_fields, *(["prompt_cache_retention"] if is_dropped else ()))


class GenerationRequest(CallRequest):
    """Fields that completions and chats have."""

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
    ] = Field([])
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None

    # Not OpenAI's, but what other open servers take through extra_body.
    top_k: int = Field(0, ge=-1, le=2**31 - 1)
    """Number of likeliest tokens to keep; 0 and -1 keep all."""
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, le=2**31 - 1)
    """The number of tokens before which nothing ends an output but its largest length."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field([], max_length=MAX_STOP_TOKENS)
    include_stop_str_in_output: bool = False
    """The stop string, or the text of the stop token, that ends an output is a part of its text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    return_token_ids: bool = False
    """Answers have the token ids of prompts and outputs."""
    return_tokens_as_token_ids: bool = False
    """Log-probabilities name a token ``token_id:5`` instead of its text."""
    speculation: bool | None = None
    """Guess the next tokens from the text, and check several at once; the output is the same. None: as the class has
    it, but yes if there is a prediction."""

    # Accepted and without effect on the answer.
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def output_limit(self) -> int | None:
        """Most output tokens; None when the request does not say."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def may_end_with_context(self) -> bool:
        """The output has fewer tokens than ``output_limit`` if the context has no room for as many."""
        return False

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token; None when no log-probabilities were asked for."""
        raise NotImplementedError

    @property
    def echoes(self) -> bool:
        """The answer begins with the prompt, its log-probabilities with the prompt's."""
        return False

    @property
    def constraint(self) -> Constraint | None:
        """The constraint on the output; None without one."""
        return None if self.response_format is None else self.response_format.constraint

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
            prompts_of,
            json_schema_input_type=_Text
            | _TokenIds
            | Annotated[list[_Text] | list[_TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)],
        ),
    ]
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=20)] | None,
        BeforeValidator(
            _num_logprobs, json_schema_input_type=Annotated[int, Field(ge=0, le=20)] | Literal[False] | None
        ),
    ] = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    """Number of outputs of which the answer has the ``n`` likeliest, by the mean log-probability of their tokens."""
    echo: bool = False
    """The answer begins with the prompt. Evaluations score texts so, with ``logprobs`` and ``max_tokens=0`` or 1."""
    add_special_tokens: bool = True
    """Texts are encoded with the special tokens that their tokenizer adds."""

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return self.echo

    @property
    def num_samples(self) -> int:
        return self.n if self.best_of is None else self.best_of


RESERVED_VARIABLES = frozenset(
    {
        "self",
        "conversation",
        "conversations",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
"""Names that ``apply_chat_template`` of transformers has for arguments of its own, and those of other fields."""


def _template_variables(value: dict[str, Any]) -> dict[str, Any]:
    if taken := sorted(value.keys() & RESERVED_VARIABLES):
        raise ValueError(f"cannot set {taken[0]!r}; if it is a field of requests, use that")
    return value


class TemplateFields(StrictModel):
    """The fields that decide how a chat template writes the messages."""

    add_generation_prompt: bool | None = None
    """The prompt goes on to where the assistant's answer begins. None: yes, unless the last message is continued."""
    continue_final_message: bool = False
    """The prompt ends inside the last message, so that the answer goes on with it."""
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_template_variables)] = Field({})
    """Variables of the template, such as ``enable_thinking``."""
    documents: list[dict[str, Any]] = Field([])
    """Texts for templates that read them."""
    reasoning_effort: str | None = None
    """A variable of the template."""
    verbosity: str | None = None
    """A variable of the template."""

    @field_validator("continue_final_message")
    @classmethod
    def _is_one_of_two(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("add_generation_prompt"):
            raise ValueError("contradicts add_generation_prompt; drop one")
        return value

    @property
    def template_options(self) -> dict[str, Any]:
        """Keyword arguments of ``apply_chat_template``."""
        begins = not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        variables: dict[str, Any] = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        if self.reasoning_effort is not None:
            # Most templates know only whether to think, by one of two names.
            variables["enable_thinking"] = variables["thinking"] = self.reasoning_effort != "none"
        return {
            **without_nulls(variables),
            **self.chat_template_kwargs,
            "documents": self.documents or None,
            "add_generation_prompt": begins,
            "continue_final_message": self.continue_final_message,
        }


class ChatRequest(TemplateFields, GenerationRequest):
    """Body of /v1/chat/completions."""

    prompt_field: ClassVar[str] = "messages"

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    logprobs: Annotated[bool, BeforeValidator(_choice_logprobs, json_schema_input_type=bool | Literal[0])] = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] = Field([], max_length=MAX_TOOLS)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    """The answer may have several calls; False: it ends with its first call."""
    add_special_tokens: bool = False
    """Put the special tokens that the tokenizer adds to texts before what the chat template writes."""
    include_reasoning: bool = True
    """The answer has the model's reasoning."""
    thinking_token_budget: int | None = Field(None, ge=-1, le=2**31 - 1)
    """Most tokens of reasoning, which is then ended; None and -1: any number."""

    @property
    def offered_tools(self) -> list[Tool]:
        """Tools that are shown to the model."""
        if isinstance(self.tool_choice, AllowedToolChoice):
            names = {tool.function.name for tool in self.tool_choice.allowed_tools.tools}
            return [tool for tool in self.tools if tool.function.name in names]
        return [] if self.tool_choice == "none" else self.tools

    @property
    def must_call(self) -> bool:
        """True if the answer has to call one of the tools."""
        choice = self.tool_choice
        return choice == "required" or (
            isinstance(choice, AllowedToolChoice) and choice.allowed_tools.mode == "required"
        )

    @property
    def constraint(self) -> Constraint | None:
        tools, choice = self.offered_tools, self.tool_choice
        if isinstance(choice, NamedTool):
            named = [tool for tool in tools if tool.function.name == choice.function.name]
            return CallConstraint(named, free_text=False, several=False)
        constraint = super().constraint
        if tools and not self.must_call and isinstance(constraint, FormatConstraint):
            return CallConstraint(tools, free_text=False, several=self.parallel_tool_calls, otherwise=constraint)
        if self.must_call or any(tool.function.strict for tool in tools):
            return CallConstraint(tools, free_text=not self.must_call, several=self.parallel_tool_calls)
        return BudgetConstraint() if constraint is None and self.thinking_budget is not None else constraint

    @property
    def thinking_budget(self) -> int | None:
        """Most tokens of reasoning; None: any number."""
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


R = TypeVar("R", bound=CallRequest)
_NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})


def parse(
    kind: type[R],
    body: bytes,
    unknown: UnknownFields,
    *,
    headers: HeaderFields = NO_HEADERS,
    defaults: Mapping[str, Any] = _NO_DEFAULTS,
) -> R:
    """Return what a request's body asks for.

    ``headers`` has fields that its headers stand for, ``defaults`` values of others that it may leave out.

    Raises:
        ApiError: It is no JSON object, or a field is missing, ill-typed, out of range, unsupported, or unknown where
            that is refused; the message names the field and what to do.
    """
    fields = read_fields(body)
    headers.add_to(fields)
    said = {name: value for name, value in fields.items() if value is not None}
    request = validate(kind, {**defaults, **said}, unknown)
    if isinstance(request, GenerationRequest):
        check_combinations(request)
    return request


def _check_tools(request: ChatRequest) -> None:
    names = [tool.function.name for tool in request.tools]
    if len(set(names)) < len(names):
        raise ApiError("two tools have the same name; rename one", param="tools")
    choice = request.tool_choice
    if not names and choice not in ("none", "auto"):
        raise ApiError("tool_choice asks for a call, but there are no tools; give some", param="tool_choice")
    named = [choice] if isinstance(choice, NamedTool) else []
    if isinstance(choice, AllowedToolChoice):
        named = choice.allowed_tools.tools
    if (unknown := next((tool.function.name for tool in named if tool.function.name not in names), None)) is not None:
        raise ApiError(f"tool_choice names {unknown!r}, which is none of the tools", param="tool_choice")


def check_combinations(request: GenerationRequest) -> None:
    """Raise ApiError if fields of a request contradict each other."""
    if isinstance(request, ChatRequest):
        _check_tools(request)
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise ApiError("max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
    if request.output_limit == 0 and not request.echoes:
        raise ApiError(
            "max_tokens must be at least 1; it may be 0 with echo=true (/v1/completions)", param="max_tokens"
        )
    if request.output_limit is not None and request.min_tokens > request.output_limit:
        raise ApiError(
            f"min_tokens is {request.min_tokens}, more than max_tokens, which is {request.output_limit}; lower it",
            param="min_tokens",
        )
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise ApiError("top_logprobs needs logprobs=true", param="top_logprobs")
    constraint = request.constraint
    if constraint is not None and constraint.num_characters > MAX_SCHEMA_CHARACTERS:
        raise ApiError(
            f"the JSON schemas that the answer has to keep come to {constraint.num_characters} characters, of at most "
            f"{MAX_SCHEMA_CHARACTERS}; make them smaller",
            param=constraint.param,
        )
    if constraint is not None and request.ignore_eos:
        what = (
            "thinking_token_budget"
            if isinstance(constraint, BudgetConstraint)
            else "a format that the answer has to keep"
        )
        raise ApiError(f"ignore_eos contradicts {what}; drop one", param="ignore_eos")
    if request.num_samples < request.n:
        raise ApiError(f"best_of must be at least n, which is {request.n}", param="best_of")
    if request.num_samples > request.n and request.stream:
        raise ApiError(
            "best_of above n cannot be streamed: which are best is known at the end; drop one", param="best_of"
        )
