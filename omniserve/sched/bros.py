"""``bros``: real-time (LS) requests by urgency, BE requests packed into the time that the most urgent one leaves.

Paper: bros 4.1 (problem), 4.2 (Algorithm 1, queue polling, adaptive batch size). The *residual time* of an LS request
is what is left to the deadline of its next token, ``T_SLO - t - (k - 1) T_avg``: t since its last token or its arrival,
k the steps that the token still takes (one for a decode, one a chunk for a prompt), T_avg the mean step. LS requests
enter in ascending order of it while the step's predicted time C is within T_res_min, the smallest of them; then BE
requests while C is; then BE requests in the place of the least urgent LS ones. BE requests enter while the step has
fewer requests than B_curr: 128 at first, doubled by each step that time kept no LS request out of, and 128 again after
one that it did.

Read differently than printed (line numbers of Algorithm 1):

* Line 4 subtracts the smallest residual time from T_SLO; it is T_res_min already.
* Line 11 admits no request, not even a BE one, once some request cannot be in time any more (T_res_min below any C),
  and this lasts for ever. Here the most urgent request always enters, and requests that no step is short enough for do
  not bound the others; while there is such a request, no BE request enters. That too resets B_curr.
* Line 26 takes an LS request out of the step whatever it may lose. Here it must bear a step more, equation (6) with
  x = 0; one without an objective is never replaced.
* Line 19 ends the step at the first BE request without a block, which may be the one that all others would have to end
  for. Here requests that hold KV come first, and the youngest gives way.
* Line 9 ends the choice of LS requests at the first one without memory. Here it is passed over, and those behind it
  enter.
* "No RT requests are detected" (batch size) means that no LS request is about to be late.

``bros-paper`` is the same policy with the paper's choices, to be run with the KV manager ``bidirectional`` and a
profile at powers of two (``python -m omniserve.profile --steps grid``). ``bros`` departs from these choices:

* B_curr limits BE requests only, in the paper (7) LS requests too (``batch_limits_ls``). That never recovers from an
  overload: one late request resets B_curr, steps of 128 bring less than larger ones, so of more LS requests some are
  always late.
* C has no swap term, in the paper (4.1) it is max(t_exec, t_swap) (``swap_term``). Copies to and from the host run
  beside the steps here, which do not wait for them: with the term a step is only given fewer requests whose KV is on
  the host, as many as can be copied while it may run. Their rows come in the next step, when the copies have ended. Of
  the waiting requests those that have no KV come first (line 17), in ``bros`` last; parked ones come back before new
  ones enter, however long their copies take. What corrects predictions corrects t_exec and the wait
  for t_swap apart, so that C is then near the maximum, not equal to it.

Departures of both: prompts are taken whole if they fit what the step's token budget leaves, else cut there, but
never for time; so ``max_num_batched_tokens`` should be a chunk that fits into a TPOT. Section 5 is the KV manager
``bidirectional``; with another one LS requests take whole BE requests' memory (``Parking``). The order by swapped
blocks (line 17) is that in which parked requests, or those that gave way and keep some KV, come back. While no LS
request waits, the first BE request in line comes back ahead of its turn. If no block is left to take, the last request
by class and arrival gives way, BE before LS; in the paper (5.2) the one with most time left does. It copies that one's
KV to the CPU; here an LS request's KV is never copied there. B_curr does not exceed ``max_num_seqs``.
The waiting queue is polled in its own order, by class and arrival, which is that of the deadlines if their TTFT is
the same. Without a latency model there is no time bound: LS by residual time, then BE."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from omniserve.core.plan import StepPlan
from omniserve.kv.base import Tier
from omniserve.sched.batch import Batch
from omniserve.sched.options import BROSOptions, BROSPaperOptions
from omniserve.sched.parking import Parking
from omniserve.sched.policy import Policy
from omniserve.sched.state import BE, LS, Phase, RequestState
from omniserve.sched.step_cost import Forecast, TimeBound, decision_of, largest

BASE_BATCH_SIZE = 128
"""B_base."""
_AVERAGE_OVER = 16  # steps, roughly, that T_avg is the mean of


@dataclass(frozen=True, slots=True)
class Chosen:
    """A request that is to be in the step, with some of its tokens."""

    state: RequestState
    start: int
    """The request's computed tokens, when it was chosen."""
    count: int
    num_kept: int = 0
    """First tokens of a request without a table that still have their KV somewhere, and need no row."""
    num_swapped: int = 0
    """Blocks of these that must come from the host."""


