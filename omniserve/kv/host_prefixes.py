"""HostPrefixes: copies of the prefix cache's device blocks, in host blocks that no request uses."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from omniserve.core.plan import KVMove
from omniserve.kv.base import MoveResult
from omniserve.kv.block_pool import BlockPool


class HostPrefixes:
    """Host blocks by the keys of ``kv.prefix_cache``; the one that was used longest ago is the first to be reclaimed.

    A request may take a device block, and write it, while a copy reads it. The host block of that copy is freed then.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: OrderedDict[bytes, int] = OrderedDict()
        """Key -> host block, the last used last."""
        self._readers: Counter[bytes] = Counter()
        """Moves that read the block of a key; it stays meanwhile."""
        self._copies: dict[int, KVMove] = {}
        self._sources: dict[int, tuple[int, bytes]] = {}
        """Device block -> the copy under way that is of use for it, and its key."""

    def has(self, key: bytes) -> bool:
        """Tell whether a host block has this key."""
        return key in self._blocks

    def is_copying(self, device_block: int) -> bool:
        """Tell whether a copy of a device block is under way."""
        return device_block in self._sources

    @property
    def num_reclaimable(self) -> int:
        """Blocks that ``reclaim`` could free."""
        return len(self._blocks) - len(self._readers)

    def reclaim(self, count: int) -> None:
        """Free ``count`` of the blocks that no move reads, or all of these if there are fewer."""
        free = (key for key in self._blocks if key not in self._readers)
        for key in list(itertools.islice(free, max(0, count))):
            self._pool.give_back([self._blocks.pop(key)])

    def begin_copy(self, move: KVMove, keys: Sequence[bytes]) -> None:
        """Note that ``move`` copies the device blocks of these keys; its target blocks are taken from the pool."""
        self._copies[move.move_id] = move
        self._sources |= {
            block: (move.move_id, key) for block, key in zip(move.src_block_ids, keys, strict=True)
        }  # fmt: skip

    def __contains__(self, move_id: int) -> bool:
        """Tell whether a copy of this id is under way."""
        return move_id in self._copies

    def forget_source(self, device_block: int) -> None:
        """Note that a request takes a device block: the copy of it that is under way is of no use."""
        self._sources.pop(device_block, None)

    def end_copy(self, move_id: int, *, succeeded: bool) -> MoveResult:
        """Keep what a copy has made, if it succeeded, of the blocks that were not taken meanwhile."""
        move = self._copies.pop(move_id)
        unused: list[int] = []
        for source, target in zip(move.src_block_ids, move.dst_block_ids, strict=True):
            of_use_for, key = self._sources.get(source, (-1, b""))
            if of_use_for == move_id:
                del self._sources[source]
            if of_use_for != move_id or not succeeded or key in self._blocks:
                unused.append(target)
            else:
                self._blocks[key] = target
        self._pool.give_back(unused)
        if len(unused) < len(move.dst_block_ids):
            return MoveResult.ARRIVED
        return MoveResult.UNUSED if succeeded else MoveResult.STAYED

    def begin_reading(self, keys: Sequence[bytes]) -> list[int]:
        """Return the blocks of these keys, which stay until ``end_reading``."""
        for key in keys:
            self._blocks.move_to_end(key)
        self._readers.update(keys)
        return [self._blocks[key] for key in keys]

    def end_reading(self, keys: Sequence[bytes]) -> None:
        """Note that a move that ``begin_reading`` was called for has ended."""
        self._readers.subtract(keys)
        self._readers = +self._readers

    @property
    def num_held(self) -> int:
        """Host blocks that are not free because of prefixes, or copies of some."""
        return len(self._blocks) + sum(len(move.dst_block_ids) for move in self._copies.values())

    def owned_blocks(self) -> Iterator[int]:
        """Yield all blocks that are held here, those of copies under way included; for checks."""
        yield from self._blocks.values()
        for move in self._copies.values():
            yield from move.dst_block_ids
