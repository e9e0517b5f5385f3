"""RequestScheduler: what a policy works with. Subclass it and write ``schedule``."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from omniserve.core.plan import Bound, Decision, KVMove, MoveDirection, PiggybackEntry, PiggybackJoin, StepPlan
from omniserve.core.request import ServiceClass
from omniserve.kv.base import Tier
from omniserve.sched.batch import Batch
from omniserve.sched.lifecycle import RequestLifecycle
from omniserve.sched.piggyback import seat_bucket
from omniserve.sched.state import Phase, RequestQueue, RequestState

LS, BE = ServiceClass.LS, ServiceClass.BE


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRows:
    """The rows of a step whose attention is the host tier's; see StepPlan."""

    entries: Sequence[PiggybackEntry] = ()
    joins: Sequence[PiggybackJoin] = ()
    pipelined: Sequence[PiggybackEntry | PiggybackJoin] = ()


class RequestScheduler(RequestLifecycle):
    """The tools of a policy: let requests into a batch, make room for them, close the plan."""

    def admit(
        self,
        batch: Batch,
        state: RequestState,
        *,
        bound_s: float = math.inf,
        min_tokens: int = 0,
        reserve_blocks: int = 0,
    ) -> bool:
        """Schedule a WAITING request's first chunk; False if budget, bound, blocks or the request limit keep it out.

        One that has to be restored first takes its blocks and nothing of the batch: it is MOVING then, and on the
        device when the copy is done.
        """
        if self.num_admitted(state.kind) >= self.limits.max_num_requests:
            batch.refused_by = Bound.REQUESTS
            return False
        if self.needs_restore(state):
            if not self.start_restore(state, reserve_blocks=reserve_blocks):
                batch.refused_by = Bound.MEMORY
                return False
            return True
        state.num_computed_tokens = num_kept = self.kv.num_kept_tokens(state.request_id, Tier.DEVICE)
        if not batch.add(state, bound_s=bound_s, min_tokens=min_tokens, reserve_blocks=reserve_blocks):
            state.num_computed_tokens = 0
            return False
        self._counters["resumed_tokens"] += num_kept
        self.waiting[state.kind].remove(state)
        state.phase = Phase.DEVICE
        state.blocked_since_s = None
        self.device[state.kind].add(state)
        return True

    def admit_waiting(self, batch: Batch, kind: ServiceClass, *, victims: Iterable[ServiceClass] = ()) -> bool:
        """Admit waiting requests of one kind in order, until one is kept out.

        Args:
            victims: Kinds whose requests are recomputed if that makes room for one.

        Returns:
            False if one was kept out: ``refused_by`` says why.
        """
        for state in self.waiting[kind]:
            if self.admit(batch, state):
                continue
            if batch.refused_by is not Bound.MEMORY or not self.make_room(self.blocks_for(state), batch, victims):
                return False
            if not self.admit(batch, state):
                return False
        return True

    def run_admitted(self, batch: Batch, kind: ServiceClass, *, victims: Iterable[ServiceClass]) -> None:
        """Schedule the DEVICE requests of one kind, decodes before prefills; see ``run_or_preempt``."""
        for state in self.runnable(batch, kind):
            self.run_or_preempt(batch, state, victims)

    def runnable(self, batch: Batch, kind: ServiceClass) -> Iterator[RequestState]:
        """Yield the DEVICE requests of one kind that the batch lacks, decodes before prefills.

        Those before a request may have taken its memory, so each is looked at only when it is its turn.
        """
        for decodes in (True, False):
            for state in self.device[kind]:
                if state.phase is Phase.DEVICE and state.decodes is decodes and state not in batch:
                    yield state

    def num_admitted(self, kind: ServiceClass) -> int:
        """Return how many requests, on the device or on their way to it, count against the limit of this kind.

        Those on their way to the host do not; one that fails to get there comes on top.
        """
        # BE requests never use up the seats of LS ones.
        kinds = (LS,) if kind is LS else (LS, BE)
        incoming = (state for state, move in self.moving.values() if move.direction is MoveDirection.TO_DEVICE)
        return sum(state.kind in kinds for state in incoming) + sum(len(self.device[kind]) for kind in kinds)

    def run_or_preempt(
        self,
        batch: Batch,
        state: RequestState,
        victims: Iterable[ServiceClass],
        *,
        bound_s: float = math.inf,
        min_tokens: int = 0,
        let_go: Callable[[RequestState], None] | None = None,
    ) -> bool:
        """Schedule a DEVICE request; if blocks are short, others give way (youngest first) until it fits.

        Args:
            victims: Kinds that may lose a request, first to last; of the request's own kind only those behind it do.
            let_go: Takes the memory of who gives way; None: ``preempt``.

        Returns:
            False if it is not scheduled: the budget or the bound is used up, or the request itself had to give way.
        """
        let_go = let_go or self.preempt
        while not batch.add(state, bound_s=bound_s, min_tokens=min_tokens):
            if batch.refused_by is not Bound.MEMORY:
                return False
            victim = self.youngest_victim(batch, state, victims)
            let_go(victim or state)
            if victim is None:
                return False
        return True

    def run_or_preempt_youngest(self, batch: Batch, state: RequestState) -> None:
        """Schedule a DEVICE request; if blocks are short, recompute the youngest of all until it fits or is the one.

        To be called in arrival order: the youngest is then never in the batch already.
        """
        while state.phase is Phase.DEVICE and not batch.add(state):
            if batch.refused_by is not Bound.MEMORY:
                return
            self.preempt(max(itertools.chain(*self.device.values()), key=lambda s: s.order))

    def make_room(self, num_blocks: int, batch: Batch, victims: Iterable[ServiceClass]) -> bool:
        """Recompute requests of the given kinds, last of a queue first, until ``num_blocks`` device blocks are free.

        Returns:
            False, and nobody was preempted, if even all of them together would not free enough.
        """
        shortage = num_blocks - self.kv.num_free(Tier.DEVICE)
        chosen = []
        for kind in victims:
            for victim in reversed(self.device[kind]):
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

    def youngest_victim(self, batch: Batch, state: RequestState, kinds: Iterable[ServiceClass]) -> RequestState | None:
        """Return whom ``run_or_preempt`` would preempt for ``state``; None if nobody is left."""
        for kind in kinds:
            for victim in reversed(self.device[kind]):
                same_kind = victim.kind is state.kind
                if victim in batch or victim is state or (same_kind and victim.place < state.place):
                    continue
                return victim
        return None

    def in_arrival_order(self, queues: Iterable[RequestQueue]) -> Iterable[RequestState]:
        """Merge queues, oldest request first, whatever its class."""
        return sorted(itertools.chain(*queues), key=lambda state: state.order)

    def blocks_for(self, state: RequestState) -> int:
        """Return how many blocks all known tokens of a request need."""
        return -(-state.num_tokens // self.limits.block_size)

    def reserve_for_ls(self, state: RequestState) -> int:
        """Return what a BE request leaves free: no block if it has the device to itself, or it might never run."""
        others = len(self.device[LS]) + len(self.waiting[LS]) + sum(s is not state for s in self.device[BE])
        return self.limits.ls_reserve_blocks if others else 0

    def host_blocks_for(self, state: RequestState) -> tuple[int, ...] | None:
        """Return blocks for a resident's newest token; if the host is full, the youngest resident is recomputed."""
        blocks = self.kv.allocate(state.request_id, state.num_tokens)
        if blocks is None and next(reversed(self.residents.queue)) is state:
            self.preempt(state)
        return blocks

    def begin_s(self, now_s: float) -> float:
        """Return when a step that is planned now begins: when the one in flight ends."""
        return max(now_s, self.busy_until_s)

    @property
    def max_piggyback_rows(self) -> int:
        """Most piggyback rows of a step."""
        rows = self.limits.max_piggyback_rows
        return rows if rows is not None else self.limits.max_piggyback_slots * (self.limits.num_layers + 1)

    @property
    def host_headroom(self) -> int:
        """Host blocks for residents to grow into, so that a full host tier does not drop what it just received."""
        return 2 * (self.residents.num_slots_used + 1) if self.offloads else 0

    def _prefetch(self) -> None:
        """Restore the first BE request in line while it waits for its turn, if memory is left. Paper: conserve 4.4."""
        first = next(iter(self.waiting[BE]), None)
        if first is None or len(self.waiting[LS]) or self.num_admitted(BE) >= self.limits.max_num_requests:
            return
        if self.needs_restore(first):
            # Each device request may need one more block soon.
            margin = self.limits.ls_reserve_blocks + sum(map(len, self.device.values()))
            self.start_restore(first, reserve_blocks=margin)

    def make_plan(
        self,
        batch: Batch,
        now_s: float,
        *,
        host_rows: HostRows = HostRows(),
        moves: Sequence[KVMove] = (),
        preemptible: frozenset[str] = frozenset(),
        decision: Decision | None = None,
    ) -> StepPlan:
        """Close a batch into a StepPlan with the smallest bucket of seats that holds its piggyback rows.

        Restores and checkpoints are added to the moves.
        """
        for chunk in batch.chunks:
            state = self.states[chunk.request_id]
            if state.first_scheduled_s is None:
                state.first_scheduled_s = now_s
        for state in self.residents.take_changed():
            state.note_slot(now_s)
        per_layer = Counter(join.layer for join in host_rows.joins)
        most = max(len(host_rows.entries), max(per_layer.values(), default=0))
        self._prefetch()
        restores, self._restores = self._restores, []
        copies: list[KVMove] = []
        if self.checkpoints is not None and self.host_is_up:
            copies = self.checkpoints.plan(self.device[BE], reserve_blocks=self.host_headroom)
        cancels, self._cancels = tuple(self._cancels), []
        return StepPlan(
            step_id=next(self._step_ids),
            chunks=batch.chunks,
            entries=tuple(host_rows.entries),
            joins=tuple(host_rows.joins),
            num_piggyback_slots=seat_bucket(most, self.limits.max_piggyback_slots),
            relocations=self.kv.take_relocations(),
            moves=(*moves, *restores, *copies),
            pipelined=tuple(host_rows.pipelined),
            preemptible=preemptible,
            cancels=cancels,
            decision=decision,
        )
