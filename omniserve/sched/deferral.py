"""Deferral by class: rows of a lower class leave a step for a request of a higher class, and go on later.

With ``defer_classes`` (off by default) a request that comes while a step runs, and would miss its TTFT, has rows of
lower classes leave that step (``Policy.to_preempt``): those whose own next token will be in time after it. They stay
out of the next step, too, while they have slack and a prompt of a higher class is late with them.

Paper: omniserve 6 (multiple priority levels): low-priority work is deferred at a layer and joins the same layer several
steps later; its objective says how many. Rows leave at safepoints (conserve 4.3), so this layer is any but the first.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from omniserve.core.plan import StepPlan
from omniserve.core.request import SLO, Request
from omniserve.latency import features_of
from omniserve.sched.batch import Batch
from omniserve.sched.features.halted_chunks import halted_chunk
from omniserve.sched.prefill_order import ahead_of, prefill_order
from omniserve.sched.state import BE, LS, RequestState
from omniserve.sched.step_cost import LS_HEADROOM, Forecast, next_token_due_s, tpot_bound, ttft_left_s
from omniserve.sched.ttft import Prefill, prefill_time
from omniserve.sched.view import RequestView


class Deferral:
    """Knows which rows of the running step may leave it for which request, and which rows that left wait on.

    A row of a lower LS class may leave as long as its own next token can still be in time after it: for a prompt by the
    TTFT, for a decode by the TPOT (``slack`` as in ``CoServingOptions``). Without an objective nothing says how long it
    may wait, so it stays. Best-effort rows may always leave, but those that left do not wait longer than other
    best-effort work does.
    """

    def __init__(self, view: RequestView, forecast: Forecast, slack: Literal["step", "deadline"]) -> None:
        self._view, self._host, self._forecast, self._slack = view, view.host, forecast, slack
        classes = view.limits.config.classes
        self._ranks = {spec.name: rank for rank, spec in enumerate(classes)}
        self._highest = min(rank for rank, spec in enumerate(classes) if spec.kind == LS)
        self._running = StepPlan(step_id=-1)
        """The running step, without the rows that were asked to leave."""
        self._running_s = 0.0
        """The seconds that such a step takes."""
        self._ends_s = 0.0
        self._host_works = False
        self._coming: list[RequestState] = []
        """LS requests that came while the step ran, as they would be if they were added now; they are after it."""

    # -- a step ----------------------------------------------------------------------------------------------------

    def mark_preemptible(self, batch: Batch) -> None:
        """Mark the chunks of a batch whose requests ``to_preempt`` may ask to leave; it is to be closed next."""
        for chunk in batch.chunks:
            state = self._view.states[chunk.request_id]
            if self._is_lower(state, self._highest) and self._may_leave(state):
                batch.replace(dataclasses.replace(chunk, is_preemptible=True))

    def note_step(self, plan: StepPlan, begin_s: float, *, host_works: bool) -> None:
        """Take note of a step that is about to begin; its decision has a prediction."""
        assert plan.decision is not None and plan.decision.predicted_s is not None
        self._running, self._running_s, self._host_works = plan, plan.decision.predicted_s, host_works
        self._ends_s = begin_s + self._running_s
        self._coming = []

    def to_preempt(self, request: Request, required_s: float, now_s: float) -> frozenset[str]:
        """Return the requests whose rows must leave the running step for one that has just come.

        They leave if the new request's first token is late otherwise, and in time if they do.

        Args:
            request: The new request; it is not added yet.
            required_s: Seconds from now by which it needs its first token; infinite without an objective.
            now_s: Now.
        """
        rank = self._ranks[request.service_class]
        new = self._newcomer(request, rank, now_s)
        ahead = ahead_of(new, [*self._unfinished(), *self._coming], now_s)
        self._coming.append(new)
        ends = {chunk.request_id: chunk.start + len(chunk.token_ids) for chunk in self._running.chunks}
        left_s, decodes = max(0.0, self._ends_s - now_s), self._ls_decodes()
        urgent = [*self._prompts([*ahead, new], ends)]
        wait_s = left_s + self._seconds(decodes, urgent, now_s)
        if wait_s <= required_s:
            return frozenset()
        candidates = (state for state in self._in_running_step() if self._is_lower(state, rank))
        leaving = frozenset(s.request_id for s in candidates if self._can_wait(s, wait_s, decodes, now_s))
        if not leaving:
            return leaving
        staying = tuple(chunk for chunk in self._running.chunks if chunk.request_id not in leaving)
        rest = dataclasses.replace(self._running, chunks=staying)
        features = features_of(rest, self._forecast.shape, host_works=self._host_works)
        rest_s = 0.0 if features.is_empty else self._forecast.predictor.step_s(features)
        left_s *= min(1.0, rest_s / self._running_s) if self._running_s > 0 else 1.0
        staying_decodes = [state for state in decodes if state.request_id not in leaving]
        if left_s + self._seconds(staying_decodes, urgent, now_s) > required_s:
            return frozenset()  # it is late all the same
        self._running, self._running_s, self._ends_s = rest, rest_s, now_s + left_s
        return leaving

    def waiting(self, begin_s: float) -> frozenset[str]:
        """Return the LS requests whose rows left a step, and stay out of the next one, which begins at ``begin_s``.

        They do if a prompt of a higher class is late with them and in time without, and if they have slack for that.
        """
        left = [state for state in self._view.device[LS] if halted_chunk(state) is not None]
        decodes = [state for state in self._ls_decodes() if halted_chunk(state) is None]
        waiting: set[str] = set()
        for rank in {state.priority_key[0] for state in left}:
            before = (state for state in prefill_order(self._unfinished(), begin_s) if state.priority_key[0] < rank)
            higher = [state for state in before if halted_chunk(state) is None]
            lower = [state for state in left if state.priority_key[0] >= rank]
            urgent = list(self._prompts(higher))
            urgent_s = self._seconds(decodes, urgent, begin_s)
            together_s = self._seconds(decodes, [*urgent, *self._prompts(lower)], begin_s)
            if any(urgent_s <= ttft_left_s(state, begin_s) < together_s for state in higher):
                waiting |= {s.request_id for s in lower if self._can_wait(s, urgent_s, decodes, begin_s)}
        return frozenset(waiting)

    def waits_for_time(self, batch: Batch, state: RequestState, bound_s: float, begin_s: float) -> bool:
        """Return whether a chunk that left a step, for which this one has no time, waits rather than begin anew."""
        halted = halted_chunk(state)
        if batch.cost is None or halted is None or not batch.chunks:
            return False
        samples = state.num_logits(halted.start, halted.num_tokens)
        if batch.cost.seconds_with(halted.start, halted.num_tokens, samples=samples) <= bound_s:
            return False
        decodes = [other for other in self._ls_decodes() if halted_chunk(other) is None]
        return self._can_wait(state, batch.cost.seconds(), decodes, begin_s)

    # -- requests --------------------------------------------------------------------------------------------------

    @staticmethod
    def _is_lower(state: RequestState, rank: int) -> bool:
        return state.kind is BE or state.priority_key[0] > rank

    @staticmethod
    def _may_leave(state: RequestState) -> bool:
        """Return whether a request is best-effort, or its objectives say when its next token is due."""
        objective_s = state.slo.tpot_s if state.num_output_tokens else state.slo.ttft_s
        return state.kind is BE or objective_s is not None

    def _can_wait(self, state: RequestState, wait_s: float, decodes: Sequence[RequestState], now_s: float) -> bool:
        """Return whether a row's next token is in time if it goes on after ``wait_s``, beside some decodes."""
        if state.kind is BE:
            return True
        if not self._may_leave(state):
            return False
        return wait_s + self._seconds(decodes, list(self._prompts([state])), now_s) <= next_token_due_s(
            state, now_s, self._slack
        )

    def _in_running_step(self) -> Iterator[RequestState]:
        """Yield the preemptible requests of the running step that have not ended."""
        states, preemptible = self._view.states, self._running.preemptible
        ids = (chunk.request_id for chunk in self._running.chunks if chunk.request_id in preemptible)
        return (states[request_id] for request_id in ids if request_id in states)

    def _ls_decodes(self) -> list[RequestState]:
        return [state for state in self._view.device[LS] if state.decodes]

    def _unfinished(self) -> Iterator[RequestState]:
        """Yield the LS requests with prompts to compute."""
        states = itertools.chain(self._view.device[LS], self._view.waiting[LS])
        return (state for state in states if not state.decodes)

    def _newcomer(self, request: Request, rank: int, now_s: float) -> RequestState:
        """Return the state that a request would have if it was added now, behind all others of its class and tenant."""
        return RequestState(
            request_id="",
            request=request,
            slo=SLO(),
            kind=LS,
            priority_key=(rank, math.inf, sys.maxsize + len(self._coming)),
            account=self._view.account_of_newcomer(request.service_class, request.tenant),
            arrival_s=now_s,
            token_ids=list(request.prompt_token_ids),
        )

    # -- time ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _prompts(states: Iterable[RequestState], ends: Mapping[str, int] = MappingProxyType({})) -> Iterator[Prefill]:
        """Yield what requests have to compute, behind what the running step computes: up to ``ends``, by request."""
        for state in states:
            start = max(state.num_computed_tokens, ends.get(state.request_id, 0))
            if start < state.num_tokens:
                yield Prefill.of(state, start)

    def _seconds(self, decodes: Sequence[RequestState], prompts: Sequence[Prefill], now_s: float) -> float:
        """Return how long it takes until the last of some prompts is computed, in steps with some decodes.

        Their shortest TPOT bounds these steps, as it does in a ``CoServingStep``.
        """
        cost, shape = self._forecast.step(host_works=self._host.is_busy), self._forecast.shape
        contexts = [state.num_computed_tokens for state in decodes]
        keys = sum(shape.keys_seen(context, 1) for context in contexts)
        cost.add_decodes(len(contexts), sum(contexts), keys, samples=len(contexts))
        if not prompts:
            return cost.seconds()
        bound_s = tpot_bound(decodes, now_s, "step", LS_HEADROOM).seconds
        max_tokens = max(1, self._view.limits.config.max_num_batched_tokens - len(decodes))
        seconds, _ = prefill_time(cost, prompts, bound_s, bound_s, max_tokens)
        return seconds
