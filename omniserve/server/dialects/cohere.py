"""The calls of Cohere's Command A and R7B, a list of JSON objects between two marks.

::

    <|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Köln"}}
    ]<|END_ACTION|>

The ids only count the calls of one answer; a call gets another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omniserve.sampling.grammar import json_value
from omniserve.server.dialects.base import Group
from omniserve.server.dialects.grammar_text import SpecialTokens
from omniserve.server.dialects.json_calls import JsonListForm
from omniserve.server.dialects.json_text import dumps

_BEGIN, _END = "<|START_ACTION|>", "<|END_ACTION|>"


class CohereCommand3(JsonListForm):
    """A JSON array of objects with an id, a name and parameters."""

    begins = (_BEGIN,)
    closing = _END
    group = Group(f"{_BEGIN}[\n    ", ",\n    ", f"\n]{_END}")
    name_word = "tool_name"

    @staticmethod
    def is_of(template: str) -> bool:
        return _BEGIN in template

    def rules(self, rule: str, name: str, schema: Mapping[str, Any], special: SpecialTokens) -> list[str]:
        index = f"{rule.upper()}_INDEX"
        before, behind = '{"tool_call_id": "', f'", "tool_name": {dumps(name)}, "parameters": '
        return [
            f'{rule}: {special.spell(before)} {index} {special.spell(behind)} {rule}_args "}}"',
            f"{index}: /[0-9]{{1,3}}/",
            f"{rule}_args: {json_value(schema)}",
        ]
