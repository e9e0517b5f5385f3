"""JSON Schemas as llguidance can enforce them: rewritten where it reads them otherwise, refused where it cannot.

What a rewritten schema allows is allowed by the client's. It may allow less: a property that tells alternatives apart
has to be there, and an address of e-mail has the usual form.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations
from typing import Any

logger = logging.getLogger(__name__)

# What llguidance compiles in a second or two, and looks through in some ms a token.
MAX_PROPERTIES, MAX_OPTIONAL_PROPERTIES, MAX_DEPTH, _MAX_MULTIPLE = 1000, 500, 100, 10_000
# It reads numbers as float64.
_MAX_INTEGER = 2**53
# How many parts of a refused schema are tried alone, to find the one at fault.
_MAX_TRIED = 100

_TYPES = frozenset({"null", "boolean", "number", "integer", "string", "array", "object"})
_TYPE_OF = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")

_UNSUPPORTED = {
    "not": "say what is allowed instead of what is not",
    "if": "write the cases as alternatives of anyOf",
    "contains": "describe all items with items",
    "dependencies": "write the cases as alternatives of anyOf",
    "dependentRequired": "write the cases as alternatives of anyOf",
    "dependentSchemas": "write the cases as alternatives of anyOf",
    "unevaluatedProperties": "write additionalProperties",
    "unevaluatedItems": "write items",
    "$dynamicRef": "write $ref",
    "$recursiveRef": "write $ref",
}
"""Keywords that narrow values and cannot be enforced -> what to write instead."""
_NARROWS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "not": (False,),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
}
"""Values with which these keywords say nothing."""

_YEAR = r"(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_N = "[0-9]{1,4}"
_DAYS = rf"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_HOURS = rf"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_LABEL = "[A-Za-z0-9]{1,20}(?:-[A-Za-z0-9]{1,20}){0,2}"
_EMAIL = rf"[A-Za-z0-9_+-]{{1,20}}(?:\.[A-Za-z0-9_+-]{{1,20}}){{0,2}}@(?:{_LABEL}\.){{1,3}}[A-Za-z]{{2,24}}"
_HEX = "[0-9a-fA-F]"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"


def _base64(letters: str) -> str:
    return f"(?:[{letters}]{{4}})*(?:[{letters}]{{2}}==|[{letters}]{{3}}=)?"


_PATTERNS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_N}W|{_DAYS}(?:{_HOURS})?|{_HOURS})",
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "name-email": _EMAIL,
    "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,3}}",
    "idn-hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,3}}",
    "ipv4": _IPV4,
    "ipv4interface": f"{_IPV4}/(?:3[0-2]|[12]?[0-9])",
    "ipv4network": f"{_IPV4}/(?:3[0-2]|[12]?[0-9])",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    **{f"uuid{v}": f"{_HEX}{{8}}-{_HEX}{{4}}-{v}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}" for v in range(1, 9)},
    "json-pointer": "(?:/(?:[^~/]|~[01])*)*",
    "byte": _base64("A-Za-z0-9+/"),
    "base64": _base64("A-Za-z0-9+/"),
    "base64url": _base64("A-Za-z0-9_-"),
}
"""Formats -> a pattern all of whose texts have this format; those of JSON Schema, OpenAPI and pydantic."""
_OTHER_FORMATS = {
    **dict.fromkeys(("uri", "uri-reference", "iri", "iri-reference", "url", "multi-host-uri"), "uri"),
    "ipv6": "ipv6",
}
"""Formats -> one of llguidance's whose texts have this format."""
_ANY_TEXT = frozenset({"binary", "directory-path", "file-path", "password", "path"})
"""Formats that every text has."""


class UnsupportedSchema(ValueError):
    """A JSON Schema cannot be enforced.

    Args:
        path: Where in the schema, as its keys joined by dots.
        problem: What is wrong there, and what to write instead.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"the JSON schema cannot be enforced at {path}: {problem}")
        self.path = path
        self.problem = problem


def enforceable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that llguidance reads as it is meant; whether it accepts that is told by ``check``.

    Raises:
        UnsupportedSchema: It is known beforehand that a part of it cannot be enforced.
    """
    try:
        # Its own, changed in place, so that references stay what they are.
        root: dict[str, Any] = json.loads(json.dumps(schema, allow_nan=False))
    except ValueError:
        raise UnsupportedSchema(_dotted(()), "a number is beyond the range of float64; write a smaller one") from None
    root.pop("$schema", None)  # one of an older draft would change how what is written here is read
    _Rewriter(root).visit(root, ())
    return root


