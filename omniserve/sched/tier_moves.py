"""Moves BE requests between the tiers: to decode on the host tier (TierMoves), or only to be kept there (Parking).

Paper: omniserve 3.3.5 (offload), 3.2.4 (delayed swap-in); conserve 4.4 (incremental checkpoints, release on demand,
prefetch); bros 5.2 (swapping).
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from omniserve.core.plan import Bound
from omniserve.core.request import ServiceClass
from omniserve.core.work import MoveDirection
from omniserve.kv.base import Tier
from omniserve.sched.batch import Batch
from omniserve.sched.options import HostTierOptions
from omniserve.sched.request_table import RequestTable
from omniserve.sched.state import BE, LS, RequestState
from omniserve.sched.step_cost import Forecast


class SlidingMax:
    """Keeps the maximum over a window of time."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._falling: deque[tuple[float, int]] = deque()

    def push(self, now_s: float, value: int) -> int:
        """Add a value, and return the largest one that is not older than the window. Time does not go back."""
        falling = self._falling
        while falling and falling[-1][1] <= value:
            falling.pop()
        falling.append((now_s, value))
        while falling[0][0] < now_s - self._window_s:
            falling.popleft()
        return falling[0][1]


# BE KV comes back only into memory that LS requests have not used for so many times min_residence_s.
_PEAK_WINDOWS = 2
# An LS prompt that lacks memory waits this long for swap-outs to end; then BE requests are recomputed instead.
LS_PATIENCE_S = 0.02


class TierMoves:
    """Starts moves of BE requests, and remembers what is needed to choose them.

    ``reserve`` returns the device blocks that a BE request leaves free; None: ``MemoryRules.reserve_for_ls``.
    """

    def __init__(
        self,
        requests: RequestTable,
        options: HostTierOptions,
        forecast: Forecast | None,
        *,
        reserve: Callable[[RequestState], int] | None = None,
    ) -> None:
        self._requests = requests
        self._reserve = reserve if reserve is not None else requests.memory.reserve_for_ls
        self._options = options
        self._limits = requests.limits
        self._kv = requests.kv
        self._host_has_own_cores = forecast is not None and forecast.host_has_own_cores
        self._ls_peak = SlidingMax(_PEAK_WINDOWS * options.min_residence_s)
        self._light_since_s: float | None = None
        self._tight_since_s: float | None = None

    def offload(self, batch: Batch, state: RequestState, *, reserve_blocks: int = 0) -> bool:
        """Start to move a decoding BE request to the host tier (3.3.5); False if there is no room.

        ``reserve_blocks`` are host blocks that it leaves free beside what residents grow into.
        """
        reserve_blocks += self._requests.memory.host_headroom
        return batch.start_move(state, MoveDirection.TO_HOST, reserve_blocks=reserve_blocks)

    def offload_until(self, batch: Batch, shortage: int, *, reserve_blocks: int = 0) -> int:
        """Offload decoding BE requests until they free ``shortage`` blocks; return what is missing.

        The youngest goes first; those that came from the host a moment ago only when no other is left.
        ``reserve_blocks`` as in ``offload``.
        """
        if shortage <= 0:
            return shortage
        freed_by = self._requests.prefixes.freed_by()
        decodes = [state for state in reversed(self._requests.device[BE]) if state.decodes and state not in batch]
        for state in sorted(decodes, key=lambda state: not self._has_stayed(batch, state)):
            if shortage <= 0:
                break
            num_blocks = freed_by(state)
            if self.offload(batch, state, reserve_blocks=reserve_blocks):
                shortage -= num_blocks
        return shortage

    def run_or_offload(self, batch: Batch, state: RequestState) -> Bound | None:
        """Schedule a BE request, or move it to the host tier if it finds no block beside its reserve (3.3.5).

        Returns:
            What keeps it out of the step, or None. It moves then, or nothing was left to take from those behind it.
        """
        requests = self._requests
        while (refused_by := batch.add(state, reserve_blocks=self._reserve(state))) is Bound.MEMORY:
            if self.offload(batch, state):
                break
            # The host tier is full or absent: the youngest gives way, until it is this one's turn to wait.
            victim = batch.youngest_victim(state, (BE,))
            if victim is None:
                break
            requests.preempt(victim)
        return refused_by

    def make_room_for_ls(self, batch: Batch, state: RequestState) -> None:
        """Free device memory for an LS prompt: by moving BE KV to the host while that is quick, else by dropping it."""
        requests = self._requests
        needed = requests.memory.blocks_for(state)
        shortage = needed - self._kv.num_free(Tier.DEVICE)
        if shortage <= 0:
            return
        if state.blocked_since_s is None:
            state.blocked_since_s = batch.now_s
        still_missing = self.offload_until(batch, shortage - requests.memory.blocks_moving_out)
        out_of_patience = batch.now_s - state.blocked_since_s >= LS_PATIENCE_S
        if still_missing <= 0 and not out_of_patience:
            return
        if not batch.make_room(needed, (BE,)) and out_of_patience:
            # The host tier is too slow or stuck: what is on its way there must not hold up an LS request.
            for move in reversed(requests.memory.moves_to_host):
                if move not in batch.moves:
                    requests.abandon_move(move.move_id)
                    if batch.make_room(needed, (BE,)):
                        break

    def make_room_for_be(self, batch: Batch, state: RequestState) -> None:
        """Offload decodes for a BE prompt that a step has time but no memory for (3.3.5)."""
        requests = self._requests
        shortage = requests.memory.blocks_for(state) + self._reserve(state) - self._kv.num_free(Tier.DEVICE)
        shortage -= requests.memory.blocks_moving_out
        if shortage > 0:
            self.offload_until(batch, shortage, reserve_blocks=requests.loads.blocks_wanted())

    @property
    def can_offload_for_time(self) -> bool:
        """The host tier is up and has cores of its own, so that a decode there takes no time of the device."""
        return self._host_has_own_cores and self._requests.host_is_up

    def offload_for_time(self, batch: Batch, kept_out: Sequence[RequestState]) -> None:
        """Offload a decode that the time bound has kept out for a while, if the host tier has cores of its own (3.3.5).

        ``kept_out`` are the decodes that the bound keeps out of this step.
        """
        if not (self.can_offload_for_time and kept_out):
            self._tight_since_s = None
            return
        if self._tight_since_s is None:
            self._tight_since_s = batch.now_s
        if batch.now_s - self._tight_since_s < self._options.swap_in_delay_s:
            return
        for state in reversed(kept_out):
            if self._has_stayed(batch, state) and self.offload(batch, state):
                return

    def swap_back(self, batch: Batch, bound_s: float, *, nothing_left_out: bool) -> None:
        """Move a BE request to the device once load has been light for a while, at a token boundary (3.2.4).

        Light is: nothing waits, memory is left beyond what LS requests took lately, and the step has time for one
        decode more. A request that has just moved stays where it is. So a load that goes up and down moves nothing to
        and fro.
        """
        requests = self._requests
        ls_blocks = sum(self._kv.num_blocks(state.request_id) for state in requests.device[LS])
        ls_may_take = self._ls_peak.push(batch.now_s, ls_blocks) - ls_blocks
        # Each device request may need one more block soon; twice that keeps the next step from undoing the move.
        margin = max(requests.memory.ls_reserve, ls_may_take) + 2 * sum(map(len, requests.device.values()))
        nothing_waits = nothing_left_out and not any(requests.waiting.values())
        if not nothing_waits or batch.moves or self._kv.num_free(Tier.DEVICE) <= margin:
            self._light_since_s = None
            return
        if self._light_since_s is None:
            self._light_since_s = batch.now_s
        if batch.now_s - self._light_since_s < self._options.swap_in_delay_s or requests.memory.is_full(BE):
            return
        for state in requests.residents.queue:
            if state.away is not None or not self._has_stayed(batch, state):
                continue
            position = state.num_computed_tokens
            if batch.cost is not None and batch.cost.seconds_with(position, 1, samples=True) > bound_s:
                return
            if batch.start_move(state, MoveDirection.TO_DEVICE, reserve_blocks=margin):
                return

    def _has_stayed(self, batch: Batch, state: RequestState) -> bool:
        return batch.now_s - state.moved_s >= self._options.min_residence_s


