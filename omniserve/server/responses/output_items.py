"""The items of an answer, made of the deltas of its text, and the events that tell them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from omniserve.core.request import TokenLogprob
from omniserve.server.choice import Delta
from omniserve.server.dialects.base import ParsedCall
from omniserve.server.responses.items import CUSTOM_INPUT, sealed

Event = dict[str, Any]
"""An event of a stream, without its number."""


class OutputItems:
    """Makes items of deltas: of reasoning, messages and calls, in their order.

    White space alone is no message, unless it is all that there is.

    Args:
        key: What the ids of items have behind their kind.
        custom_tools: Names of tools whose input is text.
        with_summary: The text of reasoning is the summary of its item instead of its content.
        with_seal: Items of reasoning have ``encrypted_content``.
        logprob: Makes the object of a token's log-probability; None: messages have none.
    """

    def __init__(
        self,
        key: str,
        *,
        custom_tools: frozenset[str],
        with_summary: bool,
        with_seal: bool,
        logprob: Callable[[TokenLogprob], dict[str, Any]] | None,
    ) -> None:
        self.items: list[dict[str, Any]] = []
        """Items that are complete; at the end, all."""
        self.is_cut = False
        """The output ended at its largest length."""
        self._key = key
        self._custom_tools = custom_tools
        self._with_summary = with_summary
        self._with_seal = with_seal
        self._logprob = logprob
        self._open = ""
        """The kind of the item that gets more text: ``message``, ``reasoning``, ``call`` or none."""
        self._call: dict[str, Any] = {}
        """The fields of the open call that do not change."""
        self._is_custom = False
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._num_chars = 0
        """Number of characters of the answer's text so far."""
        self._held = ""
        """White space that a message may begin with."""
        self._held_logprobs: list[dict[str, Any]] = []

    def add(self, delta: Delta) -> list[Event]:
        """Take a delta; return the events that tell it."""
        events: list[Event] = []
        if delta.reasoning:
            events += self._begin("reasoning")
            events += self._more(delta.reasoning)
        if self._logprob is not None:
            self._held_logprobs += map(self._logprob, delta.logprobs[delta.num_reasoning_tokens :])
        text, at = delta.text, self._num_chars
        for call in delta.tool_calls:
            before, text = text[: call.text_before - at], text[call.text_before - at :]
            events += self._say(before)
            if call.begins:
                events += [*self._close(), *self._begin_call(call)]
            events += self._more_call(call)
            self._held, self._held_logprobs = "", []
            at = call.text_before
        events += self._say(text)
        self._num_chars += len(delta.text)
        if delta.finish_reason is not None:
            self.is_cut = delta.finish_reason == "length"
        return events

    def end(self, *, is_whole: bool = True) -> list[Event]:
        """Close what is open, which is all of it unless the output was cut; return the events that tell it."""
        events: list[Event] = []
        if is_whole and not self.items and not self._open:
            events += self._begin("message")
            events += self._more(self._held) if self._held else []
        return events + self._close("completed" if is_whole and not self.is_cut else "incomplete")

    def _say(self, text: str) -> list[Event]:
        """Take text of the answer."""
        text = self._held + text
        if not text or (self._open != "message" and not text.strip()):
            self._held = text
            return []
        self._held = ""
        return [*self._begin("message"), *self._more(text)]

    def _place(self, prefix: str) -> dict[str, Any]:
        """Return what names the next item."""
        return {"item_id": f"{prefix}_{self._key}_{len(self.items)}", "output_index": len(self.items)}

    def _text_place(self) -> dict[str, Any]:
        if self._open == "message":
            return self._place("msg") | {"content_index": 0}
        return self._place("rs") | {"summary_index" if self._with_summary else "content_index": 0}

    def _begin(self, kind: str) -> list[Event]:
        if self._open == kind:
            return []
        events = self._close()
        self._open, self._texts, self._logprobs = kind, [], []
        item, place = self._item("in_progress"), self._text_place()
        part = "reasoning_summary_part" if "summary_index" in place else "content_part"
        return [
            *events,
            {"type": "response.output_item.added", "output_index": len(self.items), "item": item},
            {"type": f"response.{part}.added", **place, "part": self._part("", [])},
        ]

    def _more(self, text: str) -> list[Event]:
        self._texts.append(text)
        event = {"type": f"response.{self._text_name()}.delta", **self._text_place(), "delta": text}
        if self._open == "message":
            event["logprobs"], self._held_logprobs = self._held_logprobs, []
            self._logprobs += event["logprobs"]
        return [event]

    def _close(self, status: str = "completed") -> list[Event]:
        """Complete the open item, if there is one."""
        if not self._open:
            return []
        if self._open == "call":  # whose arguments are broken or cut off
            return self._end_call("incomplete")
        if self._open == "message":  # tokens that have no text
            self._logprobs += self._held_logprobs
            self._held_logprobs = []
        text, place = "".join(self._texts), self._text_place()
        part = "reasoning_summary_part" if "summary_index" in place else "content_part"
        done: Event = {"type": f"response.{self._text_name()}.done", **place, "text": text}
        if self._open == "message":
            done["logprobs"] = self._logprobs
        item = self._item(status, self._part(text, self._logprobs))
        events = [
            done,
            {"type": f"response.{part}.done", **place, "part": self._part(text, self._logprobs)},
            {"type": "response.output_item.done", "output_index": len(self.items), "item": item},
        ]
        self.items.append(item)
        self._open = ""
        return events

    def _text_name(self) -> str:
        if self._open == "message":
            return "output_text"
        return "reasoning_summary_text" if self._with_summary else "reasoning_text"

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._open == "message":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        return {"type": "summary_text" if self._with_summary else "reasoning_text", "text": text}

    def _item(self, status: str, part: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the open item, of which a part is the text."""
        parts = [] if part is None else [part]
        if self._open == "message":
            item_id = self._place("msg")["item_id"]
            return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": parts}
        summary, content = (parts, []) if self._with_summary else ([], parts)
        item = {"id": self._place("rs")["item_id"], "type": "reasoning", "status": status, "summary": summary}
        item |= {} if self._with_summary else {"content": content}
        if self._with_seal and part is not None:
            item["encrypted_content"] = sealed(part["text"])
        return item

    def _begin_call(self, call: ParsedCall) -> list[Event]:
        self._open, self._texts = "call", []
        self._is_custom = call.name in self._custom_tools
        kind = "custom_tool_call" if self._is_custom else "function_call"
        item_id = self._call_place()["item_id"]
        self._call = {"id": item_id, "type": kind, "call_id": call.call_id, "name": call.name}
        item = self._call | {"input" if self._is_custom else "arguments": "", "status": "in_progress"}
        return [{"type": "response.output_item.added", "output_index": len(self.items), "item": item}]

    def _more_call(self, call: ParsedCall) -> list[Event]:
        """Take a piece of the open call."""
        self._texts.append(call.arguments)
        events: list[Event] = []
        if call.arguments and not self._is_custom:
            told = "response.function_call_arguments.delta"
            events.append({"type": told, **self._call_place(), "delta": call.arguments})
        return [*events, *(self._end_call("completed") if call.ends else [])]

    def _end_call(self, status: str) -> list[Event]:
        text, place = "".join(self._texts), self._call_place()
        name, told, events = "arguments", "response.function_call_arguments", []
        if self._is_custom:  # whose input is a part of the arguments
            name, told, text = "input", "response.custom_tool_call_input", _custom_input(text)
            events.append({"type": f"{told}.delta", **place, "delta": text})
        item = self._call | {name: text, "status": status}
        events += [
            {"type": f"{told}.done", **place, name: text},
            {"type": "response.output_item.done", "output_index": len(self.items), "item": item},
        ]
        self.items.append(item)
        self._open = ""
        return events

    def _call_place(self) -> dict[str, Any]:
        return self._place("ctc" if self._is_custom else "fc")


def _custom_input(arguments: str) -> str:
    """Return the text that a call of a custom tool has as its one argument, or else what was written."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return arguments
    text = found.get(CUSTOM_INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments
