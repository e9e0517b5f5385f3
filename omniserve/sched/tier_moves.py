"""TierMoves: moves BE requests to the host tier, to decode there, and back.

Paper: omniserve 3.3.5 (offload), 3.2.4 (delayed swap-in). It does not say what an LS prompt does while its memory is
on the way out: here it waits ``LS_PATIENCE_S``, then KV of BE requests is dropped and computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from omniserve.core.plan import Bound
from omniserve.core.work import MoveDirection
from omniserve.sched.batch import Batch
from omniserve.sched.options import HostTierOptions
from omniserve.sched.state import BE, LS, RequestState
from omniserve.sched.step_cost import Forecast
from omniserve.sched.view import RequestView


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
        view: RequestView,
        options: HostTierOptions,
        forecast: Forecast | None,
        *,
        reserve: Callable[[RequestState], int] | None = None,
    ) -> None:
        self._view, self._memory, self._host = view, view.memory, view.host
        self._reserve = reserve if reserve is not None else self._memory.reserve_for_ls
        self._options = options
        self._host_has_own_cores = forecast is not None and forecast.host_has_own_cores
        self._ls_peak = SlidingMax(_PEAK_WINDOWS * options.min_residence_s)
        self._light_since_s: float | None = None
        self._tight_since_s: float | None = None

    def offload(self, batch: Batch, state: RequestState, *, reserve_blocks: int = 0) -> bool:
        """Start to move a decoding BE request to the host tier (3.3.5); False if there is no room.

        One with a deadline stays where several tenants have BE work: it may be the last in line although it is due
        first, and on the host tier it is slower. ``reserve_blocks`` are host blocks that it leaves free beside what
        residents grow into.
        """
        if state.has_due_time and self._view.is_shared(BE):
            return False
        reserve_blocks += self._memory.host_headroom
        return batch.start_move(state, MoveDirection.TO_HOST, reserve_blocks=reserve_blocks)

    def offload_until(self, batch: Batch, shortage: int, *, reserve_blocks: int = 0) -> int:
        """Offload decoding BE requests until they free ``shortage`` blocks; return what is missing.

        The youngest goes first; requests that came from the host a moment ago go only when no other is left.
        ``reserve_blocks`` as in ``offload``.
        """
        if shortage <= 0:
            return shortage
        freed_by = self._memory.freed_by()
        decodes = [state for state in reversed(self._view.device[BE]) if state.decodes and state not in batch]
        for state in sorted(decodes, key=lambda state: not self._has_stayed(batch, state)):
            if shortage <= 0:
                break
            num_blocks = freed_by(state)
            if self.offload(batch, state, reserve_blocks=reserve_blocks):
                shortage -= num_blocks
        return shortage

    def run_or_offload(self, batch: Batch, state: RequestState, *, at_stake: bool = False) -> Bound | None:
        """Schedule a BE request, or move it to the host tier if it finds no block beside its reserve (3.3.5).

        Args:
            at_stake: As for ``Batch.youngest_victim``.

        Returns:
            What keeps it out of the step, or None. It moves then, or nothing was left to take from those behind it.
        """
        while (refused_by := batch.add(state, reserve_blocks=self._reserve(state))) is Bound.MEMORY:
            # On the host tier a request is slower: one with a deadline goes there when none is left to give way.
            victim = batch.youngest_victim(state, (BE,), at_stake=at_stake) if state.has_due_time else None
            if victim is None and self.offload(batch, state):
                break
            # The host tier is full or absent: the youngest gives way, until it is this one's turn to wait.
            victim = victim or batch.youngest_victim(state, (BE,), at_stake=at_stake)
            if victim is None:
                break
            batch.preempt(victim)
        return refused_by

    def make_room_for_ls(self, batch: Batch, state: RequestState) -> None:
        """Free device memory for an LS prompt: by moving BE KV to the host while that is quick, else by dropping it."""
        needed = self._memory.blocks_for(state)
        shortage = needed - self._memory.num_free
        if shortage <= 0:
            return
        if state.blocked_since_s is None:
            state.blocked_since_s = batch.now_s
        still_missing = self.offload_until(batch, shortage - self._memory.blocks_moving_out)
        out_of_patience = batch.now_s - state.blocked_since_s >= LS_PATIENCE_S
        if still_missing <= 0 and not out_of_patience:
            return
        if not batch.make_room(needed, (BE,)) and out_of_patience:
            # The host tier is too slow or stuck: what is on its way there must not hold up an LS request.
            for move in reversed(self._memory.moves_to_host):
                if move not in batch.moves:
                    batch.abandon_move(move)
                    if batch.make_room(needed, (BE,)):
                        break

    def make_room_for_be(self, batch: Batch, state: RequestState) -> None:
        """Offload decodes for a BE prompt that a step has time but no memory for (3.3.5)."""
        shortage = self._memory.blocks_for(state) + self._reserve(state) - self._memory.num_free
        shortage -= self._memory.blocks_moving_out
        if shortage > 0:
            self.offload_until(batch, shortage, reserve_blocks=self._view.host_blocks_wanted())

    @property
    def can_offload_for_time(self) -> bool:
        """The host tier is up and has cores of its own, so that a decode there takes no time of the device."""
        return self._host_has_own_cores and self._view.host_is_up

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
        ls_blocks = sum(map(self._memory.num_blocks, self._view.device[LS]))
        ls_may_take = self._ls_peak.push(batch.now_s, ls_blocks) - ls_blocks
        # Each device request may need one more block soon; twice that keeps the next step from undoing the move.
        margin = max(self._memory.ls_reserve, ls_may_take) + 2 * self._view.num_on_device
        nothing_waits = nothing_left_out and not any(self._view.waiting.values())
        if not nothing_waits or batch.moves or self._memory.num_free <= margin:
            self._light_since_s = None
            return
        if self._light_since_s is None:
            self._light_since_s = batch.now_s
        if batch.now_s - self._light_since_s < self._options.swap_in_delay_s or self._memory.is_full(BE):
            return
        for state in self._host.queue:
            if state.away is not None or not self._has_stayed(batch, state):
                continue
            position = state.num_computed_tokens
            if batch.cost is not None and batch.cost.seconds_with(position, 1, samples=True) > bound_s:
                return
            if batch.start_move(state, MoveDirection.TO_DEVICE, reserve_blocks=margin):
                return

    def _has_stayed(self, batch: Batch, state: RequestState) -> bool:
        return batch.now_s - state.moved_s >= self._options.min_residence_s