# Blocks of a parked request that are still to be copied: the last one, and one that has just been filled.
_MOST_TO_COPY = 2


class Parking:
    """Takes device memory from BE requests that give way to others, and gives it back; nothing decodes on the host.

    A BE request between two tokens is *parked* if all but a block or two of its KV has a checkpoint: the blocks that
    have one are free at once, the others when they have been copied. Any other request is recomputed. The host's
    residents are the parked requests: a policy that parks plans no piggyback entries for them.
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
            if requests.memory.is_full(BE):
                return
            others = sum(map(len, requests.device.values())) + len(requests.moving)
            reserve = requests.memory.ls_reserve + others + 1 if others else 0
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
        self._make_room(batch, self._requests.memory.blocks_for(state))
        return batch.admit(state)

    @property
    def num_obtainable(self) -> int:
        """Device blocks that LS requests can have: free ones, those of BE requests, and those on their way out."""
        freed_by = self._requests.prefixes.freed_by()
        freed = sum(map(freed_by, (*self._requests.device[BE], *self._requests.memory.moves_to_host)))
        return self._kv.num_free(Tier.DEVICE) + freed

    def _make_room(self, batch: Batch, num_blocks: int) -> None:
        """Free device blocks of BE requests, youngest first; of none if all of them would not do."""
        if self.num_obtainable < num_blocks:
            return
        for victim in reversed(self._requests.device[BE]):
            if self._kv.num_free(Tier.DEVICE) >= num_blocks:
                return
            assert victim not in batch, "LS requests are admitted before BE ones run"
            self._let_go(batch, victim)
        for move in self._requests.memory.moves_to_host:
            # A step ago these were the last blocks of a parked request: the host is too slow to wait for them longer.
            if self._kv.num_free(Tier.DEVICE) >= num_blocks:
                return
            if move not in batch.moves:
                self._requests.abandon_move(move.move_id)

    def _let_go(self, batch: Batch, state: RequestState) -> None:
        """Park a request, or recompute it if too little of it has a checkpoint or the host has no room."""
        num_checkpointed = self._requests.checkpoints.num_blocks(state)
        num_missing = self._kv.num_blocks(state.request_id) - num_checkpointed
        can_park = state.decodes and num_checkpointed > 0 and num_missing <= _MOST_TO_COPY
        # A manager that evicts keeps the checkpoint without a move.
        can_park &= not self._requests.keeps_evicted
        if not (can_park and batch.start_move(state, MoveDirection.TO_HOST)):
            self._requests.preempt(state)
