"""The answers of /v1/completions and /v1/chat/completions: OpenAI's objects, made of the text of choices."""

from __future__ import annotations

import abc
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from omniserve.core.request import TokenLogprob
from omniserve.server.choice import Delta
from omniserve.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from omniserve.server.service import Service
from omniserve.server.tool_calls import ParsedCall

# JSON has no infinity, and no client can do anything with one.
_LOWEST_LOGPROB = -9999.0


class AnswerShape(abc.ABC):
    """Turns the deltas of one call into the objects of an endpoint of OpenAI's."""

    request_kind: type[GenerationRequest]
    id_prefix: str
    answer_object: str
    chunk_object: str

    def __init__(self, service: Service, request: GenerationRequest, call_id: str) -> None:
        self._common = {
            "id": call_id,
            "created": int(time.time()),
            "model": service.model_name,
            "service_tier": request.answered_tier,
        }
        self.is_streamed = request.stream
        self.include_usage = request.include_usage
        """A stream ends with the token counts."""
        self._codec = service.codec
        self._with_logprobs = request.num_logprobs is not None

    @abc.abstractmethod
    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the choice objects, one a chunk, that tell some new text; called once per delta, in order."""

    @abc.abstractmethod
    def whole(self, delta: Delta) -> dict[str, Any]:
        """Return the choice object of a complete text."""

    def answer(self, deltas: Sequence[Delta], usage: dict[str, Any]) -> bytes:
        """Return the body of an answer that is not streamed; one delta per choice."""
        choices = [self.whole(delta) for delta in deltas]
        return json.dumps(self._common | {"object": self.answer_object, "choices": choices, "usage": usage}).encode()

    def chunk_head(self) -> str:
        """Return the JSON text that all chunks begin with, an object still open."""
        return json.dumps(self._common | {"object": self.chunk_object})[:-1]


class CompletionShape(AnswerShape):
    """Text completion objects."""

    request_kind = CompletionRequest
    id_prefix = "cmpl"
    answer_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, service: Service, request: GenerationRequest, call_id: str) -> None:
        super().__init__(service, request, call_id)
        self._offsets: defaultdict[int, int] = defaultdict(int)

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        return [self.whole(delta)]

    def whole(self, delta: Delta) -> dict[str, Any]:
        echo = delta.echo
        return {
            "index": delta.index,
            "text": delta.text if echo is None else echo.text + delta.text,
            "logprobs": self._logprobs(delta) if self._with_logprobs else None,
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, delta: Delta) -> dict[str, list[Any]]:
        text, entries = self._codec.token_text, delta.logprobs
        first: list[int] = []
        if delta.echo is not None:
            first, entries = [delta.echo.first_token_id], [*delta.echo.logprobs, *entries]
        tokens = [text(i) for i in (*first, *(entry.token_id for entry in entries))]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[delta.index])
            self._offsets[delta.index] += len(token)
        nothing = [None] * len(first)  # nothing predicts a prompt's first token
        return {
            "tokens": tokens,
            "token_logprobs": [*nothing, *(_finite(entry.logprob) for entry in entries)],
            # The token that was taken belongs to the table even if it is not among the likeliest.
            "top_logprobs": [
                *nothing,
                *(
                    {text(i): _finite(lp) for i, lp in (*entry.top, (entry.token_id, entry.logprob))}
                    for entry in entries
                ),
            ],
            "text_offset": offsets,
        }


class ChatShape(AnswerShape):
    """Chat completion objects."""

    request_kind = ChatRequest
    id_prefix = "chatcmpl"
    answer_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, service: Service, request: GenerationRequest, call_id: str) -> None:
        super().__init__(service, request, call_id)
        self._opened: set[int] = set()

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        chunks = []
        if delta.index not in self._opened:
            self._opened.add(delta.index)
            chunks.append(_chunk(delta.index, {"role": "assistant", "content": "", "refusal": None}))
        if delta.text or delta.logprobs:
            chunks.append(_chunk(delta.index, {"content": delta.text}, self._logprobs(delta.logprobs)))
        for call in delta.tool_calls:
            chunks.append(_chunk(delta.index, {"tool_calls": [{"index": call.index, **_call(call)}]}))
        if delta.finish_reason is not None:
            chunks.append(_chunk(delta.index, {}, finish_reason=delta.finish_reason))
        return chunks

    def whole(self, delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
        if delta.tool_calls:
            message |= {"content": delta.text or None, "tool_calls": [_call(call) for call in delta.tool_calls]}
        return {
            "index": delta.index,
            "message": message,
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, list[Any]] | None:
        if not self._with_logprobs:
            return None
        content = [
            self._token(entry.token_id, entry.logprob) | {"top_logprobs": [self._token(i, lp) for i, lp in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": []}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._codec.token_text(token_id),
            "logprob": _finite(logprob),
            "bytes": list(self._codec.token_bytes(token_id)),
        }


ENDPOINTS: Mapping[str, type[AnswerShape]] = {
    "/v1/completions": CompletionShape,
    "/v1/chat/completions": ChatShape,
}


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)


def _call(call: ParsedCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chunk(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
