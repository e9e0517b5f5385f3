"""The calls of Granite 20B Functioncalling, JSON objects each behind a tag.

::

    <function_call> {"name": "weather", "arguments": {"city": "Köln"}}
"""

from __future__ import annotations

from omniserve.server.dialects.base import Group
from omniserve.server.dialects.json_calls import JsonListForm


class Granite20bFunctionCalling(JsonListForm):
    """A tag and a JSON object."""

    begins = ("<function_call>",)
    group = Group("<function_call> ", "\n<function_call> ")

    @staticmethod
    def is_of(template: str) -> bool:
        return "<function_call>" in template
