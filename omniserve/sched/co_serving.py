"""CoServingStep: fills a step in the order LS decode, LS prefill, BE work, host rows, with parts that policies choose.

``omniserve``, ``omniserve-paper``, ``neo`` and ``apex`` use it. Each policy chooses a ``LatencyControl`` (what LS
requests may expect, and the bound of BE work), a ``BestEffortWork`` (its order, and which decodes are offloaded for
time) and a ``HostRowChoice`` (the rows that the host tier attends for).

With several stages, LS requests in other steps count for the bounds of a step: they wait for it in each stage. A step
without LS work has some BE work in any case. Each plan carries its ``Decision``: prediction, bound, the bound's source,
and what was left out and why.

Paper: omniserve 3.3.2 (order), 3.3.4 (chunk sizes).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from omniserve.core.plan import Bound, LeftOut, StepPlan
from omniserve.core.request import SLO, Request
from omniserve.sched.batch import Batch
from omniserve.sched.best_effort import MIN_BE_CHUNK, BestEffortWork
from omniserve.sched.host_rows import HostRows
from omniserve.sched.options import CoServingOptions
from omniserve.sched.policy import Policy
from omniserve.sched.prefill_order import prefill_order
from omniserve.sched.queueing_control import QueueingControl
from omniserve.sched.state import BE, LS, Phase, RequestState
from omniserve.sched.step_cost import TTFT_HEADROOM, Forecast, Headrooms, TimeBound, decision_of, left_out, tpot_bound
from omniserve.sched.ttft import MIN_LS_CHUNK
from omniserve.sched.view import RequestView

if TYPE_CHECKING:
    from omniserve.sched.deadlines import Deadlines
    from omniserve.sched.deferral import Deferral
    from omniserve.sched.planned_deferral import PlannedDeferral


class LatencyControl(Protocol):
    """Predicts the TTFT of LS requests that arrive, refuses some, and bounds the BE work of steps by what is left."""

    def on_arrival(self, state: RequestState, now_s: float, begin_s: float) -> float:
        """Return the predicted TTFT of an LS request, seconds from arrival; the next step begins at ``begin_s``.

        Raises:
            RequestRejected: Its objectives cannot be met at present load.
        """

    def soonest_s(self, states: Sequence[RequestState], now_s: float, begin_s: float) -> list[float]:
        """Return the TTFT that each of these LS requests of a class would have, in seconds, behind all others.

        That is with BE work giving way, and with nothing of its prompt cached. The states are of no other use.
        """

    def on_first_token(self, state: RequestState, now_s: float) -> None:
        """Take note of an LS request's first token."""

    def on_end(self, state: RequestState) -> None:
        """Take note of the end of an LS request that had a token."""

    @property
    def margin(self) -> float:
        """The share of a TTFT that admission leaves, in [0, 1)."""

    def admittable_per_s(self, now_s: float, begin_s: float) -> dict[str, float]:
        """Return how many more requests a second would be admitted now, by LS class; without those not known."""

    @property
    def deadlines(self) -> Deadlines | None:
        """Predicts when requests with a deadline for the whole output end; None: such deadlines only order BE work."""

    def first_token_bound_s(self, state: RequestState, begin_s: float) -> float:
        """Return the most seconds of a step with a request's first token, for the LS prompts behind it in the step."""

    def long_prompt_bound_s(
        self, batch: Batch, decoding: Sequence[RequestState], bound_s: float, begin_s: float
    ) -> float:
        """Return the most seconds of a step for a prompt with a scaled TTFT; ``bound_s`` is S_d."""

    def best_effort_bound(
        self,
        batch: Batch,
        s_be: TimeBound,
        decoding: Sequence[RequestState],
        unfinished: Sequence[RequestState],
        begin_s: float,
    ) -> TimeBound:
        """Return the bound of the step for BE work, which is added to its LS work.

        Args:
            s_be: The bound by the TPOTs of the step's LS decodes.
            decoding: These decodes.
            unfinished: LS requests with prefill left after the step.
            begin_s: When the step begins.
        """


