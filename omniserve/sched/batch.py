"""Batch: the step that a policy puts together.

Prompts take all their blocks at their first chunk, so two half-prefilled prompts never wait for each other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Iterable
from typing import Any, Protocol

from omniserve.core.plan import Bound, Decision, DeviceChunk, PiggybackEntry, StepPlan
from omniserve.core.request import ServiceClass
from omniserve.core.work import KVMove, MoveDirection
from omniserve.kv.base import Tier
from omniserve.sched.features.base import OpenStep
from omniserve.sched.host_rows import NO_HOST_ROWS, HostRows
from omniserve.sched.request_table import RequestTable
from omniserve.sched.seats import num_seats
from omniserve.sched.state import BE, LS, Phase, RequestState
from omniserve.sched.step_cost import StepCost


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

    @property
    def is_empty(self) -> bool:
        """The step has no rows so far: none on the device, and none of the host tier in its cost."""
        return not self._chunks and (self.cost is None or self.cost.features.is_empty)

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

        A feature may say what the size is. Up to ``min_tokens`` are let in if the bound lets in none.
        """
        start = state.num_computed_tokens
        if state.phase is Phase.WAITING:
            start = start or self._requests.kept.num_tokens(state, Tier.DEVICE)
        count = min(state.num_tokens - start, self.tokens_left)
        if count <= 0:
            return 0, Bound.TOKENS
        for feature in self._requests.features.on:
            if (size := feature.chunk_size(state, self.tokens_left, self.cost, bound_s)) is not None:
                return size, None
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
        fields: dict[str, Any] = {}
        for feature in self._requests.features.on:
            fields |= feature.chunk_fields(state)
        self._chunks[state.request_id] = DeviceChunk(
            request_id=state.request_id,
            token_ids=tuple(state.token_ids[start : start + count]),
            start=start,
            block_ids=blocks,
            samples=start + count == state.num_tokens,
            scores=state.scores(start, count),
            pooled=state.pooled(start, count),
            lora_slot=state.lora_slot,
            **fields,
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
        if self._needs_restore(state) and not self._is_computed_sooner(state, bound_s):
            return None if self._restore(state, reserve_blocks) else Bound.MEMORY
        state.num_computed_tokens = num_kept = self._requests.kept.num_tokens(state, Tier.DEVICE)
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
        num_tokens = self._requests.prefixes_on_host.num_tokens(state)
        if state.kind is not LS or self.cost is None or not 0 < num_tokens <= self.tokens_left:
            return False
        if state.prefix is not None and state.prefix.was_computed_elsewhere:
            return False
        start, now_s = self._requests.kept.num_tokens(state, Tier.DEVICE), self.cost.seconds()
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
        let_go = let_go or self.preempt
        while (refused_by := self.add(state, bound_s=bound_s, min_tokens=min_tokens)) is Bound.MEMORY:
            victim = self.youngest_victim(state, victims)
            if victim in self._requests.pinned:
                break
            let_go(victim or state)
            if victim is None:
                break
        return refused_by

    def chunk(self, state: RequestState) -> DeviceChunk:
        """Return the chunk of a request that is in the batch."""
        return self._chunks[state.request_id]

    def replace(self, chunk: DeviceChunk) -> None:
        """Put a chunk in the place of its request's, with the same tokens."""
        self._chunks[chunk.request_id] = chunk

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

    def youngest_victim(
        self, state: RequestState, kinds: Iterable[ServiceClass], *, at_stake: bool = False
    ) -> RequestState | None:
        """Return which request ``run_or_preempt`` would preempt for ``state``; None if none is left.

        One that is pinned, if all others are gone.

        Args:
            at_stake: The request's deadline is at stake: all requests of its kind with a later deadline, or without
                one, may give way, of all tenants.
        """
        pinned: RequestState | None = None
        for kind in kinds:
            for victim in reversed(self._requests.device[kind].everyone()):
                if victim is state and not at_stake:
                    break  # those before it do not give way to it
                if victim in self or (at_stake and kind is state.kind and victim.priority_key <= state.priority_key):
                    continue
                if victim not in self._requests.pinned:
                    return victim
                pinned = pinned or victim
        return pinned

    def preempt(self, state: RequestState) -> None:
        """Take a request's memory back; it waits, in arrival order, to be resumed. Its tokens are kept."""
        self._requests.preempt(state)

    def start_move(self, state: RequestState, direction: MoveDirection, *, reserve_blocks: int = 0) -> bool:
        """Begin to move a request that stands at a token boundary to the other tier; False if there is no room."""
        move = self._requests.moves.start(state, direction, reserve_blocks=reserve_blocks)
        if move is None:
            return False
        state.moved_s = self.now_s
        self.moves.append(move)
        return True

    def _needs_restore(self, state: RequestState) -> bool:
        """Tell whether the host has KV of a WAITING request that the device has not (any more)."""
        return self._requests.residents.is_up and self._requests.kept.needs_restore(state)

    def abandon_move(self, move: KVMove) -> None:
        """Take the device memory back from a request that is moving to the host; it waits to be recomputed."""
        self._requests.moves.abandon(move.move_id)

    def plan_entries(self, max_entries: int, *, among: Container[str] | None = None) -> list[PiggybackEntry]:
        """Start the next token of host residents that stand at a token boundary, oldest first, with host blocks for it.

        If a host is full, the youngest request there is recomputed.

        Args:
            max_entries: Most tokens to start.
            among: Ids of the residents that may go on; None: all.
        """

        def allocate(state: RequestState) -> tuple[int, ...] | None:
            is_meant = among is None or state.request_id in among
            return self._requests.host_blocks_for(state) if is_meant else None

        return self._requests.residents.plan_entries(allocate, max_entries)

    def _restore(self, state: RequestState, reserve_blocks: int) -> bool:
        move = self._requests.moves.start_restore(state, reserve_blocks=reserve_blocks)
        if move is not None:
            self._restores.append(move)
        return move is not None

    def _prefetch(self) -> None:
        """Restore the first BE request in line while it waits for its turn, if memory is left. Paper: conserve 4.4."""
        requests = self._requests
        first = requests.waiting[BE].first
        if first is None or requests.waiting[LS] or requests.memory.is_full(BE) or not self._needs_restore(first):
            return
        # Each device request may need one more block soon.
        self._restore(first, requests.memory.ls_reserve + sum(map(len, requests.device.values())))

    # -- the plan ------------------------------------------------------------------------------------------------

    def plan(self, *, host_rows: HostRows = NO_HOST_ROWS, decision: Decision | None = None) -> StepPlan:
        """Close the batch, with the smallest bucket of seats that holds its piggyback rows.

        Copies that run beside the step are begun with it, and features add rows, within the decision's bound.
        """
        requests = self._requests
        for chunk in self.chunks:
            state = requests.states[chunk.request_id]
            if state.first_scheduled_s is None:
                state.first_scheduled_s = self.now_s
        for state in requests.residents.slots.take_changed():
            state.host_stays.note(state.slot >= 0, self.now_s)
        self._prefetch()
        work = requests.take_work((*self.moves, *self._restores), self._admitted)
        if requests.features.on:
            host_rows = self._complete(host_rows, decision)
        if self.cost is not None and decision is not None and decision.predicted_s is not None:
            decision = dataclasses.replace(decision, predicted_s=self.cost.seconds())
        seats = num_seats(host_rows.entries, host_rows.joins, self._limits.config.max_piggyback_seats)
        step_id = next(requests.step_ids)
        return host_rows.in_plan(step_id, num_seats=seats, chunks=self.chunks, work=work, decision=decision)

    def _complete(self, host_rows: HostRows, decision: Decision | None) -> HostRows:
        """Let features add to the step what it has room for; return its host rows then."""
        step = OpenStep(
            chunks=self._chunks,
            host_rows=host_rows,
            states=self._requests.states,
            cost=self.cost,
            bound_s=decision.bound_s if decision is not None and decision.bound_s is not None else math.inf,
            tokens_left=self.tokens_left,
            reserve_host_blocks=self._requests.memory.host_headroom,
        )
        for feature in self._requests.features.on:
            feature.complete(step)
        self._chunks, self.tokens_left = step.chunks, step.tokens_left
        return step.host_rows


class NewBatch(Protocol):
    """Makes the batch of a policy's next step; the parameters are as in ``Batch``."""

    def __call__(self, now_s: float, *, cost: StepCost | None = None, max_tokens: int | None = None) -> Batch: ...
