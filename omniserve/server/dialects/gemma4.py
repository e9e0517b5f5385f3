"""Gemma 4's calls, arguments as in JSON, but with quotes of their own for texts and none for names.

::

    <|tool_call>call:weather{city:<|"|>Köln<|"|>,days:3}<tool_call|>
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from omniserve.sampling.grammar import json_value
from omniserve.sampling.json_schema import UnsupportedSchema
from omniserve.server.dialects.base import CallForm, CallReader, Group, Piece, RawCall, Schemas, num_begun
from omniserve.server.dialects.grammar_text import SpecialTokens
from omniserve.server.dialects.json_text import Brackets, dumps, value_of
from omniserve.server.dialects.parameters import (
    PYTHON_WORDS,
    beside_alternatives,
    listed,
    parameters_of,
    resolved,
    text_rules,
    types_of,
    with_definitions,
)

_NAME = re.compile(r"\s*call:\s*(?P<name>[A-Za-z0-9_./:-]+?)\s*(?=\{)")
_BARE = re.compile(r"[^,\[\]{}]+")
_SPACE = re.compile(r"\s*")
_MAX_DEPTH = 100


@functools.cache
def _key_pattern(quote: str) -> re.Pattern[str]:
    """Return a pattern of an argument's name, which may be between quotes."""
    quote = re.escape(quote)
    return re.compile(rf"\s*(?:{quote}(?P<quoted>.*?){quote}|(?P<bare>[^:{{}}\[\],<]+?))\s*:", re.DOTALL)


class Gemma4(CallForm):
    """A name, then an object."""

    begins = ("<|tool_call>",)
    end = "<tool_call|>"
    quote = '<|"|>'
    """What is before and behind a text."""
    more_marks = (quote,)
    group = Group("<|tool_call>call:", "<|tool_call>call:")

    @staticmethod
    def is_of(template: str) -> bool:
        return "<|tool_call>" in template

    def may_end(self, body: str) -> bool:
        return body.count(self.quote) % 2 == 0

    def calls(self, begin: str, body: str, tools: Schemas) -> Sequence[RawCall]:
        if (match := _NAME.match(body)) is None:
            raise ValueError("no name")
        arguments, at = _value(body, match.end(), 0, self.quote)
        if body[at:].strip():
            raise ValueError("more than arguments")
        return [RawCall(match["name"], arguments)]

    def reader(self, begin: str, tools: Schemas) -> CallReader | None:
        return GemmaReader(tools, self.quote)

    def rules(self, rule: str, name: str, schema: Mapping[str, Any], special: SpecialTokens) -> list[str]:
        rules = _Rules(special, self.quote).of_object(f"{rule}_args", schema, name, 0)
        return [f"{rule}: {dumps(name)} {rule}_args {special.spell(self.end)}", *rules]


class GemmaReader:
    """Understands a call while it is written: each argument, of a text also its begin."""

    def __init__(self, tools: Schemas, quote: str) -> None:
        self._tools = tools
        self._quote = quote
        self._name: str | None = None
        self._kind = "key"
        """What is being read: a ``key``, a ``value`` of which nothing is told, a ``text``, or nothing that is known."""
        self._brackets = Brackets()
        self._separator = ""
        self.at = 0

    def read(self, text: str) -> list[Piece]:
        told: list[str] = []
        begins = self._name is None
        if self._name is None:
            if (match := _NAME.match(text)) is None or match["name"] not in self._tools or match.end() == len(text):
                return []
            self._name, self.at = match["name"], match.end() + 1
            told.append("{")
        steps = {"key": self._read_key, "value": self._read_value, "text": self._read_text}
        while (step := steps.get(self._kind)) is not None and step(text, told):
            pass
        return [Piece(self._name, "".join(told), begins=begins)] if any(told) else []

    def _read_key(self, text: str, told: list[str]) -> bool:
        """Read the name of an argument; return False if it is missing, as in what follows."""
        if (match := _key_pattern(self._quote).match(text, self.at)) is None:
            return False
        key = match["bare"] if match["quoted"] is None else match["quoted"]
        self.at, self._kind = _after_space(text, match.end()), "value"
        self._brackets = Brackets(1, (self._quote,), escapes=False, separator=",")
        told.append(f"{self._separator}{dumps(key)}: ")
        self._separator = ", "
        return True

    def _read_value(self, text: str, told: list[str]) -> bool:
        self.at = _after_space(text, self.at)
        if text.startswith(self._quote, self.at):
            self.at, self._kind = self.at + len(self._quote), "text"
            told.append('"')
            return True
        if (end := self._brackets.end(text, self.at)) is None:
            return False
        try:
            value, _ = _value(text, self.at, 1, self._quote)
        except ValueError:
            self._kind = ""
            return False
        told.append(value)
        self.at, self._kind = end, "key" if text[end - 1] == "," else ""
        return True

    def _read_text(self, text: str, told: list[str]) -> bool:
        end = text.find(self._quote, self.at)
        certain = text[self.at : len(text) - num_begun(text, self._quote) if end < 0 else end]
        self.at += len(certain)
        told.append(dumps(certain)[1:-1])
        if end < 0:
            return False
        if (behind := _after_space(text, end + len(self._quote))) == len(text):
            return False
        told.append('"')
        self.at, self._kind = behind + 1, "key" if text[behind] == "," else ""
        return True


