"""Checkpoints: which blocks are copied to the host in a step ahead of any need, of requests on the device and evicted.

A request whose KV is on the host already leaves the device at once when latency-sensitive work needs its memory.
Paper: conserve 4.4 (incremental checkpoints), for omniserve 3.2.4's moves to the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from omniserve.core.plan import HostEvent, HostEventKind, KVMove
from omniserve.kv.base import KVManager, MoveResult
from omniserve.sched.state import Phase, RequestState


class Checkpoints:
    """Plans the copies and hears of their ends.

    Args:
        kv: Keeps the checkpoints; a manager that has none never lets one start.
        block_size: Tokens per block.
        max_blocks_per_step: Most blocks to begin in a step, less those still under way: copies that are slower than
            the steps do not pile up in front of a move that a request waits for.
    """

    def __init__(self, kv: KVManager, block_size: int, *, max_blocks_per_step: int) -> None:
        if max_blocks_per_step < 1:
            raise ValueError(f"max_blocks_per_step must be >= 1, got {max_blocks_per_step}")
        self._kv = kv
        self._block_size = block_size
        self._max_blocks = max_blocks_per_step
        self._under_way: dict[int, int] = {}
        self.num_blocks_copied = 0
        """Counter: blocks of the copies that joined a checkpoint, if only in part."""

    def plan(self, states: Iterable[RequestState], *, reserve_blocks: int) -> list[KVMove]:
        """Begin copies: of evicted requests what is about to be taken, then of requests that rest on the device.

        Of the latter the last in their queue come first: they give way first.

        To be called when the step is decided, with what has been computed before it. All of the moves belong into its
        plan.

        Args:
            states: Requests that may have a checkpoint; those that are not on the device are passed over.
            reserve_blocks: Host blocks to leave free for requests that decode on the host.
        """
        states = list(states)
        blocks_left = self._max_blocks - sum(self._under_way.values())
        moves = self._kv.start_saving(num_ahead=self._max_blocks, max_blocks=blocks_left, reserve_blocks=reserve_blocks)
        for saving in moves:
            self._under_way[saving.move_id] = len(saving.src_block_ids)
            blocks_left -= len(saving.src_block_ids)
        num_checkpointed, size = self._kv.num_checkpointed, self._block_size
        behind = [
            state
            for state in states
            if state.phase is Phase.DEVICE and state.num_computed_tokens // size > num_checkpointed(state.request_id)
        ]
        for state in sorted(behind, key=lambda state: state.place, reverse=True):
            if blocks_left <= 0:
                break
            move = self._kv.start_checkpoint(
                state.request_id,
                state.num_computed_tokens,
                max_blocks=blocks_left,
                reserve_blocks=reserve_blocks,
                give_way=self._seniors(state, states),
            )
            if move is not None:
                self._under_way[move.move_id] = len(move.src_block_ids)
                blocks_left -= len(move.src_block_ids)
                moves.append(move)
        return moves

    def _seniors(self, state: RequestState, states: Sequence[RequestState]) -> Iterator[str]:
        """Yield the requests that are preempted after this one, the last first: a short host pool keeps the others."""
        if self._kv.restores:
            for other in sorted(states, key=lambda other: other.place):
                if other.place >= state.place:
                    return
                if other.phase is Phase.DEVICE:
                    yield other.request_id

    def on_move(self, event: HostEvent) -> bool:
        """Book the end of a copy; False, and nothing has happened, if the event is of some other move."""
        num_blocks = self._under_way.pop(event.move_id, None)
        if num_blocks is None:
            return False
        succeeded = event.kind is HostEventKind.MOVE_DONE
        if self._kv.finish_move(event.move_id, succeeded=succeeded) is MoveResult.ARRIVED:
            self.num_blocks_copied += num_blocks
        return True

    @property
    def busy(self) -> bool:
        """True while a copy is under way, be it of use or not: its host blocks are held."""
        return bool(self._under_way)
