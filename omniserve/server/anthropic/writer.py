"""Writes the messages of a conversation as those of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from omniserve.server.anthropic.blocks import (
    Block,
    DocumentBlock,
    HostedBlock,
    PastMessage,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from omniserve.server.anthropic.signatures import thought_of
from omniserve.server.errors import ApiError
from omniserve.server.fields import without_nulls

_BETWEEN_BLOCKS = "\n\n"


class ChatWriter:
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
            last["content"] = joined([last["content"], text])
        else:
            self.messages.append({"role": role, "content": text})

    def ends_in_text_to_continue(self) -> bool:
        """Return whether the last message is an assistant's, which the answer continues; one without text is removed.

        Raises:
            ApiError: It has calls, so nothing can follow but their results.
        """
        if not self.messages or (last := self.messages[-1])["role"] != "assistant":
            return False
        if "tool_calls" in last:
            message = "the last message calls tools; add a user's message with their results (tool_result)"
            raise ApiError(message, param="messages")
        if not last["content"]:
            self.messages.pop()
        return bool(last["content"])

    def _say(self, role: str, texts: Sequence[str]) -> None:
        if texts:
            self.write(role, joined(texts))

    def _tell(self, block: ToolResultBlock) -> None:
        text = joined([_text(part) for part in block.content])
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
                message["reasoning_content"] = message.get("reasoning_content", "") + thought_of(block)
            elif isinstance(block, ToolUseBlock):
                self._tool_names[block.id] = block.name
                function = {"name": block.name, "arguments": block.input}
                message.setdefault("tool_calls", []).append({"id": block.id, "function": function})
            elif isinstance(block, HostedBlock):
                self.skipped[block.type] = None


def joined(texts: Iterable[str]) -> str:
    """Return the texts of blocks as one."""
    return _BETWEEN_BLOCKS.join(texts)


def _text(block: Block) -> str:
    """Return a block of a user, a system or a tool as text."""
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, DocumentBlock):
        source = block.source
        text = source.data if source.data is not None else joined(part.text for part in source.content or ())
        return _tagged("document", {"title": block.title, "context": block.context}, text)
    if isinstance(block, SearchResultBlock):
        text = joined(part.text for part in block.content)
        return _tagged("search_result", {"title": block.title, "source": block.source}, text)
    assert isinstance(block, ToolReferenceBlock), block
    return block.tool_name


def _tagged(tag: str, about: Mapping[str, str | None], text: str) -> str:
    lines = [f"<{name}>{value}</{name}>" for name, value in about.items() if value is not None]
    return "\n".join([f"<{tag}>", *lines, text, f"</{tag}>"])
