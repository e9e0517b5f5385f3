"""The calls of Llama 3.1 to 3.3 as JSON: nothing else is in the answer, and several are separated by semicolons.

::

    {"name": "weather", "parameters": {"city": "Köln"}}; {"name": "time", "parameters": {}}

``<|python_tag|>`` may be before the first. By its own chat template, Llama 4 writes so, too. For tools of the names
that Llama was taught (``builtin_tools`` of the template) it has another form, which no grammar writes::

    <|python_tag|>brave_search.call(query="Köln")
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from omniserve.server.dialects.base import CallForm, CallReader, Group, RawCall, Schemas
from omniserve.server.dialects.call_readers import JsonReader, named_heads
from omniserve.server.dialects.grammar_text import SpecialTokens
from omniserve.server.dialects.json_calls import BracketFinder, named_call, named_call_rules
from omniserve.server.dialects.json_text import dumps

_CALL = ".call("
_ARGUMENT = re.compile(r"\s*(?P<name>\w+)\s*=\s*\"(?P<value>.*?)\"\s*(?:,(?=\s*\w+\s*=\s*\")|\Z)", re.DOTALL)


class Llama3Json(CallForm):
    """JSON objects where the answer begins, or a call of a tool that Llama knows."""

    begins = ("{", *(f"{name}{_CALL}" for name in ("brave_search", "wolfram_alpha", "ipython")))
    opening = "<|python_tag|>"
    closing = ";"
    only_at_start = True
    group = Group("{", "; {")

    @staticmethod
    def is_of(template: str) -> bool:
        heads = ("<|start_header_id|>", "<|header_start|>")  # of Llama 3, of Llama 4
        is_llama = any(head in template for head in heads)
        return is_llama and '"parameters": ' in template and "func_name1(" not in template

    def finder(self, begin: str) -> BracketFinder:
        return BracketFinder(depth=1)

    def calls(self, begin: str, body: str, tools: Schemas) -> Sequence[RawCall]:
        return [named_call(begin + body) if begin == "{" else RawCall(begin.removesuffix(_CALL), _arguments(body))]

    def reader(self, begin: str, tools: Schemas) -> CallReader | None:
        return JsonReader(named_heads(""), tools) if begin == "{" else None

    def rules(self, rule: str, name: str, schema: Mapping[str, Any], special: SpecialTokens) -> list[str]:
        return named_call_rules(rule, name, schema, special, word="parameters")


def _arguments(body: str) -> str:
    """Return the JSON of what is between the brackets of a call, texts without escapes, as the template writes them."""
    arguments: dict[str, str] = {}
    body, at = body.removesuffix(")"), 0
    while at < len(body):
        if (match := _ARGUMENT.match(body, at)) is None or match["name"] in arguments:
            raise ValueError("no arguments")
        arguments[match["name"]], at = match["value"], match.end()
    return dumps(arguments)
