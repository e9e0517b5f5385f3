"""JSON schemas as pydantic and OpenAPI write them: what is served is kept, what is refused says where and why."""

from __future__ import annotations

import datetime as dt
import ipaddress
import json
import random
import uuid
from decimal import Decimal
from enum import IntEnum, StrEnum
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from pydantic import (
    UUID4,
    Base64Bytes,
    BaseModel,
    Field,
    IPvAnyAddress,
    PastDate,
    PositiveInt,
    SecretStr,
    StringConstraints,
    TypeAdapter,
)

from omniserve.sampling.grammar import GrammarCompiler, json_grammar
from omniserve.sampling.json_schema import MAX_OPTIONAL_PROPERTIES, UnsupportedSchema, check, enforceable
from tests.masks import ids_of
from tests.server.tokenizers_for_tests import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
END = TOKENIZER.eos_token_id
COMPILER = GrammarCompiler(TOKENIZER, vocab_size=len(TOKENIZER), eos_token_ids=(END,))
# Whoever writes without a model ends what can end, now and then.
CLOSING = [END, *(TOKENIZER.convert_tokens_to_ids(token) for token in ('"', "}", "]", ",", "0"))]
SEEDS = range(12)


def validator_of(schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)


def written(schema: dict[str, Any], seed: int) -> Any:
    """Return a value that a model without sense writes under a schema's grammar."""
    rng, state, token_ids = random.Random(seed), COMPILER.compile(json_grammar(schema)).result().start(), []
    for _ in range(4000):
        allowed = ids_of(state.allowed(), len(TOKENIZER))
        closing = [i for i in CLOSING if i in allowed]
        token_ids.append(rng.choice(closing if closing and rng.random() < 0.4 else allowed))
        state.accept(token_ids[-1])
        if token_ids[-1] == END:
            return json.loads(TOKENIZER.decode(token_ids[:-1]))
    raise AssertionError(f"no end: {TOKENIZER.decode(token_ids)[:300]}")


class Colour(StrEnum):
    RED = "red"
    BLUE = "<think>"


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog", "wolf"] = "dog"
    barks: bool = True


class Fish(BaseModel):
    kind: Literal["fish"] = "fish"
    salt: Literal[True] = True


Mammal = Annotated[Cat | Dog, Field(discriminator="kind")]


class Sum(BaseModel):
    op: Literal["sum"] = "sum"
    terms: Annotated[list[Formula], Field(max_length=2)]


class Number(BaseModel):
    op: Literal["number"] = "number"
    value: Annotated[int, Field(ge=0, le=99)]


Formula = Annotated[Sum | Number, Field(discriminator="op")]


class Node(BaseModel):
    name: Annotated[str, StringConstraints(max_length=3)]
    child: Node | None = None


class Person(BaseModel):
    name: str
    born: dt.date | None = None
    tags: Annotated[list[Colour], Field(max_length=3)] = []


SERVED: dict[str, Any] = {
    "defaulted tags": Mammal,
    "nested unions": Annotated[Mammal | Fish, Field(discriminator="kind")],
    "union or none": Annotated[Cat | Dog, Field(discriminator="kind")] | None,
    "list of a union": list[Mammal],
    "recursive union": Formula,
    "recursive model": Node,
    "nested models": list[Person],
    "smart union": Cat | Dog | int | None,
    "names of an enum": dict[Colour, int],
    "literal names": dict[Literal["a", "b"], float],
    "names of a pattern": dict[Annotated[str, StringConstraints(pattern="^x[0-9]$")], int],
    "names of a length": dict[Annotated[str, StringConstraints(min_length=2, max_length=3)], int],
    "names that are ids": dict[uuid.UUID, bool],
    "names that are days": dict[dt.date, bool],
    "named at least once": Annotated[dict[str, int], Field(min_length=1)],
    "tuple": tuple[int, str, Colour],
    "tuple of any length": tuple[int, ...],
    "optional": Colour | None,
    "literals": Literal["a", 1, None, True, "<|end|>"],
    "decimal": Decimal,
    "bounds": Annotated[int, Field(gt=-5, lt=300, multiple_of=5)],
    "cents": Annotated[float, Field(ge=0, le=10, multiple_of=0.25)],
    "positive": PositiveInt,
    "pattern": Annotated[str, StringConstraints(pattern=r"^\d{2}-[a-f]+$", max_length=9)],
    "short list": Annotated[list[bool], Field(min_length=1, max_length=3)],
    "one at most": Annotated[set[int], Field(max_length=1)],
    "date": dt.date,
    "past date": PastDate,
    "date and time": dt.datetime,
    "time": dt.time,
    "duration": dt.timedelta,
    "uuid": uuid.UUID,
    "uuid4": UUID4,
    "email": Annotated[str, Field(json_schema_extra={"format": "email"})],
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "any address": IPvAnyAddress,
    "interface": ipaddress.IPv4Interface,
    "bytes": bytes,
    "base64": Base64Bytes,
    "secret": SecretStr,
    "anything": Any,
    "object": dict[str, Any],
}
# What pydantic wants beyond what its schema says.
WANTS_MORE = {"past date", "base64", "decimal"}


@pytest.mark.parametrize("name", SERVED)
def test_values_of_types_of_pydantic_keep_their_schemas(name):
    adapter = TypeAdapter(SERVED[name])
    schema = adapter.json_schema()
    validator = validator_of(schema)
    check(enforceable(schema))
    for seed in SEEDS:
        value = written(schema, seed)
        validator.validate(value)
        if name not in WANTS_MORE:
            adapter.validate_json(json.dumps(value))


