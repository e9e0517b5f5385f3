"""The calls of Jamba and of Hunyuan A13B, a list of JSON objects between tags.

::

    <tool_calls>[{"name": "weather", "arguments": {"city": "Köln"}}]</tool_calls>
"""

from __future__ import annotations

from omniserve.server.dialects.base import Group
from omniserve.server.dialects.json_calls import JsonListForm


class Jamba(JsonListForm):
    """A JSON array between two tags."""

    begins = ("<tool_calls>",)
    closing = "</tool_calls>"
    group = Group("<tool_calls>[", ", ", "]</tool_calls>")

    @staticmethod
    def is_of(template: str) -> bool:
        # MiniMax M1 has such tags around lines with an object each.
        return "<tool_calls>" in template and "<beginning_of_sentence>" not in template
