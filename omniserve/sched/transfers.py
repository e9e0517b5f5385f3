"""RequestTransfers: where requests are, and how they change place: evicted, moved between the tiers, restored."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from omniserve.core.plan import HostEvent, HostEventKind, KVMove, MoveDirection
from omniserve.core.request import ServiceClass
from omniserve.kv.base import KVManager, MoveResult, Tier
from omniserve.sched.base import Scheduler, SchedulerLimits
from omniserve.sched.checkpoints import Checkpoints
from omniserve.sched.residents import HostResidents
from omniserve.sched.state import Phase, RequestQueue, RequestState


class RequestTransfers(Scheduler):
    """Queues by place, and the moves under way between them."""

    offloads: ClassVar[bool] = False
    """The policy moves requests to the host tier."""

    def __init__(self, *, limits: SchedulerLimits, kv: KVManager) -> None:
        self.limits = limits
        self.kv = kv
        self.waiting = {c: RequestQueue() for c in ServiceClass}
        self.device = {c: RequestQueue() for c in ServiceClass}
        self.residents = HostResidents(
            num_slots=limits.num_host_slots,
            num_layers=limits.num_layers,
        )
        self.checkpoints: Checkpoints | None = None
        uses_checkpoints = kv.restores or self.offloads
        if uses_checkpoints and limits.checkpoint_blocks > 0 and limits.num_host_slots > 0:
            self.checkpoints = Checkpoints(kv, limits.block_size, max_blocks_per_step=limits.checkpoint_blocks)
        self.moving: dict[int, tuple[RequestState, KVMove]] = {}
        self.abandoned_moves: set[int] = set()
        self.host_is_up = limits.num_host_slots > 0
        self._restores: list[KVMove] = []
        self._counters: Counter[str] = Counter()

    def preempt(self, state: RequestState) -> None:
        """Take a request's memory back; it waits, in arrival order, to be resumed. Its tokens are kept.

        What the KV manager does not keep of its KV is recomputed then.
        """
        if state.phase is Phase.DEVICE:
            self.device[state.kind].remove(state)
        elif state.phase is Phase.HOST:
            self.residents.queue.remove(state)
            self.residents.release_slot(state)
        else:
            raise RuntimeError(f"request {state.request_id} cannot be preempted while {state.phase}")
        self.kv.evict(state.request_id, state.num_computed_tokens)
        self._requeue(state)

    def _requeue(self, state: RequestState) -> None:
        self._counters["preemptions"] += 1
        self._counters["preempted_tokens"] += state.num_computed_tokens
        self._wait(state)

    def _wait(self, state: RequestState) -> None:
        state.num_computed_tokens = 0
        state.halted = None
        state.phase = Phase.WAITING
        self.waiting[state.kind].add(state)

    def start_move(self, state: RequestState, direction: MoveDirection, *, reserve_blocks: int = 0) -> KVMove | None:
        """Begin to move a DEVICE or HOST request that stands at a token boundary; None if there is no room."""
        assert state.decodes and state.away is None, f"{state.request_id} is not at a token boundary"
        assert self.offloads, f"{type(self).__name__} moves requests to the host: set its offloads to True"
        to_host = direction is MoveDirection.TO_HOST
        if to_host and (not self.host_is_up or self.residents.num_free_slots == 0):
            return None
        keep_tokens = 0 if to_host or self.checkpoints is None else state.num_computed_tokens
        move = self.kv.start_move(state.request_id, direction, reserve_blocks=reserve_blocks, keep_tokens=keep_tokens)
        if move is None:
            return None
        state.halted = None
        if to_host:
            self.device[state.kind].remove(state)
            self.residents.take_slot(state)
        else:
            self.residents.queue.remove(state)
        state.phase = Phase.MOVING
        self.moving[move.move_id] = (state, move)
        return move

    def needs_restore(self, state: RequestState) -> bool:
        """Tell whether a WAITING request has a checkpoint of tokens whose KV is not on the device any more."""
        num_kept = self.kv.num_kept_tokens
        return self.host_is_up and num_kept(state.request_id, Tier.HOST) > num_kept(state.request_id, Tier.DEVICE)

    def start_restore(self, state: RequestState, *, reserve_blocks: int = 0) -> bool:
        """Begin to copy a WAITING request back that needs it; False if there is no room. The next plan has the copy.

        It holds device blocks for all its tokens from now on, and is on the device, with those behind its checkpoint
        uncomputed, when the copy is done.
        """
        num_tokens = self.kv.num_kept_tokens(state.request_id, Tier.HOST)
        move = self.kv.start_restore(state.request_id, state.num_tokens, reserve_blocks=reserve_blocks)
        if move is None:
            return False
        self.waiting[state.kind].remove(state)
        state.num_computed_tokens = num_tokens
        state.blocked_since_s = None
        state.phase = Phase.MOVING
        self.moving[move.move_id] = (state, move)
        self._restores.append(move)
        return True

    def abandon_move(self, move_id: int) -> None:
        """Take the device memory back from a request that is moving to the host; it waits to be recomputed."""
        state, _ = self.moving.pop(move_id)
        self.kv.abandon_move(move_id)
        self.abandoned_moves.add(move_id)
        self.residents.release_slot(state)
        if state.phase is Phase.DRAINING:
            state.phase = Phase.FINISHED
            self.kv.free(state.request_id)
        else:
            self._requeue(state)

    @property
    def moves_to_host(self) -> list[KVMove]:
        """Moves of requests to the host that are under way, the first begun first."""
        return [move for _, move in self.moving.values() if move.direction is MoveDirection.TO_HOST]

    @property
    def blocks_moving_out(self) -> int:
        """Device blocks that they will free."""
        return sum(len(move.src_block_ids) for move in self.moves_to_host)

    @property
    def num_preemptions(self) -> int:
        return self._counters["preemptions"]

    def _finish_move(self, event: HostEvent) -> None:
        if self.checkpoints is not None and self.checkpoints.on_move(event):
            return
        succeeded = event.kind is HostEventKind.MOVE_DONE
        result = self.kv.finish_move(event.move_id, succeeded=succeeded)
        if event.move_id in self.abandoned_moves:
            self.abandoned_moves.remove(event.move_id)
            return
        state, _ = self.moving.pop(event.move_id)
        on_host = self.kv.tier(state.request_id) is Tier.HOST
        if state.phase is Phase.DRAINING:
            state.phase = Phase.FINISHED
            self._leave_host(state)
            return
        if result is MoveResult.LOST:
            if state.slot >= 0:
                self.residents.release_slot(state)
                self._requeue(state)
            else:
                self._wait(state)  # it was counted when it gave way
            return
        if succeeded and state.slot >= 0:
            self._counters["swaps_out" if on_host else "swaps_in"] += 1
        if on_host:
            state.phase = Phase.HOST
            self.residents.queue.add(state)
            if not self.host_is_up:
                self.preempt(state)
        else:
            if state.slot < 0:
                self._counters["resumed_tokens"] += state.num_computed_tokens
            self._release_slot(state)
            state.phase = Phase.DEVICE
            self.device[state.kind].add(state)

    def _leave_host(self, state: RequestState) -> None:
        self._release_slot(state)
        self.kv.free(state.request_id)

    def _release_slot(self, state: RequestState) -> None:
        if state.slot >= 0:  # a request that is restored has none
            self.residents.release_slot(state)
