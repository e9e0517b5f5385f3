"""Policies that the papers compare theirs with. They bound no step's time, reject no request and use no latency model.

Kinds are LS and BE, classes the users' names for them. As everywhere in this engine, the limit on requests does not
count BE requests against LS ones.
"""

from __future__ import annotations

import itertools

from omniserve.core.plan import Bound, StepPlan
from omniserve.core.request import ServiceClass
from omniserve.sched.batch import Batch
from omniserve.sched.disciplines import admit_waiting, run_admitted, run_by_arrival, runnable
from omniserve.sched.host_rows import HostRows
from omniserve.sched.options import LlumnixOptions
from omniserve.sched.policy import Policy
from omniserve.sched.request_queue import by_arrival
from omniserve.sched.state import BE, LS, Phase, RequestState
from omniserve.sched.tier_moves import TierMoves


class FCFSPolicy(Policy):
    """Arrival order, whatever the class (vLLM's default policy).

    Continuous batching with chunked prefill; the youngest request is recomputed when memory is short.
    """

    def schedule(self, now_s: float) -> StepPlan:
        batch, view = self.new_batch(now_s), self.view
        preemptions = view.num_preemptions
        run_by_arrival(batch, view, view.device)
        if view.num_preemptions == preemptions:
            for state in by_arrival(view.waiting.values()):
                if batch.admit(state) is not None:
                    break
        return batch.plan()


class SarathiPolicy(Policy):
    """LS first, chunked prefill under a fixed token budget, BE fills the rest (the papers' Sarathi-P).

    Decodes come before prefills. BE gives way, by recomputing, when memory is short.

    Paper: omniserve 5.1.3, conserve 6.1 (Sarathi-Preemptive).
    """

    def schedule(self, now_s: float) -> StepPlan:
        batch = self.new_batch(now_s)
        run_admitted(batch, self.view, LS, victims=(BE, LS))
        admit_waiting(batch, self.view, LS, victims=(BE,))
        run_admitted(batch, self.view, BE, victims=(BE,))
        if not self.view.waiting[LS]:  # a BE prompt must not take the memory that an LS one waits for
            admit_waiting(batch, self.view, BE)
        return batch.plan()


class OnlineOnlyPolicy(Policy):
    """LS alone, decodes before prefills, under a fixed token budget; BE while no LS request is unfinished.

    Paper: conserve 6.1, "Online-Only (Latency Optimal)": vLLM that is given the online requests alone, for the best
    latency there can be. Departure: an engine that was given BE requests must end them, so here they have the time in
    which there is no LS request at all. An LS request then waits at most for the step that runs as it comes, and for
    nothing after it: what BE requests hold is theirs only until an LS one needs it. For the paper's own numbers, send
    none of them.
    """

    def schedule(self, now_s: float) -> StepPlan:
        batch, view = self.new_batch(now_s), self.view
        kind, victims = (LS, (BE, LS)) if view.device[LS] or view.waiting[LS] else (BE, (BE,))
        run_admitted(batch, view, kind, victims=victims)
        admit_waiting(batch, view, kind, victims=(BE,) if kind is LS else ())
        return batch.plan()


class PriorityPolicy(Policy):
    """vLLM's priority policy, with classes for priorities.

    What vLLM (v1) does, and this class with it: requests that hold KV are served before any that wait; those that wait
    are admitted by (priority, arrival), and stop at the first that lacks memory, tokens or room. Admission never
    preempts, so an LS request waits for BE requests that run. Only a running request that finds no block for its next
    token preempts: the running request that is last by (priority, arrival), perhaps itself, is recomputed. A step that
    preempts a request admits none. Prefill is chunked, and prompts and decodes share one token budget.

    Departures: running requests take tokens by (class, arrival), where vLLM keeps the order of their admission, so here
    an LS decode is never left out of a full step for a BE one. Kinds count only through the order of the classes.
    """

    def schedule(self, now_s: float) -> StepPlan:
        batch, view = self.new_batch(now_s), self.view
        preemptions = view.num_preemptions
        for kind, victims in ((LS, (BE, LS)), (BE, (BE,))):  # classes of kind LS come before those of kind BE
            for state in view.device[kind]:
                if state.phase is Phase.DEVICE:
                    batch.run_or_preempt(state, victims)
        if view.num_preemptions == preemptions and admit_waiting(batch, view, LS) is None:
            admit_waiting(batch, view, BE)
        return batch.plan()


