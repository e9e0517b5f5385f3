"""Calls whose arguments are texts between tags: their values, by the schema, and their grammars."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from omniserve.sampling.grammar import json_value
from omniserve.sampling.json_schema import UnsupportedSchema
from omniserve.server.dialects.base import CallForm, CallReader, RawCall, Schemas
from omniserve.server.dialects.grammar_text import SpecialTokens
from omniserve.server.dialects.json_text import dumps, value_of
from omniserve.server.dialects.parameter_reader import ParameterMarks, ParameterReader, Value

PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_TYPES = {bool: "boolean", dict: "object", list: "array", type(None): "null"}
# Keywords of the object of all arguments that are kept, or that say nothing of the values.
_KNOWN = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "title", "description"}
_OF_STRINGS = {"type", "pattern", "minLength", "maxLength"}
# Deeper alternatives are taken as any: they may refer to themselves.
_MAX_DEPTH = 20
_NOTES = {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "x-guidance"}


class Parameter(NamedTuple):
    """A parameter of a tool."""

    name: str
    schema: dict[str, Any]
    is_required: bool


def parameters_of(schema: Mapping[str, Any], tool: str) -> tuple[list[Parameter], dict[str, Any] | None]:
    """Return the parameters of a tool; if it takes any, the schema of their values, else None.

    Raises:
        UnsupportedSchema: The schema says more than which parameters there are.
    """
    own = resolved(schema, schema)
    if own.get("type") not in (None, "object") or (more := sorted(own.keys() - _KNOWN - _NOTES)):
        problem = more[0] if own.get("type") in (None, "object") else "type"
        raise UnsupportedSchema(
            problem,
            f"this model writes the arguments of {tool!r} one by one, so that their schema can only say type: object, "
            "properties, required and additionalProperties",
        )
    properties: Mapping[str, Any] = own.get("properties", {})
    required = own.get("required", [])
    if unknown := [name for name in required if name not in properties]:
        raise UnsupportedSchema("required", f"there is no property {unknown[0]!r}; add it")
    others = own.get("additionalProperties", True)
    if not properties and others is not False:
        return [], with_definitions(others, schema)
    return [
        Parameter(name, with_definitions(value, schema), name in required)
        for name, value in properties.items()
        if value is not False
    ], None


def with_definitions(value: Mapping[str, Any] | bool, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a value, or true for any, as one of its own, with what the whole schema defines."""
    return {
        **({} if isinstance(value, bool) else value),
        **{key: schema[key] for key in ("$defs", "definitions") if key in schema},
    }


def types_of(value: Any, schema: Mapping[str, Any], depth: int = 0) -> frozenset[str] | None:
    """Return the types that a value may have; None if it may have any. The schema may be any that a client sends."""
    value = resolved(value, schema)
    if not value or depth > _MAX_DEPTH:
        return None
    if ("enum" in value or "const" in value) and "type" not in value:
        values = value["enum"] if isinstance(value.get("enum"), list) else [value.get("const")]
        return frozenset(_TYPES.get(type(one), "string" if isinstance(one, str) else "number") for one in values)
    for word in ("anyOf", "oneOf"):
        if isinstance(value.get(word), list):
            parts = [types_of(part, schema, depth + 1) for part in value[word]]
            known = [part for part in parts if part is not None]
            return frozenset().union(*known) if len(known) == len(parts) else None
    given = value.get("type")
    names = [name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)]
    if not names:
        return None
    return frozenset([*names, *(["null"] if value.get("nullable") is True else [])])


def json_of(written: str, types: frozenset[str] | None) -> str:
    """Return the JSON of a value that is written as text: what is JSON of one of the types, as it is written."""
    if types == {"string"}:
        return dumps(written)
    stripped = written.strip()
    text = PYTHON_WORDS.get(stripped, stripped)
    try:
        value = value_of(text)
    except ValueError:
        return dumps(written)
    if types is None or "string" not in types:
        return text
    # Numbers are strings in what is read.
    kind = _TYPES.get(type(value), "string" if text.startswith('"') else "number")
    fits = kind in types or (kind == "number" and "integer" in types)
    return text if fits and kind != "string" else dumps(written)


