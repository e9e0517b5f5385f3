"""The output of one API call: its choices, each an engine request, from admission to the last token."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from omniserve.core.errors import EngineStopped
from omniserve.core.request import (
    SLO,
    FinishReason,
    Request,
    RequestOutput,
    RequestTimes,
    SamplingParams,
    Stay,
    TokenLogprob,
    add_stay,
)
from omniserve.server.engine_client import Accepted, EngineClient, Event
from omniserve.server.errors import ApiError, engine_gone, from_engine
from omniserve.server.limits import Backlog
from omniserve.server.metrics import ServerMetrics
from omniserve.server.text import TextCodec
from omniserve.server.tool_calls import ParsedCall, ToolCallParser

# Tokens of an answer that is read as a whole become text in such parts: each decoding keeps other requests waiting.
_TOKENS_PER_PART = 1024


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt, as the answer repeats it."""

    text: str
    first_token_id: int
    logprobs: tuple[TokenLogprob, ...]
    """Log-probabilities of the tokens after the first; empty if none were asked for."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice."""

    index: int
    text: str
    logprobs: Sequence[TokenLogprob]
    """Log-probabilities of the tokens since the last delta; empty if none were asked for."""
    finish_reason: str | None
    echo: Echo | None = None
    """The prompt's part, in the first delta only, of an answer that begins with the prompt."""
    tool_calls: Sequence[ParsedCall] = ()


def merge(deltas: Sequence[Delta]) -> Delta:
    """Return deltas of one choice, which follow one another, as one."""
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        deltas[0].index,
        "".join([delta.text for delta in deltas]),
        [entry for delta in deltas for entry in delta.logprobs],
        deltas[-1].finish_reason,
        deltas[0].echo,
        [call for delta in deltas for call in delta.tool_calls],
    )


@dataclass(slots=True)
class Times:
    """When a request's tokens passed through the API process; monotonic seconds."""

    arrival_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None: there is none yet."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None: there are none yet."""
        if self.first_token_s is None or self.last_token_s is None or self.num_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_tokens - 1)

    def add(self, num_tokens: int) -> None:
        """Note tokens that came now."""
        self.last_token_s = time.monotonic()
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s
        self.num_tokens += num_tokens


class Choice:
    """Follows one engine request.

    Args:
        request: The request as the engine gets it, so without stop strings.
        echo: Text of the prompt, which the answer begins with; None: it does not.
    """

    def __init__(self, index: int, request: Request, job: Job, codec: TextCodec, *, echo: str | None = None) -> None:
        self.index = index
        self.request = request
        self.times = Times(job.arrival_s)
        self.finish_reason: str | None = None
        self.predicted_ttft_s: float | None = None
        """The TTFT that the engine predicted when it accepted the request, in seconds from its arrival."""
        self.engine_times: RequestTimes | None = None
        """The times of the request as of its last output; None before its first one."""
        self.host_stays: list[Stay] = []
        """Stays on the host tier that are over; see ``add_stay``."""
        self.num_host_tokens = 0
        """Number of output tokens with attention computed on the host tier."""
        self._detokenizer = codec.detokenizer(job.stop)
        self._logprobs: list[TokenLogprob] = []
        self._echo = echo
        self._parser = ToolCallParser() if job.calls_tools else None
        self._total_logprob, self._num_logprobs = 0.0, 0
        # A stop string has to be found when it is there.
        self._in_large_parts = job.at_once and not job.stop
        self._token_ids: list[int] = []

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the tokens so far, a stop token included; 0 if none were asked for."""
        return self._total_logprob / max(1, self._num_logprobs)

    def advance(self, output: RequestOutput) -> Delta | None:
        """Take what a step produced; return the text that is certain by now, if any or if the choice is complete."""
        token_ids, logprobs = output.new_token_ids, output.new_logprobs
        self.engine_times, self.num_host_tokens = output.times, output.num_host_tokens
        for stay in output.host_stays:
            add_stay(self.host_stays, stay)
        if token_ids or self.request.sampling.max_tokens == 0:
            self.times.add(len(token_ids))
        if logprobs:
            self._total_logprob += sum(entry.logprob for entry in logprobs)
            self._num_logprobs += len(logprobs)
        if output.finish_reason is FinishReason.STOP:
            # The engine ends a request so at a stop token only, and that is no part of the text.
            token_ids, logprobs = token_ids[:-1], logprobs[: len(token_ids) - 1]
        if logprobs:
            self._logprobs += logprobs
        if self._in_large_parts:
            self._token_ids += token_ids
            if output.finish_reason is None and self._echo is None and len(self._token_ids) < _TOKENS_PER_PART:
                return None
            token_ids = tuple(self._token_ids)
            self._token_ids.clear()
        text, finish_reason = self._detokenizer.advance(token_ids, output.finish_reason)
        calls: Sequence[ParsedCall] = ()
        if self._parser is not None:
            text, calls = self._parser.push(text)
            if finish_reason is not None:
                rest, last_calls = self._parser.flush()
                text, calls = text + rest, calls + last_calls
        echo = None
        if self._echo is not None:
            echo = Echo(self._echo, self.request.prompt_token_ids[0], output.prompt_logprobs)
            self._echo = None
        elif not text and not calls and finish_reason is None:
            return None
        new_logprobs, self._logprobs = self._logprobs, []
        reason = self.finish_reason = None if finish_reason is None else str(finish_reason)
        if self._parser is not None and self._parser.num_calls and finish_reason is FinishReason.STOP:
            reason = "tool_calls"
        return Delta(self.index, text, new_logprobs, reason, echo, calls)


# Deltas that wait for a reader one by one; what comes while so many do joins the last one of its choice.
_MAX_UNREAD_DELTAS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The work of an API call: every prompt is continued once per sampling."""

    call_id: str
    arrival_s: float
    """Arrival of the call in monotonic seconds."""
    prompts: Sequence[Sequence[int]]
    samplings: Sequence[SamplingParams]
    """Without stop strings: these are looked for here, where the text is."""
    stop: Sequence[str] = ()
    """Strings that end an output; they are not part of the text."""
    service_class: str
    slo: SLO
    """The call's own or its class's default."""
    echoes: Sequence[str] | None = None
    """Text of each prompt, which its answers begin with; None: they do not."""
    num_kept: int | None = None
    """Number of outputs of each prompt that are in the answer, the likeliest ones; None: all."""
    at_once: bool = False
    """The answer is read when it is complete."""
    calls_tools: bool = False
    """Tool calls are told from the text."""
    max_unread_tokens: int | None = None
    """Per choice, on average: a stream whose reader leaves more than these unread ends; None: no limit."""
    interval_s: float = 0.0
    """Seconds between two reads, but for the first text and the end, which are read at once."""


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