class NonPreemptivePolicy(Policy):
    """Running requests in the order of admission, then waiting LS, then waiting BE, under a fixed token budget.

    Paper: conserve 6.1, "Non-Preemptive (Throughput Optimal)": online requests go before offline ones, which fill what
    is left of a chunked prefill's fixed budget, and those that run are not preempted when online ones arrive. As in
    vLLM, which the paper built it on, running requests get tokens and memory before waiting ones, in the order of
    admission. So an LS prompt waits until BE requests leave it both: its latency pays for their throughput.

    Departures: the paper does not say which request is preempted when running ones outgrow the memory together. Here,
    as in vLLM without priorities, it is the one that was admitted last, LS or BE.
    """

    def set_up(self) -> None:
        self._running: list[RequestState] = []
        """Running requests in the order of admission; those that ended or were preempted leave it as the next step
        begins."""

    def schedule(self, now_s: float) -> StepPlan:
        batch, view = self.new_batch(now_s), self.view
        preemptions = view.num_preemptions
        self._running = [state for state in self._running if state.phase is Phase.DEVICE]
        for state in [state for state in self._running if state not in view.hidden]:
            while state.phase is Phase.DEVICE and batch.add(state) is Bound.MEMORY:
                last = next(last for last in reversed(self._running) if last.phase is Phase.DEVICE)
                if last in view.pinned:
                    break  # it gives way when it is not any more
                batch.preempt(last)
        if view.num_preemptions == preemptions:
            known = {state.request_id for state in self._running}
            if admit_waiting(batch, view, LS) is None:
                admit_waiting(batch, view, BE)
            on_device = itertools.chain(view.device[LS], view.device[BE])
            self._running += [state for state in on_device if state.request_id not in known]
        return batch.plan()


class RoundRobinPolicy(Policy):
    """A step of LS requests, then a step of BE requests, each in arrival order.

    Paper: bros 2.2 and 7.1 (the RR baseline): two FCFS queues, served in turn, iteration by iteration. A kind without
    requests leaves its turn to the other, so no step is empty while there is a request.

    Departures: prefill is chunked under the step's token budget. The paper does not say how the queues share memory:
    here it goes by arrival, whatever the class. If a request finds no block for its next token, the youngest of all is
    recomputed, and a request is not admitted past an older one of the other kind that lacks memory: small requests of
    one kind would otherwise take, turn by turn, the memory that a long prompt of the other waits for. Classes of one
    kind count as one.
    """

    def set_up(self) -> None:
        self._turn = LS
        self._lacks_memory: dict[ServiceClass, RequestState | None] = {LS: None, BE: None}

    def schedule(self, now_s: float) -> StepPlan:
        batch = self.new_batch(now_s)
        first, second = (LS, BE) if self._turn is LS else (BE, LS)
        kind = next((kind for kind in (first, second) if self._serve(batch, kind)), second)
        self._turn = BE if kind is LS else LS
        return batch.plan()

    def _serve(self, batch: Batch, kind: ServiceClass) -> bool:
        """Put the requests of one kind into a batch; return whether it has any."""
        preemptions = self.view.num_preemptions
        run_by_arrival(batch, self.view, [kind])
        if self.view.num_preemptions == preemptions:
            self._admit(batch, kind)
        return bool(batch.chunks)

    def _admit(self, batch: Batch, kind: ServiceClass) -> None:
        other = self._lacks_memory[BE if kind is LS else LS]
        self._lacks_memory[kind] = None
        for state in by_arrival([self.view.waiting[kind]]):
            if other is not None and other.phase is Phase.WAITING and other.order < state.order:
                return
            refused_by = batch.admit(state)
            if refused_by is Bound.MEMORY:
                self._lacks_memory[kind] = state
            if refused_by is not None:
                return


