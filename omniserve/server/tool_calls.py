"""Tool calls as text: the grammar of calls that must be made, and the parser of calls in a streamed answer.

The one way of writing a call that is known is Hermes', which Qwen's models share: a line ``<tool_call>``, a line with a
JSON object of ``name`` and ``arguments``, a line ``</tool_call>``; any number of them, with or without text before.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from omniserve.sampling.grammar import json_value
from omniserve.server.messages import Tool

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def calls_grammar(tools: Sequence[Tool], *, free_text: bool, several: bool) -> str:
    """Return the grammar of an answer that calls tools, each with arguments of its schema.

    Args:
        tools: Those that may be called, with different names.
        free_text: There may be text around the calls, and no call at all; else there is at least one, and nothing else.
        several: There may be more than one call; with free text there may in any case.
    """
    # One rule a tool, because references inside a schema are relative to its own root.
    calls = " | ".join(f"call_{i}" for i in range(len(tools)))
    if free_text:
        # Lazy, so that the first CALL_BEGIN is one, and no text.
        rules = ["start: (head call)* TEXT", f'head[lazy]: TEXT "{CALL_BEGIN}"', r"TEXT: /(.|\n)*/"]
        begin = "\n"
    else:
        rules = [r'start: call ("\n" call)*' if several else "start: call"]
        begin = f"{CALL_BEGIN}\n"
    rules.append(f"call: {calls}")
    for i, tool in enumerate(tools):
        head = json.dumps(f'{begin}{{"name": "{tool.function.name}", "arguments": ')
        tail = json.dumps(f"}}\n{CALL_END}")
        must_keep = not free_text or tool.function.strict
        schema = (tool.function.parameters or {"properties": {}, "additionalProperties": False}) if must_keep else {}
        rules.append(f"call_{i}: {head} args_{i} {tail}")
        rules.append(f"args_{i}: {json_value({'type': 'object', **schema})}")
    return "\n".join(rules)


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A complete call."""

    index: int
    """The call's index among those of the answer."""
    call_id: str
    name: str
    arguments: str
    """JSON text."""


class ToolCallParser:
    """Separates the calls in one text from the rest of it.

    What looks like a call and is none stays text. White space before a call, and at the end after one, belongs to
    neither.
    """

    def __init__(self) -> None:
        self._held = ""
        self._space = ""
        """White space before the call that is being read."""
        self._is_inside = False
        self._seen = 0
        """Characters of what is held in which there is no end of a call."""
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[ParsedCall]]:
        """Add text; return what is certain by now to be text, and the calls that are complete."""
        self._held += text
        texts: list[str] = []
        calls: list[ParsedCall] = []
        while (at := self._held.find(CALL_END if self._is_inside else CALL_BEGIN, self._seen)) >= 0:
            before = self._held[:at]
            if self._is_inside and _ends_in_string(before):
                self._seen = at + 1  # an argument may hold the mark
                continue
            self._held = self._held[at + len(CALL_END if self._is_inside else CALL_BEGIN) :]
            self._seen = 0
            if not self._is_inside:
                texts.append(before.rstrip())
                self._space = before[len(texts[-1]) :]
            elif (call := self._call(before)) is not None:
                calls.append(call)
            else:
                texts.append(f"{self._space}{CALL_BEGIN}{before}{CALL_END}")
            self._is_inside = not self._is_inside
        if not self._is_inside:
            certain = self._held[: len(self._held) - _num_held(self._held)]
            self._held = self._held[len(certain) :]
            texts.append(certain)
        return "".join(texts), calls

    def flush(self) -> tuple[str, list[ParsedCall]]:
        """Return what was held back, once no text follows; a call that lacks only its end is one."""
        held, self._held, self._seen = self._held, "", 0
        if not self._is_inside:
            return ("" if self.num_calls and not held.strip() else held), []
        self._is_inside = False
        call = self._call(held)
        return (f"{self._space}{CALL_BEGIN}{held}", []) if call is None else ("", [call])

    def _call(self, body: str) -> ParsedCall | None:
        try:
            fields = json.loads(body, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return None
        if not isinstance(fields, dict) or not isinstance(fields.get("name"), str):
            return None
        arguments = fields.get("arguments", {})
        if not isinstance(arguments, dict):
            return None
        index, self.num_calls = self.num_calls, self.num_calls + 1
        return ParsedCall(
            index, f"call_{uuid.uuid4().hex[:24]}", fields["name"], json.dumps(arguments, ensure_ascii=False)
        )  # fmt: skip


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _ends_in_string(body: str) -> bool:
    """Return whether the beginning of a JSON object ends inside a string."""
    return body.lstrip().startswith("{") and '"' in _STRING.sub("", body)


def _num_held(text: str) -> int:
    """Return how many characters at the end may be white space before a call, or the begin of a call's begin."""
    length = max(n for n in range(len(CALL_BEGIN)) if text.endswith(CALL_BEGIN[:n]))
    before = text[: len(text) - length]
    return length + len(before) - len(before.rstrip())
