"""Predicts times to first token: for admission, for what BE work must leave, for a newcomer. Paper: omniserve 3.3.3.

LS requests are expected to put out as much of their ``max_tokens`` as those before them did.

The paper's condition compares one batch of all waiting prompts with the objective. Here the prompts are chunked under
the decoding objective as they will be, so every further step repeats the decodes and the step's own overhead.
Nor does the paper speak of memory: here prompts that wait for it take it in their order, as other requests end.
(Erratum: n(t) of 3.3.3 means the remaining prompt tokens p_j - l_j.)
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from omniserve.core.request import ServiceClass
from omniserve.sched.batch import Batch
from omniserve.sched.options import SchedulerLimits
from omniserve.sched.prefixes_on_host import Coming
from omniserve.sched.state import Phase, RequestState
from omniserve.sched.step_cost import USUAL_HEADROOMS, Forecast, Headrooms, StepCost, tpot_bound, ttft_left_s

MIN_LS_CHUNK = 16
"""Least tokens of a step's LS prefill, whatever the bound."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """The part of a prompt that is left to compute."""

    start: int
    """Tokens computed already."""
    count: int
    """Tokens to compute, at least 1."""
    num_logits: int = 1
    """Rows among them that become logits: the last, and those that tell the prompt's log-probabilities."""

    @classmethod
    def of(cls, state: RequestState, start: int) -> Self:
        """Return what is left of a request's prompt from ``start`` on."""
        count = state.num_tokens - start
        return cls(start, count, state.num_logits(start, count))


