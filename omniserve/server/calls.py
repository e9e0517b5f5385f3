"""The endpoints that generate: what a request to each may hold, and what shapes its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omniserve.server.answers import AnswerShape
from omniserve.server.chat import ChatShape
from omniserve.server.completions import CompletionShape
from omniserve.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from omniserve.server.service import Service


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint."""

    request_kind: type[GenerationRequest]
    shape_kind: type[ChatShape] | type[CompletionShape]
    id_prefix: str

    def shape(self, service: Service, request: GenerationRequest, call_id: str) -> AnswerShape:
        """Return what shapes the answer of one call."""
        return self.shape_kind(
            call_id=call_id,
            model=service.model_name,
            service_tier=request.answered_tier,
            codec=service.codec,
            with_logprobs=request.num_logprobs is not None,
        )


ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/completions": Endpoint(CompletionRequest, CompletionShape, "cmpl"),
    "/v1/chat/completions": Endpoint(ChatRequest, ChatShape, "chatcmpl"),
}
