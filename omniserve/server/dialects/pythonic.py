"""Calls as a list of Python's calls, as Llama 3.2 and 4 write them by some templates; nothing else is in the answer.

::

    [weather(city="Köln", days=2), time()]

``<|python_start|>`` and ``<|python_end|>`` may be around it. Values are literals of Python or JSON.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from omniserve.sampling.grammar import json_value
from omniserve.sampling.json_schema import UnsupportedSchema
from omniserve.server.dialects.base import CallForm, Finder, Group, RawCall, Schemas
from omniserve.server.dialects.grammar_text import SpecialTokens
from omniserve.server.dialects.json_calls import BracketFinder
from omniserve.server.dialects.json_text import dumps, value_of
from omniserve.server.dialects.parameters import listed, parameters_of

_CONSTANTS = {"true": True, "false": False, "null": None}


class Pythonic(CallForm):
    """A list of Python's calls where the answer begins."""

    begins = ("[",)
    opening = "<|python_start|>"
    closing = "<|python_end|>"
    only_at_start = True
    group = Group("[", ", ", "]")

    @staticmethod
    def is_of(template: str) -> bool:
        return "func_name1(" in template

    def finder(self, begin: str) -> Finder:
        return BracketFinder(1, "\"'")

    def calls(self, begin: str, body: str, tools: Schemas) -> Sequence[RawCall]:
        return python_calls("[" + body)

    def rules(self, rule: str, name: str, schema: Mapping[str, Any], special: SpecialTokens) -> list[str]:
        parameters, any_value = parameters_of(schema, name)
        if not name.replace(".", "_").isidentifier():
            raise UnsupportedSchema("", f"this model calls tools by names of Python's, and {name!r} is none; rename it")
        if any_value is not None:
            key = f"{rule.upper()}_KEY"
            one = f"{rule}_any"
            rules = [f"{one}: {key} {json_value(any_value)}", rf"{key}: /[A-Za-z_]\w{{0,40}}=/"]
            return [f'{rule}: {dumps(name + "(")} ({one} (", " {one})*)? ")"', *rules]
        rules = []
        for i, (key, value, _) in enumerate(parameters):
            if not key.isidentifier():
                raise UnsupportedSchema(f"properties.{key}", "a parameter must be a name of Python's; rename it")
            rules.append(f"{rule}_{i}: {dumps(key + '=')} {json_value(value)}")
        rules += listed(rule, [parameter.is_required for parameter in parameters], ", ")
        return [f'{rule}: {dumps(name + "(")} {rule}_first_0 ")"', *rules]


def python_calls(source: str) -> list[RawCall]:
    """Return the calls of Python's code: a list of calls, or one a line.

    Raises:
        ValueError: It is something else.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of backslashes in strings: they are the model's
            lines = [line.value for line in ast.parse(source).body if isinstance(line, ast.Expr)]
            nodes = lines[0].elts if len(lines) == 1 and isinstance(lines[0], ast.List) else lines
            return [_call(node, source) for node in nodes]
    except (SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError("no calls") from None


def _call(node: ast.expr, source: str) -> RawCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    arguments: dict[str, str] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("an argument without a name")
        arguments[keyword.arg] = _value(keyword.value, source)
    return RawCall(_name(node.func), "{" + ", ".join(f"{dumps(k)}: {text}" for k, text in arguments.items()) + "}")


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("no name")


def _value(node: ast.expr, source: str) -> str:
    """Return a value as JSON; what is JSON already, unchanged."""
    text = ast.get_source_segment(source, node) or ""
    try:
        value_of(text)
    except ValueError:
        return dumps(_literal(node))
    return text


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _literal(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("an object whose keys are no strings")
        return dict(zip(keys, map(_literal, node.values), strict=True))
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | None):
        raise ValueError("a value that JSON does not have")
    return value
