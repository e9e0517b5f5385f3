"""/v1/completions: the shape of its answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from omniserve.request import TokenLogprob
from omniserve.server.answers import AnswerShape, finite
from omniserve.server.choice import Delta
from omniserve.server.text import TextCodec


class CompletionShape(AnswerShape):
    """Text completion objects."""

    answer_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, *, codec: TextCodec, with_logprobs: bool, **common: Any) -> None:
        super().__init__(**common)
        self._codec = codec
        self._with_logprobs = with_logprobs
        self._offsets: defaultdict[int, int] = defaultdict(int)

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        return [self.whole(delta)]

    def whole(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.index, delta.logprobs) if self._with_logprobs else None,
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        text = self._codec.token_text
        tokens = [text(entry.token_id) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            # The token that was taken belongs to the table even if it is not among the likeliest.
            "top_logprobs": [
                {text(i): finite(lp) for i, lp in (*entry.top, (entry.token_id, entry.logprob))} for entry in entries
            ],
            "text_offset": offsets,
        }
