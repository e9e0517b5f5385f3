"""The calls of Phi-4-mini, in either of two forms.

::

    <|tool_call|>[{"name": "weather", "arguments": {"city": "Köln"}}]<|/tool_call|>
    functools[{"name": "weather", "arguments": {"city": "Köln"}}]
"""

from __future__ import annotations

from omniserve.server.dialects.base import Group
from omniserve.server.dialects.json_calls import JsonListForm


class Phi4Mini(JsonListForm):
    """A JSON array between two marks, or behind a word."""

    begins = ("<|tool_call|>", "functools[")
    closing = "<|/tool_call|>"
    group = Group("<|tool_call|>[", ", ", "]<|/tool_call|>")

    @staticmethod
    def is_of(template: str) -> bool:
        return "<|tool_call|>" in template and "<|/tool_call|>" in template
