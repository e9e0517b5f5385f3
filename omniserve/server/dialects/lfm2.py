"""The calls of Liquid's LFM2, a list of Python's calls between two marks.

::

    <|tool_call_start|>[weather(city="Köln", days=2), time()]<|tool_call_end|>
"""

from __future__ import annotations

from omniserve.server.dialects.base import Group
from omniserve.server.dialects.pythonic import Pythonic

_BEGIN, _END = "<|tool_call_start|>", "<|tool_call_end|>"


class Lfm2(Pythonic):
    """A list of Python's calls between two marks, anywhere in the answer."""

    begins = (f"{_BEGIN}[",)
    opening = ""
    closing = _END
    only_at_start = False
    group = Group(f"{_BEGIN}[", ", ", f"]{_END}")

    @staticmethod
    def is_of(template: str) -> bool:
        return _BEGIN in template
