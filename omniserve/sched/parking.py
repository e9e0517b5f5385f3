"""Parking: BE requests that give way to others, with their KV in host memory until the device has room again.

Nothing decodes there. Paper: conserve 4.4 (incremental checkpoints, release on demand, prefetch); bros 5.2 (swapping).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from omniserve.kv.base import Tier
from omniserve.plan import Bound, KVMove, MoveDirection
from omniserve.request import ServiceClass
from omniserve.sched.batch import Batch
from omniserve.sched.policy import BE, LS, RequestScheduler
from omniserve.sched.state import Phase, RequestState


class Parking:
    """Takes device memory from requests, and gives it back.

    A BE request between two tokens whose full blocks all have a checkpoint is *parked*: these blocks are free at once,
    the last one when it has been copied. Any other is recomputed. Without checkpoints, all are.

    Args:
        scheduler: Whose requests; it plans no piggyback entries, so its host residents are the parked ones.
    """

    def __init__(self, scheduler: RequestScheduler) -> None:
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self.moves: list[KVMove] = []
        """What the step starts."""

    def begin_step(self) -> None:
        """Forget the moves of the last step."""
        self.moves = []

    def end_step(self, parked: Iterable[RequestState]) -> None:
        """Bring parked requests back and plan checkpoints; to be called when the step is decided.

        They come back beside the steps while no LS request waits, into memory that leaves those on the device the LS
        reserve and a block each to grow into; one with the device to itself always comes back.

        Args:
            parked: Host residents, in the order in which they come back.
        """
        scheduler = self._scheduler
        if not scheduler.waiting[LS]:
            for state in parked:
                others = sum(map(len, scheduler.device.values())) + len(scheduler.moving)
                reserve = scheduler.limits.ls_reserve_blocks + others + 1 if others else 0
                move = scheduler.start_move(state, MoveDirection.TO_DEVICE, reserve_blocks=reserve)
                if move is None:
                    break
                self.moves.append(move)
        if scheduler.checkpoints is not None and scheduler.host_is_up:
            self.moves += scheduler.checkpoints.plan(scheduler.device[BE], reserve_blocks=0)

    def run(
        self, batch: Batch, state: RequestState, victims: Iterable[ServiceClass], *, bound_s: float = math.inf
    ) -> bool:
        """Schedule a DEVICE request; if blocks are short, others give way, youngest first, until it fits.

        Args:
            victims: Kinds that may lose a request, first to last; of the request's own kind only those behind it do.

        Returns:
            False if it is not scheduled: the budget or the bound is used up, or the request itself had to give way.
        """
        while not batch.add(state, bound_s=bound_s):
            if batch.refused_by is not Bound.MEMORY:
                return False
            victim = self._scheduler.youngest_victim(batch, state, victims)
            self._let_go(victim or state)
            if victim is None:
                return False
        return True

    def admit_ls(self, batch: Batch, state: RequestState) -> bool:
        """Admit a WAITING LS request, if need be into the memory of BE requests; False if it is kept out."""
        scheduler = self._scheduler
        if scheduler.admit(batch, state):
            return True
        if batch.refused_by is not Bound.MEMORY:
            return False
        self._make_room(scheduler.blocks_for(state), batch)
        return scheduler.admit(batch, state)

    def _make_room(self, num_blocks: int, batch: Batch) -> None:
        """Free device blocks of BE requests, youngest first; of nobody if all of them would not do."""
        scheduler = self._scheduler
        victims = [state for state in reversed(scheduler.device[BE]) if state not in batch]
        outgoing = [m for _, m in scheduler.moving.values() if m.direction is MoveDirection.TO_HOST]
        most = sum(self._kv.num_blocks(state.request_id) for state in victims) + sum(
            len(m.src_block_ids) for m in outgoing
        )
        if self._kv.num_free(Tier.DEVICE) + most < num_blocks:
            return
        for victim in victims:
            if self._kv.num_free(Tier.DEVICE) >= num_blocks:
                return
            self._let_go(victim)
        for move in outgoing:
            # A step ago that was the last block of a parked request: the host is too slow to wait for it any longer.
            if self._kv.num_free(Tier.DEVICE) >= num_blocks:
                return
            scheduler.abandon_move(move.move_id)

    def _let_go(self, state: RequestState) -> None:
        """Park a request, or recompute it if it has no checkpoint or the host has no room."""
        scheduler = self._scheduler
        num_checkpointed = self._kv.num_checkpointed(state.request_id)
        full_blocks = state.num_computed_tokens // scheduler.limits.block_size
        if state.phase is Phase.DEVICE and state.decodes and 0 < full_blocks == num_checkpointed:
            move = scheduler.start_move(state, MoveDirection.TO_HOST)
            if move is not None:
                self.moves.append(move)
                return
        scheduler.preempt(state)
