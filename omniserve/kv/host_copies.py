"""HostCopies: blocks of the host pool that no table holds: checkpoints, and blocks of prefixes.

Both give way when requests need memory, prefixes first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from omniserve.core.work import KVMove
from omniserve.kv.block_pool import BlockPool
from omniserve.kv.host_prefixes import HostPrefixes
from omniserve.kv.tiers import MoveResult


@dataclass(slots=True)
class _Checkpoint:
    blocks: list[int] = field(default_factory=list)  # copies of the request's first blocks, in order
    flight: KVMove | None = None  # the copy under way, of the blocks that follow


_NOTHING = _Checkpoint()


class HostCheckpoints:
    """Host copies of full device blocks: checkpoints by request, the oldest first. A later move copies only the rest.

    A checkpoint is of a request's first blocks, with at most one copy under way behind them. Paper: conserve 4.4
    (incremental checkpoints of append-only KV), at the granularity of a block.

    A checkpoint only ever loses blocks at its end, and if it changes, the copy under way for it is of no use: that
    stays under way, *unused*, and its target blocks are held until it is over.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._checkpoints: dict[str, _Checkpoint] = {}
        self._flights: dict[int, KVMove] = {}  # all copies under way, of use or not

    def _of(self, request_id: str) -> _Checkpoint:
        return self._checkpoints.get(request_id, _NOTHING)

    def num_blocks(self, request_id: str) -> int:
        """Return how many of the request's first blocks have a copy."""
        return len(self._of(request_id).blocks)

    def num_held(self, request_id: str) -> int:
        """Return how many blocks the request's checkpoint holds, those of the copy under way included."""
        flight = self._of(request_id).flight
        return self.num_blocks(request_id) + (len(flight.dst_block_ids) if flight is not None else 0)

    def is_copying(self, request_id: str) -> bool:
        """Tell whether a copy that the request's checkpoint waits for is under way."""
        return self._of(request_id).flight is not None

    def begin_copy(self, request_id: str, move: KVMove) -> None:
        """Note that ``move`` copies the blocks after the last copied; its target blocks are taken from the pool."""
        checkpoint = self._checkpoints.setdefault(request_id, _Checkpoint())
        assert checkpoint.flight is None, f"request {request_id} is being checkpointed already"
        checkpoint.flight = self._flights[move.move_id] = move

    def end_copy(self, move_id: int, *, succeeded: bool) -> MoveResult:
        """Take a copy's blocks into its checkpoint if it succeeded and is still of use, else free them."""
        move = self._flights.pop(move_id)
        checkpoint = self._of(move.request_id)
        if checkpoint.flight is not move:
            self._pool.give_back(move.dst_block_ids)
            return MoveResult.UNUSED
        checkpoint.flight = None
        if succeeded:
            checkpoint.blocks += move.dst_block_ids
            return MoveResult.ARRIVED
        self._pool.give_back(move.dst_block_ids)
        self._forget_if_empty(move.request_id)
        return MoveResult.STAYED

    def last_block(self, request_id: str) -> int | None:
        """Return the last copied block, None if there is none: the pool can go on behind it."""
        blocks = self._of(request_id).blocks
        return blocks[-1] if blocks else None

    def keep(self, request_id: str, blocks: list[int]) -> None:
        """Make ``blocks``, copies of the request's first ones, its checkpoint; it has none yet."""
        assert request_id not in self._checkpoints, f"request {request_id} has a checkpoint already"
        if blocks:
            self._checkpoints[request_id] = _Checkpoint(blocks)

    def take(self, request_id: str) -> list[int]:
        """Forget the request's checkpoint and return its blocks, which are the caller's now."""
        checkpoint = self._checkpoints.pop(request_id, None)
        return checkpoint.blocks if checkpoint is not None else []

    def drop(self, request_id: str) -> None:
        """Forget the request's checkpoint and free its blocks."""
        self._pool.give_back(self.take(request_id))

    def request_ids(self) -> list[str]:
        """Return the requests that have a checkpoint, the oldest first."""
        return list(self._checkpoints)

    def num_reclaimable(self, request_ids: Iterable[str]) -> int:
        """Return how many blocks ``reclaim`` could free of these requests' checkpoints."""
        return sum(len(self._checkpoints[request_id].blocks) for request_id in request_ids)

    def reclaim(self, num_blocks: int, request_ids: Iterable[str]) -> None:
        """Free ``num_blocks``, or all there are: of these requests' checkpoints, in this order, each from its end."""
        for request_id in request_ids:
            if num_blocks <= 0:
                return
            checkpoint = self._checkpoints[request_id]
            if not checkpoint.blocks:
                continue
            start = max(0, len(checkpoint.blocks) - num_blocks)
            cut = checkpoint.blocks[start:]
            del checkpoint.blocks[start:]
            checkpoint.flight = None  # what it copies would not follow the last copied block any more
            self._pool.give_back(cut)
            self._forget_if_empty(request_id)
            num_blocks -= len(cut)

    def cut_source(self, request_id: str, num_blocks: int) -> None:
        """Note that only its first ``num_blocks`` are on the device any more: a copy of others is of no use."""
        checkpoint = self._of(request_id)
        flight = checkpoint.flight
        if flight is not None and len(checkpoint.blocks) + len(flight.src_block_ids) > num_blocks:
            checkpoint.flight = None
            self._forget_if_empty(request_id)

    def owned_blocks(self) -> Iterator[int]:
        """Yield all blocks that are held here, those of copies under way included; for checks."""
        yield from itertools.chain.from_iterable(c.blocks for c in self._checkpoints.values())
        yield from itertools.chain.from_iterable(move.dst_block_ids for move in self._flights.values())

    def check(self, table_lengths: dict[str, int]) -> None:
        """Verify that each checkpoint, with what is being copied for it, is of blocks that its request has or had.

        Raises:
            AssertionError: With the checkpoint that does not fit.
        """
        for request_id, checkpoint in self._checkpoints.items():
            length = len(checkpoint.blocks)
            if checkpoint.flight is not None:
                assert self._flights.get(checkpoint.flight.move_id) is checkpoint.flight, (request_id, checkpoint)
                assert checkpoint.flight.request_id == request_id, (request_id, checkpoint)
                length += len(checkpoint.flight.src_block_ids)
            held = table_lengths.get(request_id, 0)
            assert 0 < length <= held, f"checkpoint of {length} blocks, but {request_id} has {held} on the device"

    def _forget_if_empty(self, request_id: str) -> None:
        checkpoint = self._checkpoints[request_id]
        if not checkpoint.blocks and checkpoint.flight is None:
            del self._checkpoints[request_id]