class HostRowChoice(Protocol):
    """Chooses the rows of a step that the host tier attends for."""

    def reserve_s(self, batch: Batch, bound_s: float) -> float:
        """Return the seconds of a step within the bound that device BE work leaves for host rows."""

    def choose(self, batch: Batch, bound_s: float) -> HostRows:
        """Return the host rows of a step that has all its device rows, and add them to its cost."""


class StepBounds(Protocol):
    """Bounds the seconds of steps by the TPOTs of LS requests."""

    def of(self, decoding: Iterable[RequestState], begin_s: float) -> tuple[TimeBound, TimeBound]:
        """Return S_d for LS prefill, and the bound for BE work, of a step with these decodes."""


@dataclass(frozen=True, slots=True)
class TPOTBounds:
    """The ``StepBounds`` that follow from the TPOTs of a step's LS decodes; ``slack`` as in ``CoServingOptions``."""

    slack: str
    ls_headroom: float
    """Share of a TPOT that LS prefill leaves."""
    be_headroom: float
    """Share of a TPOT that BE work leaves."""

    def of(self, decoding: Iterable[RequestState], begin_s: float) -> tuple[TimeBound, TimeBound]:
        """Return S_d for LS prefill, and the bound for BE work, of a step with these decodes."""
        states = [*decoding]
        s_d = tpot_bound(states, begin_s, self.slack, self.ls_headroom)
        return s_d, tpot_bound(states, begin_s, self.slack, self.be_headroom)


