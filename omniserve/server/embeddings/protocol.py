"""The fields of requests for embeddings, scores and ranks: OpenAI's, vLLM's, Jina's and Cohere's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from omniserve.server.completions.protocol import MAX_PROMPTS, CallRequest, prompts_of
from omniserve.server.fields import StrictModel, without_nulls

_Text = Annotated[str, Field(min_length=1)]
_TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
# Other names of the two texts of a score.
_NAMES_OF_1, _NAMES_OF_2 = ("queries", "data_1"), ("documents", "data_2", "items")


class TextsRequest(CallRequest):
    """Fields that all requests about texts have."""

    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=2**31 - 1)
    """Texts are cut to so many tokens at their ends, -1: to as many as the model takes. None: longer ones are refused.
    """


class EmbeddingRequest(TextsRequest):
    """Body of /v1/embeddings."""

    input: Annotated[
        list[Any],
        BeforeValidator(
            prompts_of,
            json_schema_input_type=_Text
            | _TokenIds
            | Annotated[list[_Text] | list[_TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)],
        ),
    ]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, le=2**31 - 1)

    # vLLM's.
    add_special_tokens: bool = True
    normalize: bool = True
    """Embeddings have the length 1."""
    embed_dtype: Literal["float32"] = "float32"
    endianness: Literal["native", "little"] = "native"


def _texts(value: Any) -> Any:
    """Return a list of texts."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("must be a string or a list of strings, and not empty")
    if len(texts) >= MAX_PROMPTS:
        raise ValueError(f"has {len(texts)} texts, of at most {MAX_PROMPTS - 1}; send several requests")
    return texts


_Texts = Annotated[
    list[str],
    BeforeValidator(
        _texts, json_schema_input_type=_Text | Annotated[list[_Text], Field(min_length=1, max_length=MAX_PROMPTS - 1)]
    ),
]


class ScoreRequest(TextsRequest):
    """Body of /v1/score: one text and many, or as many of each."""

    text_1: _Texts
    """vLLM also calls it ``queries`` or ``data_1``."""
    text_2: _Texts
    """Also ``documents``, ``items`` or ``data_2``."""

    @model_validator(mode="before")
    @classmethod
    def _usual_names(cls, fields: Any) -> Any:
        fields = without_nulls(fields)
        if isinstance(fields, dict):
            for usual, names in (("text_1", _NAMES_OF_1), ("text_2", _NAMES_OF_2)):
                for name in names:
                    if name in fields and usual not in fields:
                        fields[usual] = fields.pop(name)
        return fields

    @model_validator(mode="after")
    def _fit(self) -> ScoreRequest:
        if len(self.text_1) not in (1, len(self.text_2)):
            raise ValueError(
                f"text_1 must have one text or as many as text_2, which has {len(self.text_2)}; got {len(self.text_1)}"
            )
        return self

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The texts that are compared."""
        first = self.text_1 * len(self.text_2) if len(self.text_1) == 1 else self.text_1
        return list(zip(first, self.text_2, strict=True))


class Document(StrictModel):
    """A document of a rerank request, as Cohere writes it."""

    text: str = Field(min_length=1)


def _documents(value: Any) -> Any:
    if isinstance(value, list):
        value = [item.get("text") if isinstance(item, dict) and set(item) == {"text"} else item for item in value]
    return _texts(value)


class RerankRequest(TextsRequest):
    """Body of /rerank, /v1/rerank and /v2/rerank."""

    query: str = Field(min_length=1)
    documents: Annotated[
        list[str],
        BeforeValidator(
            _documents,
            json_schema_input_type=Annotated[list[_Text | Document], Field(min_length=1, max_length=MAX_PROMPTS - 1)],
        ),
    ]
    top_n: int = Field(0, ge=0, le=2**31 - 1)
    """Results that are returned, the best; 0: all."""
    return_documents: bool = True

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The query with each document."""
        return [(self.query, document) for document in self.documents]
