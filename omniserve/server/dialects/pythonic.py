"""Calls as a list of Python's calls, as Llama 3.2 and 4 write them by some templates; nothing else is in the answer.

::

    [weather(city="Köln", days=2), time()]

``<|python_start|>`` and ``<|python_end|>`` may be around it. Values are literals of Python or JSON.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from omniserve.sampling.grammar import json_value
from omniserve.sampling.json_schema import UnsupportedSchema
from omniserve.server.dialects.base import CallForm, CallReader, Finder, Group, Piece, RawCall, Schemas
from omniserve.server.dialects.grammar_text import SpecialTokens
from omniserve.server.dialects.json_calls import BracketFinder
from omniserve.server.dialects.json_text import Brackets, dumps, value_of
from omniserve.server.dialects.parameters import listed, parameters_of

_QUOTES = "\"'"
_CALL = re.compile(r"[\s,\[\]]*+(?P<name>[A-Za-z_]\w*+(?:\.\w++)*+)\(\s*+(?:(?P<end>\))|(?=[A-Za-z_]\w*+\s*+=))")
_KEY = re.compile(r"\s*+(?:(?P<end>\))|(?P<key>[A-Za-z_]\w*+)\s*+=)")
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
        return BracketFinder(1, _QUOTES)

    def calls(self, begin: str, body: str, tools: Schemas) -> Sequence[RawCall]:
        return python_calls("[" + body)

    def reader(self, begin: str, tools: Schemas) -> CallReader | None:
        return PythonReader(tools)

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


class PythonReader:
    """Understands calls of Python while they are written, one argument after the other."""

    def __init__(self, tools: Schemas) -> None:
        self._tools = tools
        self._name: str | None = None
        self._key = ""
        """The parameter whose value is being read."""
        self._brackets = Brackets()
        self._separator = ""
        self._is_lost = False
        """There is something else."""
        self.at = 0

    def read(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while not self._is_lost and (piece := self._next(text)) is not None:
            pieces.append(piece)
        return pieces

    def _next(self, text: str) -> Piece | None:
        """Return what is understood next; None if nothing is yet."""
        if self._name is None:
            if (match := _CALL.match(text, self.at)) is None or match["name"] not in self._tools:
                return None
            self._separator, self.at = "{", match.end()
            if match["end"]:
                return Piece(match["name"], "{}", begins=True, ends=True)
            self._name = match["name"]
        name = self._name
        if not self._key:
            if (match := _KEY.match(text, self.at)) is None:
                return None
            self.at = match.end()
            if match["end"]:
                self._name = None
                return Piece(name, "}", ends=True)
            self._key, self._brackets = match["key"], Brackets(1, _QUOTES, separator=",")
        if (end := self._brackets.end(text, self.at)) is None:
            return None
        try:
            [call] = python_calls(f"f({self._key}={text[self.at : end - 1]})")
        except ValueError:
            self._is_lost = True
            return None
        is_last, is_first = text[end - 1] == ")", self._separator == "{"
        told = f"{self._separator}{call.arguments[1:-1]}{'}' if is_last else ''}"
        self._separator, self._key, self.at = ", ", "", end
        self._name = None if is_last else name
        return Piece(name, told, begins=is_first, ends=is_last)


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
        if keyword.arg in arguments:
            raise ValueError("an argument that is there twice")
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