class CoServingStep:
    """Fills the steps of a policy.

    Args:
        tpots: Bounds LS prefill, and BE work where no TTFT bounds it more tightly.
        control: None: nothing is predicted, no request is refused, and no time bounds BE work.
        deferral: Decides which rows leave steps for requests of higher classes; None: none do.
        planned: Plans at which layers rows leave steps for tokens of higher classes; None: none do.
    """

    def __init__(
        self,
        view: RequestView,
        tpots: StepBounds,
        control: LatencyControl | None,
        best_effort: BestEffortWork,
        host_rows: HostRowChoice,
        deferral: Deferral | None = None,
        planned: PlannedDeferral | None = None,
    ) -> None:
        self._view, self._memory, self._host = view, view.memory, view.host
        self._tpots, self._moves = tpots, best_effort.moves
        self.control = control
        self.best_effort = best_effort
        self.host_rows = host_rows
        self.deferral = deferral
        self._planned = planned

    @classmethod
    def of(
        cls,
        view: RequestView,
        options: CoServingOptions,
        forecast: Forecast | None,
        best_effort: BestEffortWork,
        host_rows: HostRowChoice,
    ) -> Self:
        """Return a step with the latency control that these options ask for."""
        headrooms = Headrooms.of(options.headrooms)
        tpots = TPOTBounds(options.slack, headrooms.ls, headrooms.be)
        if forecast is None:
            return cls(view, tpots, None, best_effort, host_rows)
        control = QueueingControl(view, forecast, options)
        deferral: Deferral | None = None
        if options.defer_classes:
            from omniserve.sched.deferral import Deferral

            deferral = Deferral(view, forecast, options.slack)
        planned: PlannedDeferral | None = None
        if options.defer_tokens != "off":
            from omniserve.sched.planned_deferral import PlannedDeferral

            planned = PlannedDeferral(view, forecast, options)
        return cls(view, tpots, control, best_effort, host_rows, deferral, planned)

    def plan(self, batch: Batch, begin_s: float) -> StepPlan:
        """Fill an empty batch, whose step begins at ``begin_s``, and close it."""
        cost, deferral, device_ls = batch.cost, self.deferral, self._view.device[LS]
        self._give_place(batch)
        deferred = deferral.waiting(begin_s) if deferral is not None else frozenset[str]()
        decoding = self._decode_ls(batch, deferred)
        if self._planned is not None:
            self._planned.defer_decodes(batch, begin_s)
        # Decodes that other steps have wait for this one, too.
        s_d, s_be = self._tpots.of([*decoding, *(state for state in device_ls.hidden() if state.decodes)], begin_s)
        unfinished, kept_out = self._prefill_ls(batch, s_d, decoding, begin_s, deferred)
        if deferred and not batch.chunks:
            self._go_on(batch, deferred)
            unfinished = [state for state in unfinished if not batch.samples(state)]
        still = [s.request_id for s in device_ls if s.request_id in deferred and s not in batch]
        kept_out += left_out("LS deferred", len(still), Bound.DEFERRED, still[0] if still else "")
        ls_s = cost.seconds() if cost is not None else None
        bound = self._best_effort_bound(batch, s_be, decoding, unfinished, begin_s)
        if self.control is not None and (deadlines := self.control.deadlines) is not None and deadlines.has_any:
            bound = self.best_effort.run_first(batch, bound, deadlines)
        device_bound_s = max(0.0, bound.seconds - self.host_rows.reserve_s(batch, bound.seconds))
        kept_out += self.best_effort.run(batch, device_bound_s)
        self._moves.swap_back(batch, device_bound_s, nothing_left_out=not kept_out)
        rows = self.host_rows.choose(batch, bound.seconds)
        if self._planned is not None:
            self._planned.defer_best_effort(batch)
        if deferral is not None:
            deferral.mark_preemptible(batch)
        decision = decision_of(cost, ls_s, bound, kept_out + rows.left_out)
        plan = batch.plan(host_rows=rows, decision=decision)
        if deferral is not None:
            deferral.note_step(plan, begin_s, host_works=self._host.is_busy)
        return plan

    def _best_effort_bound(
        self,
        batch: Batch,
        s_be: TimeBound,
        decoding: Sequence[RequestState],
        unfinished: Sequence[RequestState],
        begin_s: float,
    ) -> TimeBound:
        if batch.cost is None or self.control is None:
            return TimeBound()
        bound = self.control.best_effort_bound(batch, s_be, decoding, unfinished, begin_s)
        if batch.cost.features.is_empty:
            # No LS work: the machine is never left idle because its smallest step is too long for a newcomer.
            least_s = batch.cost.seconds_with(0, MIN_BE_CHUNK, samples=True)
            bound = TimeBound(max(bound.seconds, least_s), bound.by)
        return bound

    # -- latency-sensitive ---------------------------------------------------------------------------------------

    def _give_place(self, batch: Batch) -> None:
        """Take the place of the last LS request for the first in line, if that is of a higher class and all places are
        taken."""
        first = self._view.waiting[LS].first
        if first is None or not self._memory.is_full(LS):
            return
        last = next((s for s in reversed(self._view.device[LS]) if s.phase is Phase.DEVICE), None)
        if last is not None and last.priority_key[0] > first.priority_key[0]:
            batch.preempt(last)

    def _decode_ls(self, batch: Batch, deferred: Set[str]) -> list[RequestState]:
        """Schedule all LS decodes but deferred ones; return the LS requests that are in."""
        for state in self._view.device[LS]:
            if state.phase is Phase.DEVICE and state.decodes and state.request_id not in deferred:
                batch.run_or_preempt(state, (BE, LS))
        return [state for state in self._view.device[LS] if state in batch]

    def _prefill_ls(
        self, batch: Batch, s_d: TimeBound, decoding: Sequence[RequestState], begin_s: float, deferred: Set[str]
    ) -> tuple[list[RequestState], tuple[LeftOut, ...]]:
        """Schedule LS prefill under S_d (3.3.4), in the order of ``prefill_order``.

        Returns:
            The requests with prefill left after this step, and what to note of requests that are not in it.
        """
        admitted = [state for state in self._view.device[LS] if not state.decodes]
        bound_s, min_tokens, is_full, memory_is_short = s_d.seconds, MIN_LS_CHUNK, False, False
        unfinished: list[RequestState] = []
        last_refusal: Bound | None = None
        for state in prefill_order([*admitted, *self._view.waiting[LS]], begin_s):
            if is_full or state.request_id in deferred or (memory_is_short and state.phase is Phase.WAITING):
                unfinished.append(state)
                continue
            within_s = bound_s
            if state.has_scaled_ttft and self.control is not None:
                # A long prompt goes on in steps that a short one could wait for.
                within_s = min(within_s, self.control.long_prompt_bound_s(batch, decoding, s_d.seconds, begin_s))
            refused_by = self._prefill_one(batch, state, within_s, min_tokens, begin_s)
            if refused_by is None:
                min_tokens = 0
            else:
                last_refusal = refused_by
                is_full = refused_by in (Bound.TIME, Bound.TOKENS)
                memory_is_short |= not is_full
            if not batch.samples(state):
                unfinished.append(state)
            elif batch.cost is not None and self.control is not None:
                left_s = self.control.first_token_bound_s(state, begin_s)
                if left_s >= batch.cost.seconds():
                    # None behind it may make its first token late, if it can still be in time.
                    bound_s = min(bound_s, left_s)
        kept_out = [
            s for s in unfinished if s not in batch and s.request_id not in deferred and s.phase is not Phase.MOVING
        ]
        first_id = kept_out[0].request_id if kept_out else ""
        return unfinished, left_out("LS prefill", len(kept_out), last_refusal, first_id)

    def _prefill_one(
        self, batch: Batch, state: RequestState, bound_s: float, min_tokens: int, begin_s: float
    ) -> Bound | None:
        if state.phase is Phase.DEVICE:
            if self.deferral is not None and self.deferral.waits_for_time(batch, state, bound_s, begin_s):
                return Bound.TIME
            return batch.run_or_preempt(state, (BE, LS), bound_s=bound_s, min_tokens=min_tokens)
        _, refused_by = batch.chunk_size(state, bound_s=bound_s, min_tokens=min_tokens)
        if refused_by is not None:
            return refused_by
        self._moves.make_room_for_ls(batch, state)
        return batch.admit(state, bound_s=bound_s, min_tokens=min_tokens)

    def _go_on(self, batch: Batch, deferred: Set[str]) -> None:
        """Schedule what was deferred for prompts that are not in the step: there is no memory for them."""
        for state in self._view.device[LS]:
            if state.request_id in deferred and state.phase is Phase.DEVICE:
                batch.run_or_preempt(state, (BE, LS))