class HostCopies:
    """The checkpoints of requests and, if prefixes are kept in host memory, their blocks there.

    Args:
        pool: The host pool.
        prefixes: None: no prefixes are kept there.
    """

    def __init__(self, pool: BlockPool, prefixes: HostPrefixes | None = None) -> None:
        self._pool = pool
        self.checkpoints = HostCheckpoints(pool)
        self.prefixes = prefixes

    @property
    def num_idle(self) -> int:
        """Blocks of prefixes that no request uses and no copy reads: they count as free."""
        return self.prefixes.num_reclaimable if self.prefixes is not None else 0

    @property
    def num_unused(self) -> int:
        """Blocks that no request uses, but that hold prefixes, or will when a copy ends."""
        return self.prefixes.num_held if self.prefixes is not None else 0

    def num_reclaimable(self, request_ids: Iterable[str]) -> int:
        """Return how many blocks ``reclaim`` could free, with the checkpoints of these requests."""
        return self.num_idle + self.checkpoints.num_reclaimable(request_ids)

    def reclaim(self, num_blocks: int, request_ids: Iterable[str]) -> None:
        """Free ``num_blocks``, or all there are: of prefixes, then of these requests' checkpoints, in this order."""
        num_before = self._pool.num_free
        if self.prefixes is not None:
            self.prefixes.reclaim(num_blocks)
        self.checkpoints.reclaim(num_blocks - (self._pool.num_free - num_before), request_ids)

    def share(self, request_id: str, keys: Sequence[bytes]) -> bool:
        """Make the host blocks of these keys a request's checkpoint, so that its move copies only what follows.

        Returns:
            False if there are no prefixes on the host, or the request has a checkpoint already.
        """
        if self.prefixes is None or self.checkpoints.num_held(request_id):
            return False
        self.checkpoints.keep(request_id, self.prefixes.share(keys))
        return True

    def publish(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Let others find the first blocks of a request that has come to the host, which have these keys."""
        if self.prefixes is not None:
            self.prefixes.publish(keys, blocks)

    def adopt_checkpoint(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Make a request's checkpoint blocks of prefixes; its first, full blocks have these keys."""
        assert self.prefixes is not None
        blocks = self.checkpoints.take(request_id)
        self.prefixes.adopt(keys[: len(blocks)], blocks)

    def owned_blocks(self) -> Iterator[int]:
        """Yield the blocks that checkpoints hold, and that copies of prefixes will bring; for checks."""
        yield from self.checkpoints.owned_blocks()
        if self.prefixes is not None:
            yield from self.prefixes.owned_blocks()

    def check(self, table_lengths: dict[str, int]) -> None:
        """Verify the books; ``table_lengths`` as in ``HostCheckpoints.check``.

        Raises:
            AssertionError: The books do not fit one another.
        """
        self.checkpoints.check(table_lengths)
        if self.prefixes is not None:
            self.prefixes.check()
