"""TierMoves: which BE requests change tier, and when. Paper: omniserve 3.3.5 (offload), 3.2.4 (delayed swap-in)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from omniserve.core.plan import Bound, MoveDirection
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
    """Starts moves of BE requests, and remembers what is needed to choose them."""

    def __init__(self, requests: RequestTable, options: HostTierOptions, forecast: Forecast | None) -> None:
        self._requests = requests
        self._options = options
        self._limits = requests.limits
        self._kv = requests.kv
        self._host_has_own_cores = forecast is not None and forecast.host_has_own_cores
        self._ls_peak = SlidingMax(_PEAK_WINDOWS * options.min_residence_s)
        self._light_since_s: float | None = None
        self._tight_since_s: float | None = None

    def offload(self, batch: Batch, state: RequestState) -> bool:
        """Start to move a decoding BE request to the host tier (3.3.5); False if there is no room."""
        return batch.start_move(state, MoveDirection.TO_HOST, reserve_blocks=self._requests.host_headroom)

    def offload_until(self, batch: Batch, shortage: int) -> int:
        """Offload decoding BE requests until they free ``shortage`` blocks; return what is missing.

        The youngest goes first; those that came from the host a moment ago only when no other is left.
        """
        if shortage <= 0:
            return shortage
        decodes = [state for state in reversed(self._requests.device[BE]) if state.decodes and state not in batch]
        for state in sorted(decodes, key=lambda state: not self._has_stayed(batch, state)):
            if shortage <= 0:
                break
            blocks = self._kv.num_blocks(state.request_id)
            if self.offload(batch, state):
                shortage -= blocks
        return shortage

    def run_or_offload(self, batch: Batch, state: RequestState) -> Bound | None:
        """Schedule a BE request, or move it to the host tier if it finds no block beside the LS reserve (3.3.5).

        Returns:
            What keeps it out of the step, or None. It moves then, or nothing was left to take from those behind it.
        """
        requests = self._requests
        while (refused_by := batch.add(state, reserve_blocks=requests.reserve_for_ls(state))) is Bound.MEMORY:
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
        needed = requests.blocks_for(state)
        shortage = needed - self._kv.num_free(Tier.DEVICE)
        if shortage <= 0:
            return
        if state.blocked_since_s is None:
            state.blocked_since_s = batch.now_s
        still_missing = self.offload_until(batch, shortage - requests.blocks_moving_out)
        out_of_patience = batch.now_s - state.blocked_since_s >= LS_PATIENCE_S
        if still_missing <= 0 and not out_of_patience:
            return
        if not batch.make_room(needed, (BE,)) and out_of_patience:
            # The host tier is too slow or stuck: what is on its way there must not hold up an LS request.
            for move in reversed(requests.moves_to_host):
                if move not in batch.moves:
                    requests.abandon_move(move.move_id)
                    if batch.make_room(needed, (BE,)):
                        break

    def offload_for_time(self, batch: Batch, kept_out: Sequence[RequestState]) -> None:
        """Offload a decode that the time bound has kept out for a while, if the host tier has cores of its own (3.3.5).

        Args:
            kept_out: Decodes that the bound kept out of it; empty: the step had time for all.
        """
        can_offload = self._host_has_own_cores and self._requests.host_is_up
        if not (can_offload and kept_out):
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
        margin = max(self._limits.ls_reserve_blocks, ls_may_take) + 2 * sum(map(len, requests.device.values()))
        nothing_waits = nothing_left_out and not any(requests.waiting.values())
        if not nothing_waits or batch.moves or self._kv.num_free(Tier.DEVICE) <= margin:
            self._light_since_s = None
            return
        if self._light_since_s is None:
            self._light_since_s = batch.now_s
        if batch.now_s - self._light_since_s < self._options.swap_in_delay_s or requests.is_full(BE):
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
