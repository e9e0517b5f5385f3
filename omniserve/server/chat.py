"""/v1/chat/completions: the shape of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omniserve.core.request import TokenLogprob
from omniserve.server.answers import AnswerShape, finite
from omniserve.server.choice import Delta
from omniserve.server.text import TextCodec
from omniserve.server.tool_calls import ParsedCall


class ChatShape(AnswerShape):
    """Chat completion objects."""

    answer_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, *, codec: TextCodec, with_logprobs: bool, **common: Any) -> None:
        super().__init__(**common)
        self._codec = codec
        self._with_logprobs = with_logprobs
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
            "logprob": finite(logprob),
            "bytes": list(self._codec.token_bytes(token_id)),
        }


def _call(call: ParsedCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chunk(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
