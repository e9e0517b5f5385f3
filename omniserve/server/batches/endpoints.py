"""The endpoints that lines of a batch may be for."""

from __future__ import annotations

from collections.abc import Mapping

from omniserve.server.answer_shape import CallShape
from omniserve.server.anthropic.shape import MessagesShape
from omniserve.server.completions.answers import ChatShape, CompletionShape
from omniserve.server.embeddings.shapes import EmbeddingShape
from omniserve.server.responses.shape import ResponseShape

ENDPOINTS: Mapping[str, type[CallShape]] = {
    "/v1/completions": CompletionShape,
    "/v1/chat/completions": ChatShape,
    "/v1/responses": ResponseShape,
    "/v1/messages": MessagesShape,
    "/v1/embeddings": EmbeddingShape,
}
