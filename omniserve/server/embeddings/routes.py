"""The routes of embeddings, scores and ranks, and what their answers look like."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from omniserve.server.embeddings.protocol import EmbeddingRequest, RerankRequest, ScoreRequest
from omniserve.server.embeddings.shapes import EmbeddingShape, RerankShape, ScoreShape
from omniserve.server.generate import generate
from omniserve.server.openapi import GENERATION_ERRORS, PromptTokensDetails, answers, takes
from omniserve.server.service import Service


class TextsUsage(BaseModel):
    """Tokens of a call."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    """Absent if nothing was cached."""


class _TextsAnswer(BaseModel):
    id: str
    created: int
    model: str
    service_tier: str
    usage: TextsUsage


class Embedding(BaseModel):
    """The embedding of a text."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Numbers, or float32 in base64."""


class EmbeddingList(_TextsAnswer):
    """Answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]


class Score(BaseModel):
    """The score of a pair of texts."""

    object: Literal["score"]
    index: int
    score: float


class ScoreList(_TextsAnswer):
    """Answer of /v1/score."""

    object: Literal["list"]
    data: list[Score]


class RankedText(BaseModel):
    """The text of a document."""

    text: str


class RankedDocument(BaseModel):
    """A document and its score."""

    index: int
    relevance_score: float
    document: RankedText | None = None
    """Absent without ``return_documents``."""


class Ranking(_TextsAnswer):
    """Answer of /v1/rerank, the best documents first."""

    results: list[RankedDocument]


def router(service: Service) -> APIRouter:
    """Return the routes."""
    routes = APIRouter()

    @routes.post(
        "/v1/embeddings", openapi_extra=takes(EmbeddingRequest), responses=answers(EmbeddingList, *GENERATION_ERRORS)
    )
    async def embeddings(request: Request) -> Response:
        return await generate(service, request, EmbeddingShape)

    @routes.post("/v1/score", openapi_extra=takes(ScoreRequest), responses=answers(ScoreList, *GENERATION_ERRORS))
    async def score(request: Request) -> Response:
        return await generate(service, request, ScoreShape)

    @routes.post("/rerank", openapi_extra=takes(RerankRequest), responses=answers(Ranking, *GENERATION_ERRORS))
    @routes.post("/v1/rerank", openapi_extra=takes(RerankRequest), responses=answers(Ranking, *GENERATION_ERRORS))
    @routes.post("/v2/rerank", openapi_extra=takes(RerankRequest), responses=answers(Ranking, *GENERATION_ERRORS))
    async def rerank(request: Request) -> Response:
        return await generate(service, request, RerankShape)

    return routes
