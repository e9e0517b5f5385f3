"""One API call's work: its engine requests from admission to the last token."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from omniserve.errors import EngineStopped
from omniserve.request import SLO, FinishReason, Request, RequestOutput, SamplingParams
from omniserve.server.choice import Choice, Delta
from omniserve.server.engine_client import Accepted, EngineClient, Event
from omniserve.server.errors import ApiError, engine_gone, from_engine
from omniserve.server.metrics import ServerMetrics
from omniserve.server.text import TextCodec
from omniserve.server.tool_calls import ToolCallParser


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What one API call asks of the engine: every prompt is continued once per sampling."""

    call_id: str
    arrival_s: float
    """When the call came; monotonic seconds."""
    prompts: Sequence[Sequence[int]]
    samplings: Sequence[SamplingParams]
    service_class: str
    slo: SLO
    """The call's own or its class's default."""
    echoes: Sequence[str] | None = None
    """Text of each prompt, which its answers begin with; None: they do not."""
    num_kept: int | None = None
    """Of each prompt's outputs, so many are in the answer: the likeliest; None: all."""
    calls_tools: bool = False
    """Tool calls are told from the text."""


@dataclass(slots=True)
class Usage:
    """Token counts of an API call."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return OpenAI's usage object."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
        }


class Generation:
    """The engine requests of one API call: ``start``, then ``deltas``, at last ``close``, whatever happened."""

    def __init__(self, job: Job, *, client: EngineClient, codec: TextCodec, metrics: ServerMetrics) -> None:
        self._client = client
        self._metrics = metrics
        self._job = job
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._events: list[Event] = []
        self._choices: dict[str, Choice] = {}
        self._started = False
        self.usage = Usage(num_prompt_tokens=sum(map(len, job.prompts)))
        for i, prompt in enumerate(job.prompts):
            for sampling in job.samplings:
                index = len(self._choices)
                request = Request(
                    request_id=f"{job.call_id}-{index}",
                    prompt_token_ids=prompt,
                    sampling=dataclasses.replace(sampling, stop=()),  # looked for here, where the text is
                    service_class=job.service_class,
                    slo=job.slo,
                )
                echo = None if job.echoes is None else job.echoes[i]
                parser = ToolCallParser() if job.calls_tools else None
                self._choices[f"{job.call_id}-{index}"] = Choice(
                    index, request, codec, sampling.stop, job.arrival_s, echo=echo, parser=parser
                )  # fmt: skip

    async def start(self) -> None:
        """Send the requests and wait until the engine has accepted them all.

        Raises:
            ApiError: It refused one, or is gone.
        """
        waiting = set(self._choices)
        try:
            for choice in self._choices.values():
                self._client.submit(choice.request, self._job.arrival_s, self._queue)
        except EngineStopped as error:
            raise engine_gone(str(error)) from None
        while waiting:
            request_id, event = await self._queue.get()
            if isinstance(event, Exception):
                refusal = from_engine(event)
                if refusal.status == 429:
                    self._metrics.rejected(self._job.service_class)
                raise refusal
            if isinstance(event, Accepted):
                waiting.discard(request_id)
                self._choices[request_id].predicted_ttft_s = event.predicted_ttft_s
            else:
                self._events.append((request_id, event))
        self._started = True

    @property
    def predicted_ttft_s(self) -> float | None:
        """The largest of its choices' predictions, once started; None without prediction."""
        predictions = [choice.predicted_ttft_s for choice in self._choices.values()]
        return max((seconds for seconds in predictions if seconds is not None), default=None)

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Yield new text until every choice has finished; what is there at one time comes together.

        Raises:
            ApiError: The engine died, or the server ended the call.
        """
        num_running = len(self._choices)
        events = self._events
        while num_running:
            if not events:
                events.append(await self._queue.get())
            while not self._queue.empty():
                events.append(self._queue.get_nowait())
            deltas = []
            for request_id, event in events:
                if isinstance(event, Exception):
                    raise from_engine(event)
                choice = self._choices[request_id]
                if isinstance(event, Accepted) or choice.finish_reason is not None:
                    continue  # steps go on for a moment after a stop string was found here
                delta = self._advance(request_id, choice, event)
                if delta is not None:
                    deltas.append(delta)
                num_running -= choice.finish_reason is not None
            events.clear()
            if deltas:
                yield deltas

    def best(self, deltas: Sequence[Delta]) -> list[Delta]:
        """Return the choices that the answer has, of one complete delta per output.

        Of each prompt's, the likeliest ones by the mean log-probability of their tokens, best first.
        """
        each, num_kept = len(self._job.samplings), self._job.num_kept
        if num_kept is None or num_kept == each:
            return list(deltas)
        kept: list[Delta] = []
        for first in range(0, len(deltas), each):
            ranked = sorted(deltas[first : first + each], key=lambda delta: delta.mean_logprob, reverse=True)
            kept += ranked[:num_kept]
        return [dataclasses.replace(delta, index=index) for index, delta in enumerate(kept)]

    def fail(self, error: ApiError) -> None:
        """End everything that still runs with an error."""
        self._queue.put_nowait((self._job.call_id, error))

    def close(self) -> None:
        """Abort what has not finished. Calling it again does nothing."""
        for request_id, choice in self._choices.items():
            if choice.finish_reason is None:
                choice.finish_reason = str(FinishReason.ABORT)
                self._client.abort(request_id)
                if self._started:
                    self._metrics.finished(choice)

    def _advance(self, request_id: str, choice: Choice, output: RequestOutput) -> Delta | None:
        delta = choice.advance(output)
        self.usage.num_output_tokens += len(output.new_token_ids)
        if choice.finish_reason is None:
            return delta
        if not output.finished:  # a stop string, of which the engine does not know
            self._client.abort(request_id)
        self._metrics.finished(choice)
        if choice.finish_reason == FinishReason.ERROR:
            raise ApiError(f"the engine could not go on with this request: {output.stop_reason}", status=500)
        if choice.finish_reason == FinishReason.ABORT:
            raise ApiError("the engine ended this request before it was complete; send it again", status=503)
        return delta
