"""The calls of MiniMax M2, arguments between tags.

::

    <minimax:tool_call>
    <invoke name="weather">
    <parameter name="city">Köln</parameter>
    </invoke>
    </minimax:tool_call>
"""

from __future__ import annotations

from omniserve.server.dialects.base import Group
from omniserve.server.dialects.parameters import ParameterForm


class MiniMaxM2(ParameterForm):
    """An invocation's tag with a tag for each parameter in it."""

    begins = ('<invoke name="',)
    end = "</invoke>"
    opening, closing = "<minimax:tool_call>", "</minimax:tool_call>"
    group = Group('<minimax:tool_call>\n<invoke name="', '\n<invoke name="', "\n</minimax:tool_call>")
    head = ("", '">\n')
    key = ('<parameter name="', '">')
    value_end = "</parameter>\n"
    tail = "</invoke>"
    drops_line_ends = True

    @staticmethod
    def is_of(template: str) -> bool:
        return "minimax:tool_call" in template