def check(schema: Mapping[str, Any]) -> None:
    """Compile a schema without a vocabulary.

    Raises:
        UnsupportedSchema: llguidance refuses it.
    """
    problem = _refusal(schema)
    if problem is None:
        return
    path: tuple[str, ...] = ()
    node, tried = schema, 0
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    seen: set[int] = set()
    while True:  # down to the smallest part that is refused alone
        for keys, child in _parts(schema, node):
            if id(child) in seen or tried >= _MAX_TRIED:
                continue
            seen.add(id(child))
            tried += 1
            refusal = _refusal({**definitions, **child})
            if refusal is not None:
                path, node, problem = keys if keys[0] in definitions else (*path, *keys), child, refusal
                break
        else:
            break
    logger.debug("llguidance refuses a schema at %s: %s", _dotted(path), problem)
    raise UnsupportedSchema(_dotted(path), _advice(node, problem))


def _refusal(schema: Mapping[str, Any]) -> str | None:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    # Not validate_grammar, which keeps the GIL.
    limits = LLParserLimits(verbose_errors=False)
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits)
    return matcher.get_error() if matcher.is_error() else None


def _advice(node: Mapping[str, Any], problem: str) -> str:
    if "too large" in problem or "limit" in problem or "fuel" in problem:
        return "it has too many cases (those of allOf multiply); write fewer alternatives and properties"
    if "nsatisfiable" in problem or "always empty" in problem:
        return "no value can keep it; look at what contradicts what"
    advices = {
        "patternProperties": "patternProperties must not have two patterns that the same name may fit, nor look-around",
        "pattern": "the pattern must not have look-around, back-references or word boundaries; write a simpler one",
        "minProperties": "a number of properties can only be asked for beside properties that are all required",
        "maxProperties": "a number of properties can only be asked for beside properties that are all required",
        "allOf": "the parts of allOf cannot be merged; write them as one schema",
        "$ref": "a reference with keywords beside it must not lead back to itself; move them to what it refers to",
        "enum": "the values of enum contradict the keywords beside it, or are none",
    }
    return next(
        (advice for keyword, advice in advices.items() if keyword in node),
        "a keyword has a value of the wrong kind, or contradicts another; look at " + (", ".join(node) or "it"),
    )


