"""The call of GigaChat 3, of which an answer has one: a JSON object behind a mark.

::

    <|function_call|>{"name": "weather", "arguments": {"city": "Köln"}}
"""

from __future__ import annotations

from omniserve.server.dialects.base import Group
from omniserve.server.dialects.json_calls import JsonListForm


class GigaChat3(JsonListForm):
    """A mark, or a role of its own, and a JSON object."""

    begins = ("<|function_call|>", "function call<|role_sep|>\n")
    group = Group("<|function_call|>", "\n<|function_call|>")

    @staticmethod
    def is_of(template: str) -> bool:
        return "function call<|role_sep|>" in template or "<|function_call|>" in template
