"""Checkpoints: which blocks are copied to the host in a step ahead of any need, of requests on the device and evicted.

A request that has its KV on the host already leaves the device at once when latency-sensitive work needs its memory.
Paper: conserve 4.4 (incremental checkpoints), for omniserve 3.2.4's moves to the host; bros 5.2 (lazy checkpointing).
"""

from __future__ import annotations

from collections.abc import Iterable

from omniserve.core.work import Done, KVMove
from omniserve.kv.base import KVCheckpoints, KVManager, MoveResult
from omniserve.sched.side_work import SideWorkQueue
from omniserve.sched.state import Phase, RequestState


class Checkpoints:
    """Plans the copies and hears of their ends.

    Args:
        kv: Keeps the copies. One with shared blocks saves only what evicted requests are about to lose.
        side_work: Takes the copies.
        max_blocks_per_step: Most blocks to begin in a step, less those still under way: copies that are slower than
            the steps do not pile up in front of a move that a request waits for. 0: nothing is copied.
    """

    def __init__(self, kv: KVManager, side_work: SideWorkQueue, *, max_blocks_per_step: int) -> None:
        self._checkpoints = kv.checkpoints if max_blocks_per_step > 0 else None
        self._sharing = kv.sharing if max_blocks_per_step > 0 else None
        self._moves, self._side_work = kv.moves, side_work
        self._outlive_eviction = kv.evictions is not None
        self._block_size = kv.block_size
        self._max_blocks = max_blocks_per_step
        self._under_way: dict[int, int] = {}
        self.num_blocks_copied = 0
        """Counter: blocks of the copies that joined a checkpoint, if only in part."""

    def begin(self, states: Iterable[RequestState], *, reserve_blocks: int) -> None:
        """Begin copies for the plan that is decided, of what has been computed before its step.

        Args:
            states: Requests that may have a checkpoint; those that are not on the device are passed over.
            reserve_blocks: Host blocks to leave free for requests that decode on the host.
        """
        max_blocks = self._max_blocks - sum(self._under_way.values())
        if self._sharing is not None:
            moves = self._sharing.start_saving(
                num_ahead=self._max_blocks, max_blocks=max_blocks, reserve_blocks=reserve_blocks
            )
        elif self._checkpoints is not None:
            moves = self._copy_full_blocks(self._checkpoints, states, max_blocks, reserve_blocks)
        else:
            return
        for move in moves:
            self._under_way[move.move_id] = len(move.src_block_ids)
            self._side_work.expect(move.move_id, self._on_done)
            self._side_work.begin(move)

    def _copy_full_blocks(
        self, checkpoints: KVCheckpoints, states: Iterable[RequestState], max_blocks: int, reserve_blocks: int
    ) -> list[KVMove]:
        """Begin to copy full blocks of requests on the device; the last in their queue first: they give way first."""
        on_device = sorted((s for s in states if s.phase is Phase.DEVICE), key=lambda state: state.priority_key)
        is_behind = [s.num_computed_tokens // self._block_size > self.num_blocks(s) for s in on_device]
        moves: list[KVMove] = []
        for number in (number for number in reversed(range(len(on_device))) if is_behind[number]):
            if max_blocks <= 0:
                break
            state = on_device[number]
            # A short host pool keeps the copies of requests that are preempted first.
            seniors = on_device[:number] if self._outlive_eviction else []
            move = checkpoints.start(
                state.request_id,
                state.num_computed_tokens,
                max_blocks=max_blocks,
                reserve_blocks=reserve_blocks,
                give_way=[senior.request_id for senior in seniors],
            )
            if move is not None:
                max_blocks -= len(move.src_block_ids)
                moves.append(move)
        return moves

    def num_blocks(self, state: RequestState) -> int:
        """Return how many of a request's first blocks have a copy on the host."""
        return self._checkpoints.num_blocks(state.request_id) if self._checkpoints is not None else 0

    def _on_done(self, done: Done) -> None:
        """Book the end of a copy."""
        assert self._moves is not None
        num_blocks = self._under_way.pop(done.move_id)
        if self._moves.finish(done.move_id, succeeded=done.ok) is MoveResult.ARRIVED:
            self.num_blocks_copied += num_blocks

    @property
    def are_made(self) -> bool:
        """False if nothing is ever copied ahead of need."""
        return self._checkpoints is not None or self._sharing is not None

    @property
    def busy(self) -> bool:
        """True while a copy is under way, be it of use or not: its host blocks are held."""
        return bool(self._under_way)