class ParameterForm(CallForm):
    """A name, then each argument between tags."""

    head: tuple[str, str]
    """What is before the name, and behind it."""
    key: tuple[str, str]
    """What is before an argument's name, and behind it."""
    json_key_end: str = ""
    """What is behind the name if the value is JSON and no text; empty: the same."""
    value_end: str
    """What is behind an argument's value."""
    tail: str
    """What is behind all arguments; the call's end with it."""
    drops_line_ends = False
    """A line end before a value, and one behind it, are no part of it."""

    def may_end(self, body: str) -> bool:
        body = body.rstrip()
        if self._last:
            return body.endswith(self._last)
        return self.key[0].strip() not in body or body.endswith(self.value_end.strip())

    @property
    def _last(self) -> str:
        """The mark behind all arguments that comes before the call's end; empty if there is none."""
        return self.tail.removesuffix(self.end).strip()

    def calls(self, begin: str, body: str, tools: Schemas) -> Sequence[RawCall]:
        last = self._last
        match = self._name_pattern(rf"{_marked(self.key[0])}|\Z").match(body)
        if match is None:
            raise ValueError("no name")
        name, at = match["name"], match.end()
        end = _marked(last) or r"\Z"
        follows = rf"(?=\s*(?:{_marked(self.key[0])}|{end}))"
        one = re.compile(rf"{self._key_pattern}(?P<value>.*?){_marked(self.value_end)}{follows}", re.DOTALL)
        schema = tools.get(name, {})
        arguments: list[str] = []
        while (match := one.match(body, at)) is not None:
            key, written, at = match["key"], match["value"], match.end()
            if self.drops_line_ends:
                written = written.removeprefix("\n").removesuffix("\n")
            arguments.append(f"{dumps(key)}: {self._value_of(schema, match).json_of(written)}")
        rest = body[at:].strip()
        if rest not in (last, ""):
            raise ValueError("more than arguments")
        return [RawCall(name, f"{{{', '.join(arguments)}}}")]

    def reader(self, begin: str, tools: Schemas) -> CallReader | None:
        key = self.key[0].strip()
        marks = ParameterMarks(
            name=self._name_pattern(_marked(key)),
            key=re.compile(self._key_pattern),
            value_end=self.value_end.strip(),
            follows=(key, self._last) if self._last else (key,),
            drops_line_ends=self.drops_line_ends,
        )
        return ParameterReader(marks, tools, self._value_of)

    def _name_pattern(self, follows: str) -> re.Pattern[str]:
        """Return a pattern of a call's begin, up to a name; which one of a pattern follows, if there is no mark."""
        before, behind = map(_marked, self.head)
        end = behind or rf"(?=\s*(?:{follows}))"
        return re.compile(rf"\s*{before}\s*(?P<name>[A-Za-z0-9_./:-]+){end}")

    @property
    def _key_pattern(self) -> str:
        return rf"\s*{_marked(self.key[0])}(?P<key>[^<>\n]+?){self.key_end_pattern}"

    def _value_of(self, schema: Mapping[str, Any], match: re.Match[str]) -> Value:
        properties = resolved(schema, schema).get("properties")
        known: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        types, kind = types_of(known.get(match["key"], {}), schema), match.groupdict().get("kind")
        return Value(self.is_text(types, kind), lambda written: self.json_of(written, types, kind))

    @property
    def key_end_pattern(self) -> str:
        """A pattern of what is behind an argument's name; what it has in a group ``kind``, ``json_of`` is told."""
        return _marked(self.key[1])

    def is_text(self, types: frozenset[str] | None, kind: str | None) -> bool:
        """Return whether an argument's value is a text whatever is written; see ``json_of``."""
        return types == {"string"}

    def json_of(self, written: str, types: frozenset[str] | None, kind: str | None) -> str:
        """Return the JSON of an argument's value.

        Args:
            written: The value as it is written.
            types: As the schema says; see ``types_of``.
            kind: What ``key_end_pattern`` found.
        """
        return json_of(written, types)

    def rules(self, rule: str, name: str, schema: Mapping[str, Any], special: SpecialTokens) -> list[str]:
        parameters, any_value = parameters_of(schema, name)
        before, behind = self.head
        rules: list[str] = []
        written = ""
        for i, (key, value, is_required) in enumerate(parameters):
            part = f"{rule}_{i}"
            if re.search(r"[<>\n]", key):
                raise UnsupportedSchema(f"properties.{key}", "a name must not have '<', '>' or line ends; rename it")
            rules.append(f"{part}: {special.spell(self.key[0] + key)} {part}_value")
            rules += self._value_rules(f"{part}_value", key, value, special)
            written += f" {part}{'' if is_required else '?'}"
        if any_value is not None:
            any_key = f"{rule.upper()}_KEY"
            written = f" {rule}_any*"
            rules += [
                f"{rule}_any: {special.spell(self.key[0])} {any_key} {rule}_any_value",
                rf"{any_key}: /[A-Za-z_][\w.-]{{0,40}}/",
                *self._any_value_rules(f"{rule}_any_value", any_value, special),
            ]
        head = special.spell(before + name + behind)
        return [f"{rule}: {head}{written} {special.spell(self.tail)}", *rules]

    def _any_value_rules(self, rule: str, value: dict[str, Any], special: SpecialTokens) -> list[str]:
        if types_of(value, value) is not None:
            return self._value_rules(rule, "additionalProperties", value, special)
        text = [f"{rule}_text: {special.spell(self.key[1])} {rule}_end", *special.up_to(f"{rule}_end", self.value_end)]
        if not self.json_key_end:
            return [f"{rule}: {rule}_text", *text]
        return [f"{rule}: {rule}_text | {rule}_other", *text, *self._json_rules(f"{rule}_other", value, special)]

    def _json_rules(self, rule: str, value: dict[str, Any], special: SpecialTokens) -> list[str]:
        begin, end = special.spell(self.json_key_end or self.key[1]), special.spell(self.value_end)
        return [f"{rule}: {begin} {rule}_json {end}", f"{rule}_json: {json_value(value)}"]

    def _value_rules(self, rule: str, key: str, value: dict[str, Any], special: SpecialTokens) -> list[str]:
        """Return rules of a value with what is before it, behind the argument's name, and with what is behind it."""
        own = resolved(value, value)
        if "enum" in own or "const" in own:
            values = own["enum"] if "enum" in own else [own["const"]]
            begins = [self.key[1] if isinstance(one, str) else self.json_key_end or self.key[1] for one in values]
            texts = [one if isinstance(one, str) else dumps(one) for one in values]
            written = (special.spell(begin + text + self.value_end) for begin, text in zip(begins, texts, strict=True))
            return [f"{rule}: {' | '.join(written)}"]
        parts = own.get("anyOf") or own.get("oneOf")
        types = types_of(own, value)
        if types is not None and "string" in types and isinstance(parts, list):
            if beside := beside_alternatives(own):
                raise UnsupportedSchema(f"properties.{key}.{beside[0]}", "write it into each of the alternatives")
            rules = []
            for i, part in enumerate(parts):
                rules += self._value_rules(f"{rule}_{i}", key, with_definitions(part, value), special)
            return [f"{rule}: {' | '.join(f'{rule}_{i}' for i in range(len(parts)))}", *rules]
        if types is None or "string" not in types:
            is_any = self.json_key_end and not own.keys() - _NOTES
            return self._any_value_rules(rule, value, special) if is_any else self._json_rules(rule, value, special)
        if isinstance(own["type"], list):
            single = [{**own, "type": name} for name in own["type"]]
            return self._value_rules(rule, key, with_definitions({"anyOf": single}, value), special)
        begin = special.spell(self.key[1])
        return [f"{rule}: {begin} {rule}_text", *text_rules(f"{rule}_text", key, own, self.value_end, special)]


