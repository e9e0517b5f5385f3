"""Kimi K2's calls, whose ids the model gives itself and wants back.

::

    <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Köln"}
    <|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from omniserve.sampling.grammar import json_value
from omniserve.server.dialects.base import CallForm, Group, RawCall, Schemas
from omniserve.server.dialects.grammar_text import SpecialTokens
from omniserve.server.dialects.json_text import ends_in_string, object_text

_OPENING, _CLOSING = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_NAME = re.compile(r"(?:functions\.)?(?P<name>[^\s]+?)(?::\d+)?")


class KimiK2(CallForm):
    """An id, which has the name, a mark and arguments."""

    begins = (_BEGIN,)
    end = _END
    opening, closing = _OPENING, _CLOSING
    more_marks = (_ARGUMENTS,)
    group = Group(_OPENING + _BEGIN, _BEGIN, _CLOSING)

    @staticmethod
    def is_of(template: str) -> bool:
        return _ARGUMENTS in template

    def may_end(self, body: str) -> bool:
        return not ends_in_string(body.partition(_ARGUMENTS)[2])

    def calls(self, begin: str, body: str, tools: Schemas) -> Sequence[RawCall]:
        call_id, _, written = body.partition(_ARGUMENTS)
        match = _NAME.fullmatch(call_id.strip())
        arguments = object_text(written)
        if match is None or arguments is None:
            raise ValueError("no call")
        return [RawCall(match["name"], arguments, call_id.strip())]

    def rules(self, rule: str, name: str, schema: Mapping[str, Any], special: SpecialTokens) -> list[str]:
        return [
            f"{rule}: {special.spell(f'functions.{name}:')} {rule.upper()}_INDEX {special.spell(_ARGUMENTS)} "
            f"{rule}_args {special.spell(_END)}",
            f"{rule.upper()}_INDEX: /[0-9]{{1,3}}/",
            f"{rule}_args: {json_value(schema)}",
        ]