class CoServingPolicy(Policy):
    """A policy that leaves its steps to a ``CoServingStep``, which ``set_up`` makes of the parts that it chooses."""

    predicts = True
    offloads = True
    step: CoServingStep

    def schedule(self, now_s: float) -> StepPlan:
        cost = self.forecast.step(host_works=self.host.is_busy) if self.forecast is not None else None
        batch = self.new_batch(now_s, cost=cost)
        self.begin(batch)
        return self.step.plan(batch, self.begin_s(now_s))

    def begin(self, batch: Batch) -> None:
        """Put what comes before all else into the empty batch of a step."""

    def on_arrival(self, state: RequestState, now_s: float) -> float | None:
        control = self.step.control
        if state.kind is BE:
            if control is not None and control.deadlines is not None:
                control.deadlines.admit_be(state, now_s)
            self.step.best_effort.note_arrival(state)
            return None
        return control.on_arrival(state, now_s, self.begin_s(now_s)) if control is not None else None

    def soonest_s(self, states: Sequence[RequestState], now_s: float) -> list[float] | None:
        control = self.step.control
        return control.soonest_s(states, now_s, self.begin_s(now_s)) if control is not None else None

    def on_first_token(self, state: RequestState, now_s: float) -> None:
        if state.kind is LS and self.step.control is not None:
            self.step.control.on_first_token(state, now_s)

    def on_end(self, state: RequestState) -> None:
        control = self.step.control
        if state.kind is BE:
            self.step.best_effort.note_end(state)
            if control is not None and control.deadlines is not None:
                control.deadlines.note_end(state)
        elif control is not None:
            control.on_end(state)

    def admittable_per_s(self, now_s: float) -> dict[str, float]:
        control = self.step.control
        return control.admittable_per_s(now_s, self.begin_s(now_s)) if control is not None else {}

    def to_preempt(self, request: Request, slo: SLO, waited_s: float, now_s: float) -> frozenset[str]:
        """Let rows of lower classes leave the running step for a request that is late otherwise (omniserve 6)."""
        control, deferral = self.step.control, self.step.deferral
        if control is None or deferral is None:
            return frozenset()
        required_s = math.inf
        if slo.ttft_s is not None:
            required_s = (1 - max(TTFT_HEADROOM, control.margin)) * slo.ttft_s - waited_s
        return deferral.to_preempt(request, required_s, now_s)
