"""The calls of Seed-OSS, arguments between tags.

::

    <seed:tool_call>
    <function=weather>
    <parameter=city>Köln</parameter>
    </function>
    </seed:tool_call>
"""

from __future__ import annotations

from omniserve.server.dialects.base import Group
from omniserve.server.dialects.parameters import ParameterForm


class SeedOss(ParameterForm):
    """A function's tag with a tag for each parameter in it, whose line ends belong to its value."""

    begins = ("<seed:tool_call>",)
    end = "</seed:tool_call>"
    group = Group("<seed:tool_call>", "\n<seed:tool_call>")
    head = ("\n<function=", ">\n")
    key = ("<parameter=", ">")
    value_end = "</parameter>\n"
    tail = "</function>\n</seed:tool_call>"

    @staticmethod
    def is_of(template: str) -> bool:
        return "<seed:tool_call>" in template
