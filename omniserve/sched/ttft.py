"""Time to first token, predicted: for admission, for what BE work must leave, for who may come. Paper: omniserve 3.3.3.

The paper's condition compares one batch of all waiting prompts with the objective. Here the prompts are chunked under
the decoding objective as they will be, so every further step repeats the decodes and the step's own overhead.
(Erratum: n(t) of 3.3.3 means the remaining prompt tokens p_j - l_j.)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from omniserve.errors import RequestRejected
from omniserve.request import SLO, ServiceClass
from omniserve.sched.base import SchedulerLimits
from omniserve.sched.batch import Batch
from omniserve.sched.bounds import LS_HEADROOM, TTFT_HEADROOM, tpot_bound
from omniserve.sched.load import Forecast, StepLoad
from omniserve.sched.state import Phase, RequestState

MIN_LS_CHUNK = 16
"""LS prefill goes on by so many tokens a step at least, whatever the bound."""

_RECENT = 64  # LS requests that say what the next one may be like
_NEWCOMER_FLOOR = 0.25  # share of the TTFT objective that a step without LS work may always take
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


def wait_for_memory_s(running: Iterable[tuple[RequestState, int]], shortage: int, step_s: float) -> float:
    """Return when enough LS requests will have ended at the latest, in seconds from now; 0 if nothing is short.

    Args:
        running: LS requests with KV on the device, and their blocks.
        shortage: Blocks that must become free.
        step_s: Seconds of a step.
    """
    ends = sorted((state.max_num_tokens - state.num_tokens, blocks) for state, blocks in running)
    for steps, blocks in ends:
        if shortage <= 0:
            return 0.0
        shortage -= blocks
        if shortage <= 0:
            return steps * step_s
    return 0.0


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
        objectives = [c.slo.ttft_s for c in limits.classes if c.kind is ServiceClass.LS and c.slo.ttft_s is not None]
        self._default_ttft_s = min(objectives, default=math.inf)
        self._newcomer: tuple[object, float] = (None, 0.0)

    def note(self, num_prompt_tokens: int, ttft_s: float | None) -> None:
        """Remember what an LS request was like."""
        self._recent.append((num_prompt_tokens, ttft_s))

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
        blocks: Mapping[str, int],
        num_free: int,
        now_s: float,
    ) -> TTFTPrediction:
        """Predict for a request that arrives now (3.3.3).

        Args:
            ahead: Requests whose prefill comes before its own, in any order.
            decoding: Requests that decode meanwhile.
            prompt: Its prompt.
            slo: Its objectives.
            waited_s: How long ago it came.
            has_best_effort: There is BE work to fill steps with.
            host_works: The host tier is at work.
            blocks: Device blocks by request id, of LS requests.
            num_free: Device blocks that are free or can be taken from BE requests.
            now_s: Now.
        """
        decodes = self._decodes(decoding, host_works)
        bound_s = tpot_bound(decoding, now_s, "step", LS_HEADROOM).seconds
        first_bound_s = max(bound_s, tpot_bound(decoding, now_s, self._limits.slack, LS_HEADROOM).seconds)
        max_tokens = max(1, self._limits.max_step_tokens - len(decoding))
        prompts = [Prefill.of(state, state.num_computed_tokens) for state in ahead]
        prompts.append(prompt)
        # Who is ahead decodes beside what is left, which comes in small chunks then.
        contexts = [state.num_tokens for state in ahead if state.max_num_tokens > state.num_tokens + 1]
        decodes.add_decodes(len(contexts), sum(contexts), float(sum(contexts)), num_sampled=len(contexts))
        prefill_s, num_steps = prefill_time(
            decodes, prompts, bound_s=bound_s, first_bound_s=first_bound_s, max_tokens=max_tokens
        )
        needed = self._blocks(prompt.count)
        needed += sum(self._blocks(state.num_tokens) for state in ahead if state.phase is Phase.WAITING)
        running = [(state, blocks[state.request_id]) for state in (*ahead, *decoding) if state.request_id in blocks]
        soonest_s = wait_for_memory_s(running, needed - num_free, decodes.seconds()) + prefill_s
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
        self, unfinished: Sequence[RequestState], batch: Batch, decoding: Sequence[RequestState], bound_s: float
    ) -> list[tuple[RequestState, float]]:
        """Return what the prefill of some requests takes after the step, seconds; of the first in line and a later one.

        Args:
            unfinished: In order; not empty.
            batch: The step.
            decoding: Requests that decode.
            bound_s: S_d.
        """
        decodes = self._decodes(decoding, False)
        max_tokens = max(1, self._limits.max_step_tokens - len(decoding))
        prompts = [Prefill.of(state, batch.end_of(state)) for state in unfinished[:_LOOK_AT]]
        last = len(prompts) - 1
        return [
            (
                unfinished[i],
                prefill_time(decodes, prompts[: i + 1], bound_s=bound_s, first_bound_s=bound_s, max_tokens=max_tokens)[
                    0
                ],
            )
            for i in {0, last}
        ]

    def newcomer_bound_s(self, decoding: Sequence[RequestState], bound_s: float, margin: float) -> float:
        """Return the longest step after which a request that arrives as it begins can still keep its TTFT.

        The newcomer is like the most demanding of the LS requests that came lately; before any came, its prefill is
        expected to take half of the classes' shortest TTFT. It must be admitted, too: ``margin`` is the share of its
        TTFT that admission leaves.
        """
        ttft_s = min((t for _, t in self._recent if t is not None), default=self._default_ttft_s)
        if ttft_s == math.inf:
            return math.inf
        ttft_s *= 1 - max(TTFT_HEADROOM, margin)
        if not self._recent:
            return ttft_s / 2
        num_tokens = max(count for count, _ in self._recent)
        key = (num_tokens, len(decoding), round(bound_s, 3) if bound_s < math.inf else None)
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
        return max(ttft_s - self._newcomer[1], _NEWCOMER_FLOOR * ttft_s)

    def _decodes(self, decoding: Sequence[RequestState], host_works: bool) -> StepLoad:
        load, shape = self._forecast.load(host_works=host_works), self._forecast.shape
        contexts = [state.num_computed_tokens for state in decoding]
        keys = sum(shape.load(context, 1) for context in contexts)
        load.add_decodes(len(contexts), sum(contexts), keys, num_sampled=len(contexts))
        return load

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._limits.block_size)