class LlumnixPolicy(Policy):
    """Part of the KV memory is kept for LS; BE requests that find none decode on the host tier.

    LS, then BE beside the LS reserve, decodes before prefills, then all piggyback rows that find a seat.

    Paper: omniserve 2.1 and 5.1.3, baseline A: Llumnix on the GPU, a vLLM on the CPUs for the BE requests that it
    cannot accommodate. Performance is isolated by memory alone: BE requests leave ``ls_reserve_blocks`` free, LS ones
    take them and then the memory of BE requests. With ``headroom_fraction`` BE requests hold at most the rest of the
    device blocks, however many LS ones use (2.3: the KV cache usage of BE services is limited). A BE request without
    another one beside it may go beyond that, as one that is larger would never run.

    Departures: this engine has no dense modules on the CPU, so an overflowed request is prefilled on the device and
    only its decode attention is on the host tier; its rows join the device's steps, as many as find a seat, lowest
    layer first. A BE prompt that found no memory therefore has the youngest BE decodes move out in the next step. A
    request that moved stays there to its end, as one that was sent to the other vLLM does. Llumnix's migration between
    instances has no place on one device. Without a host tier BE requests wait, or are recomputed.
    """

    options_type = LlumnixOptions
    options: LlumnixOptions
    offloads = True

    def set_up(self) -> None:
        self._moves = TierMoves(self.view, self.options, self.forecast, reserve=self._reserve)
        self._max_rows = self.options.most_rows(self.limits)
        self._headroom = int(self.options.headroom_fraction * self.memory.num_device_blocks)
        self._headroom_left = 0
        """Device blocks of the headroom that LS requests do not hold in this step."""
        self._without_memory: RequestState | None = None
        """The BE prompt for which the last step had no memory."""

    def schedule(self, now_s: float) -> StepPlan:
        batch, view = self.new_batch(now_s), self.view
        run_admitted(batch, view, LS, victims=(BE, LS))
        self._admit_ls(batch)
        held = sum(map(self.memory.num_held, view.device[LS]))
        self._headroom_left = max(0, self._headroom - held)
        lacking, self._without_memory = self._without_memory, None
        if lacking is not None and lacking.phase is Phase.WAITING and not view.waiting[LS]:
            self._moves.make_room_for_be(batch, lacking)
        for state in runnable(batch, view, BE):
            self._moves.run_or_offload(batch, state)
        if not view.waiting[LS]:  # a BE prompt must not take the memory that an LS one waits for
            self._admit_be(batch)
        seats, max_rows = self.limits.config.max_piggyback_seats, self._max_rows
        max_entries = min(seats, max_rows) if view.host_is_up else 0
        entries = batch.plan_entries(max_entries)
        # No step is begun for results that may not come.
        may_wait = bool(batch.chunks or entries or any(self.host.num_ready))
        expected = self.host.expected(has_device_rows=bool(batch.chunks)) if may_wait else None
        joins = self.host.plan_joins(max_rows - len(entries), seats, expected)
        return batch.plan(host_rows=HostRows(entries=entries, joins=joins, max_rows=max_rows))

    def _admit_ls(self, batch: Batch) -> None:
        for state in self.view.waiting[LS]:
            refused_by = batch.admit(state)
            if refused_by is Bound.MEMORY:
                self._moves.make_room_for_ls(batch, state)
                refused_by = batch.admit(state)
            if refused_by is not None:
                return

    def _admit_be(self, batch: Batch) -> None:
        for state in self.view.waiting[BE]:
            refused_by = batch.admit(state, reserve_blocks=self._reserve(state))
            if refused_by is not None:
                self._without_memory = state if refused_by is Bound.MEMORY else None
                return

    def _reserve(self, state: RequestState) -> int:
        """Return the device blocks that a BE request leaves free: the LS reserve, and the headroom that is unused."""
        reserve = self.memory.reserve_for_ls(state)
        has_others = self.view.num_moving > 0 or any(other is not state for other in self.view.device[BE])
        return max(reserve, self._headroom_left) if has_others else reserve
