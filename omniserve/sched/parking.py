"""Parking: BE requests that give way to others, with their KV in host memory until the device has room again.

Nothing decodes there. Paper: conserve 4.4 (incremental checkpoints, release on demand, prefetch); bros 5.2 (swapping).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

from omniserve.core.plan import Bound, MoveDirection
from omniserve.core.request import ServiceClass
from omniserve.kv.base import Tier
from omniserve.sched.batch import Batch
from omniserve.sched.request_table import RequestTable
from omniserve.sched.state import BE, LS, RequestState

# Blocks of a parked request that are still to be copied: the last one, and one that has just been filled.
_MOST_TO_COPY = 2


class Parking:
    """Takes device memory from requests, and gives it back.

    A BE request between two tokens is *parked* if all but a block or two of its KV has a checkpoint: the blocks that
    have one are free at once, the others when they have been copied. Any other request is recomputed.

    Args:
        requests: All of them; no piggyback entries are planned for its host residents, which are the parked ones.
    """

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests
        self._kv = requests.kv

    def bring_back(self, batch: Batch, parked: Iterable[RequestState]) -> None:
        """Bring parked requests back; to be called when the step is decided.

        They come back beside the steps while no LS request waits, into memory that leaves those on the device the LS
        reserve and a block each to grow into; one with the device to itself always comes back.
        """
        requests = self._requests
        if requests.waiting[LS]:
            return
        for state in parked:
            if requests.is_full(BE):
                return
            others = sum(map(len, requests.device.values())) + len(requests.moving)
            reserve = requests.limits.ls_reserve_blocks + others + 1 if others else 0
            if not batch.start_move(state, MoveDirection.TO_DEVICE, reserve_blocks=reserve):
                return

    def run(
        self, batch: Batch, state: RequestState, victims: Iterable[ServiceClass], *, bound_s: float = math.inf
    ) -> Bound | None:
        """Schedule a DEVICE request as ``run_or_preempt`` does; those that give way are parked."""
        return batch.run_or_preempt(state, victims, bound_s=bound_s, let_go=functools.partial(self._let_go, batch))

    def admit_ls(self, batch: Batch, state: RequestState) -> Bound | None:
        """Admit a WAITING LS request, if need be into the memory of BE requests; return what keeps it out."""
        refused_by = batch.admit(state)
        if refused_by is not Bound.MEMORY:
            return refused_by
        self._make_room(batch, self._requests.blocks_for(state))
        return batch.admit(state)

    @property
    def num_obtainable(self) -> int:
        """Device blocks that LS requests can have: free ones, those of BE requests, and those on their way out."""
        num_held = sum(self._kv.num_blocks(state.request_id) for state in self._requests.device[BE])
        return self._kv.num_free(Tier.DEVICE) + num_held + self._requests.blocks_moving_out

    def _make_room(self, batch: Batch, num_blocks: int) -> None:
        """Free device blocks of BE requests, youngest first; of none if all of them would not do."""
        if self.num_obtainable < num_blocks:
            return
        for victim in reversed(self._requests.device[BE]):
            if self._kv.num_free(Tier.DEVICE) >= num_blocks:
                return
            assert victim not in batch, "LS requests are admitted before BE ones run"
            self._let_go(batch, victim)
        for move in self._requests.moves_to_host:
            # A step ago these were the last blocks of a parked request: the host is too slow to wait for them longer.
            if self._kv.num_free(Tier.DEVICE) >= num_blocks:
                return
            if move not in batch.moves:
                self._requests.abandon_move(move.move_id)

    def _let_go(self, batch: Batch, state: RequestState) -> None:
        """Park a request, or recompute it if too little of it has a checkpoint or the host has no room."""
        num_checkpointed = self._requests.num_checkpointed(state)
        num_missing = self._kv.num_blocks(state.request_id) - num_checkpointed
        can_park = state.decodes and num_checkpointed > 0 and num_missing <= _MOST_TO_COPY
        # A manager that evicts keeps the checkpoint without a move.
        can_park &= self._requests.evicter is None
        if not (can_park and batch.start_move(state, MoveDirection.TO_HOST)):
            self._requests.preempt(state)
