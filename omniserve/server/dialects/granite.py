"""The calls of Granite 3, a list of JSON objects behind a mark.

::

    <|tool_call|>[{"name": "weather", "arguments": {"city": "Köln"}}]
"""

from __future__ import annotations

from omniserve.server.dialects.base import Group
from omniserve.server.dialects.json_calls import JsonListForm


class Granite(JsonListForm):
    """A mark and a JSON array."""

    begins = ("<|tool_call|>",)
    group = Group("<|tool_call|>[", ", ", "]")

    @staticmethod
    def is_of(template: str) -> bool:
        return "<|tool_call|>" in template and "<|/tool_call|>" not in template
