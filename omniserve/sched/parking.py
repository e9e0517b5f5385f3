"""Parking: BE requests that give way to others, with their KV in host memory until the device has room again.

Nothing decodes there. Paper: conserve 4.4 (incremental checkpoints, release on demand, prefetch); bros 5.2 (swapping).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from omniserve.core.plan import Bound, KVMove, MoveDirection
from omniserve.core.request import ServiceClass
from omniserve.kv.base import Tier
from omniserve.sched.batch import Batch
from omniserve.sched.policy import BE, LS, RequestScheduler
from omniserve.sched.state import RequestState

# Blocks of a parked request that are still to be copied: the last one, and one that has just been filled.
_MOST_TO_COPY = 2


class Parking:
    """Takes device memory from requests, and gives it back.

    A BE request between two tokens of whose KV all but a block or two has a checkpoint is *parked*: the blocks that
    have one are free at once, the others when they have been copied. Any other request is recomputed.

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
        """Bring parked requests back; to be called when the step is decided.

        They come back beside the steps while no LS request waits, into memory that leaves those on the device the LS
        reserve and a block each to grow into; one with the device to itself always comes back.

        Args:
            parked: Host residents, in the order in which they come back.
        """
        scheduler = self._scheduler
        if not scheduler.waiting[LS]:
            for state in parked:
                if scheduler.num_admitted(BE) >= scheduler.limits.max_num_requests:
                    break
                others = sum(map(len, scheduler.device.values())) + len(scheduler.moving)
                reserve = scheduler.limits.ls_reserve_blocks + others + 1 if others else 0
                move = scheduler.start_move(state, MoveDirection.TO_DEVICE, reserve_blocks=reserve)
                if move is None:
                    break
                self.moves.append(move)

    def run(
        self, batch: Batch, state: RequestState, victims: Iterable[ServiceClass], *, bound_s: float = math.inf
    ) -> bool:
        """Schedule a DEVICE request as ``run_or_preempt`` does; who gives way is parked."""
        return self._scheduler.run_or_preempt(batch, state, victims, bound_s=bound_s, let_go=self._let_go)

    def admit_ls(self, batch: Batch, state: RequestState) -> bool:
        """Admit a WAITING LS request, if need be into the memory of BE requests; False if it is kept out."""
        scheduler = self._scheduler
        if scheduler.admit(batch, state):
            return True
        if batch.refused_by is not Bound.MEMORY:
            return False
        self._make_room(scheduler.blocks_for(state), batch)
        return scheduler.admit(batch, state)

    @property
    def num_obtainable(self) -> int:
        """Device blocks that LS requests can have: free ones, those of BE requests, and those on their way out."""
        num_held = sum(self._kv.num_blocks(state.request_id) for state in self._scheduler.device[BE])
        return self._kv.num_free(Tier.DEVICE) + num_held + self._scheduler.blocks_moving_out

    def _make_room(self, num_blocks: int, batch: Batch) -> None:
        """Free device blocks of BE requests, youngest first; of nobody if all of them would not do."""
        if self.num_obtainable < num_blocks:
            return
        for victim in reversed(self._scheduler.device[BE]):
            if self._kv.num_free(Tier.DEVICE) >= num_blocks:
                return
            assert victim not in batch, "LS requests are admitted before BE ones run"
            self._let_go(victim)
        for move in self._scheduler.moves_to_host:
            # A step ago these were the last blocks of a parked request: the host is too slow to wait for them longer.
            if self._kv.num_free(Tier.DEVICE) >= num_blocks:
                return
            if move not in self.moves:
                self._scheduler.abandon_move(move.move_id)

    def _let_go(self, state: RequestState) -> None:
        """Park a request, or recompute it if too little of it has a checkpoint or the host has no room."""
        scheduler = self._scheduler
        num_checkpointed = self._kv.num_checkpointed(state.request_id)
        num_missing = self._kv.num_blocks(state.request_id) - num_checkpointed
        if not self._kv.restores and state.decodes and num_checkpointed > 0 and num_missing <= _MOST_TO_COPY:
            move = scheduler.start_move(state, MoveDirection.TO_HOST)
            if move is not None:
                self.moves.append(move)
                return
        scheduler.preempt(state)
