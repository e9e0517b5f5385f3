"""Understands calls whose arguments are between tags while they are written: each value, of a text also its begin."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from omniserve.server.dialects.base import Piece, Schemas, num_begun
from omniserve.server.dialects.json_text import dumps


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterMarks:
    """What a call is told by, whose arguments are between tags."""

    name: re.Pattern[str]
    """What the call begins with, its name in a group ``name``."""
    key: re.Pattern[str]
    """What is before a value, the parameter's name in a group ``key``."""
    value_end: str
    """What is behind a value, if one of ``follows`` is behind that."""
    follows: tuple[str, ...]
    """What begins the next argument, and what is behind all of them."""
    drops_line_ends: bool
    """A line end before a value, and one behind it, are no part of it."""


@dataclass(frozen=True, slots=True)
class Value:
    """How the value of a parameter becomes JSON."""

    is_text: bool
    """The value is a text, whatever is written."""
    json_of: Callable[[str], str]
    """Returns the JSON of what is written."""


class ParameterReader:
    """Understands one call.

    Args:
        marks: What the call is told by.
        tools: The tools that are offered.
        value_of: Returns, for what the tool's schema says and the match of a key, how the value becomes JSON.
    """

    def __init__(
        self, marks: ParameterMarks, tools: Schemas, value_of: Callable[[Mapping[str, Any], re.Match[str]], Value]
    ) -> None:
        self._marks = marks
        self._tools = tools
        self._value_of = value_of
        self._name: str | None = None
        self._value: Value | None = None
        """The value of the parameter that is being read."""
        self._seen = 0
        """The place up to which there is no end of its value."""
        self._separator = ""
        self.at = 0

    def read(self, text: str) -> list[Piece]:
        told: list[str] = []
        begins = self._name is None
        if self._name is None:
            match = self._marks.name.match(text)
            if match is None or match["name"] not in self._tools:
                return []
            self._name, self.at = match["name"], match.end()
            told.append("{")
        while self._read_key(text, told) if self._value is None else self._read_value(text, self._value, told):
            pass
        return [Piece(self._name, "".join(told), begins=begins)] if told else []

    def _read_key(self, text: str, told: list[str]) -> bool:
        """Read up to the begin of a value; return False if it is missing."""
        match = self._marks.key.match(text, self.at)
        if match is None:
            return False
        begin = match.end()
        if self._marks.drops_line_ends:
            if begin == len(text):
                return False
            begin += text.startswith("\n", begin)
        assert self._name is not None
        self._value = self._value_of(self._tools[self._name], match)
        self.at = self._seen = begin
        quote = '"' if self._value.is_text else ""
        told.append(f"{self._separator}{dumps(match['key'])}: {quote}")
        self._separator = ", "
        return True

    def _read_value(self, text: str, value: Value, told: list[str]) -> bool:
        """Read up to the end of a value; return False if it is missing."""
        marks = self._marks
        while (end := text.find(marks.value_end, self._seen)) >= 0:
            behind = text[end + len(marks.value_end) :].lstrip()
            if behind.startswith(marks.follows):
                written = text[self.at : self._without_line_end(text, end)]
                told.append(f'{_inner(written)}"' if value.is_text else value.json_of(written))
                self._value, self.at = None, end + len(marks.value_end)
                return True
            if any(mark.startswith(behind) for mark in marks.follows):
                break
            self._seen = end + 1
        if end < 0:
            end = len(text) - num_begun(text, marks.value_end)
            self._seen = max(self._seen, end)
        if value.is_text and (certain := text[self.at : self._without_line_end(text, end)]):
            told.append(_inner(certain))
            self.at += len(certain)
        return False

    def _without_line_end(self, text: str, end: int) -> int:
        return end - (self._marks.drops_line_ends and end > self.at and text[end - 1] == "\n")


def _inner(text: str) -> str:
    """Return a text as JSON without its quotes."""
    return dumps(text)[1:-1]
