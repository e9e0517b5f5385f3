"""Mistral's calls, in the form up to version 7 of its tokenizers, a JSON array, and in the newer one.

::

    [TOOL_CALLS][{"name": "weather", "arguments": {"city": "Köln"}}]
    [TOOL_CALLS]weather[ARGS]{"city": "Köln"}[TOOL_CALLS]time[ARGS]{}

The templates take no other ids of calls than nine letters and digits.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from omniserve.sampling.grammar import json_value
from omniserve.server.dialects.base import CallForm, CallReader, Group, RawCall, Schemas
from omniserve.server.dialects.call_readers import Head, JsonReader, named_heads
from omniserve.server.dialects.grammar_text import SpecialTokens
from omniserve.server.dialects.json_calls import named_call, named_call_rules
from omniserve.server.dialects.json_text import Brackets, items, members, object_text

_BEGIN, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_HEAD = re.compile(
    r"\s*(?:(?P<name>[A-Za-z0-9_./:-]+)(?:\[CALL_ID\](?P<id>[A-Za-z0-9]+))?(?:\[ARGS\])?\s*(?=\{)|(?=\[))"
)
_ALPHABET = string.ascii_letters + string.digits


class _Finder:
    def __init__(self) -> None:
        self._brackets = Brackets()
        self._begin: int | None = None

    def find(self, text: str) -> tuple[int, int] | None:
        if self._begin is None:
            if (match := _HEAD.match(text)) is None:
                return None
            self._begin = match.end()
        end = self._brackets.end(text, self._begin)
        return None if end is None else (end, end)


class Mistral(CallForm):
    """A mark, then a name and arguments; an array of calls is understood, too."""

    begins = (_BEGIN,)
    more_marks = (_ARGUMENTS, _ID)
    group = Group(_BEGIN, _BEGIN)

    @staticmethod
    def is_of(template: str) -> bool:
        return _BEGIN in template and _ARGUMENTS in template

    def finder(self, begin: str) -> _Finder:
        return _Finder()

    def calls(self, begin: str, body: str, tools: Schemas) -> Sequence[RawCall]:
        head = _HEAD.match(body)
        if head is None:
            raise ValueError("no name")
        if head["name"] is None:
            return [_listed_call(item) for item in items(body)]
        if (arguments := object_text(body[head.end() :])) is None:
            raise ValueError("no arguments")
        return [RawCall(head["name"], arguments, head["id"])]

    def reader(self, begin: str, tools: Schemas) -> CallReader | None:
        return JsonReader(_find_head, tools)

    def new_id(self) -> str:
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))

    def rules(self, rule: str, name: str, schema: Mapping[str, Any], special: SpecialTokens) -> list[str]:
        return [f"{rule}: {special.spell(name + _ARGUMENTS)} {rule}_args", f"{rule}_args: {json_value(schema)}"]


class OldMistral(Mistral):
    """A mark, then a JSON array of calls; a name and arguments are understood, too."""

    group = Group(f"{_BEGIN}[", ", ", "]")

    @staticmethod
    def is_of(template: str) -> bool:
        return _BEGIN in template and _ARGUMENTS not in template

    def rules(self, rule: str, name: str, schema: Mapping[str, Any], special: SpecialTokens) -> list[str]:
        return named_call_rules(rule, name, schema, special, before="{")


def _listed_call(text: str) -> RawCall:
    call_id, _ = members(text).get("id", (None, ""))
    return named_call(text)._replace(call_id=_given_id(call_id) if isinstance(call_id, str) else None)


def _given_id(written: str) -> str | None:
    """Return the id of a call if it is one that the templates take."""
    return written if re.fullmatch("[A-Za-z0-9]{9}", written) else None


_FIND_LISTED = named_heads(r"\s*+\[\s*+\{", get_id=_given_id)


def _find_head(text: str, at: int) -> Head | None:
    match = None if at else _HEAD.match(text)
    if match is None or match["name"] is None:
        return _FIND_LISTED(text, at)
    return Head(match["name"], match.end(), match["id"])