class OutputStream:
    """The outputs of one API call: ``start``, then ``deltas`` or ``collect``, at last ``close``, whatever happened.

    Outputs are taken as they come, read or not: a stop string ends its request at once, and times are the engine's, not
    the reader's. What is not read yet is bounded: in deltas by merging them, in tokens by the job.
    """

    def __init__(
        self, job: Job, *, client: EngineClient, codec: TextCodec, metrics: ServerMetrics, backlog: Backlog
    ) -> None:
        self.job = job
        """The work that was asked for."""
        self.usage = Usage(num_prompt_tokens=sum(map(len, job.prompts)))
        self.error: Exception | None = None
        """The error that ended the call before all choices had finished, if one did."""
        self._client = client
        self._metrics = metrics
        self._backlog = backlog
        self._unread: list[list[Delta]] = []
        """Each list is merged when it is read."""
        self._last_unread: dict[int, list[Delta]] = {}  # by choice
        self._num_unread_tokens = 0
        self._news = asyncio.Event()
        self._read_s = -math.inf
        """Of the event loop's clock: when text was read last."""
        self._timer: asyncio.TimerHandle | None = None
        """Wakes the reader when the job's interval is over."""
        self._choices: dict[str, Choice] = {}
        for i, prompt in enumerate(job.prompts):
            for sampling in job.samplings:
                index = len(self._choices)
                request = Request(
                    request_id=f"{job.call_id}-{index}",
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    service_class=job.service_class,
                    slo=job.slo,
                )
                echo = None if job.echoes is None else job.echoes[i]
                self._choices[f"{job.call_id}-{index}"] = Choice(index, request, job, codec, echo=echo)
        self._num_unaccepted = self._num_running = len(self._choices)
        try:
            backlog.enter(job.service_class, len(self._choices))
        except ApiError as refusal:
            self._count_if_load(refusal)
            raise
        self._queued = set(self._choices)  # counted there

    async def start(self) -> None:
        """Send the requests and wait until the engine has accepted them all.

        Raises:
            ApiError: It refused one, or is gone.
        """
        try:
            for choice in self._choices.values():
                self._client.submit(choice.request, self.job.arrival_s, self.put_nowait)
        except EngineStopped as error:
            raise engine_gone(str(error), retry_after_s=1.0) from None
        while self._num_unaccepted:
            if self.error is not None:
                refusal = from_engine(self.error)
                self._count_if_load(refusal)
                raise refusal
            await self._wait_for_news()

    @property
    def choices(self) -> Sequence[Choice]:
        """Every choice, also those that are not in the answer."""
        return list(self._choices.values())

    @property
    def predicted_ttft_s(self) -> float | None:
        """The largest of its choices' predictions, once started; None without prediction."""
        predictions = [choice.predicted_ttft_s for choice in self._choices.values()]
        return max((seconds for seconds in predictions if seconds is not None), default=None)

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Yield new text until every choice has finished; all text that is there comes as one list.

        Raises:
            ApiError: The engine died, the server ended the call, or it was read too slowly.
        """
        while True:
            if self._unread:
                unread, self._unread = self._unread, []
                self._last_unread.clear()
                self._num_unread_tokens = 0
                self._read_s = asyncio.get_running_loop().time()
                yield [merge(deltas) for deltas in unread]
            elif self.error is not None:
                raise from_engine(self.error)
            elif not self._num_running:
                return
            else:
                await self._wait_for_news()

    async def collect(self) -> list[Delta]:
        """Wait for the whole output; return one delta per choice of the answer, in order.

        Of each prompt's outputs, the answer has the likeliest by the mean log-probability of their tokens, best first.

        Raises:
            ApiError: As ``deltas`` does.
        """
        parts = defaultdict[int, list[Delta]](list)
        async for deltas in self.deltas():
            for delta in deltas:
                parts[delta.index].append(delta)
        whole = [merge(parts[index]) for index in sorted(parts)]
        each, num_kept = len(self.job.samplings), self.job.num_kept
        if num_kept is None or num_kept == each:
            return whole
        kept: list[Delta] = []
        for first in range(0, len(whole), each):
            choices = sorted(self.choices[first : first + each], key=lambda choice: choice.mean_logprob, reverse=True)
            kept += [whole[choice.index] for choice in choices[:num_kept]]
        return [dataclasses.replace(delta, index=index) for index, delta in enumerate(kept)]

    def put_nowait(self, event: Event) -> None:
        """Take an event; called by the engine's client."""
        request_id, item = event
        if self.error is not None:
            return
        if isinstance(item, Exception):
            self._end(item)
        elif isinstance(item, Accepted):
            self._num_unaccepted -= 1
            self._choices[request_id].predicted_ttft_s = item.predicted_ttft_s
        elif not self._advance(request_id, item):
            return  # to wake the reader costs more than all else that is done for a token
        self._tell()

    def fail(self, error: ApiError) -> None:
        """End everything that still runs with an error."""
        self.put_nowait((self.job.call_id, error))

    def close(self) -> None:
        """Abort what has not finished. Calling it again does nothing."""
        self._stop_timer()
        for request_id, choice in self._choices.items():
            self._leave_backlog(request_id)
            if choice.finish_reason is None:
                choice.finish_reason = str(FinishReason.ABORT)
                self._client.abort(request_id)
                if not self._num_unaccepted:
                    self._metrics.finished(choice)

    def _tell(self) -> None:
        """Wake the reader now or, as long as outputs go on, when the job's interval is over."""
        due_s = self._read_s + self.job.interval_s
        if not self._num_running or self.error is not None or asyncio.get_running_loop().time() >= due_s:
            self._stop_timer()
            self._news.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(due_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._news.set()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _count_if_load(self, refusal: ApiError) -> None:
        if refusal.status == 429:
            self._metrics.rejected(self.job.service_class)

    async def _wait_for_news(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _end(self, error: Exception) -> None:
        """End the call with an error. What it holds is freed now, not when its reader takes the error."""
        self.error = error
        self.close()

    def _advance(self, request_id: str, output: RequestOutput) -> bool:
        """Take an output; return whether there is something to read."""
        choice = self._choices[request_id]
        if choice.finish_reason is not None:
            return False  # steps go on for a moment after a stop string was found here
        before_s = choice.times.last_token_s
        delta = choice.advance(output)
        self.usage.num_output_tokens += len(output.new_token_ids)
        self._num_unread_tokens += len(output.new_token_ids)
        if choice.times.last_token_s is not None:
            self._leave_backlog(request_id)
            if before_s is not None and output.new_token_ids:
                self._metrics.gap(self.job.service_class, choice.times.last_token_s - before_s)
        if delta is not None:
            self._keep(delta)
        elif not self._unread:
            self._num_unread_tokens = 0  # text that is held back cannot be read
        if choice.finish_reason is not None:
            self._finish(request_id, choice, output)
        limit = self.job.max_unread_tokens
        if limit is not None and self._num_unread_tokens > limit * len(self._choices) and self.error is None:
            self._end(
                ApiError(
                    f"{self._num_unread_tokens} tokens of the stream were not read; read faster, or ask for less "
                    f"(the server's limit is {limit} a choice, --limit max_unread_tokens)",
                    status=408,
                    code="slow_reader",
                )
            )
        return bool(self._unread)  # as of the last output of each choice

    def _keep(self, delta: Delta) -> None:
        """Add a delta to the unread ones."""
        last = self._last_unread.get(delta.index)
        if last is not None and (self.job.interval_s or len(self._unread) >= _MAX_UNREAD_DELTAS):
            last.append(delta)
        else:
            self._unread.append([delta])
            self._last_unread[delta.index] = self._unread[-1]

    def _finish(self, request_id: str, choice: Choice, output: RequestOutput) -> None:
        self._num_running -= 1
        self._leave_backlog(request_id)
        if not output.finished:  # a stop string, of which the engine does not know
            self._client.abort(request_id)
        self._metrics.finished(choice)
        if choice.finish_reason == FinishReason.ERROR:
            self._end(ApiError(f"the engine could not go on with this request: {output.stop_reason}", status=500))
        if choice.finish_reason == FinishReason.ABORT:
            self._end(
                ApiError(
                    "the engine ended this request before it was complete; send it again", status=503, retry_after_s=1
                )
            )

    def _leave_backlog(self, request_id: str) -> None:
        if request_id in self._queued:
            self._queued.discard(request_id)
            self._backlog.leave(self.job.service_class, time.monotonic() - self.job.arrival_s)
