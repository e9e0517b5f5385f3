"""The calls of GLM 4.5 and later, arguments as pairs of a key and a value.

::

    <tool_call>weather
    <arg_key>city</arg_key>
    <arg_value>Köln</arg_value>
    </tool_call>
"""

from __future__ import annotations

from omniserve.server.dialects.base import Group
from omniserve.server.dialects.parameters import ParameterForm


class Glm45(ParameterForm):
    """A name with pairs of tags behind it; GLM 4.7 leaves out the line ends."""

    begins = ("<tool_call>",)
    end = "</tool_call>"
    more_marks = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    group = Group("<tool_call>", "\n<tool_call>")
    head = ("", "\n")
    key = ("<arg_key>", "</arg_key>\n<arg_value>")
    value_end = "</arg_value>\n"
    tail = "</tool_call>"

    @staticmethod
    def is_of(template: str) -> bool:
        return "<arg_key>" in template
