"""The calls of InternLM 2 and later, a JSON object between marks.

::

    <|action_start|><|plugin|>
    {"name": "weather", "parameters": {"city": "Köln"}}<|action_end|>
"""

from __future__ import annotations

from omniserve.server.dialects.base import Group
from omniserve.server.dialects.json_calls import NamedCallForm

_BEGIN = "<|action_start|><|plugin|>"


class InternLM(NamedCallForm):
    """Two marks, a line with a JSON object, a mark."""

    begins = (_BEGIN,)
    end = "<|action_end|>"
    group = Group(_BEGIN, f"\n{_BEGIN}")
    word = "parameters"
    space = ("\n", "")

    @staticmethod
    def is_of(template: str) -> bool:
        return "<|action_start|>" in template
