"""TierMoves: which BE requests change tier, and when. Paper: omniserve 3.3.5 (offload), 3.2.4 (delayed swap-in)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from omniserve.core.plan import Bound, KVMove, MoveDirection
from omniserve.kv.base import Tier
from omniserve.sched.batch import Batch
from omniserve.sched.policy import BE, LS, RequestScheduler
from omniserve.sched.sliding_max import SlidingMax
from omniserve.sched.state import RequestState

# BE KV comes back only into memory that LS requests have not used for so many times min_residence_s.
_PEAK_WINDOWS = 2
# An LS prompt that lacks memory waits this long for swap-outs to end; then BE requests are recomputed instead.
LS_PATIENCE_S = 0.02


class TierMoves:
    """The moves of one step, and what has to be remembered to choose them.

    Args:
        scheduler: Whose requests move.
    """

    def __init__(self, scheduler: RequestScheduler) -> None:
        self._scheduler = scheduler
        self._limits = scheduler.limits
        self._kv = scheduler.kv
        self._ls_peak = SlidingMax(_PEAK_WINDOWS * scheduler.limits.min_residence_s)
        self._light_since_s: float | None = None
        self._tight_since_s: float | None = None
        self._now_s = 0.0
        self.moves: list[KVMove] = []
        """What the step starts."""

    def begin_step(self, now_s: float) -> None:
        """Forget the moves of the last step."""
        self._now_s = now_s
        self.moves = []

    def offload(self, state: RequestState) -> bool:
        """Start to move a decoding BE request to the host tier (3.3.5); False if there is no room."""
        return self._start(state, MoveDirection.TO_HOST, self._scheduler.host_headroom)

    def offload_until(self, shortage: int, batch: Batch) -> int:
        """Offload decoding BE requests until they free ``shortage`` blocks; return what is missing.

        The youngest goes first; those that came from the host a moment ago only when nobody else is left.
        """
        stayed: list[RequestState] = []
        moved: list[RequestState] = []
        if shortage > 0:
            for state in reversed(self._scheduler.device[BE]):
                if state.decodes and state not in batch:
                    (stayed if self._has_stayed(state) else moved).append(state)
        for state in itertools.chain(stayed, moved):
            if shortage <= 0:
                break
            blocks = self._kv.num_blocks(state.request_id)
            if self.offload(state):
                shortage -= blocks
        return shortage

    def run_or_offload(self, batch: Batch, state: RequestState) -> bool:
        """Schedule a BE request, or move it to the host tier if it finds no block beside the LS reserve (3.3.5).

        Returns:
            False if it is not scheduled: it moves, or nothing was left to take from those behind it.
        """
        scheduler = self._scheduler
        while not batch.add(state, reserve_blocks=scheduler.reserve_for_ls(state)):
            if batch.refused_by is not Bound.MEMORY or self.offload(state):
                return False
            # The host tier is full or absent: the youngest gives way, until it is this one's turn to wait.
            victim = scheduler.youngest_victim(batch, state, (BE,))
            if victim is None:
                return False
            scheduler.preempt(victim)
        return True

    def make_room_for_ls(self, batch: Batch, state: RequestState) -> None:
        """Free device memory for an LS prompt: by moving BE KV to the host while that is quick, else by dropping it."""
        scheduler = self._scheduler
        needed = scheduler.blocks_for(state)
        shortage = needed - self._kv.num_free(Tier.DEVICE)
        if shortage <= 0:
            return
        if state.blocked_since_s is None:
            state.blocked_since_s = self._now_s
        still_missing = self.offload_until(shortage - scheduler.blocks_moving_out, batch)
        out_of_patience = self._now_s - state.blocked_since_s >= LS_PATIENCE_S
        if still_missing <= 0 and not out_of_patience:
            return
        if not scheduler.make_room(needed, batch, (BE,)) and out_of_patience:
            # The host tier is too slow or stuck: what is on its way there must not hold up an LS request.
            for move in reversed(scheduler.moves_to_host):
                if move not in self.moves:
                    scheduler.abandon_move(move.move_id)
                    if scheduler.make_room(needed, batch, (BE,)):
                        break

    def offload_for_time(self, kept_out: Sequence[RequestState]) -> None:
        """Offload a decode that the time bound has kept out for a while, if the host tier has cores of its own (3.3.5).

        Only with ``offload_for_time``.

        Args:
            kept_out: Decodes that the bound kept out of this step; empty: the step had time for all.
        """
        forecast = self._scheduler.forecast
        own_cores = forecast is not None and forecast.host_has_own_cores
        if not (self._limits.offload_for_time and kept_out and own_cores and self._scheduler.host_is_up):
            self._tight_since_s = None
            return
        if self._tight_since_s is None:
            self._tight_since_s = self._now_s
        if self._now_s - self._tight_since_s < self._limits.swap_in_delay_s:
            return
        for state in reversed(kept_out):
            if self._has_stayed(state) and self.offload(state):
                return

    def swap_back(self, batch: Batch, bound_s: float, *, nothing_left_out: bool) -> None:
        """Move a BE request to the device once load has been light for a while, at a token boundary (3.2.4).

        Light is: nobody waits, memory is left beyond what LS requests took lately, and the step has time for one decode
        more. A request that has just moved stays where it is. So a load that goes up and down moves nobody to and fro.
        """
        scheduler = self._scheduler
        ls_blocks = sum(self._kv.num_blocks(state.request_id) for state in scheduler.device[LS])
        ls_may_take = self._ls_peak.push(self._now_s, ls_blocks) - ls_blocks
        # Each device request may need one more block soon; twice that keeps the next step from undoing the move.
        margin = max(self._limits.ls_reserve_blocks, ls_may_take) + 2 * sum(map(len, scheduler.device.values()))
        nobody_waits = nothing_left_out and not any(scheduler.waiting.values())
        if not nobody_waits or self.moves or self._kv.num_free(Tier.DEVICE) <= margin:
            self._light_since_s = None
            return
        if self._light_since_s is None:
            self._light_since_s = self._now_s
        if self._now_s - self._light_since_s < self._limits.swap_in_delay_s:
            return
        if scheduler.num_admitted(BE) >= self._limits.max_num_requests:
            return
        for state in scheduler.residents.queue:
            if state.away is not None or not self._has_stayed(state):
                continue
            position = state.num_computed_tokens
            if batch.load is not None and batch.load.seconds_with(position, 1, samples=True) > bound_s:
                return
            if self._start(state, MoveDirection.TO_DEVICE, margin):
                return

    def _has_stayed(self, state: RequestState) -> bool:
        return self._now_s - state.moved_s >= self._limits.min_residence_s

    def _start(self, state: RequestState, direction: MoveDirection, reserve_blocks: int) -> bool:
        move = self._scheduler.start_move(state, direction, reserve_blocks=reserve_blocks)
        if move is None:
            return False
        state.moved_s = self._now_s
        self.moves.append(move)
        return True
