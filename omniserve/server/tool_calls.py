"""Tool calls as text: the grammar of calls that must be made, and the parser of calls in a streamed answer.

The one way of writing a call that is known is Hermes', which Qwen's models share: a line ``<tool_call>``, a line with a
JSON object of ``name`` and ``arguments``, a line ``</tool_call>``; any number of them, with or without text before.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from omniserve.sampling.grammar import json_value
from omniserve.server.messages import Tool

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """A tokenizer's special tokens, which are not part of a text, as grammars need them.

    Most tokenizers have no special tokens for tags. There a tag is text, be it one token (Qwen's) or several.
    """

    begin: int | None = None
    """Id of CALL_BEGIN; None where that is text."""
    end: int | None = None
    """Id of CALL_END; None where that is text."""
    others: tuple[int, ...] = ()
    """The special tokens that are no tags. They may be anywhere in free text."""

    @property
    def tags(self) -> frozenset[int]:
        """The special tokens that are tags."""
        return frozenset(token_id for token_id in (self.begin, self.end) if token_id is not None)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema that a tool's arguments have to keep."""
    return {"type": "object", **(tool.function.parameters or {"properties": {}, "additionalProperties": False})}


def calls_grammar(
    schemas: Mapping[str, Mapping[str, Any]], *, free_text: bool, several: bool, special: SpecialTokens
) -> str:
    """Return the grammar of an answer that calls tools, each with arguments of its schema.

    Args:
        schemas: Schemas of the arguments, by the names of the tools that may be called.
        free_text: There may be text around the calls, and no call at all; else there is at least one, and nothing else.
        several: There may be more than one call; with free text there may in any case.
        special: The tokenizer's special tokens.
    """
    begin, end = (
        json.dumps(tag) if token_id is None else f"<[{token_id}]>"
        for tag, token_id in ((CALL_BEGIN, special.begin), (CALL_END, special.end))
    )
    if free_text:
        rules = ["start: (skipped* begin call)* skipped* TEXT" if special.others else "start: (begin call)* TEXT"]
        # Lazy, so that the first CALL_BEGIN is one, and no text.
        rules.append(f"begin[lazy]: TEXT {begin}" if special.begin is None else f"begin: TEXT {begin}")
        rules.append(r"TEXT: /(.|\n)*/")
        if special.others:
            rules.append(f"skipped: TEXT <[{','.join(map(str, special.others))}]>")
    else:
        rules = [r'start: begin call ("\n" begin call)*' if several else "start: begin call", f"begin: {begin}"]
    # One rule a tool, because references inside a schema are relative to its own root.
    rules.append(f"call: {' | '.join(f'call_{i}' for i in range(len(schemas)))}")
    for i, (name, schema) in enumerate(schemas.items()):
        head = json.dumps(f'\n{{"name": {json.dumps(name)}, "arguments": ')
        rules.append(f'call_{i}: {head} args_{i} "}}\\n" {end}')
        rules.append(f"args_{i}: {json_value(schema)}")
    return "\n".join(rules)


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A complete call."""

    index: int
    """The call's index among those of the answer."""
    call_id: str
    name: str
    arguments: str
    """The text of a JSON object, as the model wrote it."""


class ToolCallParser:
    """Separates the calls in one text from the rest of it.

    What looks like a call and is none stays text: what is no JSON, or calls a tool that is not offered. White space
    before a call, and at the end after one, belongs to neither.

    Args:
        names: The tools that are offered.
        several: There may be more than one call; else the text ends with the first.
    """

    def __init__(self, names: Collection[str], *, several: bool = True) -> None:
        self._names = names
        self._several = several
        self._held = ""
        self._space = ""
        """White space before the call that is being read."""
        self._is_inside = False
        self._seen = 0
        """Characters of what is held in which there is no end of a call."""
        self.num_calls = 0

    @property
    def is_over(self) -> bool:
        """True once there can be no further call and no text; what is pushed afterwards is ignored."""
        return self.num_calls > 0 and not self._several

    def push(self, text: str) -> tuple[str, list[ParsedCall]]:
        """Add text; return what is certain by now to be text, and the calls that are complete."""
        if self.is_over:
            return "", []
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
                if self.is_over:
                    self._held = ""
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
            members = _members(body)
        except (ValueError, RecursionError):
            return None
        name, _ = members.get("name", (None, ""))
        if not isinstance(name, str) or name not in self._names:
            return None
        # Llama 3 was taught the second word, and writes it in other forms, too. A call with both is not understood.
        given = [members[word] for word in ("arguments", "parameters") if word in members] or [({}, "{}")]
        if len(given) > 1 or not isinstance(given[0][0], dict):
            return None
        index, self.num_calls = self.num_calls, self.num_calls + 1
        return ParsedCall(index, f"call_{uuid.uuid4().hex[:24]}", name, given[0][1])


def _members(text: str) -> dict[str, tuple[Any, str]]:
    """Return the members of a JSON object: each value, and its own text.

    Raises:
        ValueError: The text is no JSON object, or a member is there twice.
    """
    members: dict[str, tuple[Any, str]] = {}
    at, expected = _after_space(text, 0), "{"
    while text[at : at + 1] == expected:
        at = _after_space(text, at + 1)
        if not members and text[at : at + 1] == "}":
            break
        key, at = _DECODER.raw_decode(text, at)
        at = _after_space(text, at)
        if not isinstance(key, str) or key in members or text[at : at + 1] != ":":
            raise ValueError("no JSON object, or one that says a thing twice")
        begin = _after_space(text, at + 1)
        value, at = _DECODER.raw_decode(text, begin)
        members[key] = value, text[begin:at]
        at, expected = _after_space(text, at), ","
    if text[at : at + 1] != "}" or _after_space(text, at + 1) != len(text):
        raise ValueError("no JSON object")
    return members


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


# Numbers are only passed on, and one of Python's has a largest length.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=str, parse_float=str)


def _ends_in_string(body: str) -> bool:
    """Return whether the beginning of a JSON object ends inside a string."""
    return body.lstrip().startswith("{") and '"' in _STRING.sub("", body)


def _num_held(text: str) -> int:
    """Return how many characters at the end may be white space before a call, or the begin of a call's begin."""
    length = max(n for n in range(len(CALL_BEGIN)) if text.endswith(CALL_BEGIN[:n]))
    before = text[: len(text) - length]
    return length + len(before) - len(before.rstrip())
