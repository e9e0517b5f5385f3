"""A conversation of the Messages API as a chat."""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from omniserve.server.anthropic.fields import (
    Block,
    Conversation,
    CustomTool,
    DocumentBlock,
    HostedBlock,
    HostedTool,
    MessagesBody,
    PastMessage,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from omniserve.server.constraints import Constraint, FormatConstraint
from omniserve.server.errors import ApiError
from omniserve.server.fields import read_fields, validate, without_nulls
from omniserve.server.header_fields import NO_HEADERS, HeaderFields
from omniserve.server.protocol import ChatRequest, check_combinations
from omniserve.server.service import Service

# The begin of the system block in which Claude Code tells its version, with a hash of the conversation or of the call.
_BILLING_HEADER = "x-anthropic-billing-header:"
_BETWEEN_BLOCKS = "\n\n"
# The begin of a signature, before the thinking if that is nowhere else.
_SIGNED = "omniserve:"
_HIGHEST_EFFORTS = {"xhigh": "high", "max": "high"}
_TIERS = {"standard_only": "default"}
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SAME_AS_IN_CHATS = (
    "model", "max_tokens", "stream", "temperature", "top_p", "top_k", "metadata", "cache_salt", "ignore_eos", "min_p",
    "min_tokens", "priority", "prompt_cache_key", "repetition_penalty", "seed", "session_id", "slo", "speculation",
    "stop_token_ids",
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
        constraint = super().constraint
        if isinstance(constraint, FormatConstraint):
            return dataclasses.replace(constraint, param="output_config.format")
        return constraint


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
    asked = validate(Conversation, read_fields(body), service.unknown_fields)
    return _chat(service, asked, without_nulls({"model": asked.model}))


def signature_of(thinking: str, *, is_omitted: bool) -> str:
    """Return a signature; if the thinking is omitted, it is in the signature, from which ``_thought`` reads it."""
    return base64.b64encode(f"{_SIGNED}{thinking if is_omitted else ''}".encode()).decode()


def _thought(block: ThinkingBlock) -> str:
    if block.thinking:
        return block.thinking
    try:
        text = base64.b64decode(block.signature, validate=True).decode()
    except (binascii.Error, ValueError):  # another server's
        return ""
    return text.removeprefix(_SIGNED) if text.startswith(_SIGNED) else ""


def _chat(service: Service, asked: Conversation, fields: Mapping[str, Any]) -> MessagesRequest:
    """Return the chat of a conversation; ``fields`` are those of chats that have no part in its prompt."""
    tools = [tool for tool in asked.tools if isinstance(tool, CustomTool)]
    hosted = [tool.type for tool in asked.tools if isinstance(tool, HostedTool)]
    _check_choice(asked, tools, hosted)
    offers_tools = bool(tools) and (asked.tool_choice is None or asked.tool_choice.type != "none")
    writer = _ChatWriter(
        takes_late_system=service.codec.takes_late_system(with_tools=offers_tools),
        takes_user_after_tool=service.codec.takes_user_after_tool(with_tools=offers_tools),
    )
    writer.write("system", _system(asked.system, without_header=service.drops_billing_header))
    for message in asked.messages:
        writer.add(message)
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
        "continue_final_message": writer.ends_in_text_to_continue(),
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
    if asked.format is not None and tools and (choice is None or choice.type != "none"):
        raise ApiError(
            "output_config.format would keep the model from calling tools; drop one, or set tool_choice to "
            "{'type': 'none'}",
            param="output_config.format",
        )


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
    return _BETWEEN_BLOCKS.join(texts)


class _ChatWriter:
    """Writes a conversation as the messages of a chat: each result of a tool is a message of its own.

    Args:
        takes_late_system: The chat template writes the system's messages in their places. Else those behind the first
            message of a user become a part of a user's message.
        takes_user_after_tool: The chat template writes a user's message behind results of tools. Else it becomes a part
            of the last result.
    """

    def __init__(self, *, takes_late_system: bool, takes_user_after_tool: bool) -> None:
        self.messages: list[dict[str, Any]] = []
        self.skipped: dict[str, None] = {}
        """Types of the blocks that were skipped."""
        self._takes_late_system = takes_late_system
        self._takes_user_after_tool = takes_user_after_tool
        self._tool_names: dict[str, str] = {}
        """Names of the tools that were called, by the ids of the calls."""

    def add(self, message: PastMessage) -> None:
        """Add a message."""
        if message.role == "assistant":
            self._answer(message.content)
            return
        texts: list[str] = []
        for block in message.content:
            if isinstance(block, ToolResultBlock):
                self._say(message.role, texts)
                texts = []
                self._tell(block)
            else:
                texts.append(_text(block))
        self._say(message.role, texts if message.content else [""])

    def write(self, role: str, text: str) -> None:
        """Add a text of a system or a user."""
        last = self.messages[-1] if self.messages else None
        if role == "system" and not text:
            return
        if role == "system" and last is not None and last["role"] != "system" and not self._takes_late_system:
            role, text = "user", f"<system-reminder>\n{text}\n</system-reminder>"
        joins = last is not None and (
            last["role"] == role or (last["role"] == "tool" and role == "user" and not self._takes_user_after_tool)
        )
        if joins:
            assert last is not None
            last["content"] = _joined([last["content"], text])
        else:
            self.messages.append({"role": role, "content": text})

    def ends_in_text_to_continue(self) -> bool:
        """Return whether the last message is an assistant's, which the answer continues; one without text is removed.

        Raises:
            ApiError: It has calls, so nothing can follow but their results.
        """
        last = self.messages[-1]
        if last["role"] != "assistant":
            return False
        if "tool_calls" in last:
            message = "the last message calls tools; add a user's message with their results (tool_result)"
            raise ApiError(message, param="messages")
        if not last["content"]:
            self.messages.pop()
        return bool(last["content"])

    def _say(self, role: str, texts: Sequence[str]) -> None:
        if texts:
            self.write(role, _joined(texts))

    def _tell(self, block: ToolResultBlock) -> None:
        text = _joined([_text(part) for part in block.content])
        message = {
            "role": "tool",
            "tool_call_id": block.tool_use_id,
            "name": self._tool_names.get(block.tool_use_id),
            "content": f"Error: {text}" if block.is_error else text,
        }
        self.messages.append(without_nulls(message))

    def _answer(self, blocks: Iterable[Block]) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        message = self.messages[-1]
        for block in blocks:
            if isinstance(block, TextBlock):
                message["content"] += block.text  # whatever stood between two parts of it, this was one text
            elif isinstance(block, ThinkingBlock):
                message["reasoning_content"] = message.get("reasoning_content", "") + _thought(block)
            elif isinstance(block, ToolUseBlock):
                self._tool_names[block.id] = block.name
                function = {"name": block.name, "arguments": block.input}
                message.setdefault("tool_calls", []).append({"id": block.id, "function": function})
            elif isinstance(block, HostedBlock):
                self.skipped[block.type] = None


def _joined(texts: Iterable[str]) -> str:
    return _BETWEEN_BLOCKS.join(texts)


def _text(block: Block) -> str:
    """Return a block of a user, a system or a tool as text."""
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, DocumentBlock):
        source = block.source
        text = source.data if source.data is not None else _joined(part.text for part in source.content or ())
        return _tagged("document", {"title": block.title, "context": block.context}, text)
    if isinstance(block, SearchResultBlock):
        text = _joined(part.text for part in block.content)
        return _tagged("search_result", {"title": block.title, "source": block.source}, text)
    assert isinstance(block, ToolReferenceBlock), block
    return block.tool_name


def _tagged(tag: str, about: Mapping[str, str | None], text: str) -> str:
    lines = [f"<{name}>{value}</{name}>" for name, value in about.items() if value is not None]
    return "\n".join([f"<{tag}>", *lines, text, f"</{tag}>"])