class Selection:
    """Selects the requests of a step, most urgent first. A prompt is cut only where the token budget ends."""

    def __init__(
        self,
        forecast: Forecast | None,
        max_tokens: int,
        kept: Callable[[RequestState], tuple[int, int]],
        block_bytes: int,
    ) -> None:
        self._forecast, self._kept, self._block_bytes = forecast, kept, block_bytes
        self.tokens_left = max_tokens
        self.chosen: list[Chosen] = []

    def whole(self, state: RequestState) -> Chosen:
        """Return a request with all its tokens that are to be computed, at least one."""
        num_kept, num_swapped = self._kept(state)
        count = max(1, state.num_uncomputed_tokens - num_kept)
        return Chosen(state, state.num_computed_tokens, count, num_kept, num_swapped)

    def push(self, state: RequestState) -> None:
        """Choose one more request; there must be a token for it."""
        one = self.whole(state)
        one = dataclasses.replace(one, count=min(one.count, self.tokens_left))
        self.chosen.append(one)
        self.tokens_left -= one.count

    def replace(self, chosen: list[Chosen]) -> None:
        """Choose these instead; the tokens they need must be there."""
        self.tokens_left += sum(one.count for one in self.chosen) - sum(one.count for one in chosen)
        assert self.tokens_left >= 0, "more tokens than the step's budget"
        self.chosen = chosen

    def seconds(self, chosen: Iterable[Chosen], num_swapped: int = 0) -> float:
        """Return C, the predicted seconds of a step of these, and of ``num_swapped`` other blocks from the host."""
        if self._forecast is None:
            return 0.0
        cost = self._forecast.step()
        for one in chosen:
            start = one.start + one.num_kept
            cost.add_chunk(start, one.count, samples=one.state.num_logits(start, one.count))
            num_swapped += one.num_swapped
        cost.features.swap_bytes = num_swapped * self._block_bytes
        return cost.seconds()

    def num_within(self, num_blocks: Iterable[int], bound_s: float) -> int:
        """Return how many parked requests, which have so many blocks each, can be copied back within the bound."""
        totals = itertools.accumulate(num_blocks)
        return sum(1 for _ in itertools.takewhile(lambda total: self.seconds(self.chosen, total) <= bound_s, totals))

    def keep_within(self, bound_s: float, least: int) -> bool:
        """Drop requests from the end until C is within the bound, all but the first ``least``; return if any was."""
        most = len(self.chosen)
        if most <= least or bound_s == math.inf:
            return False
        more = largest(lambda count: self.seconds(self.chosen[: least + count]), most - least, bound_s)
        self.replace(self.chosen[: least + more])
        return least + more < most


