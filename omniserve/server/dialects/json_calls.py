"""Calls as JSON objects of a name and arguments, which several forms of calls put between marks of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from omniserve.sampling.grammar import json_value
from omniserve.server.dialects.base import CallForm, CallReader, RawCall, Schemas
from omniserve.server.dialects.call_readers import Head, JsonReader, named_heads
from omniserve.server.dialects.grammar_text import SpecialTokens
from omniserve.server.dialects.json_text import Brackets, dumps, ends_in_string, items, members, object_text

_OBJECT = re.compile(r"\s*(?=\{)")


def named_call(text: str, name_word: str = "name") -> RawCall:
    """Return the call that a JSON object of ``name``, or another word, and ``arguments`` is.

    Raises:
        ValueError: It is none.
    """
    found = members(text)
    name, _ = found.get(name_word, (None, ""))
    # Some models were taught the second word, and some write either. A call with both is not understood.
    given = [found[word] for word in ("arguments", "parameters") if word in found] or [({}, "{}")]
    if not isinstance(name, str) or len(given) > 1 or not isinstance(given[0][0], dict):
        raise ValueError("no call")
    return RawCall(name, given[0][1])


def named_call_rules(
    rule: str,
    name: str,
    schema: Mapping[str, Any],
    special: SpecialTokens,
    *,
    before: str = "",
    word: str = "arguments",
    behind: str = "",
) -> list[str]:
    """Return rules of a call as a JSON object; the first character of which may be a part of ``before``."""
    head = special.spell(f'{before}"name": {dumps(name)}, "{word}": ')
    return [f"{rule}: {head} {rule}_args {special.spell('}' + behind)}", f"{rule}_args: {json_value(schema)}"]


class BracketFinder:
    """Finds the end of a JSON value, or of a call in brackets, that follows a mark."""

    def __init__(self, depth: int = 0, quotes: str = '"') -> None:
        self._brackets = Brackets(depth, quotes)

    def find(self, text: str) -> tuple[int, int] | None:
        end = self._brackets.end(text)
        return None if end is None else (end, end)


class NamedCallForm(CallForm):
    """A mark, a JSON object of a name and arguments, a mark."""

    word = "arguments"
    """What the object calls the arguments."""
    space: tuple[str, str] = ("\n", "\n")
    """What is between the first mark and the object, and between it and the last mark."""

    def calls(self, begin: str, body: str, tools: Schemas) -> Sequence[RawCall]:
        return [named_call(body)]

    def reader(self, begin: str, tools: Schemas) -> CallReader | None:
        return JsonReader(named_heads(r"\s*+\{"), tools)

    def rules(self, rule: str, name: str, schema: Mapping[str, Any], special: SpecialTokens) -> list[str]:
        before, behind = self.space
        return named_call_rules(
            rule, name, schema, special, before=before + "{", word=self.word, behind=behind + self.end
        )


class MarkedArgumentsForm(CallForm):
    """A head that has the name, a mark, the JSON object of the arguments, a mark."""

    mark: str
    """What is between the head and the arguments."""

    def may_end(self, body: str) -> bool:
        return not ends_in_string(body.partition(self.mark)[2])

    def calls(self, begin: str, body: str, tools: Schemas) -> Sequence[RawCall]:
        head, mark, written = body.partition(self.mark)
        arguments = object_text(written)
        if not mark or arguments is None:
            raise ValueError("no call")
        name, call_id = self.name_and_id(head.strip())
        return [RawCall(name, arguments, call_id)]

    def reader(self, begin: str, tools: Schemas) -> CallReader | None:
        return JsonReader(self._find_head, tools)

    def _find_head(self, text: str, at: int) -> Head | None:
        head, mark, _ = ("", "", "") if at else text.partition(self.mark)
        found = _OBJECT.match(text, len(head) + len(mark))
        if not mark or found is None:
            return None
        try:
            name, call_id = self.name_and_id(head.strip())
        except ValueError:
            return None
        return Head(name, found.end(), call_id)

    def name_and_id(self, head: str) -> tuple[str, str | None]:
        """Return what the head says: a name, and the id that the model gives the call, if it does.

        Raises:
            ValueError: It says neither.
        """
        return head, None

    def rules(self, rule: str, name: str, schema: Mapping[str, Any], special: SpecialTokens) -> list[str]:
        return [
            f"{rule}: {rule}_head {special.spell(self.mark)} {rule}_args {special.spell(self.end)}",
            f"{rule}_args: {json_value(schema)}",
            *self.head_rules(f"{rule}_head", name, special),
        ]

    def head_rules(self, rule: str, name: str, special: SpecialTokens) -> list[str]:
        """Return rules of the head; the one of this name is all of it."""
        return [f"{rule}: {special.spell(name)}"]


class JsonListForm(CallForm):
    """A mark, then a JSON array of calls, or a single call."""

    name_word = "name"
    """What a call's object calls the name."""

    def finder(self, begin: str) -> BracketFinder:
        return BracketFinder(begin.count("["))

    def calls(self, begin: str, body: str, tools: Schemas) -> Sequence[RawCall]:
        text = "[" * begin.count("[") + body
        found = items(text) if text.lstrip().startswith("[") else [text]
        return [named_call(one, self.name_word) for one in found]

    def reader(self, begin: str, tools: Schemas) -> CallReader | None:
        before = r"\s*+\{" if "[" in begin else r"\s*+\[?+\s*+\{"
        return JsonReader(named_heads(before, self.name_word), tools)

    def rules(self, rule: str, name: str, schema: Mapping[str, Any], special: SpecialTokens) -> list[str]:
        return named_call_rules(rule, name, schema, special, before="{")
