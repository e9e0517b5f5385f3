"""One choice of an answer: an engine request, the text of its output, its times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from omniserve.request import FinishReason, Request, RequestOutput, TokenLogprob
from omniserve.server.text import TextCodec


@dataclass(slots=True)
class Delta:
    """New text of one choice."""

    index: int
    text: str
    logprobs: list[TokenLogprob]
    """Of the tokens since the last delta; empty when none were asked for."""
    finish_reason: str | None

    def extend(self, later: Delta) -> None:
        """Append the delta of the same choice that came after this one."""
        self.text += later.text
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason


@dataclass(slots=True)
class Times:
    """When a request's tokens passed through the API process; monotonic seconds."""

    arrival_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_tokens: int = 0

    def add(self, num_tokens: int) -> None:
        """Note tokens that came now."""
        self.last_token_s = time.monotonic()
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s
        self.num_tokens += num_tokens


class Choice:
    """Follows one engine request.

    Args:
        index: Its place in the answer.
        request: The request as the engine gets it, so without stop strings.
        stop: The stop strings.
        arrival_s: When the HTTP request came.
    """

    def __init__(self, index: int, request: Request, codec: TextCodec, stop: Sequence[str], arrival_s: float) -> None:
        self.index = index
        self.request = request
        self.times = Times(arrival_s)
        self.finish_reason: str | None = None
        self.predicted_ttft_s: float | None = None
        """What the engine predicted when it accepted the request; from its arrival."""
        self._detokenizer = codec.detokenizer(stop)
        self._logprobs: list[TokenLogprob] = []

    def advance(self, output: RequestOutput) -> Delta | None:
        """Take what a step produced; return the text that is certain by now, if any or if the choice is complete."""
        token_ids, logprobs = output.new_token_ids, output.new_logprobs
        if token_ids:
            self.times.add(len(token_ids))
        if output.finish_reason is FinishReason.STOP:
            # The engine ends a request so at a stop token only, and that is no part of the text.
            token_ids, logprobs = token_ids[:-1], logprobs[: len(token_ids) - 1]
        if logprobs:
            self._logprobs += logprobs
        text = self._detokenizer.push(token_ids)
        if output.finish_reason is not None:
            text += self._detokenizer.flush()
            self.finish_reason = str(output.finish_reason)
        if self._detokenizer.stopped is not None:
            self.finish_reason = str(FinishReason.STOP)
        if not text and self.finish_reason is None:
            return None
        logprobs_so_far, self._logprobs = self._logprobs, []
        return Delta(self.index, text, logprobs_so_far, self.finish_reason)