def prefill_time(
    decodes: StepCost, prompts: Sequence[Prefill], bound_s: float, first_bound_s: float, max_tokens: int
) -> tuple[float, int]:
    """Return how long it takes until the last of some prompts is computed, in seconds and in steps.

    Each step has these decodes, at most ``max_tokens`` >= 1 tokens of prompts, and takes at most ``bound_s``; the first
    one may have another bound.
    """
    together = decodes.copy()
    for prompt in prompts:
        together.add_chunk(prompt.start, prompt.count, samples=prompt.num_logits)
    total_s, total = together.seconds(), sum(prompt.count for prompt in prompts)
    if total <= max_tokens and total_s <= first_bound_s:
        return total_s, 1
    last = prompts[-1]
    middle = last.start + last.count // 2
    least = min(MIN_LS_CHUNK, max_tokens)

    def num_scored(start: int, count: int) -> int:
        return min(count, last.num_logits - 1)

    chunk = max(least, decodes.largest_chunk(middle, max_tokens, bound_s, samples=num_scored))
    first = chunk
    if first_bound_s != bound_s:
        first = max(least, decodes.largest_chunk(middle, max_tokens, first_bound_s, samples=num_scored))
    num_steps = 1 + -(-max(total - first, 1) // chunk)
    # What all of it costs in one step, and what each further step costs again: its decodes and its overhead.
    again = decodes.copy()
    again.add_chunk(middle, 1, samples=False)
    return total_s + (num_steps - 1) * again.seconds(), num_steps


def steps_until_room(
    running: Iterable[tuple[int, int]], waiting: Iterable[tuple[int, int]], num_needed: int, num_free: int
) -> int:
    """Return after how many steps there will be room for an LS request; 0 if there is now.

    Room is memory, in blocks, or places of ``max_num_seqs``, of which each request needs one.

    Args:
        running: LS requests on the device: (steps until they end, room that they have).
        waiting: Requests before it that have no room yet, in order: (steps that they decode, room).
        num_needed: Room that it needs.
        num_free: Room that is free, or can be taken from other requests.
    """
    ends = list(running)
    heapq.heapify(ends)
    step = 0
    for num_steps, blocks in (*waiting, (0, num_needed)):
        while num_free < blocks and ends:
            step, given_back = heapq.heappop(ends)
            num_free += given_back
        num_free -= blocks
        heapq.heappush(ends, (step + num_steps, blocks))
    return step


@dataclass(frozen=True, slots=True)
class LSQueue:
    """LS requests at a moment, and the device blocks that they have or can have."""

    decoding: Sequence[RequestState]
    prompts: Sequence[RequestState]
    """Requests with prefill left, in the order in which it goes on; some may still wait for memory."""
    blocks: Mapping[str, int]
    """Number of blocks of each request on the device, by id."""
    num_free: int
    """Blocks that are free, or can be taken from BE requests."""
    num_places: int
    """Places of ``max_num_seqs`` that are free."""
    behind: Sequence[RequestState] = ()
    """Other requests on the device: they have places, but nothing of theirs is computed before what is predicted."""


# The LS requests that say what the next one may be like: the last 8, and of the last 64 those of the last minute.
_FEW_RECENT, _MANY_RECENT, _RECENT_S = 8, 64, 60.0
_NEWCOMER_FLOOR = 0.25  # share of the TTFT objective that a step without LS work may always take
_OUTPUT_WEIGHT = 0.05  # of a request that ended, in the mean of how much of its max_tokens they put out
_LOOK_AT = 8  # deadlines of so many unfinished prompts are looked at, of those first in line


@dataclass(frozen=True, slots=True)
class TTFTPrediction:
    """The TTFT that a request which arrives now may expect, in seconds from now."""

    soonest_s: float
    """Seconds if BE work gives way entirely."""
    expected_s: float
    """Seconds with BE work in every step up to its bound."""
    idle_s: float
    """Seconds if no other request were there."""
    best_s: float
    """Seconds if no other request were there, on the machine as profiled, without what has slowed steps lately."""
    num_prompt_tokens: int
    """Tokens of the prompt that are to be computed."""
    step_rows: int
    """Rows of prompts in each of the steps that ``soonest_s`` consists of."""

    def later(self, seconds: float) -> TTFTPrediction:
        """Return the prediction if the request can only begin ``seconds`` later."""
        return dataclasses.replace(
            self,
            soonest_s=self.soonest_s + seconds,
            expected_s=self.expected_s + seconds,
            idle_s=self.idle_s + seconds,
            best_s=self.best_s + seconds,
        )


class _Arrival(NamedTuple):
    """An LS request that came: when, how long its prompt and its output may be, and its objective."""

    arrival_s: float
    num_prompt_tokens: int
    max_tokens: int
    ttft_s: float | None


class TTFTEstimator:
    """Predicts times to first token; ``slack`` is that of ``CoServingOptions``."""

    def __init__(
        self, forecast: Forecast, limits: SchedulerLimits, slack: str, headrooms: Headrooms = USUAL_HEADROOMS
    ) -> None:
        self._forecast, self._headrooms = forecast, headrooms
        self._limits = limits
        self._slack = slack
        self._recent: deque[_Arrival] = deque(maxlen=_MANY_RECENT)
        self._output_share = 1.0
        """Running mean: how much of its ``max_tokens`` an LS request puts out."""
        objectives = [
            c.slo.ttft_s for c in limits.config.classes if c.kind is ServiceClass.LS and c.slo.ttft_s is not None
        ]
        self._default_ttft_s = min(objectives, default=math.inf)
        self._newcomer: tuple[object, float] = (None, 0.0)
        """The last estimate of a newcomer's prefill, behind what it follows from."""

    def note(self, state: RequestState) -> None:
        """Remember what an LS request was like that has come."""
        lengths = state.num_prompt_tokens, state.request.sampling.max_tokens
        self._recent.append(_Arrival(state.arrival_s, *lengths, state.slo.ttft_s))
        while len(self._recent) > _FEW_RECENT and self._recent[0].arrival_s < state.arrival_s - _RECENT_S:
            self._recent.popleft()

    @property
    def usual_lengths(self) -> tuple[int, int] | None:
        """The means of prompts and of ``max_tokens`` of LS requests lately; None: there were none."""
        if not self._recent:
            return None
        prompts, outputs = (sum(lengths) for lengths in zip(*(each[1:3] for each in self._recent), strict=True))
        return max(1, round(prompts / len(self._recent))), max(1, round(outputs / len(self._recent)))

    def note_end(self, state: RequestState) -> None:
        """Remember how long an LS request's output was."""
        most = state.max_num_tokens - state.num_prompt_tokens
        if most > 0:
            self._output_share += _OUTPUT_WEIGHT * (state.num_output_tokens / most - self._output_share)

    def predict(
        self,
        new: RequestState,
        queue: LSQueue,
        now_s: float,
        *,
        has_best_effort: bool,
        host_works: bool,
        coming: Coming | None = None,
        num_overtaking: int = 0,
    ) -> TTFTPrediction:
        """Predict for a request that arrives now, behind the prompts of the queue (3.3.3).

        ``coming``: KV that is copied to the device for it, unless it is there sooner by computing all.
        ``num_overtaking``: prompt tokens of other requests that are yet to come, and go before it.
        """
        if coming is not None:
            computed = self.predict(
                new, queue, now_s, has_best_effort=has_best_effort, host_works=host_works, num_overtaking=num_overtaking
            )
            copied = self._predict(
                new,
                queue,
                now_s,
                new.num_ready_tokens + coming.num_tokens,
                has_best_effort=has_best_effort,
                host_works=host_works,
                num_overtaking=num_overtaking,
            ).later(coming.seconds)
            return min(computed, copied, key=lambda each: each.soonest_s)
        return self._predict(
            new,
            queue,
            now_s,
            new.num_ready_tokens,
            has_best_effort=has_best_effort,
            host_works=host_works,
            num_overtaking=num_overtaking,
        )

    def _predict(
        self,
        new: RequestState,
        queue: LSQueue,
        now_s: float,
        num_ready: int,
        *,
        has_best_effort: bool,
        host_works: bool,
        num_overtaking: int,
    ) -> TTFTPrediction:
        decodes = self._decodes(queue.decoding, host_works=host_works)
        bound_s = tpot_bound(queue.decoding, now_s, "step", self._headrooms.ls).seconds
        first_bound_s = max(bound_s, tpot_bound(queue.decoding, now_s, self._slack, self._headrooms.ls).seconds)
        max_tokens = self._max_prompt_tokens(queue.decoding)
        prompt = Prefill.of(new, num_ready)
        prompts = [*(Prefill.of(state, state.num_ready_tokens) for state in queue.prompts), prompt]
        if num_overtaking:
            prompts.insert(-1, Prefill(0, num_overtaking))
        # Those ahead decode beside what is left, which comes in small chunks then; as many as memory holds.
        fitting = list(self._fitting(queue))
        contexts = [state.num_tokens for state in fitting if state.max_num_tokens > state.num_tokens + 1]
        decodes.add_decodes(len(contexts), sum(contexts), float(sum(contexts)), samples=len(contexts))
        prefill_s, num_steps = prefill_time(decodes, prompts, bound_s, first_bound_s, max_tokens)
        soonest_s = self._steps_until_room(new, queue) * decodes.seconds() + prefill_s
        expected_s = soonest_s
        if has_best_effort:
            full = decodes.copy()
            full.add_chunk(0, max_tokens, samples=False)
            filled_s = (num_steps - 1) * min(bound_s, full.seconds()) + min(first_bound_s, full.seconds())
            if new.slo.ttft_s is not None:
                waited_s = max(0.0, now_s - new.arrival_s)
                filled_s = min(filled_s, (1 - self._headrooms.ttft) * new.slo.ttft_s - waited_s)
            expected_s = max(soonest_s, filled_s)
        budget = self._limits.config.max_num_batched_tokens
        idle_s, _ = prefill_time(self._forecast.step(), [prompt], math.inf, math.inf, budget)
        best_s, _ = prefill_time(self._forecast.step(at_best=True), [prompt], math.inf, math.inf, budget)
        at_once = prompts if len(fitting) == len(queue.prompts) else prompts[: max(1, len(fitting))]
        step_rows = -(-sum(each.count for each in prompts) // num_steps)
        step_rows = min(step_rows, sum(each.count for each in at_once))  # memory may keep steps smaller
        return TTFTPrediction(soonest_s, expected_s, idle_s, best_s, prompt.count, step_rows)

    def prompt_bounds(self, queue: LSQueue, batch: Batch, bound_s: float, begin_s: float) -> list[tuple[str, float]]:
        """Return how long the step may be, so that the first prompt in line and a later one keep their TTFT after it.

        ``bound_s`` is S_d; the queue has one prompt at least.
        """
        decodes, max_tokens = self._decodes(queue.decoding), self._max_prompt_tokens(queue.decoding)
        prompts = [Prefill.of(state, batch.end_of(state)) for state in queue.prompts[:_LOOK_AT]]
        bounds = []
        for i in sorted({0, len(prompts) - 1}):
            state, num_steps = queue.prompts[i], 0
            prefill_s, _ = prefill_time(decodes, prompts[: i + 1], bound_s, bound_s, max_tokens)
            if state.phase is Phase.WAITING and state not in batch:
                behind = (*queue.behind, *queue.prompts[i + 1 :])
                ahead = dataclasses.replace(queue, prompts=queue.prompts[:i], behind=behind)
                num_steps = self._steps_until_room(state, ahead)
            # Where room is what it waits for, so many steps come before its own.
            left_s = ttft_left_s(state, begin_s, self._headrooms.ttft) - prefill_s
            bounds.append((state.request_id, left_s / (1 + num_steps)))
        return bounds

    def newcomer_bound_s(
        self, decoding: Sequence[RequestState], bound_s: float, *, margin: float, busy_s: float
    ) -> float:
        """Return the longest step after which a request that arrives as it is planned can still keep its TTFT.

        The newcomer is like the most demanding of the LS requests that came lately; before any came, its prefill is
        expected to take half of the classes' shortest TTFT. ``bound_s`` is S_d, ``margin`` the share of its TTFT that
        admission leaves, and the step in flight still takes ``busy_s``.
        """
        objectives = (arrival.ttft_s for arrival in self._recent)
        ttft_s = min((ttft_s for ttft_s in objectives if ttft_s is not None), default=self._default_ttft_s)
        if ttft_s == math.inf:
            return math.inf
        ttft_s *= 1 - max(self._headrooms.ttft, margin)
        prefill_s = self._newcomer_prefill_s(decoding, bound_s) if self._recent else ttft_s / 2
        return max(ttft_s - prefill_s - busy_s, _NEWCOMER_FLOOR * ttft_s)

    def _newcomer_prefill_s(self, decoding: Sequence[RequestState], bound_s: float) -> float:
        """Return the estimate of a newcomer's prefill; each step asks, so it is made again only for other inputs."""
        num_tokens = max(arrival.num_prompt_tokens for arrival in self._recent)
        log2_pace = math.log2(self._forecast.predictor.pace)
        inputs = (num_tokens, len(decoding), round(bound_s, 3), round(log2_pace, 1))
        if self._newcomer[0] != inputs:
            prompts, max_tokens = [Prefill(0, num_tokens)], self._max_prompt_tokens(decoding)
            seconds, _ = prefill_time(self._decodes(decoding), prompts, bound_s, bound_s, max_tokens)
            self._newcomer = (inputs, seconds)
        return self._newcomer[1]

    def _max_prompt_tokens(self, decoding: Sequence[RequestState]) -> int:
        """Return how many tokens of prompts a step has room for beside the decodes; 1 at least."""
        return max(1, self._limits.config.max_num_batched_tokens - len(decoding))

    def _decodes(self, decoding: Sequence[RequestState], *, host_works: bool = False) -> StepCost:
        cost, shape = self._forecast.step(host_works=host_works), self._forecast.shape
        contexts = [state.num_computed_tokens for state in decoding]
        keys = sum(shape.keys_seen(context, 1) for context in contexts)
        cost.add_decodes(len(contexts), sum(contexts), keys, samples=len(contexts))
        return cost

    def _steps_until_room(self, state: RequestState, queue: LSQueue) -> int:
        """Return after how many steps there will be memory and a place for a request behind the queue."""
        return max(self._steps_until_memory(state.num_tokens, queue), self._steps_until_place(state, queue))

    def _steps_until_place(self, new: RequestState, queue: LSQueue) -> int:
        """Return after how many steps one of ``max_num_seqs`` places is free; lower classes give theirs."""
        waiting = [state for state in queue.prompts if state.phase in (Phase.WAITING, Phase.LOADING)]
        if len(waiting) < queue.num_places:
            return 0
        having = (*queue.prompts, *queue.decoding, *queue.behind)
        running = [state for state in having if state.request_id in queue.blocks]
        staying = [state for state in running if state.priority_key[0] <= new.priority_key[0]]
        ends = [(self._steps_left(state), 1) for state in staying]
        starts = [(self._steps_left(state), 1) for state in waiting]
        return steps_until_room(ends, starts, 1, queue.num_places + len(running) - len(staying))

    def _steps_until_memory(self, num_tokens: int, queue: LSQueue) -> int:
        """Return after how many steps there will be memory for ``num_tokens`` behind the queue.

        If there is memory for all of them to begin, they do so at once, whatever they come to need.
        """
        held = queue.blocks
        waiting = [state for state in queue.prompts if state.phase in (Phase.WAITING, Phase.LOADING)]
        if sum(self._blocks(state.num_tokens) for state in waiting) + self._blocks(num_tokens) <= queue.num_free:
            return 0
        running = [state for state in (*queue.prompts, *queue.decoding) if state.request_id in held]
        ends, starts = [*map(self._until_end, running)], [*map(self._until_end, waiting)]
        num_free = queue.num_free + sum(held[state.request_id] for state in running) - sum(blocks for _, blocks in ends)
        return steps_until_room(ends, starts, self._blocks(num_tokens), num_free)

    def _until_end(self, state: RequestState) -> tuple[int, int]:
        """Return how many tokens a request will still put out, and the blocks that it has then."""
        num_steps = self._steps_left(state)
        return num_steps, self._blocks(state.num_tokens + num_steps)

    def _steps_left(self, state: RequestState) -> int:
        """Return how many tokens a request will still put out, if its output is like that of others."""
        expected = math.ceil(self._output_share * (state.max_num_tokens - state.num_prompt_tokens))
        return max(1, expected - state.num_output_tokens)

    def _fitting(self, queue: LSQueue) -> Iterator[RequestState]:
        """Yield the prompts for which there is memory at a time, beside those that decode."""
        held = (queue.blocks.get(state.request_id, 0) for state in (*queue.prompts, *queue.decoding))
        left = queue.num_free + sum(held) - sum(self._until_end(state)[1] for state in queue.decoding)
        for state in queue.prompts:
            left -= self._until_end(state)[1]
            if left < 0:
                return
            yield state

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._limits.config.block_size)
