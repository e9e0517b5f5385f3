"""Deadlines for whole outputs: which requests can be complete in time, and what time they leave other work.

An LS request has its deadline as objectives: of the time that is left over, half goes to its TTFT and the rest to its
TPOT, and steps are bounded by these. Of a tenant's BE requests those with a deadline are worked on before those without
one, the earliest deadline first. Where only one tenant has BE work they come before all of it; where several have, only
those do whose deadline is at stake, and the tenants' turns decide between the others. Other BE work gets the time that
requests with a deadline have to spare.

How long an output will be is not known: each is expected to have the share of its ``max_tokens`` that those before it
had.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omniserve.core.errors import RequestRejected
from omniserve.sched.state import BE, LS, Phase, RequestState
from omniserve.sched.step_cost import Forecast, StepCost
from omniserve.sched.ttft import Prefill, prefill_time
from omniserve.sched.view import RequestView

HEADROOM = 0.1
"""Share of a deadline that admission leaves for what no prediction knows."""
_OUTPUT_WEIGHT = 0.05  # of a request that ended, in the mean of how much of its max_tokens they put out
MIN_CHUNK = 16
"""Least tokens of prompts in a step for which a prediction is made, whatever the bound."""
AT_STAKE = 1.0
"""A deadline is at stake if the time to spare is less than so many times that which the output takes."""
_WAITING = (Phase.WAITING, Phase.LOADING)
_LOOK_AT = 64  # each step looks at so many requests with a deadline that wait, of those first in line


@dataclass(frozen=True, slots=True)
class Outlook:
    """The predicted end of a BE request with a deadline."""

    state: RequestState
    finish_s: float
    """Seconds from now until its output is complete."""
    num_steps: int
    """Steps until then that have a token of it."""
    is_first: bool
    """The request runs at once, or as soon as there is room; False: it waits until those before it have ended, because
    they have no time to spare for it."""


@dataclass(frozen=True, slots=True)
class _Pace:
    """The time that BE work takes in steps with all LS decodes."""

    step_s: float
    """Seconds of a step with the decodes alone, BE ones with a deadline among them."""
    token_s: float
    """Seconds by which each token of a prompt lengthens a step."""
    chunk: int
    """Most tokens of prompts in a step."""

    def prefill_s(self, num_tokens: int) -> float:
        """Return the seconds of the steps that so many tokens of prompts take."""
        return num_tokens * self.token_s + -(-num_tokens // self.chunk) * self.step_s


class Deadlines:
    """Predicts when requests with a deadline for the whole output end, and refuses those that would be late.

    Args:
        step_bound_s: Returns the most seconds of steps with these LS decodes, as BE work may make them.
        refuses: Requests are refused; False: all are let in.
        has_headroom: A share of each deadline is left for what no prediction knows.
    """

    def __init__(
        self,
        view: RequestView,
        forecast: Forecast,
        step_bound_s: Callable[[Sequence[RequestState]], float],
        *,
        refuses: bool,
        has_headroom: bool,
    ) -> None:
        self._view, self._forecast = view, forecast
        self._host = view.host
        self._step_bound_s = step_bound_s
        self._refuses = refuses
        self._usable = 1 - HEADROOM if has_headroom else 1.0
        self._output_share = {LS: 1.0, BE: 1.0}
        self._open: list[RequestState] = []
        """BE requests with a deadline in their order; some may have ended, or wait for nothing but their last token."""

    def note_end(self, state: RequestState) -> None:
        """Learn from the length of a request's output."""
        if (most := state.request.sampling.max_tokens) > 0:
            share = self._output_share[state.kind]
            self._output_share[state.kind] += _OUTPUT_WEIGHT * (state.num_output_tokens / most - share)

    @property
    def has_any(self) -> bool:
        """There is a BE request with a deadline that has something left to compute."""
        if self._open:
            states = self._view.states
            unfinished = (state for state in self._open if states.get(state.request_id) is state)
            self._open = [state for state in unfinished if state.phase is not Phase.ENDING]
        return bool(self._open)

    # -- arrivals ------------------------------------------------------------------------------------------------

    def admit_ls(self, state: RequestState, first_token_s: float) -> None:
        """Let in an LS request, and make of its deadline the objectives that keep it.

        Args:
            first_token_s: Seconds from its arrival until its first token, if BE work gives way.

        Raises:
            RequestRejected: It cannot be complete by its deadline.
        """
        if (deadline_s := state.request.deadline_s) is None:
            return
        num_more, decoding = self._outputs_left(state) - 1, self._ls()
        needed_s = first_token_s + num_more * self._decodes(decoding).seconds()
        usable_s = self._usable * deadline_s
        if needed_s > usable_s:
            if self._refuses and self._forecast.predictor.has_seen(len(decoding)):
                raise _too_late(needed_s, deadline_s, usable_s, self._alone_s(state))
            return
        spare_s, state.told_slo = usable_s - needed_s, state.slo
        own_ttft_s, own_tpot_s = state.slo.ttft_s, state.slo.tpot_s
        ttft_s = min(first_token_s + spare_s / 2, math.inf if own_ttft_s is None else own_ttft_s)
        tpot_s = own_tpot_s
        if num_more:
            tpot_s = min((usable_s - ttft_s) / num_more, math.inf if own_tpot_s is None else own_tpot_s)
        state.slo = dataclasses.replace(state.slo, ttft_s=ttft_s, tpot_s=tpot_s)

    def admit_be(self, state: RequestState, now_s: float) -> None:
        """Let in a BE request; one with a deadline is worked on by it.

        Raises:
            RequestRejected: It cannot be complete by its deadline, or another one would miss its own.
        """
        if state.request.deadline_s is None:
            return
        before = [*self._open] if self.has_any else []
        states = [*before]
        bisect.insort(states, state, key=lambda each: each.priority_key)
        pace = self._pace(states)
        if self._refuses and self._forecast.predictor.has_seen(min(pace.chunk, state.num_uncomputed_tokens)):
            self._check(state, state.request.deadline_s, states, before, pace, now_s)
        self._open = states

    def _check(
        self,
        state: RequestState,
        deadline_s: float,
        states: Sequence[RequestState],
        before: Sequence[RequestState],
        pace: _Pace,
        now_s: float,
    ) -> None:
        """Refuse a BE request that would be late, or would make one late that is in time without it."""
        outlook = self._walk(states, pace, now_s)
        own = next(each for each in outlook if each.state is state)
        predicted_s, usable_s = now_s - state.arrival_s + own.finish_s, self._usable * deadline_s
        if predicted_s > usable_s:
            raise _too_late(predicted_s, deadline_s, usable_s, self._alone_s(state))
        late = {each.state for each in outlook if not _is_in_time(each, now_s)}
        if late and any(each.state in late and _is_in_time(each, now_s) for each in self.outlook(before, now_s)):
            raise RequestRejected(
                f"with this request, which would take {predicted_s:.3g} s, another one would miss its deadline; try "
                "again later, or ask for a later slo.deadline_s",
                retry_after_s=max(each.finish_s for each in outlook if each.state in late),
                predicted_s=predicted_s,
                required_s=deadline_s,
            )

    # -- steps ---------------------------------------------------------------------------------------------------

    def first_and_spare_s(self, now_s: float) -> tuple[list[RequestState], float]:
        """Return the BE requests that come before all other BE work, and by how much that may lengthen a step.

        The former are in their order; those that have missed their deadline keep their place, if no other tenant has BE
        work. The latter is the smallest share that a step has of the time that a request has to spare, of those on the
        device and in line for it that can still be in time.
        """
        looked_at, num_waiting = [], 0
        for state in self._open:
            num_waiting += state.phase in _WAITING
            if num_waiting > _LOOK_AT:
                break
            looked_at.append(state)
        outlook = self.outlook(looked_at, now_s)
        spares_s = (
            max(0.0, _to_spare_s(each, now_s)) / each.num_steps
            for each in outlook
            if each.state.priority_key[1] > now_s and each.state.phase not in (Phase.HOST, Phase.MOVING)
        )
        spare_s = min(spares_s, default=math.inf)
        if self._view.is_shared(BE):
            outlook = _at_stake(outlook, now_s)
        return [each.state for each in outlook if each.is_first], spare_s

    # -- predictions ---------------------------------------------------------------------------------------------

    def outlook(self, states: Sequence[RequestState], now_s: float) -> list[Outlook]:
        """Predict when BE requests with deadlines end, in their order, if no other BE work holds them up."""
        return self._walk(states, self._pace(states), now_s) if states else []

    def _walk(self, states: Sequence[RequestState], pace: _Pace, now_s: float) -> list[Outlook]:
        """Predict as ``outlook``: each request runs beside those before it, if they have time to spare for its prompt.

        Else it waits for their end. A request that has no room gets it as others end.
        """
        ls = self._ls()
        room = _Room(self._view, [*ls, *states], self._blocks_in_the_end)
        ls_tokens = sum(each.num_uncomputed_tokens for each in ls if not each.decodes)
        beside_s, prefill_free_s = ls_tokens * pace.token_s, pace.prefill_s(ls_tokens)
        for each in ls:
            room.give_back(each, prefill_free_s + self._outputs_left(each) * pace.step_s)
        last_end_s, to_spare_s, is_first = 0.0, math.inf, True
        outlook: list[Outlook] = []
        for state in states:
            num_steps = self._outputs_left(state)
            if state.phase in (Phase.HOST, Phase.MOVING):
                num_steps *= self._view.limits.num_layers + 1  # there a token takes a step a layer
            if state.decodes:
                # Beside the prompts before it, which lengthen its steps.
                own = Outlook(state, beside_s + num_steps * pace.step_s, num_steps, is_first=True)
            else:
                prefill_s = pace.prefill_s(state.num_uncomputed_tokens)
                begin_s = max(prefill_free_s, room.since_s(state))
                is_first &= prefill_s <= to_spare_s
                if is_first:
                    to_spare_s -= prefill_s
                else:
                    begin_s, to_spare_s = max(begin_s, last_end_s), math.inf
                beside_s += state.num_uncomputed_tokens * pace.token_s
                prefill_free_s = begin_s + prefill_s
                num_steps += -(-state.num_uncomputed_tokens // pace.chunk) - 1
                finish_s = prefill_free_s + (self._outputs_left(state) - 1) * pace.step_s
                own = Outlook(state, finish_s, num_steps, is_first)
            room.give_back(state, own.finish_s)
            last_end_s = max(last_end_s, own.finish_s)
            to_spare_s = min(to_spare_s, _to_spare_s(own, now_s))
            outlook.append(own)
        return outlook

    def _pace(self, states: Sequence[RequestState]) -> _Pace:
        """Return the pace of BE requests with deadlines beside all LS requests that are there."""
        limits, ls = self._view.limits.config, self._ls()
        running = states[: max(1, limits.max_num_seqs - len(ls))]
        decodes = self._decodes([*ls, *running])
        bound_s = self._step_bound_s([state for state in ls if state.decodes])
        most = max(1, limits.max_num_batched_tokens - len(ls) - len(running))
        longest = max(state.num_tokens for state in states)
        chunk = max(min(MIN_CHUNK, most), decodes.largest_chunk(longest // 2, most, bound_s, samples=lambda *_: 1))
        step_s = decodes.seconds()
        return _Pace(step_s, (decodes.seconds_with(longest // 2, chunk, samples=1) - step_s) / chunk, chunk)

    def _decodes(self, states: Sequence[RequestState], *, at_best: bool = False) -> StepCost:
        """Return a step in which each of some requests has a token at the end of its output.

        ``at_best``: on an idle machine without what has slowed steps lately.
        """
        cost = self._forecast.step(host_works=self._host.is_busy and not at_best, at_best=at_best)
        shape = self._forecast.shape
        contexts = [state.num_tokens + self._outputs_left(state) for state in states]
        keys = sum(shape.keys_seen(context, 1) for context in contexts)
        cost.add_decodes(len(contexts), sum(contexts), keys, samples=len(contexts))
        return cost

    def _alone_s(self, state: RequestState) -> float:
        """Return the seconds that a request would take if no other were there, and nothing slowed the machine."""
        budget = self._view.limits.config.max_num_batched_tokens
        prompt = [Prefill.of(state, state.num_ready_tokens)]
        prefill_s, _ = prefill_time(self._forecast.step(at_best=True), prompt, math.inf, math.inf, budget)
        return prefill_s + (self._outputs_left(state) - 1) * self._decodes([state], at_best=True).seconds()

    def _ls(self) -> list[RequestState]:
        queues = self._view.device[LS].everyone(), self._view.waiting[LS].everyone()
        return [*itertools.chain(*queues), *(state for state in self._view.loading if state.kind is LS)]

    def _outputs_left(self, state: RequestState) -> int:
        expected = math.ceil(self._output_share[state.kind] * state.request.sampling.max_tokens)
        return max(1, expected - state.num_output_tokens)

    def _blocks_in_the_end(self, state: RequestState) -> int:
        return -(-(state.num_tokens + self._outputs_left(state)) // self._view.limits.config.block_size)


class _Room:
    """Memory and places, as requests with deadlines take them in their order and give them back at their end.

    Args:
        states: LS requests, and BE ones with deadlines.
        blocks: Returns the blocks that a request has in the end. Those that are not waiting are to have them.
    """

    def __init__(
        self, view: RequestView, states: Sequence[RequestState], blocks: Callable[[RequestState], int]
    ) -> None:
        memory = view.memory
        self._blocks = {state: blocks(state) for state in states}
        has_room = {state for state in states if state.kind is LS or state.phase not in _WAITING}
        of_others = sum(memory.num_held(state) for state in view.device[BE].everyone() if state not in has_room)
        still_taken = sum(max(0, self._blocks[state] - memory.num_held(state)) for state in has_room)
        self._free = memory.num_free + of_others - memory.ls_reserve - still_taken
        self._places = view.limits.config.max_num_seqs - len(has_room)
        self._ends: list[tuple[float, int]] = []

    def since_s(self, state: RequestState) -> float:
        """Take the room of the next request, and return in how many seconds it is there; 0: now."""
        if state.phase not in _WAITING:
            return 0.0
        since_s = 0.0
        while self._ends and (self._free < self._blocks[state] or self._places < 1):
            since_s, given_back = heapq.heappop(self._ends)
            self._free, self._places = self._free + given_back, self._places + 1
        self._free, self._places = self._free - self._blocks[state], self._places - 1
        return since_s

    def give_back(self, state: RequestState, at_s: float) -> None:
        """Note when a request ends."""
        heapq.heappush(self._ends, (at_s, self._blocks[state]))


def _to_spare_s(outlook: Outlook, now_s: float) -> float:
    return outlook.state.priority_key[1] - now_s - outlook.finish_s


def _at_stake(outlook: Sequence[Outlook], now_s: float) -> list[Outlook]:
    """Return the requests that would soon be late if other work came first, and those before them; no lost ones."""
    num_first = 0
    for number, each in enumerate(outlook, start=1):
        if _is_open(each, now_s) and _to_spare_s(each, now_s) < AT_STAKE * each.finish_s:
            num_first = number
    return [each for each in outlook[:num_first] if _is_open(each, now_s)]


def _is_open(outlook: Outlook, now_s: float) -> bool:
    return outlook.state.priority_key[1] > now_s


def _is_in_time(outlook: Outlook, now_s: float) -> bool:
    return _to_spare_s(outlook, now_s) >= 0


def _too_late(predicted_s: float, deadline_s: float, usable_s: float, alone_s: float) -> RequestRejected:
    if alone_s > usable_s:
        return RequestRejected(
            f"the request has a deadline of {deadline_s:.3g} s, and alone it takes about {alone_s:.3g} s here: lower "
            "max_tokens, or ask for a later slo.deadline_s",
            predicted_s=alone_s,
            required_s=deadline_s,
        )
    # The work before it shrinks by a second a second, if nothing else is admitted.
    retry_after_s = predicted_s - usable_s
    return RequestRejected(
        f"with the requests before it the output would be complete in {predicted_s:.3g} s, and its deadline is "
        f"{deadline_s:.3g} s; try again in {retry_after_s:.3g} s, or ask for a later slo.deadline_s",
        retry_after_s=retry_after_s,
        predicted_s=predicted_s,
        required_s=deadline_s,
    )
