"""``response_format``: what an answer has to be, as a grammar."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from omniserve.sampling.grammar import json_grammar

_STRICT = ConfigDict(extra="forbid", strict=True)


class JsonSchemaFormat(BaseModel):
    """The schema of a ``json_schema`` format."""

    model_config = _STRICT

    name: str
    """For people; the model is not told."""
    description: str | None = None
    """The same."""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """Accepted and without effect: the schema is kept in any case."""


class ResponseFormat(BaseModel):
    """OpenAI's field."""

    model_config = _STRICT

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_a_schema_if_it_needs_one(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type 'json_schema', and only to it")
        return self

    @property
    def grammar(self) -> str | None:
        """What ``SamplingParams.grammar`` is for this format; None: anything goes."""
        if self.type == "text":
            return None
        return json_grammar({"type": "object"} if self.json_schema is None else self.json_schema.schema_)
