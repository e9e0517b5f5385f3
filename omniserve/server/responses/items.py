"""Items: the input of a response, which may hold the output of earlier ones, and the chat that they are."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from omniserve.server.completions.messages import TextContent, text_of
from omniserve.server.fields import StrictModel, without_nulls

MAX_ITEMS = 4096
CUSTOM_INPUT = "input"
"""The one argument of a custom tool's call, whose input is any text, where the model makes it as that of a function."""
_SEAL = "omniserve-1:"
_Status = Literal["in_progress", "completed", "incomplete"]
OTHER_ITEMS = frozenset(
    {
        "additional_tools",
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "compaction",
        "computer_call",
        "computer_call_output",
        "configuration_update",
        "file_search_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
"""Types of items that other servers write for tools of their own. They are left out of the chat."""


class ItemMessage(StrictModel):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextContent
    id: str | None = None
    status: _Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    """Accepted and without effect."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        return without_nulls(fields)


class ItemFunctionCall(StrictModel):
    """A function that the model called."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: _Status | None = None


class ItemCustomCall(StrictModel):
    """A custom tool that the model called; its input is text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    id: str | None = None
    status: _Status | None = None


class ItemCallOutput(StrictModel):
    """The result of a call, which the client has made."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: TextContent
    id: str | None = None
    status: _Status | None = None


class ItemText(StrictModel):
    """A part of an item of reasoning."""

    type: Literal["summary_text", "reasoning_text", "text"]
    text: str


class ItemReasoning(StrictModel):
    """The model's reasoning before a message or a call."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ItemText] = Field([])
    content: list[ItemText] = Field([])
    encrypted_content: str | None = None
    """What a server gave a client that keeps its history by itself."""
    status: _Status | None = None

    @property
    def thought(self) -> str:
        """The reasoning, from whichever part has it."""
        whole = None if self.encrypted_content is None else unsealed(self.encrypted_content)
        return whole or "".join(part.text for part in self.content or self.summary)


class ItemReference(StrictModel):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: str


class OtherItem(StrictModel):
    """An item of one of ``OTHER_ITEMS``."""

    model_config = ConfigDict(extra="ignore")

    type: str


_KINDS: Mapping[str, type[StrictModel]] = {
    "message": ItemMessage,
    "function_call": ItemFunctionCall,
    "custom_tool_call": ItemCustomCall,
    "function_call_output": ItemCallOutput,
    "custom_tool_call_output": ItemCallOutput,
    "reasoning": ItemReasoning,
    "item_reference": ItemReference,
    **dict.fromkeys(OTHER_ITEMS, OtherItem),
}
Item = ItemMessage | ItemFunctionCall | ItemCustomCall | ItemCallOutput | ItemReasoning | ItemReference | OtherItem


def _item(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    kind = value.get("type") or ("message" if "role" in value else "item_reference")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"its type must be one of {', '.join(sorted(_KINDS))}")
    return _KINDS[kind].model_validate(value)


def _items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


_Entry = Annotated[Any, BeforeValidator(_item, json_schema_input_type=Item)]
Input = Annotated[
    Annotated[list[_Entry], Field(max_length=MAX_ITEMS)],
    BeforeValidator(_items, json_schema_input_type=str | Annotated[list[Item], Field(max_length=MAX_ITEMS)]),
]
"""A text of the user, or items."""


def sealed(thought: str) -> str:
    """Return reasoning in a form that clients take for opaque, so that they send it back unchanged."""
    return _SEAL + base64.b64encode(thought.encode()).decode()


def unsealed(text: str) -> str | None:
    """Return the reasoning that ``sealed`` was given; None: the text is another server's."""
    if not text.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(text[len(_SEAL) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def read_item(value: Any) -> Item:
    """Return an item that was stored."""
    item: Item = _item(value)
    return item


def stored_form(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return items as they are stored and shown; those of other servers' tools are left out."""
    return [_stored(item) for item in items if not isinstance(item, OtherItem)]


def _stored(item: Item) -> dict[str, Any]:
    fields = {"type": item.type} | item.model_dump(exclude_none=True)
    if isinstance(item, ItemMessage):
        kind = "output_text" if item.role == "assistant" else "input_text"
        more: dict[str, Any] = {"annotations": []} if item.role == "assistant" else {}
        fields["content"] = [
            {"type": kind, "text": part.text, **more}
            if part.type.endswith("text")
            else part.model_dump(exclude_none=True)
            for part in item.content
        ]
    if isinstance(item, ItemCallOutput):
        fields["output"] = text_of(item.output)
    return {"status": "completed"} | fields


def messages_of(items: Iterable[Item], instructions: str | None) -> list[dict[str, Any]]:
    """Return the messages of a chat.

    Reasoning, text and calls that follow one another are one message of the assistant, as chat templates want it. The
    instructions, and messages of the system or developer before the first other item, are one message, too: many
    templates know one of the system, at the begin.

    Args:
        items: References have been replaced by what they refer to.
        instructions: The text before them; None: there is none.
    """
    messages: list[dict[str, Any]] = []
    leading = [] if instructions is None else [instructions]
    turn: dict[str, Any] | None = None  # the assistant's message that may still get more
    for item in items:
        if isinstance(item, ItemMessage) and item.role in ("system", "developer") and not messages:
            leading.append(text_of(item.content))
        elif isinstance(item, ItemCallOutput):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
            turn = None
        elif isinstance(item, ItemMessage) and item.role != "assistant":
            messages.append({"role": item.role, "content": text_of(item.content)})
            turn = None
        elif (part := _assistants(item)) is not None:
            if turn is None or not _goes_on(turn, part):
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _extend(turn, part)
    first = [{"role": "system", "content": "\n\n".join(text for text in leading if text)}] if any(leading) else []
    return first + messages


def _assistants(item: Item) -> dict[str, Any] | None:
    """Return what an item adds to a message of the assistant; None: nothing."""
    if isinstance(item, ItemMessage):
        thought = "".join(part.thought for part in item.content)
        return {"content": text_of(item.content)} | ({"reasoning_content": thought} if thought else {})
    if isinstance(item, ItemReasoning):
        return {"reasoning_content": item.thought} if item.thought else None
    if isinstance(item, ItemFunctionCall):
        name, arguments = item.name, item.arguments
    elif isinstance(item, ItemCustomCall):
        name, arguments = item.name, json.dumps({CUSTOM_INPUT: item.input}, ensure_ascii=False)
    else:
        return None
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"id": item.call_id, "type": "function", "function": function}]}


def _goes_on(turn: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """Return whether a message of the assistant takes one more part: what comes behind its text are calls alone."""
    if "tool_calls" in part:
        return True
    if "reasoning_content" in part:
        return not turn["content"] and "tool_calls" not in turn
    return not turn["content"] or "tool_calls" in turn


def _extend(turn: dict[str, Any], part: Mapping[str, Any]) -> None:
    for name, value in part.items():
        turn[name] = turn.get(name, type(value)()) + value


def skipped(items: Sequence[Item]) -> list[str]:
    """Return the names of what is left out of the chat: items of other servers' tools, and their sealed reasoning."""
    names = [f"input.{item.type}" for item in items if isinstance(item, OtherItem)]
    lost = [item for item in items if isinstance(item, ItemReasoning) and item.encrypted_content and not item.thought]
    return [*names, *(["input.reasoning.encrypted_content"] if lost else [])]
