"""What the parts that shape an answer have in common."""

from __future__ import annotations

import abc
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from omniserve.core.request import TokenLogprob
from omniserve.server.choice import Delta, Echo
from omniserve.server.generation import Generation
from omniserve.server.tool_calls import ParsedCall

# JSON has no infinity, and no client can do anything with one.
_LOWEST_LOGPROB = -9999.0


class AnswerShape(abc.ABC):
    """Turns deltas into OpenAI's objects.

    Args:
        call_id: The answer's id.
        model: The name that the model is served under.
        service_tier: The tier that was used.
    """

    answer_object: str
    chunk_object: str

    def __init__(self, *, call_id: str, model: str, service_tier: str) -> None:
        self._common = {"id": call_id, "created": int(time.time()), "model": model, "service_tier": service_tier}

    @abc.abstractmethod
    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the choice objects, one a chunk, that tell some new text; called once per delta, in order."""

    @abc.abstractmethod
    def whole(self, delta: Delta) -> dict[str, Any]:
        """Return the choice object of a complete text."""

    def answer(self, deltas: Sequence[Delta], usage: dict[str, int]) -> bytes:
        """Return the body of an answer that is not streamed; one delta per choice."""
        choices = [self.whole(delta) for delta in deltas]
        return json.dumps(self._common | {"object": self.answer_object, "choices": choices, "usage": usage}).encode()

    def chunk_head(self) -> str:
        """Return the JSON text that all chunks begin with, an object still open."""
        return json.dumps(self._common | {"object": self.chunk_object})[:-1]


@dataclass(slots=True)
class _Text:
    parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    echo: Echo | None = None
    mean_logprob: float = 0.0
    tool_calls: list[ParsedCall] = field(default_factory=list)


async def collect(generation: Generation) -> list[Delta]:
    """Wait for the whole output; return one delta per choice of the answer, in order."""
    texts: dict[int, _Text] = {}
    async for deltas in generation.deltas():
        for delta in deltas:
            text = texts.setdefault(delta.index, _Text())
            text.parts.append(delta.text)
            text.logprobs += delta.logprobs
            text.finish_reason = delta.finish_reason
            text.echo = text.echo or delta.echo
            text.mean_logprob = delta.mean_logprob
            text.tool_calls += delta.tool_calls
    return generation.best(
        [
            Delta(i, "".join(t.parts), t.logprobs, t.finish_reason, t.echo, t.mean_logprob, t.tool_calls)
            for i, t in sorted(texts.items())
        ]
    )


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return max(logprob, _LOWEST_LOGPROB)
