"""Time to first token, predicted: for admission, for what BE work must leave, for who may come. Paper: omniserve 3.3.3.

The paper's condition compares one batch of all waiting prompts with the objective. Here the prompts are chunked under
the decoding objective as they will be, so every further step repeats the decodes and the step's own overhead.
Nor does the paper speak of memory: here those that wait for it take it in their order, as others end, who are expected
to put out as much of their ``max_tokens`` as those before them did.
(Erratum: n(t) of 3.3.3 means the remaining prompt tokens p_j - l_j.)
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from omniserve.core.errors import RequestRejected
from omniserve.core.request import SLO, ServiceClass
from omniserve.sched.batch import Batch
from omniserve.sched.bounds import LS_HEADROOM, TTFT_HEADROOM, tpot_bound
from omniserve.sched.limits import SchedulerLimits
from omniserve.sched.load import Forecast, StepLoad
from omniserve.sched.state import Phase, RequestState

MIN_LS_CHUNK = 16
"""LS prefill goes on by so many tokens a step at least, whatever the bound."""

_RECENT = 64  # LS requests that say what the next one may be like
_NEWCOMER_FLOOR = 0.25  # share of the TTFT objective that a step without LS work may always take
_OUTPUT_WEIGHT = 0.05  # of a request that ended, in the mean of how much of its max_tokens they put out
_LOOK_AT = 8  # unfinished prompts whose deadlines are looked at, of those first in line


@dataclass(frozen=True, slots=True)
class Prefill:
    """What is left of a prompt."""

    start: int
    """Tokens computed already."""
    count: int
    """Tokens to compute, at least 1."""
    num_logits: int = 1
    """Rows among them that become logits: the last, and those whose successors' log-probabilities are asked for."""

    @classmethod
    def of(cls, state: RequestState, start: int) -> Self:
        """Return what is left of a request's prompt from ``start`` on."""
        count = state.num_tokens - start
        return cls(start, count, state.num_logits(start, count))


def prefill_time(
    decodes: StepLoad, prompts: Sequence[Prefill], *, bound_s: float, first_bound_s: float, max_tokens: int
) -> tuple[float, int]:
    """Return how long it takes until the last of some prompts is computed, in seconds and in steps.

    Args:
        decodes: What each step decodes beside them.
        prompts: What is left of each, in order.
        bound_s: Longest step.
        first_bound_s: The same for the first one, which may have more time than the others.
        max_tokens: Most prompt tokens of a step, at least 1.
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


def steps_until_memory(
    running: Iterable[tuple[int, int]], waiting: Iterable[tuple[int, int]], num_needed: int, num_free: int
) -> int:
    """Return after how many steps there will be memory for an LS request; 0 if there is now.

    Args:
        running: LS requests with KV on the device: (steps until they end, blocks).
        waiting: Those before it that have none yet, in order: (steps that they decode, blocks).
        num_needed: Blocks that it needs.
        num_free: Blocks that are free, or can be taken from BE requests.
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
class LSMemory:
    """Who has the device's blocks."""

    blocks: Mapping[str, int]
    """Of LS requests, by id."""
    num_free: int
    """Free, or to be taken from BE requests."""


@dataclass(frozen=True, slots=True)
class TTFTPrediction:
    """What a request that arrives now may expect, in seconds from now."""

    soonest_s: float
    """If BE work gives way entirely."""
    expected_s: float
    """With BE work in every step up to its bound."""
    idle_s: float
    """If nobody else were there."""
    num_prompt_tokens: int

    def meets(self, required_s: float, waited_s: float, margin: float) -> bool:
        """Return whether the objective can be kept, less a margin (a share of it)."""
        return waited_s + self.soonest_s <= (1 - margin) * required_s

    def rejection(self, required_s: float, waited_s: float, margin: float) -> RequestRejected:
        """Return the error for a request whose objective, less the margin, cannot be kept."""
        predicted_s = waited_s + self.soonest_s
        text = f"the first token would take {predicted_s:.3g} s, and the request asks for {required_s:.3g} s; "
        if self.idle_s > (1 - margin) * required_s:
            text += (
                f"its {self.num_prompt_tokens} prompt tokens alone take {self.idle_s:.3g} s here: "
                "shorten the prompt, relax slo.ttft_s or send it as best effort"
            )
            retry_after_s = None
        else:
            # The work in front of it shrinks by a second a second, if nothing else is admitted.
            retry_after_s = max(predicted_s - (1 - margin) * required_s, 0.0)
            text += f"try again in {retry_after_s:.3g} s, relax slo.ttft_s or send it as best effort"
        return RequestRejected(
            text, retry_after_s=retry_after_s, predicted_ttft_s=predicted_s, required_ttft_s=required_s
        )


