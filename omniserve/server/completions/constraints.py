"""Constraints on answers: from the fields of a request to a grammar for the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from omniserve.sampling.grammar import json_value
from omniserve.sampling.json_schema import UnsupportedSchema, check, enforceable
from omniserve.server.completions.messages import Tool
from omniserve.server.dialects.base import Dialect, Opening
from omniserve.server.errors import ApiError
from omniserve.server.tokenizing.text import TextCodec

MAX_SCHEMA_CHARACTERS = 128 << 10
"""Most characters of a request's schemas together. A waiting request keeps little, whatever the size of bodies."""
# Results that are kept, in case the next request has the same schemas.
_MAX_KEPT, _MAX_KEPT_CHARACTERS = 256, 4 << 20


@dataclass(frozen=True, slots=True)
class FormatConstraint:
    """The answer is JSON of a schema."""

    schema: Mapping[str, Any]
    param: str = "response_format"
    """The field that asks for it."""

    @property
    def num_characters(self) -> int:
        """Length of its schema as JSON."""
        return len(json.dumps(self.schema))


@dataclass(frozen=True, slots=True)
class CallConstraint:
    """The answer calls tools; see ``Dialect.calls_grammar``."""

    tools: Sequence[Tool]
    free_text: bool
    several: bool
    otherwise: FormatConstraint | None = None
    """The answer keeps this if it calls none; None: it calls one, or with ``free_text`` is any."""

    param = "tools"

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Schemas of the arguments, by tool; of a tool that is not strict and may be called, any object."""
        must_call = not self.free_text and self.otherwise is None
        return {
            tool.function.name: tool.arguments_schema if tool.function.strict or must_call else {"type": "object"}
            for tool in self.tools
        }

    @property
    def num_characters(self) -> int:
        """Length of its schemas as JSON."""
        return len(json.dumps(self.schemas)) + (self.otherwise.num_characters if self.otherwise else 0)


@dataclass(frozen=True, slots=True)
class BudgetConstraint:
    """The answer is any; the tokens of its thinking are bounded."""

    param = "thinking_token_budget"
    num_characters = 0


Constraint = FormatConstraint | CallConstraint | BudgetConstraint


def with_format_of(constraint: Constraint | None, param: str) -> Constraint | None:
    """Return the same constraint, whose format is asked for by a field of another name."""
    if isinstance(constraint, FormatConstraint):
        return dataclasses.replace(constraint, param=param)
    if isinstance(constraint, CallConstraint) and constraint.otherwise is not None:
        return dataclasses.replace(constraint, otherwise=dataclasses.replace(constraint.otherwise, param=param))
    return constraint


class GrammarWriter:
    """Writes grammars for one tokenizer, beside the event loop; those that were asked for last are kept."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        # One thread: what it does takes some ms, and the engine's process compiles beside it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="schemas")
        self._kept: OrderedDict[str, str | ApiError] = OrderedDict()

    async def grammar(self, constraint: Constraint, dialect: Dialect, opening: Opening) -> str:
        """Return the grammar of a constraint, for an answer in a dialect that begins so.

        Raises:
            ApiError: A schema cannot be enforced; the message says where in it, and what to write instead.
        """
        key = repr((_key(constraint), id(dialect), opening))
        if key not in self._kept:
            work = asyncio.get_running_loop().run_in_executor(self._thread, self._write, constraint, dialect, opening)
            self._kept[key] = await work
            while len(self._kept) > 1 and (
                len(self._kept) > _MAX_KEPT or sum(map(len, self._kept)) > _MAX_KEPT_CHARACTERS
            ):
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        if isinstance(result := self._kept[key], ApiError):
            raise ApiError(result.message, param=result.param, code=result.code)
        return result

    def _write(self, constraint: Constraint, dialect: Dialect, opening: Opening) -> str | ApiError:
        special = self._codec.special_tokens(dialect)
        if isinstance(constraint, BudgetConstraint):
            return dialect.text_grammar(special=special, opening=opening)
        if isinstance(constraint, FormatConstraint):
            value = _value(constraint)
            return (
                value if isinstance(value, ApiError) else dialect.value_grammar(value, special=special, opening=opening)
            )
        otherwise = None if constraint.otherwise is None else _value(constraint.otherwise)
        if isinstance(otherwise, ApiError):
            return otherwise
        name, schemas = "", {}
        try:
            for name, given in constraint.schemas.items():
                schemas[name] = enforceable(given)
                check(schemas[name])
                # Alone, so that an error can name the tool.
                dialect.calls_grammar(
                    {name: schemas[name]}, free_text=False, several=False, special=special, opening=opening
                )
        except UnsupportedSchema as error:
            return ApiError(f"tools: of the tool {name!r}, {error}", param=constraint.param, code="invalid_schema")
        return dialect.calls_grammar(
            schemas,
            free_text=constraint.free_text,
            several=constraint.several,
            otherwise=otherwise,
            special=special,
            opening=opening,
        )


def _value(constraint: FormatConstraint) -> str | ApiError:
    """Return an expression of JSON that keeps a schema."""
    try:
        schema = enforceable(constraint.schema)
        check(schema)
    except UnsupportedSchema as error:
        return ApiError(f"{constraint.param}: {error}", param=constraint.param, code="invalid_schema")
    return json_value(schema)


def _key(constraint: Constraint) -> str:
    if isinstance(constraint, BudgetConstraint):
        return ""
    if isinstance(constraint, FormatConstraint):
        return json.dumps([constraint.param, constraint.schema])
    otherwise = None if constraint.otherwise is None else _key(constraint.otherwise)
    return json.dumps([constraint.free_text, constraint.several, constraint.schemas, otherwise])
