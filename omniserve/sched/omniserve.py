"""``omniserve``: LS first, BE in what is left, BE decodes that find no device memory on the host tier.

Paper: omniserve 3.3.2 (order), 3.3.5 (offload), 3.3.6 (piggyback control), 3.2.4 (delayed swap-in).
"""

from __future__ import annotations

from omniserve.kv.base import KVManager, Tier
from omniserve.plan import KVMove, MoveDirection, StepPlan
from omniserve.sched.base import SCHEDULERS, SchedulerLimits
from omniserve.sched.batch import Batch
from omniserve.sched.policy import BE, LS, RequestScheduler
from omniserve.sched.state import Phase, RequestState

# An LS prompt that lacks memory waits this long for swap-outs to end; then BE requests are recomputed instead.
LS_PATIENCE_S = 0.02


@SCHEDULERS.register("omniserve")
class OmniServeScheduler(RequestScheduler):
    """LS decode, LS chunked prefill, BE chunked prefill, BE decode, then piggyback rows, lowest layer first."""

    def __init__(self, *, limits: SchedulerLimits, kv: KVManager) -> None:
        super().__init__(limits=limits, kv=kv)
        self._moves: list[KVMove] = []
        self._light_steps = 0
        rows = limits.max_piggyback_rows
        self._max_rows = rows if rows is not None else limits.max_piggyback_slots * (limits.num_layers + 1)

    def schedule(self, now_s: float) -> StepPlan:
        batch = Batch(self.kv, self.limits.max_step_tokens)
        self._moves = []
        self._run_ls(batch)
        self._admit_ls(batch, now_s)
        self._prefill_be(batch)
        self._decode_be(batch)
        self._swap_back()
        entries = self.residents.plan_entries(self._host_blocks, self._max_rows) if self.host_is_up else []
        joins = self.residents.plan_joins(self._max_rows - len(entries))
        return self.make_plan(batch, now_s, entries=entries, joins=joins, moves=self._moves)

    # -- latency-sensitive ---------------------------------------------------------------------------------------

    def _run_ls(self, batch: Batch) -> None:
        for decodes in (True, False):
            for state in self.device[LS]:
                if state.phase is Phase.DEVICE and state.decodes is decodes and state not in batch:
                    self.run_or_preempt(batch, state, (BE, LS))

    def _admit_ls(self, batch: Batch, now_s: float) -> None:
        for state in self.waiting[LS]:
            self._make_room_for_ls(batch, state, now_s)
            if not self.admit(batch, state):
                break

    def _make_room_for_ls(self, batch: Batch, state: RequestState, now_s: float) -> None:
        """Free device memory for an LS prompt: by moving BE KV to the host while that is quick, else by dropping it."""
        needed = self.blocks_for(state)
        shortage = needed - self.kv.num_free(Tier.DEVICE)
        if shortage <= 0:
            return
        if state.blocked_since_s is None:
            state.blocked_since_s = now_s
        still_missing = self._offload_until(shortage - self._blocks_moving_out(), batch)
        out_of_patience = now_s - state.blocked_since_s >= LS_PATIENCE_S
        if still_missing <= 0 and not out_of_patience:
            return
        if not self.make_room(needed, batch, (BE,)) and out_of_patience:
            # The host tier is too slow or stuck: what is on its way there must not hold up an LS request.
            for move_id, (_, move) in reversed(tuple(self.moving.items())):
                if self.make_room(needed, batch, (BE,)):
                    break
                if move.direction is MoveDirection.TO_HOST and move not in self._moves:
                    self.abandon_move(move_id)

    # -- best-effort ---------------------------------------------------------------------------------------------

    def _prefill_be(self, batch: Batch) -> None:
        for state in self.device[BE]:
            if not state.decodes:
                batch.add(state)  # it holds all its blocks since its first chunk
        if self.waiting[LS]:
            return  # a BE prompt must not take the memory that an LS one waits for
        for state in self.waiting[BE]:
            reserve = self._reserve_blocks(state)
            if self.admit(batch, state, reserve_blocks=reserve):
                continue
            if batch.tokens_left:
                shortage = self.blocks_for(state) + reserve - self.kv.num_free(Tier.DEVICE)
                self._offload_until(shortage - self._blocks_moving_out(), batch)
            break

    def _decode_be(self, batch: Batch) -> None:
        for state in self.device[BE]:
            if batch.tokens_left == 0:
                return
            if state.phase is not Phase.DEVICE or not state.decodes or state in batch:
                continue
            while not batch.add(state, reserve_blocks=self._reserve_blocks(state)):
                if self._offload(state):
                    break
                # The host tier is full or absent: the youngest gives way, until it is this one's turn to wait.
                victim = self.youngest_victim(batch, state, (BE,))
                if victim is None:
                    break
                self.preempt(victim)

    def _reserve_blocks(self, state: RequestState) -> int:
        """Blocks that a BE request leaves free for LS: none if it has the device to itself, else it might never run."""
        others = len(self.device[LS]) + len(self.waiting[LS]) + sum(s is not state for s in self.device[BE])
        return self.limits.ls_reserve_blocks if others else 0

    def _offload(self, state: RequestState) -> bool:
        """Start to move a decoding BE request to the host tier (3.3.5); False if there is no room."""
        # Two blocks for each resident to grow into, so that a full host tier does not drop what it just received.
        headroom = 2 * (self.residents.num_slots_used + 1)
        move = self.start_move(state, MoveDirection.TO_HOST, reserve_blocks=headroom)
        if move is None:
            return False
        self._moves.append(move)
        return True

    def _offload_until(self, shortage: int, batch: Batch) -> int:
        """Offload decoding BE requests, youngest first, until they free ``shortage`` blocks; return what is missing."""
        for state in reversed(self.device[BE]):
            if shortage <= 0:
                break
            if state.decodes and state not in batch and self._offload(state):
                shortage -= self.kv.num_blocks(state.request_id)
        return shortage

    def _blocks_moving_out(self) -> int:
        outgoing = (move for _, move in self.moving.values() if move.direction is MoveDirection.TO_HOST)
        return sum(len(move.src_block_ids) for move in outgoing)

    # -- host tier -----------------------------------------------------------------------------------------------

    def _host_blocks(self, state: RequestState) -> tuple[int, ...] | None:
        """Blocks for a resident's newest token; if the host pool is full, the youngest resident is recomputed."""
        blocks = self.kv.allocate(state.request_id, state.num_tokens)
        if blocks is None and next(reversed(self.residents.queue)) is state:
            self.preempt(state)
        return blocks

    def _swap_back(self) -> None:
        """Move a BE request to the device once memory has been light for a while, at a token boundary (3.2.4)."""
        # Each device request may need one more block soon; twice that keeps the next step from undoing the move.
        margin = self.limits.ls_reserve_blocks + 2 * sum(len(queue) for queue in self.device.values())
        nobody_waits = not any(self.waiting.values())
        if not nobody_waits or self._moves or self.kv.num_free(Tier.DEVICE) <= margin:
            self._light_steps = 0
            return
        self._light_steps += 1
        if self._light_steps <= self.limits.swap_in_delay_steps:
            return
        for state in self.residents.queue:
            if state.away is None:
                move = self.start_move(state, MoveDirection.TO_DEVICE, reserve_blocks=margin)
                if move is not None:
                    self._moves.append(move)
                return
