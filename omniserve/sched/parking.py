"""Parking: takes BE requests from the device to the host tier only to keep their KV there, and brings them back.

Paper: conserve 4.4 (incremental checkpoints, release on demand, prefetch); bros 5.2 (swapping).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

from omniserve.core.plan import Bound
from omniserve.core.request import ServiceClass
from omniserve.core.work import MoveDirection
from omniserve.sched.batch import Batch
from omniserve.sched.state import BE, LS, RequestState
from omniserve.sched.view import RequestView

# Blocks of a parked request that are still to be copied: the last one, and one that has just been filled.
_MOST_TO_COPY = 2


class Parking:
    """Takes device memory from BE requests that give way to others, and gives it back; nothing decodes on the host.

    A BE request between two tokens is *parked* if all but a block or two of its KV has a checkpoint: the blocks that
    have one are free at once, the others when they have been copied. Any other request is recomputed. The host's
    residents are the parked requests: a policy that parks plans no piggyback entries for them.
    """

    def __init__(self, view: RequestView) -> None:
        self._view, self._memory = view, view.memory

    def bring_back(self, batch: Batch, parked: Iterable[RequestState]) -> None:
        """Bring parked requests back; to be called when the step is decided.

        They come back beside the steps while no LS request waits, into memory that leaves the requests on the
        device the LS reserve and a block each to grow into; one with the device to itself always comes back.
        """
        if self._view.waiting[LS]:
            return
        for state in parked:
            if self._memory.is_full(BE):
                return
            others = self._view.num_on_device + self._view.num_moving
            reserve = self._memory.ls_reserve + others + 1 if others else 0
            if not batch.start_move(state, MoveDirection.TO_DEVICE, reserve_blocks=reserve):
                return

    def run(
        self, batch: Batch, state: RequestState, victims: Iterable[ServiceClass], *, bound_s: float = math.inf
    ) -> Bound | None:
        """Schedule a DEVICE request as ``run_or_preempt`` does; requests that give way are parked."""
        return batch.run_or_preempt(state, victims, bound_s=bound_s, let_go=functools.partial(self._let_go, batch))

    def admit_ls(self, batch: Batch, state: RequestState) -> Bound | None:
        """Admit a WAITING LS request, if need be into the memory of BE requests; return what keeps it out."""
        refused_by = batch.admit(state)
        if refused_by is not Bound.MEMORY:
            return refused_by
        self._make_room(batch, self._memory.blocks_for(state))
        return batch.admit(state)

    @property
    def num_obtainable(self) -> int:
        """Device blocks that LS requests can have: free ones, and what BE requests and moves to the host would free."""
        freed_by = self._memory.freed_by()
        freed = sum(map(freed_by, (*self._view.device[BE], *self._memory.moves_to_host)))
        return self._memory.num_free + freed

    def _make_room(self, batch: Batch, num_blocks: int) -> None:
        """Free device blocks of BE requests, youngest first; of none if all of them would not do."""
        if self.num_obtainable < num_blocks:
            return
        for victim in reversed(self._view.device[BE]):
            if self._memory.num_free >= num_blocks:
                return
            assert victim not in batch, "LS requests are admitted before BE ones run"
            self._let_go(batch, victim)
        for move in self._memory.moves_to_host:
            # A step ago these were the last blocks of a parked request: the host is too slow to wait for them longer.
            if self._memory.num_free >= num_blocks:
                return
            if move not in batch.moves:
                batch.abandon_move(move)

    def _let_go(self, batch: Batch, state: RequestState) -> None:
        """Park a request, or recompute it if too little of it has a checkpoint or the host has no room."""
        num_checkpointed = self._view.num_checkpointed(state)
        num_missing = self._memory.num_blocks(state) - num_checkpointed
        can_park = state.decodes and num_checkpointed > 0 and num_missing <= _MOST_TO_COPY
        # A manager that evicts keeps the checkpoint without a move.
        can_park &= not self._view.keeps_evicted
        if not (can_park and batch.start_move(state, MoveDirection.TO_HOST)):
            batch.preempt(state)
