"""/v1/completions: the shape of its answers."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

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
            "token_logprobs": [*nothing, *(finite(entry.logprob) for entry in entries)],
            # The token that was taken belongs to the table even if it is not among the likeliest.
            "top_logprobs": [
                *nothing,
                *(
                    {text(i): finite(lp) for i, lp in (*entry.top, (entry.token_id, entry.logprob))}
                    for entry in entries
                ),
            ],
            "text_offset": offsets,
        }