def _value(text: str, at: int, depth: int, quote: str) -> tuple[str, int]:
    """Return the JSON of the value that begins at a place, and the place behind it.

    Raises:
        ValueError: There is none.
    """
    at = _after_space(text, at)
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    if text.startswith(quote, at):
        end = text.find(quote, at + len(quote))
        if end < 0:
            raise ValueError("a text without an end")
        return dumps(text[at + len(quote) : end]), end + len(quote)
    if (bracket := text[at : at + 1]) in ("{", "["):
        return _parts(text, at + 1, bracket, depth, quote)
    if (match := _BARE.match(text, at)) is None:
        raise ValueError("no value")
    written = match[0].strip()
    written = PYTHON_WORDS.get(written, written)
    value_of(written)
    return written, match.end()


def _parts(text: str, at: int, bracket: str, depth: int, quote: str) -> tuple[str, int]:
    """Return the JSON of an object or array, and the place behind it; its bracket has been read."""
    closing = {"{": "}", "[": "]"}[bracket]
    parts: list[str] = []
    at = _after_space(text, at)
    while text[at : at + 1] != closing:
        key = ""
        if bracket == "{":
            if (match := _key_pattern(quote).match(text, at)) is None:
                raise ValueError("no name of a value")
            key, at = f"{dumps(match['bare'] if match['quoted'] is None else match['quoted'])}: ", match.end()
        value, at = _value(text, at, depth + 1, quote)
        parts.append(key + value)
        at = _after_space(text, at)
        if text[at : at + 1] == ",":
            at = _after_space(text, at + 1)
        elif text[at : at + 1] != closing:
            raise ValueError("no end of an object or array")
    return f"{bracket}{', '.join(parts)}{closing}", at + 1


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


class _Rules:
    """Writes the rules of grammars of values."""

    def __init__(self, special: SpecialTokens, quote: str) -> None:
        self._special = special
        self._quote = quote

    def of_object(self, rule: str, schema: Mapping[str, Any], where: str, depth: int) -> list[str]:
        parameters, any_value = parameters_of(schema, where)
        if any_value is not None:
            one = f"{rule}_any"
            key = f"{rule.upper()}_KEY"
            rules = [
                f'{rule}: "{{" ({one} ("," {one})*)? "}}"',
                rf"{one}: {key} {one}_value",
                rf"{key}: /[A-Za-z_]\w{{0,40}}:/",
            ]
            return [*rules, *self._of_value(f"{one}_value", any_value, where, depth + 1)]
        rules = [f'{rule}: "{{" {rule}_first_0 "}}"', *listed(rule, [one.is_required for one in parameters], ",")]
        for i, (key, value, _) in enumerate(parameters):
            if not re.fullmatch(r"[\w.-]+", key):
                raise UnsupportedSchema(
                    f"properties.{key}", "a name must have letters, digits and '_' alone; rename it"
                )
            rules.append(f"{rule}_{i}: {dumps(key + ':')} {rule}_{i}_value")
            rules += self._of_value(f"{rule}_{i}_value", value, key, depth + 1)
        return rules

    def _of_value(self, rule: str, value: Mapping[str, Any], key: str, depth: int) -> list[str]:
        if depth > 8:
            raise UnsupportedSchema(
                f"properties.{key}", "it is nested too deeply, or refers to itself; make it flatter"
            )
        own, special, quote = resolved(value, value), self._special, self._quote
        types = types_of(own, value)
        if "enum" in own or "const" in own:
            values = own["enum"] if "enum" in own else [own["const"]]
            if any(isinstance(one, dict | list) for one in values):
                raise UnsupportedSchema(
                    f"properties.{key}", "an enum can have no objects and arrays here; write their type"
                )
            texts = [special.spell(f"{quote}{one}{quote}" if isinstance(one, str) else dumps(one)) for one in values]
            return [f"{rule}: {' | '.join(texts)}"]
        parts = own.get("anyOf") or own.get("oneOf")
        if types is None:
            parts = [{"type": ["string", "number", "boolean", "null"]}]
        elif not isinstance(parts, list) and isinstance(own["type"], list):
            parts = [{**own, "type": name} for name in own["type"]]
        elif isinstance(parts, list) and (beside := beside_alternatives(own)):
            raise UnsupportedSchema(f"properties.{key}.{beside[0]}", "write it into each of the alternatives")
        if isinstance(parts, list):
            rules = [f"{rule}: {' | '.join(f'{rule}_{i}' for i in range(len(parts)))}"]
            for i, part in enumerate(parts):
                rules += self._of_value(f"{rule}_{i}", with_definitions(part, value), key, depth + 1)
            return rules
        if types == {"object"}:
            return self.of_object(rule, with_definitions(own, value), key, depth)
        if types == {"array"}:
            if more := sorted(own.keys() & {"prefixItems", "minItems", "maxItems", "uniqueItems"}):
                raise UnsupportedSchema(f"properties.{key}.{more[0]}", "it cannot be enforced here; write items alone")
            items = self._of_value(f"{rule}_item", with_definitions(own.get("items", {}), value), key, depth + 1)
            return [f'{rule}: "[" ({rule}_item ("," {rule}_item)*)? "]"', *items]
        if types == {"string"}:
            return [
                f"{rule}: {special.spell(quote)} {rule}_text",
                *text_rules(f"{rule}_text", key, own, quote, special),
            ]
        return [f"{rule}: {json_value(value)}"]
