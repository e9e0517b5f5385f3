"""The output of one API call: its choices, each an engine request, from admission to the last token."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence

from omniserve.core.errors import EngineStopped, RequestRejected
from omniserve.core.request import SLO, FinishReason, Request, RequestOutput
from omniserve.server.access.limits import Backlog
from omniserve.server.choice import Choice, Delta, merge
from omniserve.server.engines.client import Accepted, Event
from omniserve.server.engines.placement import Placement, is_tried_elsewhere
from omniserve.server.errors import ApiError, engine_gone, from_engine
from omniserve.server.jobs import Fallback, Job, Usage
from omniserve.server.telemetry.metrics import ServerMetrics
from omniserve.server.tokenizing.text import TextCodec

# Deltas that wait for a reader one by one; what comes while so many do joins the last one of its choice.
_MAX_UNREAD_DELTAS = 64


class OutputStream:
    """The outputs of one API call: ``start``, then ``deltas`` or ``collect``, at last ``close``, whatever happened.

    Outputs are taken as they come, read or not: a stop string ends its request at once, and times are the engine's, not
    the reader's. What is not read yet is bounded: in deltas by merging them, in tokens by the job.
    """

    def __init__(
        self, job: Job, *, place: Callable[[Job], Placement], codec: TextCodec, metrics: ServerMetrics, backlog: Backlog
    ) -> None:
        self.job = job
        """The work that was asked for."""
        self.usage = Usage(num_prompt_tokens=sum(map(len, job.prompts)))
        self.error: Exception | None = None
        """The error that ended the call before all choices had finished, if one did."""
        self._find_place, self._place = place, place(job)
        self._metrics = metrics
        self._backlog = backlog
        self._unread: list[list[Delta]] = []
        """Lists of deltas that have not been read; each list is merged when it is read."""
        self._last_unread: dict[int, list[Delta]] = {}  # by choice
        self._num_unread_tokens = 0
        self._news = asyncio.Event()
        self._read_s = -math.inf
        """Time of the last read of text, by the event loop's clock."""
        self._timer: asyncio.TimerHandle | None = None
        """Wakes the reader when the job's interval is over."""
        self._codec = codec
        self.used_tier: str | None = None
        """The tier that was used if that is not the one that was asked for, as admission refused the call in that."""
        self._queued: set[str] = set()
        """Requests that the backlog counts."""
        try:
            try:
                self._begin()
            except ApiError as refusal:
                if job.fallback is None or refusal.status != 429:
                    raise
                self._fall_back(job.fallback)
        except ApiError as refusal:
            self._count_if_load(refusal)
            self._place.end()
            raise

    def _begin(self, suffix: str = "") -> None:
        """Make the requests of the job, and have the backlog count them.

        Raises:
            ApiError: Too many requests of their class wait already.
        """
        job, self._choices = self.job, dict[str, Choice]()
        for i, prompt in enumerate(job.prompts):
            for sampling in job.samplings:
                index = len(self._choices)
                request_id = f"{job.call_id}-{index}{suffix}"
                request = Request(
                    request_id=request_id,
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    service_class=job.service_class,
                    slo=job.slo if job.brings_slo else None,
                    deadline_s=job.deadline_s,
                    max_queue_s=job.max_queue_s,
                    speculation=job.speculation,
                    cache_salt=job.cache_salt,
                    session=job.session,
                    session_ttl_s=job.session_ttl_s,
                    lora=job.lora,
                    tenant=job.tenant,
                    weight=job.weight,
                    predicted_token_ids=job.prediction,
                )
                echo = None if job.echoes is None else job.echoes[i]
                self._choices[request_id] = Choice(
                    index, request, self._codec, slo=job.slo, arrival_s=job.arrival_s, form=job.form, echo=echo
                )
        self._num_unaccepted = self._num_running = len(self._choices)
        self._backlog.enter(job.service_class, len(self._choices), tenant=job.tenant, weight=job.weight)
        self._queued = set(self._choices)

    def _fall_back(self, fallback: Fallback) -> None:
        """Make the call a best-effort one without objectives, whose requests are not sent yet.

        Raises:
            ApiError: Too many requests of that class wait already, or no engine takes requests.
        """
        for request_id in self._choices:
            self._leave_backlog(request_id)
            self._place.client.abort(request_id)
        self._place.end()
        self._metrics.fell_back(self.job.service_class)
        self.job = dataclasses.replace(
            self.job,
            service_class=fallback.service_class,
            slo=fallback.slo,
            brings_slo=False,
            deadline_s=None,
            fallback=None,
            interval_s=fallback.interval_s,
        )
        self._place = self._find_place(self.job)
        self.used_tier = fallback.tier
        self.usage = Usage(num_prompt_tokens=self.usage.num_prompt_tokens)
        self._unread.clear()
        self._last_unread.clear()
        self._num_unread_tokens = 0
        self._begin("-flex")  # other ids: what is still on its way from the engine is about the first ones

    async def start(self) -> None:
        """Send the requests and wait until the engine has accepted them all.

        If the call has a longest time in the queue, wait until they have begun, too.

        Raises:
            ApiError: It refused one, or is gone, or one waited for too long.
        """
        try:
            self._submit()
        except EngineStopped as error:
            if not self._is_tried_elsewhere(error):
                raise engine_gone(str(error), retry_after_s=1.0) from None
        must_begin = self.job.max_queue_s is not None
        while True:
            if self.error is not None and (self._num_unaccepted or must_begin):
                refusal = from_engine(self.error)
                self._count_if_load(refusal)
                raise refusal
            if not self._num_unaccepted and not (must_begin and self._queued):
                return
            await self._wait_for_news()

    @property
    def choices(self) -> Sequence[Choice]:
        """The choices of the call, also those that are not in the answer."""
        return list(self._choices.values())

    @property
    def predicted_ttft_s(self) -> float | None:
        """The largest of its choices' predictions, once started; None without prediction."""
        predictions = [choice.predicted_ttft_s for choice in self._choices.values()]
        return max((seconds for seconds in predictions if seconds is not None), default=None)

    @property
    def scaled_slo(self) -> SLO | None:
        """The objectives of its first choice whose objectives admission has scaled, once started; None: of none."""
        return next((choice.scaled_slo for choice in self._choices.values() if choice.scaled_slo is not None), None)

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
        if isinstance(item, int):
            if not self._advance_by(request_id, item):
                return
        elif isinstance(item, Exception):
            if self._is_tried_elsewhere(item):
                return
            error = self._place.last_error(item)
            is_for_load = isinstance(error, RequestRejected) or (isinstance(error, ApiError) and error.status == 429)
            if is_for_load and self.job.fallback is not None:
                self._serve_otherwise(self.job.fallback)
            else:
                self._end(error)
        elif isinstance(item, Accepted):
            self._num_unaccepted -= 1
            choice = self._choices[request_id]
            choice.predicted_ttft_s, choice.scaled_slo = item.predicted_ttft_s, item.scaled_slo
            if item.scaled_slo is not None:
                self._metrics.scaled(self.job.service_class, self.job.slo, item.scaled_slo)
        elif not self._advance(request_id, item):
            return  # to wake the reader costs more than all else that is done for a token
        self._tell()

    def _submit(self) -> None:
        for choice in self._choices.values():
            self._place.client.submit(choice.request, self.job.arrival_s, self.put_nowait)
        self._place.note_sent()

    def _serve_otherwise(self, fallback: Fallback) -> None:
        """Serve the call, which was refused, as its fallback says."""
        try:
            self._fall_back(fallback)
            self._submit()
        except ApiError as error:
            self._end(error)
        except EngineStopped as error:
            if not self._is_tried_elsewhere(error):
                self._end(error)

    def _is_tried_elsewhere(self, error: Exception) -> bool:
        """Send the requests to the next engine if one refused them or died, and no output has begun."""
        if self.usage.num_output_tokens or self._num_running < len(self._choices):
            return False
        return is_tried_elsewhere(self._place, error, self._choices, self._submit_again)

    def _submit_again(self) -> None:
        self._num_unaccepted = len(self._choices)
        self._submit()

    def fail(self, error: ApiError) -> None:
        """End everything that still runs with an error."""
        self.put_nowait((self.job.call_id, error))

    def close(self) -> None:
        """Abort what has not finished. Calling it again does nothing."""
        self._stop_timer()
        self._place.end()
        for request_id, choice in self._choices.items():
            self._leave_backlog(request_id)
            if choice.finish_reason is None:
                choice.finish_reason = str(FinishReason.ABORT)
                self._place.client.abort(request_id)
                if not self._num_unaccepted:
                    self._metrics.finished(choice)

    def _tell(self) -> None:
        """Wake the reader now or, as long as outputs go on, when the job's interval is over."""
        if not self.job.interval_s:
            self._news.set()
            return
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

    def _num_cached_tokens(self) -> int:
        """Return the sum over the prompts; the choices of a prompt follow one another."""
        choices, num_samples = [*self._choices.values()], len(self.job.samplings)
        groups = (choices[first : first + num_samples] for first in range(0, len(choices), num_samples))
        return sum(max(choice.num_cached_tokens for choice in group) for group in groups)

    def _advance(self, request_id: str, output: RequestOutput) -> bool:
        """Take an output; return whether there is something to read."""
        choice = self._choices[request_id]
        if choice.finish_reason is not None:
            return False  # steps go on for a moment after a stop string was found here
        before_s, num_before = choice.times.last_token_s, choice.times.num_tokens
        self.usage.num_accepted_drafts -= choice.num_accepted_drafts
        self.usage.num_rejected_drafts -= choice.num_rejected_drafts
        self.usage.num_reasoning_tokens -= choice.num_reasoning_tokens
        num_cached_before = choice.num_cached_tokens
        delta = choice.advance(output)
        if choice.num_cached_tokens != num_cached_before:
            self.usage.num_cached_tokens = self._num_cached_tokens()
        self.usage.num_accepted_drafts += choice.num_accepted_drafts
        self.usage.num_rejected_drafts += choice.num_rejected_drafts
        self.usage.num_reasoning_tokens += choice.num_reasoning_tokens
        num_new = choice.times.num_tokens - num_before
        self.usage.num_output_tokens += num_new
        self._num_unread_tokens += num_new
        if choice.times.last_token_s is not None:
            self._leave_backlog(request_id)
            if before_s is not None and output.new_token_ids:
                self._metrics.gap(self.job.service_class, choice.times.last_token_s - before_s)
        return self._is_news(request_id, choice, delta, output)

    def _advance_by(self, request_id: str, token_id: int) -> bool:
        """Take an output that is one more token and no more; return what ``_advance`` does."""
        choice = self._choices[request_id]
        if choice.finish_reason is not None:
            return False
        before_s, num_thought = choice.times.last_token_s, choice.num_reasoning_tokens
        delta = choice.advance_by(token_id)
        usage = self.usage
        usage.num_output_tokens += 1
        usage.num_reasoning_tokens += choice.num_reasoning_tokens - num_thought
        self._num_unread_tokens += 1
        if before_s is not None and choice.times.last_token_s is not None:
            self._metrics.gap(self.job.service_class, choice.times.last_token_s - before_s)
        return self._is_news(request_id, choice, delta, None)

    def _is_news(self, request_id: str, choice: Choice, delta: Delta | None, output: RequestOutput | None) -> bool:
        """Keep new text, end what is to end; return whether there is something to read. None: of a bare token."""
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

    def _finish(self, request_id: str, choice: Choice, output: RequestOutput | None) -> None:
        self._num_running -= 1
        self._leave_backlog(request_id)
        if output is None or not output.finished:  # a stop string, of which the engine does not know
            self._place.client.abort(request_id)
        self._metrics.finished(choice)
        if choice.finish_reason == FinishReason.ERROR and output is not None:
            self._end(ApiError(f"the engine could not go on with this request: {output.stop_reason}", status=500))
        if choice.finish_reason == FinishReason.TIMEOUT:
            self._end(
                ApiError(
                    f"the request has waited for {self.job.max_queue_s:g} s (slo.max_queue_s) and has not begun; send "
                    "it again later",
                    status=429,
                    code="queue_timeout",
                    retry_after_s=self._backlog.retry_s(self.job.service_class),
                )
            )
        if choice.finish_reason == FinishReason.ABORT:
            self._end(
                ApiError(
                    "the engine ended this request before it was complete; send it again", status=503, retry_after_s=1
                )
            )

    def _leave_backlog(self, request_id: str) -> None:
        if request_id in self._queued:
            self._queued.discard(request_id)
            waited_s = time.monotonic() - self.job.arrival_s
            self._backlog.leave(self.job.service_class, waited_s, tenant=self.job.tenant)
