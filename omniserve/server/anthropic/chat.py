"""A conversation of the Messages API as a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omniserve.server.anthropic.blocks import TextBlock
from omniserve.server.anthropic.fields import Conversation, CountedConversation, CustomTool, HostedTool, MessagesBody
from omniserve.server.anthropic.writer import ChatWriter, joined
from omniserve.server.completions.constraints import Constraint, with_format_of
from omniserve.server.completions.protocol import ChatRequest, check_combinations
from omniserve.server.errors import ApiError
from omniserve.server.fields import read_fields, validate, without_nulls
from omniserve.server.header_fields import NO_HEADERS, HeaderFields
from omniserve.server.service import Service

# The begin of the system block in which Claude Code tells its version, with a hash of the conversation or of the call.
_BILLING_HEADER = "x-anthropic-billing-header:"
_HIGHEST_EFFORTS = {"xhigh": "high", "max": "high"}
_TIERS = {"standard_only": "default"}
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SAME_AS_IN_CHATS = (
    "model", "max_tokens", "stream", "temperature", "top_p", "top_k", "metadata", "cache_salt", "ignore_eos", "min_p",
    "min_tokens", "priority", "prompt_cache_key", "prompt_cache_retention", "repetition_penalty", "seed",
    "session_id", "slo", "speculation", "stop_token_ids",
)  # fmt: skip
_MAX_NAME = 64


class MessagesRequest(ChatRequest):
    """A request to /v1/messages as a chat."""

    omits_thinking: bool = False
    """The answer has the thinking in its signature alone."""

    @property
    def may_end_with_context(self) -> bool:
        return True

    @property
    def constraint(self) -> Constraint | None:
        return with_format_of(super().constraint, "output_config.format")


def read_request(service: Service, body: bytes, headers: HeaderFields = NO_HEADERS) -> MessagesRequest:
    """Return what the body of a request to /v1/messages asks for; ``headers`` is as in ``AnswerShape.read``.

    Raises:
        ApiError: As ``protocol.parse``.
    """
    fields = read_fields(body)
    headers.add_to(fields)
    asked = validate(MessagesBody, fields, service.unknown_fields)
    own = {name: getattr(asked, name) for name in _SAME_AS_IN_CHATS}
    own["service_tier"] = _TIERS.get(asked.service_tier or "", asked.service_tier)
    own["stop"] = asked.stop_sequences
    return _chat(service, asked, {**service.defaults.fields, **without_nulls(own)})


def read_conversation(service: Service, body: bytes) -> MessagesRequest:
    """Return the chat whose prompt a request to /v1/messages/count_tokens asks for.

    Raises:
        ApiError: As ``protocol.parse``.
    """
    asked = validate(CountedConversation, read_fields(body), service.unknown_fields)
    return _chat(service, asked, without_nulls({"model": asked.model}))


def _chat(service: Service, asked: Conversation, fields: Mapping[str, Any]) -> MessagesRequest:
    """Return the chat of a conversation; ``fields`` are those of chats that have no part in its prompt."""
    tools = [tool for tool in asked.tools if isinstance(tool, CustomTool)]
    hosted = [tool.type for tool in asked.tools if isinstance(tool, HostedTool)]
    _check_choice(asked, tools, hosted)
    offers_tools = bool(tools) and (asked.tool_choice is None or asked.tool_choice.type != "none")
    writer = ChatWriter(
        takes_late_system=service.codec.takes_late_system(with_tools=offers_tools),
        takes_user_after_tool=service.codec.takes_user_after_tool(with_tools=offers_tools),
    )
    writer.write("system", _system(asked.system, without_header=service.drops_billing_header))
    for message in asked.messages:
        writer.add(message)
    continues = writer.ends_in_text_to_continue()
    if not writer.messages:
        raise ApiError("the messages have no content; add a user's message with a text", param="messages")
    skipped = [f"tools.{kind[:_MAX_NAME]}" for kind in hosted] + [f"messages.content.{kind}" for kind in writer.skipped]
    thinking = asked.thinking if asked.thinking is not None and asked.thinking.type != "disabled" else None
    budget = None if thinking is None else thinking.budget_tokens
    if budget is not None and not service.codec.dialect(with_tools=offers_tools).thinks:
        budget = None
        skipped.append("thinking.budget_tokens")
    effort = None if asked.output_config is None else asked.output_config.effort
    thinks = thinking is not None
    chat: dict[str, Any] = {
        "messages": writer.messages,
        "continue_final_message": continues,
        "tools": [_tool(tool) for tool in tools],
        "chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks, **asked.chat_template_kwargs},
        "reasoning_effort": _HIGHEST_EFFORTS.get(effort or "", effort),
        "include_reasoning": thinks,
        "thinking_token_budget": budget,
        "omits_thinking": thinking is not None and thinking.display == "omitted",
    }
    if (choice := asked.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        chat["tool_choice"] = _TOOL_CHOICES.get(choice.type, named)
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if (form := asked.format) is not None:
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
    request = validate(MessagesRequest, {**fields, **without_nulls(chat)}, service.unknown_fields)
    check_combinations(request)
    request.note_ignored((*asked.ignored_fields, *skipped))
    return request


def _check_choice(asked: Conversation, tools: Sequence[CustomTool], hosted: Sequence[str]) -> None:
    choice = asked.tool_choice
    but = f"; tools of the type {hosted[0][:_MAX_NAME]!r} are skipped here" if hosted else ""
    if choice is not None and choice.type in ("any", "tool"):
        if not tools:
            message = f"tool_choice asks for a call, but there are no tools{but}; give some with an input_schema"
            raise ApiError(message, param="tool_choice")
        if choice.name is not None and choice.name not in {tool.name for tool in tools}:
            raise ApiError(f"tool_choice names {choice.name!r}, which is none of the tools{but}", param="tool_choice")


def _tool(tool: CustomTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": without_nulls(function)}


def _system(blocks: Sequence[TextBlock], *, without_header: bool) -> str:
    texts = [block.text for block in blocks]
    if without_header and texts and texts[0].startswith(_BILLING_HEADER):
        _, _, rest = texts[0].partition("\n")
        texts = [rest, *texts[1:]] if rest else texts[1:]
    return joined(texts)
