"""Pools of block ids, one of which keeps neighbours together, and the blocks of the host's that hold checkpoints."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from omniserve.core.work import KVMove
from omniserve.kv.base import MoveResult


class BlockPool:
    """Hands out the ids ``[0, num_blocks)``, the most recently freed first (its memory is the warmest)."""

    def __init__(self, num_blocks: int, name: str) -> None:
        self.num_blocks = num_blocks
        self.name = name
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = bytearray(b"\1" * num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def free_ids(self) -> list[int]:
        """Return the free ids, in no particular order."""
        return list(self._free)

    def take(self, count: int, after: int | None = None) -> list[int] | None:
        """Take ``count`` ids; None, and nothing taken, if fewer are free.

        ``after`` is the id that they will stand behind in a block table; a pool to which neighbours matter tries to
        go on there.
        """
        if count > len(self._free):
            return None
        cut = len(self._free) - count
        taken = self._free[cut:][::-1]
        del self._free[cut:]
        for block in taken:
            self._is_free[block] = 0
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        """Free ids that ``take`` handed out.

        Raises:
            RuntimeError: An id is free already.
        """
        for block in blocks:
            if self._is_free[block]:
                raise RuntimeError(f"{self.name} block {block} was freed twice")
            self._is_free[block] = 1
            self._free.append(block)

    def check(self, owned: Iterable[int]) -> None:
        """Verify that ``owned`` are exactly the ids that are not free, each owned once.

        Raises:
            AssertionError: With the ids that are lost, doubled or both free and owned.
        """
        counts = Counter(owned)
        free = Counter(self.free_ids())
        doubled = sorted(block for block, n in (counts + free).items() if n > 1)
        lost = sorted(set(range(self.num_blocks)) - counts.keys() - free.keys())
        assert not doubled and not lost, (
            f"{self.name} pool of {self.num_blocks} blocks: {sum(counts.values())} owned, {self.num_free} free; "
            f"owned twice or also free: {doubled[:16]}; lost: {lost[:16]}"
        )


class RunPool(BlockPool):
    """Hands out the ids ``[0, num_blocks)`` in ascending runs, as long as it can and from low ids up.

    A host kernel reads a request's blocks in order, and a longer run of memory at a higher speed (measured with random
    pieces: 8 KiB at a third to a half of the read bandwidth, 128 KiB at 0.8 to 0.9, 256 KiB at 0.9 to 0.97).

    Free ids are kept as maximal runs, in bins by the power of two of their length. ``take`` carves from a run of the
    smallest bin that surely has one long enough, so that long runs are kept for requests that need them; only if there
    is none does it put several together, the longest first.
    """

    def __init__(self, num_blocks: int, name: str) -> None:
        self.num_blocks = num_blocks
        self.name = name
        self._num_free = 0
        self._ends: dict[int, int] = {}  # free run [start, end), and the other way round
        self._starts: dict[int, int] = {}
        self._bins: list[dict[int, None]] = [{} for _ in range(num_blocks.bit_length() + 1)]  # starts, by bit length
        self._is_free = bytearray(num_blocks)
        if num_blocks:
            self._add_run(0, num_blocks)

    @property
    def num_free(self) -> int:
        return self._num_free

    def free_ids(self) -> list[int]:
        return [block for start, end in self._ends.items() for block in range(start, end)]

    def take(self, count: int, after: int | None = None) -> list[int] | None:
        if count > self._num_free:
            return None
        taken: list[int] = []
        if after is not None and after + 1 in self._ends:
            taken += self._carve(after + 1, count)
        while len(taken) < count:
            missing = count - len(taken)
            taken += self._carve(self._best_run(missing), missing)
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        ordered = sorted(blocks)
        if not ordered:
            return
        for block, following in pairwise([*ordered, -1]):
            if self._is_free[block] or block == following:
                raise RuntimeError(f"{self.name} block {block} was freed twice")
        start = ordered[0]
        for block, following in pairwise([*ordered, -1]):
            if following != block + 1:
                self._join_run(start, block + 1)
                start = following

    def _best_run(self, count: int) -> int:
        """Return the start of a run of at least ``count`` ids if there surely is one, else of a longest one."""
        exact = count.bit_length()
        for start in list(self._bins[exact])[:8]:  # of this length some are long enough and some are not
            if self._ends[start] - start >= count:
                return start
        for bin_ in self._bins[exact + 1 :]:
            if bin_:
                return next(iter(bin_))
        for bin_ in reversed(self._bins[: exact + 1]):
            if bin_:
                return next(iter(bin_))
        raise AssertionError(f"{self.name} pool: {self._num_free} free, but no run")

    def _carve(self, start: int, most: int) -> list[int]:
        end = self._remove_run(start)
        cut = min(end, start + most)
        if cut < end:
            self._add_run(cut, end)
        return list(range(start, cut))

    def _join_run(self, start: int, end: int) -> None:
        if start in self._starts:
            start = self._starts[start]
            self._remove_run(start)
        if end in self._ends:
            end = self._remove_run(end)
        self._add_run(start, end)

    def _add_run(self, start: int, end: int) -> None:
        self._ends[start], self._starts[end] = end, start
        self._bins[(end - start).bit_length()][start] = None
        self._is_free[start:end] = b"\1" * (end - start)
        self._num_free += end - start

    def _remove_run(self, start: int) -> int:
        end = self._ends.pop(start)
        del self._starts[end], self._bins[(end - start).bit_length()][start]
        self._is_free[start:end] = bytes(end - start)
        self._num_free -= end - start
        return end


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