def test_types_together_in_one_model():
    kinds = {f"f{i}": (kind, ...) for i, kind in enumerate(SERVED.values())}
    from pydantic import create_model

    schema = create_model("All", **kinds).model_json_schema()
    validator = validator_of(schema)
    for seed in range(2):
        validator.validate(written(schema, seed))


NULLABLE = {"type": "object", "required": ["a", "b", "c"], "additionalProperties": False, "properties": {
    "a": {"type": "integer", "nullable": True, "maximum": 9, "minimum": 0},
    "b": {"$ref": "#/$defs/Name", "nullable": True},
    "c": {"type": ["boolean", "null"], "nullable": True},
}, "$defs": {"Name": {"type": "string", "maxLength": 2}}}  # fmt: skip


def test_nullable_of_openapi_allows_null():
    values = [written(NULLABLE, seed) for seed in range(60)]
    for name, kind in (("a", int), ("b", str), ("c", bool)):
        assert {type(value[name]) for value in values} == {kind, type(None)}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "format": "int64", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "number", "format": "double", "maximum": 10, "minimum": 0},
        {"type": "string", "format": "binary", "maxLength": 3},
        {"type": "string", "format": "date", "pattern": "^2"},
        {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "integer", "maximum": 9}, {"type": "null"}]},
        {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["c"]}, {"const": 1}]},
        {"oneOf": [
            {"properties": {"t": {"enum": ["a", "b"]}}, "additionalProperties": False},
            {"properties": {"t": {"const": "c"}, "u": {"type": "null"}}, "additionalProperties": False},
        ]},
        {"not": False, "type": "boolean", "uniqueItems": False, "unevaluatedProperties": True},
        {"$schema": "http://json-schema.org/draft-04/schema#", "const": "x"},
        {"allOf": [{"$ref": "#/definitions/A"}], "definitions": {"A": {"type": "boolean"}}},
        {"type": "object", "properties": {"e\u0301": {"const": "A\u030a \u212b"}}, "required": ["e\u0301"],
         "additionalProperties": False},
    ],
)  # fmt: skip
def test_values_of_other_schemas_keep_them(schema):
    validator = validator_of(schema)
    for seed in SEEDS:
        validator.validate(written(schema, seed))


class IntKey(IntEnum):
    ONE = 1


def _many(count: int) -> dict[str, Any]:
    return {f"p{i}": {"type": "integer"} for i in range(count)}


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def _in_object(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": schema}}}}


@pytest.mark.parametrize(
    ("schema", "path", "advice"),
    [
        (TypeAdapter(set[str]).json_schema(), "properties.a.properties.b", "write list instead of set"),
        (TypeAdapter(list[frozenset[int]]).json_schema(), "properties.a.properties.b.items", "write list"),
        (TypeAdapter(dict[IntKey, int]).json_schema(), "properties.a.properties.b", "names of properties are strings"),
        ({"not": {"type": "null"}}, "properties.a.properties.b", "say what is allowed"),
        ({"if": {}, "then": {"type": "null"}}, "properties.a.properties.b", "alternatives of anyOf"),
        ({"type": "string", "format": "phone"}, "properties.a.properties.b", "write a pattern"),
        ({"type": "string", "pattern": "^(?=a)b"}, "properties.a.properties.b", "look-around"),
        ({"type": "string", "pattern": "("}, "properties.a.properties.b", "write a simpler one"),
        ({"type": "nonsense"}, "properties.a.properties.b", "no type 'nonsense'"),
        ({"enum": []}, "properties.a.properties.b", "give it a value"),
        ({"enum": [2**53 + 1]}, "properties.a.properties.b", "write them as strings"),
        ({"type": "integer", "multipleOf": 999_983}, "properties.a.properties.b", "smaller"),
        ({"$ref": "#/$defs/Gone"}, "properties.a.properties.b", "no '#/$defs/Gone'"),
        ({"$ref": "https://example.com/a.json"}, "properties.a.properties.b", "#/$defs/NAME"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "properties.a.properties.b.oneOf", "write anyOf"),
        ({"oneOf": [{"enum": [1]}, {"enum": [1.0]}]}, "properties.a.properties.b.oneOf", "write anyOf"),
        ({"properties": 5}, "properties.a.properties.b", "must be an object"),
        ({"items": 5}, "properties.a.properties.b", "items"),
        ({"type": "object", "minProperties": 2}, "properties.a.properties.b", "may come twice"),
        ({"type": "object", "patternProperties": {"^a": {}, "a$": {}}}, "properties.a.properties.b", "two patterns"),
        ({"type": "object", "properties": _many(MAX_OPTIONAL_PROPERTIES + 1)}, "properties.a.properties.b", "split"),
        (_deep(150), "properties.a.properties.b.items", "use $ref"),
        ({"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(8)]},
         "properties.a.properties.b", "too many cases"),
        ({"type": "number", "maximum": float("inf")}, "its root", "float64"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused_with_its_place(schema, path, advice):
    with pytest.raises(UnsupportedSchema) as caught:
        check(enforceable(_in_object(schema) | {k: v for k, v in schema.items() if k == "$defs"}))
    assert caught.value.path.startswith(path)
    assert advice in caught.value.problem
    assert "nimplemented" not in str(caught.value) and "\n" not in str(caught.value)


def test_schema_of_the_client_is_not_changed():
    before = json.dumps(NULLABLE)
    enforceable(NULLABLE)
    assert json.dumps(NULLABLE) == before
