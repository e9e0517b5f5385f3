"""The body of a request to /v1/responses."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints, create_model, model_validator

from omniserve.server.completions.messages import TOOL_NAME
from omniserve.server.completions.protocol import MAX_TOOLS, ChatRequest
from omniserve.server.fields import Fate, StrictModel, without_nulls
from omniserve.server.responses.items import Input

INCLUDE_LOGPROBS, INCLUDE_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
_Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # What follows is of tools that are not here: no answer has such items.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
Metadata = Annotated[
    dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
    Field(max_length=16),
]


class ResponseReasoning(StrictModel):
    """How much the model is to reason, and what the answer has of that."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """The whole reasoning is the summary of its item, as no model here writes another one. None: it is its content."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """Former name of ``summary``."""


class TextFormat(StrictModel):
    """The format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    """Accepted and without effect: the schema is kept in any case."""

    @model_validator(mode="after")
    def _has_a_schema_if_it_needs_one(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema belongs to the type 'json_schema', and that needs one")
        return self


class ResponseText(StrictModel):
    """What the answer's text is to be like."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseStreamOptions(StrictModel):
    """Options of a stream."""

    include_obfuscation: bool = False
    """Accepted and without effect: it only pads events."""


class ResponseFunction(StrictModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseCustomFormat(StrictModel):
    """The form of a custom tool's input, of which the model is told."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class ResponseCustomTool(StrictModel):
    """A tool whose input is text."""

    type: Literal["custom"]
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    format: ResponseCustomFormat | None = None


class ResponseHostedTool(StrictModel):
    """A tool that a server of OpenAI's runs, or one of another form: there is none here, so the model is not told."""

    model_config = ConfigDict(extra="ignore")

    type: str


_Tool = ResponseFunction | ResponseCustomTool | ResponseHostedTool


def _tool(value: Any) -> Any:
    kinds: dict[Any, type[StrictModel]] = {"function": ResponseFunction, "custom": ResponseCustomTool}
    kind = value.get("type") if isinstance(value, dict) else None
    return (kinds.get(kind, ResponseHostedTool) if isinstance(kind, str) else ResponseHostedTool).model_validate(value)


class ChosenTool(StrictModel):
    """A tool that ``tool_choice`` names."""

    model_config = ConfigDict(extra="ignore")

    type: str
    name: str | None = None


class AllowedToolsChoice(StrictModel):
    """The tools that may be called, or of which one has to be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ChosenTool] = Field(min_length=1, max_length=MAX_TOOLS)


def _tool_choice(value: Any) -> Any:
    if value in ("none", "auto", "required"):
        return value
    allows = isinstance(value, dict) and value.get("type") == "allowed_tools"
    try:
        return (AllowedToolsChoice if allows else ChosenTool).model_validate(value)
    except ValueError:
        message = "must be 'none', 'auto', 'required', {'type': 'function', 'name': ...} or {'type': 'allowed_tools', "
        raise ValueError(f"{message}'mode': 'auto' or 'required', 'tools': [...]}}") from None


def _refused(advice: str, *harmless: Any) -> Fate:
    return Fate(harmless, advice)


_NO_EFFECT, _DROPPED = Fate(), Fate(())
_USE_INPUT = "{name} is a field of chats; send input, or send the request to /v1/chat/completions"
_USE_MAX = "{name} is not a field of responses; use max_output_tokens"
_OWN_FATES = {
    "access_programs": _DROPPED,
    "background_options": _DROPPED,
    "client_metadata": _NO_EFFECT,
    "context_management": _DROPPED,
    "conversation": _refused("conversations are not kept here; send previous_response_id, or all items as input"),
    "generate": Fate((True,)),
    "image": _NO_EFFECT,  # there are none
    "input.caller": _NO_EFFECT,
    "input.content.annotations": _NO_EFFECT,
    "input.content.logprobs": _NO_EFFECT,
    "input.content.prompt_cache_breakpoint": _NO_EFFECT,
    "input.created_by": _NO_EFFECT,
    "input.namespace": _NO_EFFECT,
    "input.output.annotations": _NO_EFFECT,
    "input.output.prompt_cache_breakpoint": _NO_EFFECT,
    "logprobs": _refused("{name} is not a field of responses; use include=['message.output_text.logprobs']", False, 0),
    "max_completion_tokens": _refused(_USE_MAX),
    "max_tokens": _refused(_USE_MAX),
    "messages": _refused(_USE_INPUT),
    "n": _refused("a response has one answer; remove {name}, or send several requests", 1),
    "personality": _DROPPED,
    "prompt": _refused("prompt templates are not kept here; send their text as instructions or input"),
    "reasoning.context": _DROPPED,
    "reasoning.mode": Fate(("standard",)),
    "reasoning_effort": _refused("{name} is not a field of responses; use reasoning.effort"),
    "response_format": _refused("{name} is not a field of responses; use text.format", {"type": "text"}),
    "tools.allowed_callers": _DROPPED,
    "tools.async": Fate((False,)),
    "tools.defer_loading": Fate((False,)),
    "tools.output_schema": _NO_EFFECT,
    "verbosity": _refused("{name} is not a field of responses; use text.verbosity"),
}
"""What becomes of fields that OpenAI documents for responses or for chats, and that ``CreateResponse`` lacks."""


class ResponseFields(StrictModel):
    """Body of /v1/responses."""

    fates: ClassVar[Mapping[str, Fate]] = _OWN_FATES

    model: str
    input: Input = Field([])
    instructions: str | None = None
    """A message of the system before all others; that of the previous response does not hold any more."""
    previous_response_id: str | None = None
    """The items of this stored response, and of those before it, come before the input."""
    store: bool = True
    """The answer is kept for ``previous_response_id`` and to be read again; without effect if the server keeps none."""
    background: bool = False
    """The request runs without a connection; its answer is stored, and is read by its id."""
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    include: list[_Include] = Field([], max_length=64)
    max_output_tokens: int | None = Field(None, ge=1)
    max_tool_calls: int | None = Field(None, ge=0)
    """Accepted and without effect: it counts calls of tools that servers run."""
    tools: Annotated[
        list[Annotated[Any, BeforeValidator(_tool, json_schema_input_type=_Tool)]], Field(max_length=MAX_TOOLS)
    ] = Field([])
    tool_choice: Annotated[
        Any,
        BeforeValidator(
            _tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | AllowedToolsChoice | ChosenTool
        ),
    ] = "auto"
    parallel_tool_calls: bool = True
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    """``auto``: the oldest turns are left out if the input is too long."""
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    service_tier: str = "auto"
    metadata: Metadata = Field({})
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        return without_nulls(fields)

    @property
    def with_summary(self) -> bool:
        """The reasoning is to be the summary of its item."""
        return self.reasoning is not None and bool(self.reasoning.summary or self.reasoning.generate_summary)


_OF_CHATS = {
    *("add_generation_prompt", "continue_final_message", "include_reasoning", "logprobs", "max_completion_tokens"),
    *("max_tokens", "messages", "n", "prediction", "reasoning_effort", "response_format", "return_token_ids"),
    *("return_tokens_as_token_ids", "verbosity"),
}
PASSED_ON = frozenset(ChatRequest.model_fields) - frozenset(ResponseFields.model_fields) - _OF_CHATS
"""Fields that mean here what they mean in chats, such as ``top_k`` and ``slo``."""
_MORE: dict[str, Any] = {
    name: (info.annotation, copy.copy(info)) for name, info in ChatRequest.model_fields.items() if name in PASSED_ON
}

CreateResponse: type[ResponseFields] = create_model("CreateResponse", __base__=ResponseFields, **_MORE)
"""The fields of a request, with those that are passed on to the chat."""
