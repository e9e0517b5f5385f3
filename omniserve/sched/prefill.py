"""How long LS prompts take to be computed, and to wait for memory. Paper: omniserve 3.3.3.

The paper's condition compares one batch of all waiting prompts with the objective. Here the prompts are chunked under
the decoding objective as they will be, so every further step repeats the decodes and the step's own overhead.
Nor does the paper speak of memory: here prompts that wait for it take it in their order, as other requests end.
(Erratum: n(t) of 3.3.3 means the remaining prompt tokens p_j - l_j.)
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from omniserve.sched.state import RequestState
from omniserve.sched.step_cost import StepCost

MIN_LS_CHUNK = 16
"""LS prefill goes on by so many tokens a step at least, whatever the bound."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """What is left of a prompt."""

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
class LSQueue:
    """LS requests at a moment, and the device blocks that they have or can have."""

    decoding: Sequence[RequestState]
    prompts: Sequence[RequestState]
    """Those with prefill left, in the order in which it goes on; some may still wait for memory."""
    blocks: Mapping[str, int]
    """What each request on the device holds, by id."""
    num_free: int
    """Free, or to be taken from BE requests."""
