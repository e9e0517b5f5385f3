"""The calls of Qwen3-Coder and Qwen 3.5, arguments between tags.

::

    <tool_call>
    <function=weather>
    <parameter=city>
    Köln
    </parameter>
    </function>
    </tool_call>
"""

from __future__ import annotations

from omniserve.server.dialects.base import Group
from omniserve.server.dialects.parameters import ParameterForm


class Qwen3Coder(ParameterForm):
    """A function's tag with a tag for each parameter in it."""

    begins = ("<tool_call>",)
    end = "</tool_call>"
    group = Group("<tool_call>", "\n<tool_call>")
    head = ("\n<function=", ">\n")
    key = ("<parameter=", ">\n")
    value_end = "\n</parameter>\n"
    tail = "</function>\n</tool_call>"
    drops_line_ends = True

    @staticmethod
    def is_of(template: str) -> bool:
        return "<function=" in template and "<parameter=" in template and "<seed:tool_call>" not in template