def beside_alternatives(schema: Mapping[str, Any]) -> list[str]:
    """Return the keywords beside alternatives that narrow all of them."""
    return sorted(schema.keys() - _NOTES - {"anyOf", "oneOf", "$defs", "definitions"})


def text_rules(rule: str, key: str, own: Mapping[str, Any], end: str, special: SpecialTokens) -> list[str]:
    """Return rules of a text of a schema, with what is behind it.

    Raises:
        UnsupportedSchema: A part of the schema cannot be enforced.
    """
    if unknown := sorted(own.keys() - _OF_STRINGS - _NOTES - {"$defs", "definitions"}):
        raise UnsupportedSchema(
            f"properties.{key}.{unknown[0]}",
            "it cannot be enforced for a text that this model writes without quotes; write a pattern",
        )
    least, most = own.get("minLength", 0), own.get("maxLength")
    if "pattern" not in own and not least and most is None:
        return special.up_to(rule, end)
    terminal, rules = rule.upper(), []
    length = rf"/(.|\n){{{least},{'' if most is None else most}}}/"
    if "pattern" in own:
        rules = [f"{terminal}_P: {_pattern(own['pattern'], key)}", f"{terminal}_L: {length}"]
        rules.append(f"{terminal}: {terminal}_P & {terminal}_L")
    else:
        rules = [f"{terminal}: {length}"]
    return [*replace(special, others=()).up_to(rule, end, before=terminal), *rules]


