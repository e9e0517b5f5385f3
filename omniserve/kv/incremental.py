"""``incremental``: like ``tiered``, but a preempted request keeps as much KV as possible; eviction copies nothing.

Its device blocks count as free, but hold their KV until other requests take them, block by block, from the end of its
tokens on. Its checkpoint stays on the host. So each of its blocks is on the device, on the host, on both, or must be
recomputed. As blocks are lost from the end, the tokens that still have their KV are always a prefix.

Any policy may evict. When the request's turn comes again, or before, if there is memory, what the device lost is copied
back beside the steps; the rest is recomputed.

Paper: conserve 4.4. The paper speaks of tokens; its pages, like the blocks here, are what is copied and discarded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omniserve.core.work import KVMove, MoveDirection
from omniserve.kv.base import MoveResult, Tier
from omniserve.kv.tiered import Table, TieredKVManager


@dataclass(slots=True)
class _Evicted:
    num_tokens: int  # that had been computed
    blocks: list[int]  # the request's device blocks [0, len(blocks)), which were not taken yet


class IncrementalKVManager(TieredKVManager):
    """Paged KV on two tiers; requests are evicted at no cost and restored from their checkpoints."""

    def __init__(self, *, num_device_blocks: int, num_host_blocks: int, block_size: int, **prefixes: Any) -> None:
        """Make the pools.

        Args:
            prefixes: The arguments of ``TieredKVManager`` that concern the prefix cache. With a prefix cache the
                scheduler calls ``release`` instead of ``evict`` for a preempted request: the request's blocks and those
                of its checkpoint stay, and are found by their keys.
        """
        super().__init__(
            num_device_blocks=num_device_blocks, num_host_blocks=num_host_blocks, block_size=block_size, **prefixes
        )
        self._evicted: dict[str, _Evicted] = {}  # the first evicted first; its blocks are taken first

    def evict(self, request_id: str, num_computed_tokens: int) -> None:
        table = self._tables[request_id]
        self._require_still(request_id, table)
        del self._tables[request_id]
        on_device = table.tier is Tier.DEVICE
        # On the device the last block may be partly filled; a checkpoint is of full blocks.
        num_kept = -(-num_computed_tokens // self.block_size) if on_device else num_computed_tokens // self.block_size
        if table.network is not None:
            num_kept = 0
        self._pool(table).give_back(reversed(table.blocks[num_kept:]))
        del table.blocks[num_kept:]
        if not on_device:
            self._checkpoints.keep(request_id, table.blocks)
        self._evicted[request_id] = _Evicted(num_computed_tokens, table.blocks if on_device else [])

    def num_kept_tokens(self, request_id: str, tier: Tier) -> int:
        evicted = self._evicted.get(request_id)
        if evicted is None:
            return 0
        blocks = len(evicted.blocks) if tier is Tier.DEVICE else self._checkpoints.num_blocks(request_id)
        return min(evicted.num_tokens, blocks * self.block_size)

    def allocate(self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0) -> tuple[int, ...] | None:
        evicted = self._evicted.get(request_id)
        if evicted is None:
            return super().allocate(request_id, num_tokens, reserve_blocks=reserve_blocks)
        missing = self._num_missing(evicted, num_tokens)
        if missing > 0 and not self._make_room(Tier.DEVICE, missing, reserve_blocks, request_id):
            return None
        del self._evicted[request_id]
        # What is not restored is recomputed: a checkpoint is never of more than that.
        self._checkpoints.reclaim(self._checkpoints.num_blocks(request_id) - len(evicted.blocks), [request_id])
        self._tables[request_id] = Table(Tier.DEVICE, evicted.blocks)
        return super().allocate(request_id, num_tokens)

    def free(self, request_id: str) -> None:
        evicted = self._evicted.pop(request_id, None)
        if evicted is None:
            super().free(request_id)
            return
        self._checkpoints.drop(request_id)
        self._pools[Tier.DEVICE].give_back(reversed(evicted.blocks))

    def start_restore(self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0) -> KVMove | None:
        evicted = self._evicted[request_id]
        num_on_device, num_on_host = len(evicted.blocks), self._checkpoints.num_blocks(request_id)
        missing = self._num_missing(evicted, num_tokens)
        if num_on_host <= num_on_device or not self._make_room(Tier.DEVICE, missing, reserve_blocks, request_id):
            return None
        del self._evicted[request_id]
        # The table holds the checkpoint while it is read, so that it cannot give way.
        table = Table(Tier.HOST, self._checkpoints.take(request_id), arrived=evicted.blocks, num_kept=num_on_host)
        after = table.arrived[-1] if table.arrived else None
        table.move = self._new_move(request_id, MoveDirection.TO_DEVICE, table.blocks[num_on_device:], after)
        moved = table.move.dst_block_ids
        table.behind = self._take(Tier.DEVICE, missing - len(moved), after=moved[-1])
        self._tables[request_id] = table
        self._await_end(table.move, self._end_restore)
        return table.move

    def _end_restore(self, move: KVMove, *, succeeded: bool) -> MoveResult:
        if succeeded:
            return self._end_move(move, succeeded=True)
        table = self._tables.pop(self._moves.pop(move.move_id))
        self._pools[Tier.DEVICE].give_back(table.target)
        self._pools[Tier.HOST].give_back(table.blocks)
        return MoveResult.LOST

    def _num_missing(self, evicted: _Evicted, num_tokens: int) -> int:
        assert num_tokens >= evicted.num_tokens, f"{evicted.num_tokens} tokens had been computed, now {num_tokens}"
        return -(-num_tokens // self.block_size) - len(evicted.blocks)

    def _num_reclaimable(self, tier: Tier, spare: str) -> int:
        if tier is Tier.HOST:
            return super()._num_reclaimable(tier, spare)
        return sum(len(evicted.blocks) for request_id, evicted in self._evicted.items() if request_id != spare)

    def _reclaim(self, tier: Tier, num_blocks: int, spare: str) -> None:
        if tier is Tier.HOST:
            super()._reclaim(tier, num_blocks, spare)
            return
        for request_id, evicted in self._evicted.items():
            if num_blocks <= 0:
                return
            if request_id == spare or not evicted.blocks:
                continue
            start = max(0, len(evicted.blocks) - num_blocks)
            cut = evicted.blocks[start:]
            del evicted.blocks[start:]
            self._pools[Tier.DEVICE].give_back(reversed(cut))
            self._checkpoints.cut_source(request_id, start)
            num_blocks -= len(cut)

    def _give_way(self, spare: str) -> list[str]:
        # The checkpoint of a request that still has its blocks may never be needed: it goes before those that will be.
        return sorted(super()._give_way(spare), key=self._evicted.__contains__)

    def _strand(self, request_id: str, blocks: list[int]) -> None:
        if self._cache is not None:
            super()._strand(request_id, blocks)
            return
        self._checkpoints.keep(request_id, blocks)
        self._evicted[request_id] = _Evicted(len(blocks) * self.block_size, [])

    def _num_copyable(self) -> dict[str, int]:
        evicted = {
            request_id: len(e.blocks) if self._checkpoints.is_copying(request_id) else e.num_tokens // self.block_size
            for request_id, e in self._evicted.items()
        }
        return super()._num_copyable() | evicted

    def _owned(self) -> dict[Tier, list[int]]:
        owned = super()._owned()
        for evicted in self._evicted.values():
            owned[Tier.DEVICE] += evicted.blocks
        return owned

    def check_integrity(self) -> None:
        super().check_integrity()
        assert not self._evicted.keys() & self._tables.keys(), "an evicted request has a table"
