"""The calls of Nemotron Nano 2 and of Llama Nemotron, a list of JSON objects between tags.

::

    <TOOLCALL>[{"name": "weather", "arguments": {"city": "Köln"}}]</TOOLCALL>
"""

from __future__ import annotations

from omniserve.server.dialects.base import Group
from omniserve.server.dialects.json_calls import JsonListForm


class Nemotron(JsonListForm):
    """A JSON array between two tags."""

    begins = ("<TOOLCALL>",)
    closing = "</TOOLCALL>"
    group = Group("<TOOLCALL>[", ", ", "]</TOOLCALL>")

    @staticmethod
    def is_of(template: str) -> bool:
        return "<TOOLCALL>" in template
