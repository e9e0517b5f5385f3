"""The record of a call that has been answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omniserve.core.request import FinishReason
from omniserve.server.errors import CLIENT_CLOSED_REQUEST, ApiError
from omniserve.server.output_stream import OutputStream

TRACED_PATHS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/embeddings": "embeddings",
    "/v1/score": "score",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
}
"""Path -> what OpenTelemetry calls the operation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedCall:
    """A call that is over, however it ended."""

    path: str
    headers: Mapping[str, str]
    """The request's, names in lower case."""
    request_id: str | None
    """The call's ``x-request-id``."""
    began_s: float
    """Arrival of the request in monotonic seconds."""
    ended_s: float
    """Time at which the last byte of the answer was written, or the client was gone."""
    status: int | None
    """Status of the answer; None if there was none."""
    refusal: ApiError | None
    """The error that was the answer instead of an output."""
    outputs: OutputStream | None
    """Closed; None if the call did not come that far."""

    @property
    def error(self) -> Exception | None:
        """The error that the call ended with, instead of an answer or after a part of one; None without one."""
        return self.refusal or (self.outputs.error if self.outputs is not None else None)

    @property
    def was_abandoned(self) -> bool:
        """True if it ended because the client went away."""
        cut = self.outputs is not None and any(
            choice.finish_reason == FinishReason.ABORT for choice in self.outputs.choices
        )
        return self.error is None and (cut or self.status in (None, CLIENT_CLOSED_REQUEST))