def _parts(root: Mapping[str, Any], node: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the schemas inside a schema with the keys that lead to them, also what it refers to."""
    for keyword in ("properties", "patternProperties"):
        if isinstance(named := node.get(keyword), dict):
            yield from (((keyword, name), part) for name, part in named.items() if isinstance(part, dict))
    for keyword in ("items", "additionalProperties", "additionalItems"):
        if isinstance(node.get(keyword), dict):
            yield (keyword,), node[keyword]
    for keyword in (*_ALTERNATIVES, "prefixItems", "items"):
        if isinstance(several := node.get(keyword), list):
            yield from (((keyword, str(i)), part) for i, part in enumerate(several) if isinstance(part, dict))
    if isinstance(reference := node.get("$ref"), str) and isinstance(target := _referred(root, reference), dict):
        yield tuple(reference.split("/")[1:]) or ("$ref",), target


def _referred(root: Any, reference: str) -> Any:
    """Return what a reference within a schema refers to; None: nothing."""
    node = root
    for key in reference.split("/")[1:]:
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node if reference.startswith("#/") or reference == "#" else None


def _dotted(path: Sequence[str]) -> str:
    return ".".join(path) or "its root"


class _Rewriter:
    """Rewrites a schema in place, with all that it refers to."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._seen: dict[int, Any] = {}
        """Parts by their ``id``; kept, so that none is given again."""

    def visit(self, node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, bool) or id(node) in self._seen:
            return
        if not isinstance(node, dict):
            raise UnsupportedSchema(_dotted(path), "a schema must be an object, true or false")
        if len(path) > MAX_DEPTH:
            raise UnsupportedSchema(_dotted(path[:8]), f"it goes deeper than {MAX_DEPTH} levels; use $ref")
        self._seen[id(node)] = node
        for keyword, nothing in _NARROWS_NOTHING.items():
            if keyword in node and node[keyword] in nothing and type(node[keyword]) in map(type, nothing):
                del node[keyword]
        for keyword, advice in _UNSUPPORTED.items():
            if keyword in node:
                raise UnsupportedSchema(_dotted(path), f"{keyword} cannot be enforced; {advice}")
        self._check_kinds(node, path)
        self._reference(node, path)
        self._unique_items(node, path)
        self._property_names(node, path)
        self._numbers(node, path)
        self._format(node, path)
        self._tell_apart(node, path)
        self._count(node, path)
        for keys, part in list(_parts(self._root, node)):
            if keys[0] not in ("$defs", "definitions", "$ref"):
                self.visit(part, (*path, *keys))
        self._nullable(node)

    def _check_kinds(self, node: dict[str, Any], path: tuple[str, ...]) -> None:
        kinds: list[tuple[tuple[str, ...], type | tuple[type, ...], str]] = [
            (("properties", "patternProperties"), dict, "an object of schemas"),
            ((*_ALTERNATIVES, "prefixItems"), list, "a list of schemas"),
            (("additionalProperties", "propertyNames"), (dict, bool), "a schema, true or false"),
            (("required", "enum"), list, "a list"),
            (("$ref", "pattern", "format"), str, "a string"),
            (("type",), (str, list), "the name of a type or a list of them"),
        ]
        for keywords, kind, name in kinds:
            for keyword in keywords:
                if keyword in node and not isinstance(node[keyword], kind):
                    raise UnsupportedSchema(_dotted(path), f"{keyword} must be {name}")
        types = node.get("type", [])
        for name in [types] if isinstance(types, str) else types:
            if name not in _TYPES:
                raise UnsupportedSchema(
                    _dotted(path), f"there is no type {name!r}; write one of {', '.join(sorted(_TYPES))}"
                )
        if node.get("enum") == []:
            raise UnsupportedSchema(_dotted(path), "enum is empty; give it a value")

    def _reference(self, node: dict[str, Any], path: tuple[str, ...]) -> None:
        if (reference := node.get("$ref")) is None:
            return
        target = _referred(self._root, reference)
        if target is None:
            raise UnsupportedSchema(
                _dotted(path),
                f"there is no {reference!r} in the schema; references have the form '#/$defs/NAME', with a name "
                "without '/', '~' and '%'",
            )
        self.visit(target, tuple(reference.split("/")[1:]))

    def _resolved(self, node: Any) -> Any:
        """Return what a node stands for that is but a reference, or an allOf of one schema."""
        for _ in range(MAX_DEPTH):
            if not isinstance(node, dict):
                break
            if isinstance(node.get("$ref"), str):
                node = _referred(self._root, node["$ref"])
            elif isinstance(node.get("allOf"), list) and len(node["allOf"]) == 1 and "properties" not in node:
                node = node["allOf"][0]
            else:
                break
        return node

    def _nullable(self, node: dict[str, Any]) -> None:
        """Write OpenAPI 3.0's ``nullable`` as JSON Schema has it."""
        types = node.get("type", [])
        if node.pop("nullable", False) is True and types != "null" and "null" not in types:
            value = dict(node)
            node.clear()
            # Beside it, as references may go there.
            node.update({key: value.pop(key) for key in ("$defs", "definitions") if key in value})
            node["anyOf"] = [value, {"type": "null"}]
            self._seen[id(value)] = value

    def _unique_items(self, node: dict[str, Any], path: tuple[str, ...]) -> None:
        if node.get("uniqueItems") is not True:
            return
        if node.get("maxItems") in (0, 1):
            del node["uniqueItems"]
            return
        raise UnsupportedSchema(
            _dotted(path),
            "uniqueItems cannot be enforced; remove it (in Python, write list instead of set or frozenset), and drop "
            "what comes twice",
        )

    def _property_names(self, node: dict[str, Any], path: tuple[str, ...]) -> None:
        """Write what ``propertyNames`` says as properties, or as a pattern of them."""
        if node.keys() & {"patternProperties", "properties", "additionalProperties", "propertyNames"} == {
            "patternProperties"
        }:
            node["additionalProperties"] = False  # pydantic's dictionaries have no other names; it does not say so
        if "propertyNames" not in node:
            return
        names = self._resolved(node.pop("propertyNames"))
        value = node.get("additionalProperties", True)
        known = ("type", "title", "description", "enum", "const", "pattern", "format", "minLength", "maxLength")
        rest = isinstance(names, dict) and {key for key in names if key in known[3:]}
        if not isinstance(names, dict) or "patternProperties" in node or not names.keys() <= set(known) or not rest:
            raise UnsupportedSchema(
                _dotted(path), "propertyNames can be enforced as enum, pattern or lengths alone; write one of these"
            )
        values = [names["const"]] if "const" in names else names.get("enum")
        if values is not None:
            if not all(isinstance(name, str) for name in values):
                raise UnsupportedSchema(
                    _dotted(path), "names of properties are strings, but those of propertyNames are not"
                )
            own = node.get("properties", {})
            node["properties"] = {name: own.get(name, value) for name in values}
            node["additionalProperties"] = False
            return
        if "pattern" in names:
            pattern = names["pattern"]
        elif "format" in names:
            if names["format"] not in _PATTERNS:
                raise UnsupportedSchema(
                    _dotted(path), f"propertyNames cannot have the format {names['format']!r}; write a pattern"
                )
            pattern = f"^(?:{_PATTERNS[names['format']]})$"
        else:
            pattern = rf"^(?:.|\n){{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
        if len(rest) > (2 if "pattern" not in names and "format" not in names else 1):
            raise UnsupportedSchema(_dotted(path), "propertyNames must not have several of pattern, format and lengths")
        node["patternProperties"] = {pattern: value}
        node["additionalProperties"] = False

    def _numbers(self, node: dict[str, Any], path: tuple[str, ...]) -> None:
        def is_large(value: Any) -> bool:
            return type(value) is int and abs(value) > _MAX_INTEGER

        values = [*node.get("enum", []), node.get("const")]
        if any(map(is_large, values)):
            raise UnsupportedSchema(_dotted(path), "integers beyond 2^53 cannot be told apart; write them as strings")
        for keyword, sign in (("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1), ("exclusiveMaximum", 1)):
            value = node.get(keyword)
            if value is not None and is_large(value):
                if value * sign < 0:
                    raise UnsupportedSchema(_dotted(path), f"{keyword} must not be beyond 2^53; write a string")
                node[keyword] = sign * _MAX_INTEGER  # narrower
        multiple = node.get("multipleOf")
        if isinstance(multiple, int | float) and Fraction(str(multiple)).numerator > _MAX_MULTIPLE:
            raise UnsupportedSchema(
                _dotted(path),
                f"multipleOf is enforced up to {_MAX_MULTIPLE}, not counting the point; write a smaller one",
            )

    def _format(self, node: dict[str, Any], path: tuple[str, ...]) -> None:
        if (name := node.pop("format", None)) is None:
            return
        types = node.get("type", "string")
        if "string" not in types or name in _ANY_TEXT:
            return  # formats are about texts: int64 and the like say nothing
        if name in _PATTERNS:
            part: dict[str, Any] = {"type": "string", "pattern": f"^(?:{_PATTERNS[name]})$"}
        elif name in _OTHER_FORMATS:
            node["format"] = _OTHER_FORMATS[name]
            return
        elif name == "ipvanyaddress":
            part = {"anyOf": [{"type": "string", "pattern": f"^(?:{_IPV4})$"}, {"type": "string", "format": "ipv6"}]}
        else:
            raise UnsupportedSchema(
                _dotted(path), f"the format {name!r} cannot be enforced; remove it, or write a pattern"
            )
        if "pattern" in part and "pattern" not in node:
            node["pattern"] = part["pattern"]
        elif types == "string":
            node["allOf"] = [*node.get("allOf", []), part]
        else:
            raise UnsupportedSchema(_dotted(path), f"the format {name!r} needs the type string alone; write anyOf")

    def _tell_apart(self, node: dict[str, Any], path: tuple[str, ...]) -> None:
        """Write oneOf as anyOf where no value fits two alternatives, as it is if a property tells them apart."""
        discriminator = node.pop("discriminator", None)
        tag = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        for keyword in ("anyOf", "oneOf"):
            if tag is not None and keyword in node:
                for part in node[keyword]:
                    self._require(part, tag)
        if "oneOf" not in node:
            return
        parts = node["oneOf"]
        kinds = [self._kinds(part) for part in parts]
        values = [self._listed(part) for part in parts]
        tags = [self._tags(part) for part in parts]
        for (i, first), (j, second) in combinations(enumerate(parts), 2):
            common = kinds[i] & kinds[j]
            if not common:
                continue
            if (some := values[i]) is not None and (others := values[j]) is not None and some.isdisjoint(others):
                continue
            shared = (name for name in (tag, *tags[i]) if name in tags[i] and name in tags[j])
            name = next((name for name in shared if tags[i][name].isdisjoint(tags[j][name])), None)
            if name is None:
                raise UnsupportedSchema(
                    _dotted((*path, "oneOf")),
                    f"alternatives {i} and {j} may both fit a value, which oneOf forbids; write anyOf, or give each a "
                    "property with a const of its own",
                )
            self._require(first, name, only_objects=common != {"object"})
            self._require(second, name, only_objects=common != {"object"})
        del node["oneOf"]
        if "anyOf" in node:
            node["allOf"] = [*node.get("allOf", []), {"anyOf": parts}]
        else:
            node["anyOf"] = parts

    def _kinds(self, node: Any, depth: int = 0) -> frozenset[str]:
        """Return the types that a schema's values may have, without telling integers from other numbers."""
        node = self._resolved(node)
        if isinstance(node, dict) and depth <= MAX_DEPTH:
            if (values := self._listed(node)) is not None:
                return frozenset(_TYPE_OF[type(json.loads(value))] for value in values)
            if "type" in node:
                types = [node["type"]] if isinstance(node["type"], str) else node["type"]
                return frozenset("number" if name == "integer" else name for name in types)
            for keyword in ("anyOf", "oneOf"):
                if keyword in node:
                    return frozenset().union(*(self._kinds(part, depth + 1) for part in node[keyword]))
        return _TYPES

    def _listed(self, node: Any) -> frozenset[str] | None:
        """Return a schema's values as JSON if they are listed."""
        node = self._resolved(node)
        if not isinstance(node, dict) or not ("const" in node or "enum" in node):
            return None
        values = [node["const"]] if "const" in node else node["enum"]
        # As 1 and 1.0 are the same.
        return frozenset(json.dumps(float(v) if type(v) is int else v, sort_keys=True) for v in values)

    def _tags(self, node: Any, depth: int = 0) -> dict[str, frozenset[str]]:
        """Return the properties of a schema whose values are listed, with these."""
        node = self._resolved(node)
        if not isinstance(node, dict) or depth > MAX_DEPTH:
            return {}
        tags: dict[str, frozenset[str]] = {}
        for name, part in node.get("properties", {}).items():
            if (values := self._listed(part)) is not None:
                tags[name] = values
        for keyword in ("anyOf", "oneOf"):
            if keyword in node:
                each = [self._tags(part, depth + 1) for part in node[keyword]]
                for name in set.intersection(*(set(some) for some in each)) if each else ():
                    tags.setdefault(name, frozenset().union(*(some[name] for some in each)))
        return tags

    def _require(self, node: Any, name: str, *, only_objects: bool = False, depth: int = 0) -> None:
        """Require a property wherever an alternative has it; with ``only_objects`` it is nothing but objects then."""
        node = self._resolved(node)
        if not isinstance(node, dict) or depth > MAX_DEPTH:
            return
        if name in node.get("properties", {}):
            node["required"] = list(dict.fromkeys([*node.get("required", []), name]))
            if only_objects:
                node["type"] = "object"
        for keyword in ("anyOf", "oneOf"):
            for part in node.get(keyword, []):
                self._require(part, name, only_objects=only_objects, depth=depth + 1)

    def _count(self, node: dict[str, Any], path: tuple[str, ...]) -> None:
        properties, required = node.get("properties", {}), node.get("required", [])
        num_optional = len(properties.keys() - set(required))
        if len(properties) > MAX_PROPERTIES or num_optional > MAX_OPTIONAL_PROPERTIES:
            raise UnsupportedSchema(
                _dotted(path),
                f"it has {len(properties)} properties, {num_optional} of them not required; an object may have at most "
                f"{MAX_PROPERTIES}, and {MAX_OPTIONAL_PROPERTIES} that are not required: split it, or require more",
            )
        least = node.get("minProperties", 0)
        if isinstance(least, int) and least > len(required) + 1:
            raise UnsupportedSchema(
                _dotted(path),
                f"minProperties is {least}, but a name may come twice; require the properties, or ask for at most "
                f"{len(required) + 1}",
            )
