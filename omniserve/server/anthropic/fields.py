"""The fields of requests to /v1/messages; ``FATES`` has what becomes of others that Anthropic's API documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from omniserve.server.anthropic.blocks import Block, PastMessage, Texts
from omniserve.server.completions.messages import MAX_MESSAGES, TOOL_NAME
from omniserve.server.completions.protocol import (
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MAX_TOOLS,
    SloFields,
)
from omniserve.server.fields import Fate, StrictModel

_NO_EFFECT = Fate()
_DROPPED = Fate(())

FATES: Mapping[str, Fate] = {
    "betas": _NO_EFFECT,
    "billing_policy": _NO_EFFECT,
    "cache_control": _NO_EFFECT,  # the prefix cache keeps what it can without being asked
    "compaction": _DROPPED,
    "container": Fate((), "containers are not supported; remove {name}"),
    "context_management": _DROPPED,
    "diagnostics": _NO_EFFECT,
    "fallback_credit_token": _NO_EFFECT,
    "fallbacks": _DROPPED,
    "inference_geo": _DROPPED,
    "mcp_servers": Fate(([],), "MCP servers are not called from here; give their tools as tools, and call them there"),
    "speed": Fate(("standard",)),
    "thread": _DROPPED,
    "user_profile_id": _NO_EFFECT,
    "workspace_id": _NO_EFFECT,
    "messages.content.caller": _NO_EFFECT,
    "messages.content.content.citations": _NO_EFFECT,
    "messages.content.toolset_name": _NO_EFFECT,
    "output_config.task_budget": _DROPPED,
    "tools.allowed_callers": Fate((["direct"],)),
    "tools.defer_loading": Fate((False,)),
    "tools.eager_input_streaming": _NO_EFFECT,
    "tools.input_examples": _DROPPED,
}
"""Documented fields -> what becomes of them, as in ``fields.NOT_HONOURED``."""


class CustomTool(Block):
    """A tool that the client runs."""

    type: Literal["custom"] = "custom"
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    """Calls keep the schema, whatever the model would say. Calls that must be made always do."""


class HostedTool(StrictModel):
    """A tool that Anthropic's servers run or its models were trained with, such as ``web_search_20250305``.

    It is skipped.
    """

    type: str
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        return {name: fields.get(name) for name in ("type", "name")} if isinstance(fields, dict) else fields


def _kind_of_tool(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "custom" if kind is None or kind == "custom" else "hosted"


_Tool = Annotated[
    Annotated[CustomTool, Tag("custom")] | Annotated[HostedTool, Tag("hosted")], Discriminator(_kind_of_tool)
]


class ToolChoice(StrictModel):
    """The calls that an answer may or has to make."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_a_tool_if_it_has_to(self) -> ToolChoice:
        if (self.name is not None) != (self.type == "tool"):
            raise ValueError("name belongs to the type 'tool', which needs it")
        return self


class Thinking(StrictModel):
    """The field ``thinking``: it switches the model's thinking on or off, and bounds it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    """Most tokens of thinking, which is then ended; None: any number."""
    display: Literal["summarized", "omitted"] | None = None
    """``omitted``: answers have the thinking in its signature alone. Else they have all of it."""

    @model_validator(mode="after")
    def _has_a_budget_if_it_is_enabled(self) -> Thinking:
        if self.budget_tokens is not None and self.type != "enabled":
            raise ValueError("budget_tokens belongs to the type 'enabled'")
        return self


class OutputFormat(StrictModel):
    """A JSON schema that the answer keeps."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    """A note for people, which the model does not see."""


class OutputConfig(StrictModel):
    """The form of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """The chat template's variable ``reasoning_effort``, in which the two highest are ``high``, too."""
    format: OutputFormat | None = None


class Conversation(StrictModel):
    """The fields that make a prompt."""

    fates: ClassVar[Mapping[str, Fate]] = FATES

    model: str | None = None
    messages: list[PastMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Texts = Field([])
    tools: list[_Tool] = Field([], max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    """None: the model does not think, if it can be told so, and the answer has no thinking."""
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The former place of ``output_config.format``."""
    chat_template_kwargs: dict[str, Any] = Field({})
    """Variables of the chat template."""

    @model_validator(mode="after")
    def _has_one_format(self) -> Conversation:
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise ValueError("output_format and output_config.format are two formats; drop one")
        return self

    @property
    def format(self) -> OutputFormat | None:
        """The form of the answer; None: any text."""
        return self.output_format or (None if self.output_config is None else self.output_config.format)


class MessagesBody(Conversation):
    """Body of /v1/messages."""

    max_tokens: int = Field(ge=1)
    """Most tokens of the answer. If the context has room for fewer, the answer ends with the context."""
    stream: bool = False
    stop_sequences: list[Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]] = Field([], max_length=MAX_STOP_STRINGS)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    service_tier: str | None = None
    """``auto``, ``standard_only``, or what chats may have; see ``class_of_tier``."""
    metadata: dict[str, Any] | None = None
    """Without effect."""

    # This server's own, as chats have them.
    cache_salt: str | None = Field(None, max_length=256)
    ignore_eos: bool | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    session_id: str | None = None
    slo: SloFields | None = None
    speculation: bool | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(None, max_length=MAX_STOP_TOKENS)


class CountedConversation(Conversation):
    """Body of /v1/messages/count_tokens; what has no part in the prompt has no effect."""

    fates: ClassVar[Mapping[str, Fate]] = {**dict.fromkeys(MessagesBody.model_fields, _NO_EFFECT), **FATES}
