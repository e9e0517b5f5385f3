"""Apertus' calls, a list of objects that have the arguments under the name.

::

    <|tools_prefix|>[{"weather": {"city": "Köln"}}, {"time": {}}]<|tools_suffix|>
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omniserve.sampling.grammar import json_value
from omniserve.server.dialects.base import Group, RawCall, Schemas
from omniserve.server.dialects.grammar_text import SpecialTokens
from omniserve.server.dialects.json_calls import JsonListForm
from omniserve.server.dialects.json_text import dumps, items, members

_BEGIN, _END = "<|tools_prefix|>", "<|tools_suffix|>"


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

    def rules(self, rule: str, name: str, schema: Mapping[str, Any], special: SpecialTokens) -> list[str]:
        head = special.spell(f"{{{dumps(name)}: ")
        return [f'{rule}: {head} {rule}_args "}}"', f"{rule}_args: {json_value(schema)}"]
