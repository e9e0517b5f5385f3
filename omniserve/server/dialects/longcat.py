"""The calls of LongCat Flash, as Hermes' between tags of its own.

::

    <longcat_tool_call>
    {"name": "weather", "arguments": {"city": "Köln"}}
    </longcat_tool_call>
"""

from __future__ import annotations

from omniserve.server.dialects.base import Group
from omniserve.server.dialects.json_calls import NamedCallForm


class LongCat(NamedCallForm):
    """A line with a tag, a line with a JSON object, a line with a tag."""

    begins = ("<longcat_tool_call>",)
    end = "</longcat_tool_call>"
    group = Group("<longcat_tool_call>", "\n<longcat_tool_call>")

    @staticmethod
    def is_of(template: str) -> bool:
        return "<longcat_tool_call>" in template
