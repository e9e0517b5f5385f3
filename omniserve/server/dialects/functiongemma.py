"""FunctionGemma's calls: those of Gemma 4 with other marks.

::

    <start_function_call>call:weather{city:<escape>Köln<escape>,days:3}<end_function_call>
"""

from __future__ import annotations

from omniserve.server.dialects.base import Group
from omniserve.server.dialects.gemma4 import Gemma4


class FunctionGemma(Gemma4):
    """A name, then an object."""

    begins = ("<start_function_call>",)
    end = "<end_function_call>"
    quote = "<escape>"
    more_marks = (quote,)
    group = Group("<start_function_call>call:", "<start_function_call>call:")

    @staticmethod
    def is_of(template: str) -> bool:
        return "<start_function_call>" in template
