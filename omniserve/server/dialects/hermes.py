"""Hermes' calls, which Qwen 2.5 and 3, Granite 4 and many others share.

::

    <tool_call>
    {"name": "weather", "arguments": {"city": "Köln"}}
    </tool_call>
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omniserve.server.dialects.base import CallForm, Group, RawCall, Schemas
from omniserve.server.dialects.grammar_text import SpecialTokens
from omniserve.server.dialects.json_calls import named_call, named_call_rules


class Hermes(CallForm):
    """A line with a tag, a line with a JSON object, a line with a tag."""

    begins = ("<tool_call>",)
    end = "</tool_call>"
    group = Group("<tool_call>", "\n<tool_call>")

    @staticmethod
    def is_of(template: str) -> bool:
        return "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template

    def calls(self, begin: str, body: str, tools: Schemas) -> Sequence[RawCall]:
        return [named_call(body)]

    def rules(self, rule: str, name: str, schema: Mapping[str, Any], special: SpecialTokens) -> list[str]:
        return named_call_rules(rule, name, schema, special, before="\n{", behind="\n</tool_call>")

    @property
    def marks(self) -> Sequence[str]:
        return (*self.begins, self.end)
