"""Batch: the step that a policy puts together.

Prompts take all their blocks at their first chunk, so two half-prefilled prompts never wait for each other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from omniserve.core.plan import Bound, Decision, DeviceChunk, LeftOut, PiggybackEntry, PiggybackJoin, StepPlan
from omniserve.core.request import ServiceClass
from omniserve.core.work import KVMove, MoveDirection
from omniserve.kv.base import Tier
from omniserve.sched.request_table import RequestTable
from omniserve.sched.state import BE, LS, Phase, RequestState, by_arrival
from omniserve.sched.step_cost import StepCost, num_seats


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRows:
    """The rows of a step that the host tier attends for; see StepPlan."""

    entries: Sequence[PiggybackEntry] = ()
    joins: Sequence[PiggybackJoin] = ()
    joins_as_one: bool = False
    max_rows: int | None = None
    """Most entries and joins of the step, their drafts included; None: as many as find seats."""
    pipelined: Sequence[PiggybackEntry | PiggybackJoin] = ()
    hybrid: frozenset[str] = frozenset()
    left_out: tuple[LeftOut, ...] = ()
    """Rows of this kind that could have been in the step and are not."""


class Batch:
    """Collects chunks under a token budget and, with a latency model, a time bound; takes memory for them.

    Methods that let requests in return what keeps one out, or None.

    Args:
        cost: Is told every chunk; None: there is no latency model, and time bounds mean nothing.
        max_tokens: The step's token budget; None: that of the limits.
    """

    def __init__(
        self, requests: RequestTable, now_s: float, *, cost: StepCost | None = None, max_tokens: int | None = None
    ) -> None:
        self._requests = requests
        self._kv = requests.kv
        self._limits = requests.limits
        self._chunks: dict[str, DeviceChunk] = {}
        self._restores: list[KVMove] = []
        self._admitted: set[str] = set()
        self.now_s = now_s
        self.cost = cost
        self.tokens_left = requests.limits.config.max_num_batched_tokens if max_tokens is None else max_tokens
        self.moves: list[KVMove] = []
        """Moves between the tiers that the step starts."""

    def __contains__(self, state: RequestState) -> bool:
        return state.request_id in self._chunks

    @property
    def chunks(self) -> tuple[DeviceChunk, ...]:
        return tuple(self._chunks.values())

    def samples(self, state: RequestState) -> bool:
        """Return whether a request gets a new token from this step."""
        chunk = self._chunks.get(state.request_id)
        return chunk is not None and chunk.samples

    def end_of(self, state: RequestState) -> int:
        """Return how many of a request's tokens are computed after this step."""
        chunk = self._chunks.get(state.request_id)
        return state.num_computed_tokens if chunk is None else chunk.start + len(chunk.token_ids)

    # -- one request ---------------------------------------------------------------------------------------------

    def chunk_size(
        self, state: RequestState, *, bound_s: float = math.inf, min_tokens: int = 0
    ) -> tuple[int, Bound | None]:
        """Return how many of a request's tokens the step has time and tokens for; if none, also what it lacks.

        A chunk that left an earlier step goes on as it is; if it does not fit, the request forgets it and begins anew.
        Up to ``min_tokens`` are let in if the bound lets in none.
        """
        start = state.num_computed_tokens
        if state.phase is Phase.WAITING:
            start = start or self._requests.num_kept_tokens(state, Tier.DEVICE)
        count = min(state.num_tokens - start, self.tokens_left)
        if count <= 0:
            return 0, Bound.TOKENS
        if (halted := state.halted) is not None:
            fits = halted.num_tokens <= self.tokens_left
            if fits and self.cost is not None and bound_s < math.inf:
                samples = state.num_logits(halted.start, halted.num_tokens)
                fits = self.cost.seconds_with(halted.start, halted.num_tokens, samples=samples) <= bound_s
            if fits:
                return halted.num_tokens, None
            state.halted = None
        if self.cost is None or bound_s == math.inf:
            return count, None
        within = self.cost.largest_chunk(start, count, bound_s, samples=state.num_logits)
        count = within or min(count, min_tokens)
        return count, None if count else Bound.TIME

    def add(
        self, state: RequestState, *, bound_s: float = math.inf, min_tokens: int = 0, reserve_blocks: int = 0
    ) -> Bound | None:
        """Schedule the next uncomputed tokens of a request, as many as budget and bound let in.

        Blocks are taken for *all* known tokens at the first chunk: two half-prefilled prompts can then never wait for
        each other's memory. What is refused has changed nothing.
        """
        count, refused_by = self.chunk_size(state, bound_s=bound_s, min_tokens=min_tokens)
        if refused_by is not None:
            return refused_by
        blocks = self._requests.allocate(state, reserve_blocks=reserve_blocks)
        if blocks is None:
            return Bound.MEMORY
        start = state.num_computed_tokens
        self._chunks[state.request_id] = DeviceChunk(
            request_id=state.request_id,
            token_ids=tuple(state.token_ids[start : start + count]),
            start=start,
            block_ids=blocks,
            samples=start + count == state.num_tokens,
            is_reversed=self._requests.runs_from_right(state),
            from_layer=state.halted.layer if state.halted is not None else 0,
            scores=state.scores(start, count),
            state_slot=self._requests.state_slots.of(state),
        )
        self.tokens_left -= count
        if self.cost is not None:
            self.cost.add_chunk(start, count, samples=state.num_logits(start, count))
        if state.phase is Phase.DEVICE:
            self._requests.prefixes.publish_ahead(state, start + count)
        return None

    def admit(
        self, state: RequestState, *, bound_s: float = math.inf, min_tokens: int = 0, reserve_blocks: int = 0
    ) -> Bound | None:
        """Schedule a WAITING request's first chunk.

        One that has to be restored first takes its blocks and nothing of the batch: it is MOVING then, and on the
        device when the copy is done.
        """
        if self._requests.memory.is_full(state.kind):
            return Bound.REQUESTS
        if self._requests.needs_restore(state) and not self._is_computed_sooner(state, bound_s):
            return None if self._restore(state, reserve_blocks) else Bound.MEMORY
        state.num_computed_tokens = num_kept = self._requests.num_kept_tokens(state, Tier.DEVICE)
        refused_by = self.add(state, bound_s=bound_s, min_tokens=min_tokens, reserve_blocks=reserve_blocks)
        if refused_by is not None:
            state.num_computed_tokens = 0
            return refused_by
        if state.prefix is None or state.prefix.num_prompt_tokens is not None:  # it was preempted
            self._requests.counters["resumed_tokens"] += num_kept
        self._requests.admit(state)
        self._admitted.add(state.request_id)
        self._requests.prefixes.publish_ahead(state, self.end_of(state))
        return None

    def _is_computed_sooner(self, state: RequestState, bound_s: float) -> bool:
        """Tell whether an LS request has its first token sooner without what the host has of it.

        What is copied is there for the next step at the soonest. This one may become as long as ``bound_s``. What was
        computed elsewhere for it is not computed again: that is the time which was to be saved.
        """
        num_tokens = self._requests.prefixes.num_tokens_on_host(state)
        if state.kind is not LS or self.cost is None or not 0 < num_tokens <= self.tokens_left:
            return False
        if state.prefix is not None and state.prefix.was_computed_elsewhere:
            return False
        start, now_s = self._requests.num_kept_tokens(state, Tier.DEVICE), self.cost.seconds()
        longer_s = self.cost.seconds_with(start, num_tokens, samples=0) - now_s
        return longer_s < (bound_s if bound_s < math.inf else now_s)

    def run_or_preempt(
        self,
        state: RequestState,
        victims: Iterable[ServiceClass],
        *,
        bound_s: float = math.inf,
        min_tokens: int = 0,
        let_go: Callable[[RequestState], None] | None = None,
    ) -> Bound | None:
        """Schedule a DEVICE request; if blocks are short, others give way (youngest first) until it fits.

        If none is left that can, the request itself gives way; but it waits for one that is pinned.

        Args:
            victims: Kinds that may lose a request, first to last; of the request's own kind only those behind it do.
            let_go: Takes the memory of a request that gives way; None: it is preempted.
        """
        let_go = let_go or self._requests.preempt
        while (refused_by := self.add(state, bound_s=bound_s, min_tokens=min_tokens)) is Bound.MEMORY:
            victim = self.youngest_victim(state, victims)
            if victim in self._requests.pinned:
                break
            let_go(victim or state)
            if victim is None:
                break
        return refused_by

    # -- requests of a kind --------------------------------------------------------------------------------------

    def runnable(self, kind: ServiceClass) -> Iterator[RequestState]:
        """Yield the DEVICE requests of one kind that the batch lacks, decodes before prefills.

        Those before a request may have taken its memory, so each is looked at only when it is its turn.
        """
        for decodes in (True, False):
            for state in self._requests.device[kind]:
                if state.phase is Phase.DEVICE and state.decodes is decodes and state not in self:
                    yield state

    def run_admitted(self, kind: ServiceClass, *, victims: Iterable[ServiceClass]) -> None:
        """Schedule the DEVICE requests of one kind, decodes before prefills; see ``run_or_preempt``."""
        for state in self.runnable(kind):
            self.run_or_preempt(state, victims)

    def run_by_arrival(self, kinds: Iterable[ServiceClass]) -> None:
        """Schedule the DEVICE requests of some kinds, oldest first; if blocks are short, recompute the youngest of all.

        In arrival order the youngest is never in the batch already.
        """
        device = self._requests.device
        for state in by_arrival(device[kind] for kind in kinds):
            while state.phase is Phase.DEVICE and self.add(state) is Bound.MEMORY:
                youngest = max((s for queue in device.values() for s in queue.everyone()), key=lambda s: s.order)
                if youngest in self._requests.pinned:
                    return  # it gives way when it is not any more
                self._requests.preempt(youngest)

    def admit_waiting(self, kind: ServiceClass, *, victims: Iterable[ServiceClass] = ()) -> Bound | None:
        """Admit waiting requests of one kind in order, until one is kept out; return by what.

        Requests of the kinds ``victims`` are recomputed if that makes room for one.
        """
        for state in self._requests.waiting[kind]:
            refused_by = self.admit(state)
            if refused_by is Bound.MEMORY and self.make_room(self._requests.memory.blocks_for(state), victims):
                refused_by = self.admit(state)
            if refused_by is not None:
                return refused_by
        return None

    # -- memory --------------------------------------------------------------------------------------------------

    def make_room(self, num_blocks: int, victims: Iterable[ServiceClass]) -> bool:
        """Recompute requests of the given kinds, last of a queue first, until ``num_blocks`` device blocks are free.

        Returns:
            False, and none was preempted, if even all of them together would not free enough.
        """
        shortage, freed_by = num_blocks - self._kv.num_free(Tier.DEVICE), self._requests.prefixes.freed_by()
        chosen = []
        for kind in victims:
            for victim in reversed(self._requests.device[kind]):
                if shortage <= 0:
                    break
                if victim not in self:
                    chosen.append(victim)
                    shortage -= freed_by(victim)
        if shortage > 0:
            return False
        for victim in chosen:
            self._requests.preempt(victim)
        return True

    def youngest_victim(self, state: RequestState, kinds: Iterable[ServiceClass]) -> RequestState | None:
        """Return which request ``run_or_preempt`` would preempt for ``state``; None if none is left.

        One that is pinned, if all others are gone.
        """
        pinned: RequestState | None = None
        for kind in kinds:
            for victim in reversed(self._requests.device[kind].everyone()):
                same_kind = victim.kind is state.kind
                if victim in self or victim is state or (same_kind and victim.priority_key < state.priority_key):
                    continue
                if victim not in self._requests.pinned:
                    return victim
                pinned = pinned or victim
        return pinned

    def start_move(self, state: RequestState, direction: MoveDirection, *, reserve_blocks: int = 0) -> bool:
        """Begin to move a request that stands at a token boundary to the other tier; False if there is no room."""
        move = self._requests.start_move(state, direction, reserve_blocks=reserve_blocks)
        if move is None:
            return False
        state.moved_s = self.now_s
        self.moves.append(move)
        return True

    def _restore(self, state: RequestState, reserve_blocks: int) -> bool:
        move = self._requests.start_restore(state, reserve_blocks=reserve_blocks)
        if move is not None:
            self._restores.append(move)
        return move is not None

    def _prefetch(self) -> None:
        """Restore the first BE request in line while it waits for its turn, if memory is left. Paper: conserve 4.4."""
        requests = self._requests
        first = next(iter(requests.waiting[BE]), None)
        if first is None or requests.waiting[LS] or requests.memory.is_full(BE) or not requests.needs_restore(first):
            return
        # Each device request may need one more block soon.
        self._restore(first, requests.memory.ls_reserve + sum(map(len, requests.device.values())))

    def _add_drafts(
        self, host_rows: HostRows, preemptible: frozenset[str], decision: Decision | None
    ) -> tuple[HostRows, Decision | None]:
        """Let decodes carry drafts, in the memory, seats and time that are left; return the decision with their time.

        Those of the device come first: they are verified at once.
        """
        states = [self._requests.states[request_id] for request_id in self._chunks]
        bound_s = decision.bound_s if decision is not None and decision.bound_s is not None else math.inf
        if any(state.speculation is not None for state in states):
            from omniserve.sched.draft_rows import with_drafts

            self._chunks |= with_drafts(
                self.chunks,
                states,
                self._kv,
                cost=self.cost,
                bound_s=bound_s,
                tokens_left=self.tokens_left,
                max_model_len=self._limits.max_model_len,
                without=preemptible,
            )
        if self._limits.max_host_drafts and self._may_have_drafts(host_rows):
            host_rows = self._with_host_drafts(host_rows, bound_s)
        if self.cost is not None and decision is not None and decision.predicted_s is not None:
            decision = dataclasses.replace(decision, predicted_s=self.cost.seconds())
        return host_rows, decision

    def _may_have_drafts(self, host_rows: HostRows) -> bool:
        states = self._requests.states
        ids = [entry.request_id for entry in host_rows.entries] + [join.request_id for join in host_rows.joins]
        return any([states[request_id].speculation is not None for request_id in ids])

    def _with_host_drafts(self, host_rows: HostRows, bound_s: float) -> HostRows:
        from omniserve.sched.host_draft_rows import HostSeats, with_host_drafts

        most_seats, requests = self._limits.config.max_piggyback_seats, self._requests
        seats = HostSeats(
            taken=num_seats(host_rows.entries, host_rows.joins, most_seats),
            most=most_seats,
            most_rows=most_seats * (self._limits.num_layers + 1) if host_rows.max_rows is None else host_rows.max_rows,
            most_drafts=self._limits.max_host_drafts,
        )
        entries, joins = with_host_drafts(
            host_rows.entries,
            host_rows.joins,
            requests.states,
            self._kv,
            seats,
            cost=self.cost,
            bound_s=bound_s,
            chunks=self.chunks,
            max_model_len=self._limits.max_model_len,
            reserve_blocks=requests.memory.host_headroom,
        )
        return dataclasses.replace(host_rows, entries=entries, joins=joins)

    # -- the plan ------------------------------------------------------------------------------------------------

    def plan(
        self,
        *,
        host_rows: HostRows = HostRows(),
        preemptible: frozenset[str] = frozenset(),
        decision: Decision | None = None,
    ) -> StepPlan:
        """Close the batch, with the smallest bucket of seats that holds its piggyback rows.

        Copies that run beside the step are begun with it, and drafts are added to decodes, within the decision's bound.
        """
        requests = self._requests
        for chunk in self.chunks:
            state = requests.states[chunk.request_id]
            if state.first_scheduled_s is None:
                state.first_scheduled_s = self.now_s
        for state in requests.residents.take_changed():
            state.note_slot(self.now_s)
        self._prefetch()
        work = requests.take_work((*self.moves, *self._restores), self._admitted)
        for request_id in preemptible:
            self._chunks[request_id] = dataclasses.replace(self._chunks[request_id], is_preemptible=True)
        host_rows, decision = self._add_drafts(host_rows, preemptible, decision)
        seats = num_seats(host_rows.entries, host_rows.joins, self._limits.config.max_piggyback_seats)
        return StepPlan(
            step_id=next(requests.step_ids),
            chunks=self.chunks,
            entries=tuple(host_rows.entries),
            joins=tuple(host_rows.joins),
            joins_as_one=host_rows.joins_as_one,
            num_piggyback_seats=seats,
            work=work,
            pipelined=tuple(_with_hybrid(host_rows)),
            decision=decision,
        )


def _with_hybrid(host_rows: HostRows) -> Iterator[PiggybackEntry | PiggybackJoin]:
    """Yield the pipelined rows, those of the first sub-batch marked."""
    for row in host_rows.pipelined:
        if isinstance(row, PiggybackEntry) and row.request_id in host_rows.hybrid:
            yield dataclasses.replace(row, is_hybrid=True)
        else:
            yield row
