"""RequestScheduler: what a policy works with. Subclass it and write ``schedule``."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from omniserve.kv.base import Tier
from omniserve.plan import KVMove, PiggybackEntry, PiggybackJoin, StepPlan
from omniserve.request import ServiceClass
from omniserve.sched.batch import Batch
from omniserve.sched.lifecycle import RequestLifecycle
from omniserve.sched.state import Phase, RequestQueue, RequestState

LS, BE = ServiceClass.LS, ServiceClass.BE


class RequestScheduler(RequestLifecycle):
    """The tools of a policy: let requests into a batch, make room for them, close the plan."""

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
            victim = self.youngest_victim(batch, state, victims)
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

    def youngest_victim(
        self, batch: Batch, state: RequestState, classes: Iterable[ServiceClass]
    ) -> RequestState | None:
        """Return whom ``run_or_preempt`` would preempt for ``state``; None if nobody is left."""
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

    def blocks_for(self, state: RequestState) -> int:
        """Return how many blocks all known tokens of a request need."""
        return -(-state.num_tokens // self.limits.block_size)

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


def seat_bucket(count: int, largest: int) -> int:
    """Return P for ``count`` rows: 0, or the smallest power of two that holds them, at most ``largest``."""
    return min(1 << (count - 1).bit_length(), largest) if count else 0
