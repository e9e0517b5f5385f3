"""DeepSeek's calls, in the forms of V3 and R1 and of V3.1.

::

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather
    ```json
    {"city": "Köln"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from omniserve.sampling.grammar import json_value
from omniserve.server.dialects.base import CallReader, Group, RawCall, Schemas
from omniserve.server.dialects.call_readers import Head, JsonReader
from omniserve.server.dialects.grammar_text import SpecialTokens
from omniserve.server.dialects.json_calls import MarkedArgumentsForm
from omniserve.server.dialects.json_text import object_text

_OPENING, _CLOSING = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_HEAD = re.compile(rf"\s*function\s*{_SEPARATOR}\s*(?P<name>[^\s`]+)\s*```(?:json)?\s*(?=\{{)")
_FENCED = re.compile(r"\s*(?P<name>[^\s`]+)\s*```(?:json)?\s*(?P<arguments>.*?)\s*```\s*", re.DOTALL)


class DeepSeekV31(MarkedArgumentsForm):
    """A name, a mark and arguments."""

    begins = (_BEGIN,)
    mark = _SEPARATOR
    end = _END
    opening, closing = _OPENING, _CLOSING
    more_marks = (_SEPARATOR,)
    group = Group(_OPENING + _BEGIN, _BEGIN, _CLOSING)

    @staticmethod
    def is_of(template: str) -> bool:
        return _SEPARATOR in template and "```json" not in template


class DeepSeekV3(DeepSeekV31):
    """The word ``function``, a mark, a name and arguments in a block of code."""

    @staticmethod
    def is_of(template: str) -> bool:
        return _SEPARATOR in template and "```json" in template

    def may_end(self, body: str) -> bool:
        return body.rstrip().endswith("```")

    def calls(self, begin: str, body: str, tools: Schemas) -> Sequence[RawCall]:
        kind, _, call = body.partition(_SEPARATOR)
        match = _FENCED.fullmatch(call)
        if kind.strip() != "function" or match is None or (arguments := object_text(match["arguments"])) is None:
            raise ValueError("no call")
        return [RawCall(match["name"], arguments)]

    def reader(self, begin: str, tools: Schemas) -> CallReader | None:
        return JsonReader(_find_head, tools)

    def rules(self, rule: str, name: str, schema: Mapping[str, Any], special: SpecialTokens) -> list[str]:
        head = special.spell(f"function{_SEPARATOR}{name}\n```json\n")
        end = special.spell(f"\n```{_END}")
        return [f"{rule}: {head} {rule}_args {end}", f"{rule}_args: {json_value(schema)}"]


def _find_head(text: str, at: int) -> Head | None:
    match = None if at else _HEAD.match(text)
    return None if match is None else Head(match["name"], match.end())
