"""JSON in the text of an answer: the texts of its parts, unchanged, and where a value ends that still comes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SPACE = re.compile(r"[ \t\n\r]*")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


# Numbers are only passed on, and one of Python's has a largest length.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=str, parse_float=str)


def value_of(text: str) -> Any:
    """Return the value of a JSON text, in which numbers are strings.

    Raises:
        ValueError: It is no JSON, or nested too deeply.
    """
    try:
        value, at = _DECODER.raw_decode(text, _after_space(text, 0))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if _after_space(text, at) != len(text):
        raise ValueError("more than a JSON value")
    return value


def object_text(text: str) -> str | None:
    """Return a text without the white space around it if it is a JSON object; else None."""
    text = text.strip()
    try:
        return text if isinstance(value_of(text), dict) else None
    except ValueError:
        return None


def members(text: str) -> dict[str, tuple[Any, str]]:
    """Return the members of a JSON object: each value, and its own text.

    Raises:
        ValueError: The text is no JSON object, a member is there twice, or it is nested too deeply.
    """
    found: dict[str, tuple[Any, str]] = {}
    for begin, key, value, end in _parts(text, "{}"):
        if key in found:
            raise ValueError("an object that says a thing twice")
        found[key] = value, text[begin:end]
    return found


def items(text: str) -> list[str]:
    """Return the texts of a JSON array's items.

    Raises:
        ValueError: The text is no JSON array, or is nested too deeply.
    """
    return [text[begin:end] for begin, _, _, end in _parts(text, "[]")]


def dumps(value: Any) -> str:
    """Return a value as JSON, in the characters that it has.

    Raises:
        ValueError: It has no JSON, such as infinity.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return json.dumps(value, allow_nan=False)
    return text


def ends_in_string(text: str) -> bool:
    """Return whether the beginning of a JSON object ends inside a string."""
    return text.lstrip().startswith("{") and '"' in _STRING.sub("", text)


class Brackets:
    """Finds where a bracketed value ends in a text that grows, looking at each character once.

    Args:
        depth: The number of brackets that are open before the text.
        quotes: What strings may begin and end with.
        escapes: A backslash in a string takes its meaning from what follows.
        separator: A character that ends the value, too, if one bracket is open: those of the value are more.
    """

    def __init__(
        self, depth: int = 0, quotes: Sequence[str] = '"', *, escapes: bool = True, separator: str = ""
    ) -> None:
        self._depth = depth
        self._separator = separator
        self._marks = re.compile(rf"[\[\](){{}}{separator}]|{'|'.join(map(re.escape, quotes))}")
        escape = r"\\|" if escapes else ""
        self._string_marks = {quote: re.compile(escape + re.escape(quote)) for quote in quotes}
        self._num_begun = max(map(len, quotes)) - 1
        """Number of characters at the end that may begin a quote."""
        self._quote = ""
        self._at = 0

    def end(self, text: str, begin: int = 0) -> int | None:
        """Return the place behind the value's last bracket; None while that is missing.

        Args:
            text: All of the text so far.
            begin: Where in it the value begins; the same in every call.
        """
        self._at = max(self._at, begin)
        while match := (self._string_marks[self._quote] if self._quote else self._marks).search(text, self._at):
            mark, self._at = match[0], match.end()
            if mark == "\\":
                if self._at == len(text):
                    self._at -= 1
                    return None
                self._at += 1
            elif self._quote:
                self._quote = ""
            elif mark in self._string_marks:
                self._quote = mark
            elif mark == self._separator:
                if self._depth == 1:
                    return self._at
            else:
                self._depth += 1 if mark in "[({" else -1
                if self._depth <= 0:
                    return self._at
        self._at = max(self._at, len(text) - self._num_begun)
        return None


def _parts(text: str, brackets: str) -> list[tuple[int, str, Any, int]]:
    """Return the begin, key, value and end of each part of an object or array; keys of an array are empty."""
    parts: list[tuple[int, str, Any, int]] = []
    at, expected = _after_space(text, 0), brackets[0]
    try:
        while text[at : at + 1] == expected:
            at = _after_space(text, at + 1)
            if not parts and text[at : at + 1] == brackets[1]:
                break
            key = ""
            if brackets == "{}":
                key, at = _DECODER.raw_decode(text, at)
                at = _after_space(text, at)
                if not isinstance(key, str) or text[at : at + 1] != ":":
                    raise ValueError("no JSON object")
                at = _after_space(text, at + 1)
            begin = at
            value, at = _DECODER.raw_decode(text, begin)
            parts.append((begin, key, value, at))
            at, expected = _after_space(text, at), ","
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if text[at : at + 1] != brackets[1] or _after_space(text, at + 1) != len(text):
        raise ValueError("no JSON object or array")
    return parts


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()
