"""Hermes' calls, which Qwen 2.5 and 3, Granite 4 and many others share.

::

    <tool_call>
    {"name": "weather", "arguments": {"city": "Köln"}}
    </tool_call>
"""

from __future__ import annotations

from omniserve.server.dialects.base import Group
from omniserve.server.dialects.json_calls import NamedCallForm


class Hermes(NamedCallForm):
    """A line with a tag, a line with a JSON object, a line with a tag."""

    begins = ("<tool_call>",)
    end = "</tool_call>"
    group = Group("<tool_call>", "\n<tool_call>")

    @staticmethod
    def is_of(template: str) -> bool:
        return "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template
