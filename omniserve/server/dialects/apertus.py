"""Apertus' calls, a list of objects that have the arguments under the name.

::

    <|tools_prefix|>[{"weather": {"city": "Köln"}}, {"time": {}}]<|tools_suffix|>
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from omniserve.sampling.grammar import json_value
from omniserve.server.dialects.base import CallReader, Group, RawCall, Schemas
from omniserve.server.dialects.call_readers import Head, JsonReader
from omniserve.server.dialects.grammar_text import SpecialTokens
from omniserve.server.dialects.json_calls import JsonListForm
from omniserve.server.dialects.json_text import dumps, items, members, value_of

_BEGIN, _END = "<|tools_prefix|>", "<|tools_suffix|>"
_NAME = r'\{\s*+(?P<name>"(?:[^"\\]|\\.)*+")\s*+:\s*+(?=\{)'
_FIRST, _NEXT = re.compile(rf"\s*+\[\s*+{_NAME}"), re.compile(rf"\s*+\}}\s*+,\s*+{_NAME}")


class Apertus(JsonListForm):
    """A JSON array of objects with one member each."""

    begins = (_BEGIN,)
    closing = _END
    group = Group(f"{_BEGIN}[", ", ", f"]{_END}")

    @staticmethod
    def is_of(template: str) -> bool:
        return _BEGIN in template

    def calls(self, begin: str, body: str, tools: Schemas) -> Sequence[RawCall]:
        calls = []
        for item in items(body):
            found = members(item)
            if len(found) != 1 or not all(isinstance(value, dict) for value, _ in found.values()):
                raise ValueError("no call")
            calls += [RawCall(name, text) for name, (_, text) in found.items()]
        return calls

    def reader(self, begin: str, tools: Schemas) -> CallReader | None:
        return JsonReader(_find_head, tools)

    def rules(self, rule: str, name: str, schema: Mapping[str, Any], special: SpecialTokens) -> list[str]:
        head = special.spell(f"{{{dumps(name)}: ")
        return [f'{rule}: {head} {rule}_args "}}"', f"{rule}_args: {json_value(schema)}"]


def _find_head(text: str, at: int) -> Head | None:
    match = (_NEXT if at else _FIRST).match(text, at)
    if match is None:
        return None
    try:
        return Head(value_of(match["name"]), match.end())
    except ValueError:
        return None