def listed(rule: str, needed: Sequence[bool], separator: str) -> list[str]:
    """Return rules of parameters in their order, with separators between those that are there.

    The rule of parameter i is called ``{rule}_{i}``, that of all together ``{rule}_first_0``.
    """
    last = len(needed)
    rules = [f'{rule}_first_{last}: ""', f'{rule}_next_{last}: ""']
    for i, is_needed in enumerate(needed):
        first, then = f"{rule}_{i} {rule}_next_{i + 1}", f"({dumps(separator)} {rule}_{i})"
        rules.append(f"{rule}_first_{i}: {first}" if is_needed else f"{rule}_first_{i}: {first} | {rule}_first_{i + 1}")
        rules.append(f"{rule}_next_{i}: {then}{'' if is_needed else '?'} {rule}_next_{i + 1}")
    return rules


def _pattern(pattern: str, key: str) -> str:
    """Return a terminal of all texts in which a pattern is."""
    begin, end = r"(.|\n)*", r"(.|\n)*"
    if pattern.startswith("^"):
        pattern, begin = pattern[1:], ""
    if pattern.endswith("$") and not pattern.endswith("\\$"):
        pattern, end = pattern[:-1], ""
    if re.search(r"(?<![\\\[])[\^$]|\\[bBAzZ]|\(\?[=!<]", pattern):
        raise UnsupportedSchema(f"properties.{key}.pattern", "it has anchors within or looks around; write it without")
    escaped = re.sub(r"(?<!\\)/", r"\\/", pattern)
    return f"/{begin}(?:{escaped}){end}/"


def resolved(value: Any, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a schema is that only refers to another one of the whole schema."""
    for _ in range(20):
        if not isinstance(value, Mapping):
            return {}
        reference, parts = value.get("$ref"), value.get("allOf")
        if isinstance(reference, str):
            found: Any = schema
            for key in reference.split("/")[1:]:
                found = found.get(key) if isinstance(found, Mapping) else None
            value = found
        elif isinstance(parts, list) and len(parts) == 1 and "properties" not in value and "type" not in value:
            value = parts[0]
        else:
            return value
    return {}


def _marked(mark: str) -> str:
    """Return a pattern of a mark, with any white space or none where it has line ends."""
    return r"\s*".join(map(re.escape, mark.strip().split("\n")))
