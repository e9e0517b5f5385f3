"""Kimi K2's calls, whose ids the model gives itself and wants back.

::

    <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Köln"}
    <|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

import re

from omniserve.server.dialects.base import Group
from omniserve.server.dialects.grammar_text import SpecialTokens
from omniserve.server.dialects.json_calls import MarkedArgumentsForm

_OPENING, _CLOSING = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_NAME = re.compile(r"(?:functions\.)?(?P<name>[^\s]+?)(?::\d+)?")


class KimiK2(MarkedArgumentsForm):
    """An id, which has the name, a mark and arguments."""

    begins = (_BEGIN,)
    mark = _ARGUMENTS
    end = _END
    opening, closing = _OPENING, _CLOSING
    more_marks = (_ARGUMENTS,)
    group = Group(_OPENING + _BEGIN, _BEGIN, _CLOSING)

    @staticmethod
    def is_of(template: str) -> bool:
        return _ARGUMENTS in template

    def name_and_id(self, head: str) -> tuple[str, str | None]:
        match = _NAME.fullmatch(head)
        if match is None:
            raise ValueError("no name")
        return match["name"], head

    def head_rules(self, rule: str, name: str, special: SpecialTokens) -> list[str]:
        index = f"{rule.upper()}_INDEX"
        return [f"{rule}: {special.spell(f'functions.{name}:')} {index}", f"{index}: /[0-9]{{1,3}}/"]