class BROSPolicy(Policy):
    """LS by residual time, BE packed beside them and in the place of those that can wait; adaptive batch size."""

    predicts = True
    offloads = True
    options_type = BROSOptions
    options: BROSOptions

    def set_up(self) -> None:
        self._parking = Parking(self.view)
        most = self.limits.config.max_num_seqs
        self._base_size = min(BASE_BATCH_SIZE, most) if self.options.adapt_batch else most
        self._batch_size = self._base_size
        self._average_s: float | None = None
        self._begins_s: dict[int, float] = {}
        """Step id -> when it was planned, of steps that have not ended."""
        self._ended_s = -math.inf

    def schedule(self, now_s: float) -> StepPlan:
        limits = self.limits
        step = Selection(self.forecast, limits.config.max_num_batched_tokens, self._kept, limits.kv_block_bytes)
        residuals, lacks_memory = self._choose_ls(step, now_s)
        bound, late = self._bound(step, residuals)
        # In whatever the bound: the most urgent, and those before all others that cannot be in time any more.
        least = max(1, sum(1 for _ in itertools.takewhile(bool, late)))
        kept_out = step.keep_within(bound.seconds, least)
        if not any(late):
            self._choose_be(step, residuals[: len(step.chosen)], bound.seconds, admits=not lacks_memory)
        retreats = kept_out or any(late)
        self._batch_size = self._base_size if retreats else min(2 * self._batch_size, limits.config.max_num_seqs)
        cost = self.forecast.step() if self.forecast is not None else None
        batch = self.new_batch(now_s, cost=cost)
        complete = self._place_ls(batch, [one for one in step.chosen if one.state.kind is LS])
        ls_s = cost.seconds() if cost is not None else None
        self._place_be(batch, [one for one in step.chosen if one.state.kind is BE], bound.seconds, complete=complete)
        parked = sorted(self.host.queue, key=lambda s: (self.memory.num_blocks(s), s.priority_key))
        if self.options.swap_term and parked:
            parked = parked[: step.num_within(map(self.memory.num_blocks, parked), bound.seconds)]
        self._parking.bring_back(batch, parked)
        plan = batch.plan(decision=decision_of(cost, ls_s, bound))
        self._begins_s[plan.step_id] = now_s
        return plan

    def _kept(self, state: RequestState) -> tuple[int, int]:
        """Return how many of a WAITING request's tokens need no row, and how many blocks of them the host has alone.

        Without the swap term the answer is none: what a request still has is found when it is admitted.
        """
        if not self.options.swap_term or state.phase is not Phase.WAITING:
            return 0, 0
        on_device, on_host = (self.view.num_kept_tokens(state, tier) for tier in Tier)
        num_swapped = max(0, on_host - on_device) if self.view.host_is_up else 0
        block_size = self.limits.config.block_size
        # A block of which the device has a part is copied as a whole.
        num_blocks = -(-on_host // block_size) - on_device // block_size if num_swapped else 0
        return on_device + num_swapped, num_blocks

    def on_step_end(self, plan: StepPlan, now_s: float) -> None:
        begins_s = self._begins_s.pop(plan.step_id, None)
        if begins_s is not None and not plan.is_empty:  # else it only began copies, maybe not by this policy
            # One that was planned while another ran begins when that ends.
            seconds = now_s - max(begins_s, self._ended_s)
            self._ended_s = now_s
            average_s = self._average_s if self._average_s is not None else seconds
            self._average_s = average_s + (seconds - average_s) / _AVERAGE_OVER

    # -- latency-sensitive (lines 1 to 14) -----------------------------------------------------------------------

    def _residual_s(self, state: RequestState, now_s: float) -> float:
        """Return T_SLO - t - (k - 1) T_avg, in seconds; infinite without an objective."""
        begin_s = self.begin_s(now_s)
        if state.num_pending_tokens:
            objective_s, since_s = state.slo.tpot_s, begin_s  # that token comes as the step begins
        elif state.last_token_s is None:
            objective_s, since_s = state.slo.ttft_s, state.arrival_s
        else:
            objective_s, since_s = state.slo.tpot_s, state.last_token_s
        if objective_s is None:
            return math.inf
        more_steps = (state.num_uncomputed_tokens - 1) // self.limits.config.max_num_batched_tokens
        return objective_s - (begin_s - since_s) - more_steps * (self._average_s or 0.0)

    def _by_urgency(self, now_s: float) -> Iterator[tuple[float, tuple[int, float, int], RequestState]]:
        """Poll the sorted running requests and the waiting queue for the most urgent, one after another (Fig. 8)."""
        pending = sorted((self._residual_s(state, now_s), state.priority_key, state) for state in self.view.device[LS])
        waiting = ((self._residual_s(state, now_s), state.priority_key, state) for state in self.view.waiting[LS])
        return heapq.merge(pending, waiting)

    def _choose_ls(self, step: Selection, now_s: float) -> tuple[list[float], bool]:
        """Choose LS requests by urgency while the limits on requests, the tokens and the memory allow.

        Returns:
            Their residual times, and whether one that waits finds no memory, be it that of all BE requests.
        """
        blocks = self._parking.num_obtainable
        num_open = self.limits.config.max_num_seqs - len(self.view.device[LS])
        residuals: list[float] = []
        lacks_memory = False
        for residual_s, _, state in self._by_urgency(now_s):
            if step.tokens_left == 0 or (self.options.batch_limits_ls and len(step.chosen) >= self._batch_size):
                break
            if state.phase is Phase.WAITING:
                needed = self.memory.blocks_for(state)
                if num_open == 0 or needed > blocks:
                    lacks_memory |= num_open > 0
                    continue
                blocks, num_open = blocks - needed, num_open - 1
            step.push(state)
            residuals.append(residual_s)
        return residuals, lacks_memory

    def _bound(self, step: Selection, residuals: Sequence[float]) -> tuple[TimeBound, list[bool]]:
        """Return T_res_min of the requests that can be in time, and those that cannot: each alone takes too long."""
        bound = TimeBound()
        if self.forecast is None or not residuals:
            return bound, []
        shortest_s = step.seconds(step.chosen[:1])
        late = [residual_s < shortest_s for residual_s in residuals]
        for chosen, residual_s, is_late in zip(step.chosen, residuals, late, strict=True):
            if not is_late:
                bound = bound.or_tighter(residual_s, f"residual time of {chosen.state.request_id}")
        return bound, late

    def _place_ls(self, batch: Batch, chosen: Iterable[Chosen]) -> bool:
        """Put the chosen into the batch; return False if one of them found no memory after all."""
        complete = True
        for one in chosen:
            state = one.state
            if not self._is_as_chosen(one):
                complete = False
            elif state.phase is Phase.DEVICE:
                complete &= self._parking.run(batch, state, (BE, LS)) is None
            else:
                complete &= self._parking.admit_ls(batch, state) is None
        return complete

    @staticmethod
    def _is_as_chosen(one: Chosen) -> bool:
        """Return False if the request had to give way since it was chosen."""
        return one.state.phase in (Phase.DEVICE, Phase.WAITING) and one.state.num_computed_tokens == one.start

    # -- best-effort (lines 15 to 33) ----------------------------------------------------------------------------

    def _choose_be(self, step: Selection, residuals: Sequence[float], bound_s: float, *, admits: bool) -> None:
        """Pack BE requests beside the LS ones, then replace the least urgent of these by more.

        Requests without KV enter only if ``admits``.
        """
        num_ls = len(step.chosen)
        candidates = self._best_effort(step.chosen, admits=admits)
        tried = []
        for state in candidates:
            tried.append(state)
            if len(step.chosen) >= self._batch_size or step.tokens_left == 0:
                break
            step.push(state)
        step.keep_within(bound_s, num_ls)
        left_over = tried[len(step.chosen) - num_ls :]
        if self.options.replace_ls:
            self._replace_ls(step, residuals, itertools.chain(left_over, candidates), bound_s)

    def _best_effort(self, chosen: Sequence[Chosen], *, admits: bool) -> Iterator[RequestState]:
        """Yield BE requests that have KV, then those that find room and blocks beside the chosen LS requests."""
        new_ls = sum(one.state.phase is Phase.WAITING for one in chosen)
        needed = sum(self.memory.blocks_for(one.state) - self.memory.num_blocks(one.state) for one in chosen)
        yield from self.view.device[BE]
        if not admits or self.host.queue:  # a parked request comes back before a new one enters
            return
        free = self.memory.num_free - needed
        num_open = self.limits.config.max_num_seqs - self.view.num_on_device - new_ls
        for state in itertools.islice(self._by_missing_tokens(), max(0, num_open)):
            free -= self.memory.blocks_for(state)
            if free < 0:
                return
            yield state

    def _by_missing_tokens(self) -> Iterable[RequestState]:
        """Return waiting BE requests by class, the less KV must be copied back the sooner; last those without any."""
        if not self.view.keeps_evicted:
            return self.view.waiting[BE]

        def missing(state: RequestState) -> tuple[int, bool, int]:
            on_device, on_host = (self.view.num_kept_tokens(state, tier) for tier in Tier)
            is_last = on_device == on_host == 0 and not self.options.swap_term  # line 17 has those without KV first
            return state.priority_key[0], is_last, max(0, on_host - on_device)

        return sorted(self.view.waiting[BE], key=missing)

    def _replace_ls(
        self, step: Selection, residuals: Sequence[float], candidates: Iterable[RequestState], bound_s: float
    ) -> None:
        """Put as many BE requests in the place of the least urgent LS ones as these can wait for, a step longer."""
        num_ls, average_s, tokens = len(residuals), self._average_s or 0.0, step.tokens_left
        new: list[Chosen] = []
        for index, state in zip(reversed(range(num_ls)), candidates, strict=False):
            one = step.whole(state)
            tokens += step.chosen[index].count - one.count
            if tokens < 0 or residuals[index] == math.inf:
                break
            new.append(one)
        if not new:
            return
        packed = step.chosen[num_ls:]

        def replaced(count: int) -> list[Chosen]:
            return [*step.chosen[: num_ls - count], *packed, *new[:count]]

        def excess_s(count: int) -> float:
            seconds = step.seconds(replaced(count))
            return max(seconds - bound_s, seconds + average_s - residuals[num_ls - count])

        count = largest(excess_s, len(new), 0.0)
        if count > 0:
            step.replace(replaced(count))

    def _place_be(self, batch: Batch, chosen: Iterable[Chosen], bound_s: float, *, complete: bool) -> None:
        """Put the chosen into the batch.

        If it is ``complete``, with all chosen LS requests, a decode takes no more time than it did in the choice.
        """
        for one in chosen:
            state = one.state
            if not self._is_as_chosen(one):
                complete = False
                continue
            limit_s = math.inf if complete and one.count == 1 else bound_s
            if state.phase is Phase.DEVICE:
                complete &= self._parking.run(batch, state, (BE,), bound_s=limit_s) is None
            elif complete:
                complete = batch.admit(state, bound_s=limit_s) is None


@final
class BROSPaperPolicy(BROSPolicy):
    """``bros`` with the paper's choices: B_curr limits LS requests, too, C has a swap term, and models of its own.

    Only the defaults of its options differ.
    """

    options_type = BROSPaperOptions
    options: BROSPaperOptions