class TTFTForecast:
    """Predicts times to first token.

    Args:
        forecast: The latency model.
        limits: Sizes, budgets and classes.
    """

    def __init__(self, forecast: Forecast, limits: SchedulerLimits) -> None:
        self._forecast = forecast
        self._limits = limits
        self._recent: deque[tuple[int, float | None]] = deque(maxlen=_RECENT)
        self._output_share = 1.0
        """Running mean: how much of its ``max_tokens`` an LS request puts out."""
        objectives = [c.slo.ttft_s for c in limits.classes if c.kind is ServiceClass.LS and c.slo.ttft_s is not None]
        self._default_ttft_s = min(objectives, default=math.inf)
        self._newcomer: tuple[object, float] = (None, 0.0)

    def note(self, num_prompt_tokens: int, ttft_s: float | None) -> None:
        """Remember what an LS request was like."""
        self._recent.append((num_prompt_tokens, ttft_s))

    def note_end(self, state: RequestState) -> None:
        """Remember how long an LS request's output was."""
        most = state.max_num_tokens - state.num_prompt_tokens
        if most > 0:
            self._output_share += _OUTPUT_WEIGHT * (state.num_output_tokens / most - self._output_share)

    def predict(
        self,
        ahead: Sequence[RequestState],
        decoding: Sequence[RequestState],
        prompt: Prefill,
        *,
        slo: SLO,
        waited_s: float,
        has_best_effort: bool,
        host_works: bool,
        memory: LSMemory,
        now_s: float,
    ) -> TTFTPrediction:
        """Predict for a request that arrives now (3.3.3).

        Args:
            ahead: Requests whose prefill comes before its own; those that wait for memory in their order.
            decoding: Requests that decode meanwhile.
            prompt: Its prompt.
            slo: Its objectives.
            waited_s: How long ago it came.
            has_best_effort: There is BE work to fill steps with.
            host_works: The host tier is at work.
            memory: Who has the device's blocks.
            now_s: Now.
        """
        decodes = self._decodes(decoding, host_works)
        bound_s = tpot_bound(decoding, now_s, "step", LS_HEADROOM).seconds
        first_bound_s = max(bound_s, tpot_bound(decoding, now_s, self._limits.slack, LS_HEADROOM).seconds)
        max_tokens = max(1, self._limits.max_step_tokens - len(decoding))
        prompts = [Prefill.of(state, state.num_computed_tokens) for state in ahead]
        prompts.append(prompt)
        # Who is ahead decodes beside what is left, which comes in small chunks then; as many as memory holds.
        contexts = [s.num_tokens for s in self._fitting(ahead, decoding, memory) if s.max_num_tokens > s.num_tokens + 1]
        decodes.add_decodes(len(contexts), sum(contexts), float(sum(contexts)), samples=len(contexts))
        prefill_s, num_steps = prefill_time(
            decodes, prompts, bound_s=bound_s, first_bound_s=first_bound_s, max_tokens=max_tokens
        )
        waiting_steps = self._steps_until_memory(prompt.count, ahead, decoding, memory)
        soonest_s = waiting_steps * decodes.seconds() + prefill_s
        expected_s = soonest_s
        if has_best_effort:
            full = decodes.copy()
            full.add_chunk(0, max_tokens, samples=False)
            filled_s = (num_steps - 1) * min(bound_s, full.seconds()) + min(first_bound_s, full.seconds())
            if slo.ttft_s is not None:
                filled_s = min(filled_s, (1 - TTFT_HEADROOM) * slo.ttft_s - waited_s)
            expected_s = max(soonest_s, filled_s)
        idle = self._forecast.load()
        idle_s, _ = prefill_time(
            idle,
            [prompt],
            bound_s=math.inf,
            first_bound_s=math.inf,
            max_tokens=self._limits.max_step_tokens,
        )
        return TTFTPrediction(soonest_s, expected_s, idle_s, prompt.count)

    def rest(
        self,
        unfinished: Sequence[RequestState],
        batch: Batch,
        decoding: Sequence[RequestState],
        bound_s: float,
        memory: LSMemory,
    ) -> list[tuple[RequestState, float, int]]:
        """Return what some requests need after the step; of the first in line and a later one.

        Args:
            unfinished: In order; not empty.
            batch: The step.
            decoding: Requests that decode.
            bound_s: S_d.
            memory: Who has the device's blocks.

        Returns:
            A request, the seconds of its prefill, and the steps after which it can begin, for want of memory.
        """
        decodes = self._decodes(decoding, False)
        max_tokens = max(1, self._limits.max_step_tokens - len(decoding))
        prompts = [Prefill.of(state, batch.end_of(state)) for state in unfinished[:_LOOK_AT]]
        last = len(prompts) - 1
        needs = []
        for i in {0, last}:
            state, num_steps = unfinished[i], 0
            seconds, _ = prefill_time(
                decodes, prompts[: i + 1], bound_s=bound_s, first_bound_s=bound_s, max_tokens=max_tokens
            )
            if state.phase is Phase.WAITING and state not in batch:
                num_steps = self._steps_until_memory(state.num_tokens, unfinished[:i], decoding, memory)
            needs.append((state, seconds, num_steps))
        return needs

    def newcomer_bound_s(
        self, decoding: Sequence[RequestState], bound_s: float, margin: float, *, busy_s: float
    ) -> float:
        """Return the longest step after which a request that arrives as it is planned can still keep its TTFT.

        The newcomer is like the most demanding of the LS requests that came lately; before any came, its prefill is
        expected to take half of the classes' shortest TTFT. It must be admitted, too: ``margin`` is the share of its
        TTFT that admission leaves. ``busy_s`` is how long the step in flight still takes before this one begins.
        """
        ttft_s = min((t for _, t in self._recent if t is not None), default=self._default_ttft_s)
        if ttft_s == math.inf:
            return math.inf
        ttft_s *= 1 - max(TTFT_HEADROOM, margin)
        if not self._recent:
            return max(ttft_s / 2 - busy_s, _NEWCOMER_FLOOR * ttft_s)
        num_tokens = max(count for count, _ in self._recent)
        pace = round(math.log2(self._forecast.predictor.pace), 1)
        key = (num_tokens, len(decoding), round(bound_s, 3) if bound_s < math.inf else None, pace)
        if self._newcomer[0] != key:
            max_tokens = max(1, self._limits.max_step_tokens - len(decoding))
            seconds, _ = prefill_time(
                self._decodes(decoding, False),
                [Prefill(0, num_tokens)],
                bound_s=bound_s,
                first_bound_s=bound_s,
                max_tokens=max_tokens,
            )
            self._newcomer = (key, seconds)
        return max(ttft_s - self._newcomer[1] - busy_s, _NEWCOMER_FLOOR * ttft_s)

    def _decodes(self, decoding: Sequence[RequestState], host_works: bool) -> StepLoad:
        load, shape = self._forecast.load(host_works=host_works), self._forecast.shape
        contexts = [state.num_computed_tokens for state in decoding]
        keys = sum(shape.load(context, 1) for context in contexts)
        load.add_decodes(len(contexts), sum(contexts), keys, samples=len(contexts))
        return load

    def _steps_until_memory(
        self, num_tokens: int, ahead: Sequence[RequestState], decoding: Sequence[RequestState], memory: LSMemory
    ) -> int:
        """Return after how many steps there will be memory for so many tokens behind those that are ahead.

        If there is memory for all of them to begin, they do so at once, whatever they come to need.
        """
        held, waiting = memory.blocks, [state for state in ahead if state.phase is Phase.WAITING]
        if sum(self._blocks(state.num_tokens) for state in waiting) + self._blocks(num_tokens) <= memory.num_free:
            return 0
        running = [state for state in (*ahead, *decoding) if state.request_id in held]
        ends = [(self._steps_left(state), self._blocks_in_the_end(state)) for state in running]
        return steps_until_memory(
            ends,
            [(self._steps_left(state), self._blocks_in_the_end(state)) for state in waiting],
            self._blocks(num_tokens),
            memory.num_free + sum(held[state.request_id] for state in running) - sum(blocks for _, blocks in ends),
        )

    def _blocks_in_the_end(self, state: RequestState) -> int:
        return self._blocks(state.num_tokens + self._steps_left(state))

    def _steps_left(self, state: RequestState) -> int:
        """Return how many tokens a request will still put out, if it is as the others were."""
        expected = math.ceil(self._output_share * (state.max_num_tokens - state.num_prompt_tokens))
        return max(1, expected - state.num_output_tokens)

    def _fitting(
        self, ahead: Sequence[RequestState], decoding: Sequence[RequestState], memory: LSMemory
    ) -> Iterator[RequestState]:
        """Yield those that are ahead for which there is memory at a time, beside those that decode."""
        held = memory.blocks
        left = memory.num_free + sum(held.get(state.request_id, 0) for state in (*ahead, *decoding))
        left -= sum(map(self._blocks_in_the_end, decoding))
        for state in ahead:
            left -= self._blocks_in_the_end(state)
            if left < 0:
                return
            yield state

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._limits.block_size)
