"""RequestScheduler: everything of a scheduler that is not policy (queues, tokens, ends, moves, host results).

A policy subclasses it and writes ``schedule``.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from omniserve.kv.base import KVManager, Tier
from omniserve.plan import (
    HostEvent,
    HostEventKind,
    KVMove,
    MoveDirection,
    PiggybackEntry,
    PiggybackJoin,
    SampledToken,
    StepOutput,
    StepPlan,
)
from omniserve.request import SLO, FinishReason, Request, RequestOutput, ServiceClass
from omniserve.sched.base import Scheduler, SchedulerLimits, SchedulerStats
from omniserve.sched.batch import Batch
from omniserve.sched.residents import HostResidents
from omniserve.sched.state import Phase, RequestQueue, RequestState

logger = logging.getLogger(__name__)

LS, BE = ServiceClass.LS, ServiceClass.BE


class RequestScheduler(Scheduler):
    """Book-keeping shared by all policies.

    Invariants, between calls: a state is in exactly one of ``waiting[class]``, ``device[class]``, ``residents.queue``
    and ``moving``, by its phase; a WAITING state holds no block; only HOST and MOVING states hold a slot.
    """

    def __init__(self, *, limits: SchedulerLimits, kv: KVManager) -> None:
        self.limits = limits
        self.kv = kv
        self.states: dict[str, RequestState] = {}
        self.waiting = {c: RequestQueue() for c in ServiceClass}
        self.device = {c: RequestQueue() for c in ServiceClass}
        self.residents = HostResidents(
            num_slots=limits.num_host_slots,
            num_layers=limits.num_layers,
            max_seats=limits.max_piggyback_slots,
        )
        self.moving: dict[int, tuple[RequestState, KVMove]] = {}
        self.abandoned_moves: set[int] = set()
        self.draining: dict[int, RequestState] = {}
        self.host_is_up = limits.num_host_slots > 0
        self._cancels: list[int] = []
        self._orders = itertools.count()
        self._step_ids = itertools.count()
        self._counters: Counter[str] = Counter()
        self._output_tokens: Counter[ServiceClass] = Counter()
        self._prompt_tokens: Counter[ServiceClass] = Counter()

    # -- arrivals and ends ---------------------------------------------------------------------------------------

    def add(self, request_id: str, request: Request, slo: SLO, now_s: float) -> None:
        state = RequestState(
            request_id=request_id,
            request=request,
            slo=slo,
            order=next(self._orders),
            arrival_s=now_s,
            token_ids=list(request.prompt_token_ids),
        )
        self.states[request_id] = state
        self.waiting[state.service_class].add(state)

    def abort(self, request_id: str, now_s: float) -> RequestOutput | None:
        state = self.states.get(request_id)
        if state is None:
            return None
        self._end(state)
        return state.output(reason=FinishReason.ABORT, now_s=now_s)

    def _end(self, state: RequestState) -> None:
        """Forget a request; its KV is freed now, or when the copy or host task that uses it is over."""
        del self.states[state.request_id]
        phase, state.phase = state.phase, Phase.FINISHED
        if phase is Phase.WAITING:
            self.waiting[state.service_class].remove(state)
        elif phase is Phase.DEVICE:
            self.device[state.service_class].remove(state)
            self.kv.free(state.request_id)
        elif phase is Phase.MOVING:
            state.phase = Phase.DRAINING
        elif phase is Phase.HOST:
            self.residents.queue.remove(state)
            if state.away is not None and not state.away.ready:
                state.phase = Phase.DRAINING
                self.draining[state.slot] = state
                self._cancels.append(state.slot)
            else:
                self._leave_host(state)

    def _leave_host(self, state: RequestState) -> None:
        self.residents.release_slot(state)
        self.kv.free(state.request_id)

    # -- what happens beside the steps ---------------------------------------------------------------------------

    def notify(self, events: Sequence[HostEvent]) -> None:
        for event in events:
            if event.kind in (HostEventKind.MOVE_DONE, HostEventKind.MOVE_FAILED):
                self._finish_move(event)
            elif event.kind is HostEventKind.TIER_DOWN:
                self.host_is_up = False
                for state in self.residents.queue:
                    if state.away is None:
                        self.preempt(state)
            else:
                self._finish_attention(event)

    def _finish_attention(self, event: HostEvent) -> None:
        ended = self.draining.get(event.slot)
        if ended is not None and ended.epoch == event.epoch:
            del self.draining[event.slot]
            ended.phase = Phase.FINISHED
            self._leave_host(ended)
            return
        state = self.residents.on_event(event)
        if state is None:
            logger.warning("dropped a stale host result: %s", event)
        elif event.kind is HostEventKind.ATTENTION_FAILED:
            self.preempt(state)

    def _finish_move(self, event: HostEvent) -> None:
        succeeded = event.kind is HostEventKind.MOVE_DONE
        self.kv.finish_move(event.move_id, succeeded=succeeded)
        if event.move_id in self.abandoned_moves:
            self.abandoned_moves.remove(event.move_id)
            return
        state, _ = self.moving.pop(event.move_id)
        on_host = self.kv.tier(state.request_id) is Tier.HOST
        if state.phase is Phase.DRAINING:
            state.phase = Phase.FINISHED
            self._leave_host(state)
            return
        if succeeded:
            self._counters["swaps_out" if on_host else "swaps_in"] += 1
        if on_host:
            state.phase = Phase.HOST
            self.residents.queue.add(state)
            if not self.host_is_up:
                self.preempt(state)
        else:
            self.residents.release_slot(state)
            state.phase = Phase.DEVICE
            self.device[state.service_class].add(state)

    # -- what policies do with requests --------------------------------------------------------------------------

    def preempt(self, state: RequestState) -> None:
        """Drop a request's KV; it waits, in arrival order, to be recomputed. Its tokens are kept."""
        if state.phase is Phase.DEVICE:
            self.device[state.service_class].remove(state)
            self.kv.free(state.request_id)
        elif state.phase is Phase.HOST:
            self.residents.queue.remove(state)
            self._leave_host(state)
        else:
            raise RuntimeError(f"request {state.request_id} cannot be preempted while {state.phase}")
        self._requeue(state)

    def _requeue(self, state: RequestState) -> None:
        self._counters["preemptions"] += 1
        state.num_computed_tokens = 0
        state.phase = Phase.WAITING
        self.waiting[state.service_class].add(state)

    def start_move(self, state: RequestState, direction: MoveDirection, *, reserve_blocks: int = 0) -> KVMove | None:
        """Begin to move a DEVICE or HOST request that stands at a token boundary; None if there is no room."""
        assert state.decodes and state.away is None, f"{state.request_id} is not at a token boundary"
        to_host = direction is MoveDirection.TO_HOST
        if to_host and (not self.host_is_up or self.residents.num_free_slots == 0):
            return None
        move = self.kv.start_move(state.request_id, direction, reserve_blocks=reserve_blocks)
        if move is None:
            return None
        if to_host:
            self.device[state.service_class].remove(state)
            self.residents.take_slot(state)
        else:
            self.residents.queue.remove(state)
        state.phase = Phase.MOVING
        self.moving[move.move_id] = (state, move)
        return move

    def abandon_move(self, move_id: int) -> None:
        """Take the device memory back from a request that is moving to the host; it waits to be recomputed."""
        state, _ = self.moving.pop(move_id)
        self.kv.abandon_move(move_id)
        self.abandoned_moves.add(move_id)
        self.residents.release_slot(state)
        if state.phase is Phase.DRAINING:
            state.phase = Phase.FINISHED
        else:
            self._requeue(state)

    def admit(self, batch: Batch, state: RequestState, *, reserve_blocks: int = 0) -> bool:
        """Schedule a WAITING request's first chunk; False if budget, blocks or the request limit do not let it in."""
        # BE requests never use up the seats of LS ones.
        classes = (LS,) if state.service_class is LS else (LS, BE)
        num_admitted = sum(len(self.device[c]) for c in classes)
        if num_admitted >= self.limits.max_num_requests or not batch.add(state, reserve_blocks=reserve_blocks):
            return False
        self.waiting[state.service_class].remove(state)
        state.phase = Phase.DEVICE
        state.blocked_since_s = None
        self.device[state.service_class].add(state)
        return True

    def run_or_preempt(self, batch: Batch, state: RequestState, victims: Iterable[ServiceClass]) -> bool:
        """Schedule a DEVICE request; if blocks are short, recompute others (youngest first) until it fits.

        Args:
            victims: Classes that may lose a request, first to last; of the request's own class only younger ones do.

        Returns:
            False if it is not scheduled: the budget is used up, or the request itself had to give way.
        """
        if batch.tokens_left == 0:
            return False
        while not batch.add(state):
            victim = self._youngest_victim(batch, state, victims)
            if victim is None:
                self.preempt(state)
                return False
            self.preempt(victim)
        return True

    def make_room(self, num_blocks: int, batch: Batch, victims: Iterable[ServiceClass]) -> bool:
        """Recompute requests of the given classes, youngest first, until ``num_blocks`` device blocks are free.

        Returns:
            False, and nobody was preempted, if even all of them together would not free enough.
        """
        shortage = num_blocks - self.kv.num_free(Tier.DEVICE)
        chosen = []
        for service_class in victims:
            for victim in reversed(self.device[service_class]):
                if shortage <= 0:
                    break
                if victim not in batch:
                    chosen.append(victim)
                    shortage -= self.kv.num_blocks(victim.request_id)
        if shortage > 0:
            return False
        for victim in chosen:
            self.preempt(victim)
        return True

    def _youngest_victim(
        self, batch: Batch, state: RequestState, classes: Iterable[ServiceClass]
    ) -> RequestState | None:
        for service_class in classes:
            for victim in reversed(self.device[service_class]):
                same_class = victim.service_class is state.service_class
                if victim in batch or victim is state or (same_class and victim.order < state.order):
                    continue
                return victim
        return None

    def in_arrival_order(self, queues: Iterable[RequestQueue]) -> Iterable[RequestState]:
        """Merge queues, oldest request first."""
        return heapq.merge(*queues, key=lambda state: state.order)

    @property
    def num_preemptions(self) -> int:
        return self._counters["preemptions"]

    def blocks_for(self, state: RequestState) -> int:
        """Return how many blocks all known tokens of a request need."""
        return -(-state.num_tokens // self.limits.block_size)

    # -- plan and result -----------------------------------------------------------------------------------------

    def make_plan(
        self,
        batch: Batch,
        now_s: float,
        *,
        entries: Sequence[PiggybackEntry] = (),
        joins: Sequence[PiggybackJoin] = (),
        moves: Sequence[KVMove] = (),
    ) -> StepPlan:
        """Close a batch into a StepPlan with the smallest bucket of seats that holds its piggyback rows."""
        for request_id in itertools.chain((c.request_id for c in batch.chunks), (e.request_id for e in entries)):
            state = self.states[request_id]
            if state.first_scheduled_s is None:
                state.first_scheduled_s = now_s
        per_layer = Counter(join.layer for join in joins)
        most = max(len(entries), max(per_layer.values(), default=0))
        cancels, self._cancels = tuple(self._cancels), []
        return StepPlan(
            step_id=next(self._step_ids),
            chunks=batch.chunks,
            entries=tuple(entries),
            joins=tuple(joins),
            num_piggyback_slots=seat_bucket(most, self.limits.max_piggyback_slots),
            moves=tuple(moves),
            cancels=cancels,
        )

    def update(self, plan: StepPlan, output: StepOutput, now_s: float) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        for chunk in plan.chunks:
            state = self.states[chunk.request_id]
            state.num_computed_tokens = chunk.start + len(chunk.token_ids)
            if chunk.samples:
                self._append(state, output, now_s, outputs)
        for entry in plan.entries:
            self.residents.enter(self.states[entry.request_id], entry.position)
        for join in plan.joins:
            state = self.states[join.request_id]
            if self.residents.advance(state):
                state.num_computed_tokens += 1
                state.num_host_tokens += 1
                self._counters["host_output_tokens"] += 1
                self._append(state, output, now_s, outputs)
        return outputs

    def _append(self, state: RequestState, output: StepOutput, now_s: float, outputs: list[RequestOutput]) -> None:
        if (message := output.failed.get(state.request_id)) is not None:
            logger.error("request %s failed: %s", state.request_id, message)
            self._end(state)
            outputs.append(state.output(reason=FinishReason.ERROR, stop_reason=message, now_s=now_s))
            return
        sampled: SampledToken = output.tokens[state.request_id]
        state.token_ids.append(sampled.token_id)
        if state.first_token_s is None:
            state.first_token_s = now_s
            self._prompt_tokens[state.service_class] += state.num_prompt_tokens
        self._output_tokens[state.service_class] += 1
        reason, stop_reason = state.finish_reason(
            sampled.token_id, self.limits.eos_token_ids, self.limits.max_model_len
        )
        if reason is not None:
            self._end(state)
        outputs.append(
            state.output((sampled.token_id,), sampled.logprob, reason=reason, stop_reason=stop_reason, now_s=now_s)
        )

    # -- what others ask -----------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        return bool(self.states or self.moving or self.abandoned_moves or self.draining)

    def stats(self) -> SchedulerStats:
        running = {c: len(self.device[c]) for c in ServiceClass}
        for state in itertools.chain(self.residents.queue, (state for state, _ in self.moving.values())):
            running[state.service_class] += 1
        return SchedulerStats(
            waiting={c: len(self.waiting[c]) for c in ServiceClass},
            running=running,
            host_requests=len(self.residents.queue),
            output_tokens=dict(self._output_tokens),
            prompt_tokens=dict(self._prompt_tokens),
            host_output_tokens=self._counters["host_output_tokens"],
            preemptions=self._counters["preemptions"],
            swaps_out=self._counters["swaps_out"],
            swaps_in=self._counters["swaps_in"],
        )

    def check_integrity(self) -> None:
        """Verify the class's invariants and the KV manager's; for tests and debugging.

        Raises:
            AssertionError: With what does not fit.
        """
        self.kv.check_integrity()
        for state in self.states.values():
            homes = {
                Phase.WAITING: state in self.waiting[state.service_class],
                Phase.DEVICE: state in self.device[state.service_class],
                Phase.HOST: state in self.residents.queue,
                Phase.MOVING: any(other is state for other, _ in self.moving.values()),
            }
            assert [phase for phase, home in homes.items() if home] == [state.phase], (state.request_id, homes)
            holds = self.kv.num_blocks(state.request_id)
            assert (holds == 0) == (state.phase is Phase.WAITING), (state.request_id, state.phase, holds)
            assert (state.slot >= 0) == (state.phase in (Phase.HOST, Phase.MOVING)), (state.request_id, state.slot)
        ended = [s for s, _ in self.moving.values() if s.phase is Phase.DRAINING] + list(self.draining.values())
        held = self.residents.num_slots_used
        on_host = sum(s.slot >= 0 for s in self.states.values()) + len(ended)
        assert held == on_host, f"{held} slots are taken, {on_host} requests hold one"


def seat_bucket(count: int, largest: int) -> int:
    """Return P for ``count`` rows: 0, or the smallest power of two that holds them, at most ``largest``."""
    return min(1 << (count - 1).bit_length(), largest) if count else 0
