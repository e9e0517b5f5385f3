"""``tiered``: block tables on the device and on the host, and whole-request moves between them.

Paper: omniserve 3.2.4 (swap-out beside the step; when to swap in is the scheduler's decision).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from omniserve.kv.base import KV_MANAGERS, KVManager, KVUsage, Tier
from omniserve.kv.block_pool import BlockPool
from omniserve.kv.paged import grow_table
from omniserve.kv.run_pool import RunPool
from omniserve.plan import KVMove, MoveDirection

_SOURCE = {MoveDirection.TO_HOST: Tier.DEVICE, MoveDirection.TO_DEVICE: Tier.HOST}
_TARGET = {MoveDirection.TO_HOST: Tier.HOST, MoveDirection.TO_DEVICE: Tier.DEVICE}


@dataclass(slots=True)
class _Table:
    tier: Tier
    blocks: list[int]
    move: KVMove | None = None


@KV_MANAGERS.register("tiered")
class TieredKVManager(KVManager):
    """Paged KV on two tiers."""

    def __init__(self, *, num_device_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._pools: dict[Tier, BlockPool] = {
            Tier.DEVICE: BlockPool(num_device_blocks, "device"),
            Tier.HOST: RunPool(num_host_blocks, "host"),
        }
        self._tables: dict[str, _Table] = {}
        self._moves: dict[int, str] = {}
        self._abandoned: dict[int, KVMove] = {}
        self._move_ids = itertools.count()

    def allocate(self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0) -> tuple[int, ...] | None:
        table = self._tables.get(request_id) or _Table(Tier.DEVICE, [])
        self._require_still(request_id, table)
        if not grow_table(table.blocks, self._pools[table.tier], num_tokens, self.block_size, reserve_blocks):
            return None
        self._tables[request_id] = table
        return tuple(table.blocks)

    def free(self, request_id: str) -> None:
        table = self._tables.get(request_id)
        if table is None:
            return
        self._require_still(request_id, table)
        del self._tables[request_id]
        self._pools[table.tier].give_back(reversed(table.blocks))

    def tier(self, request_id: str) -> Tier | None:
        table = self._tables.get(request_id)
        return table.tier if table is not None else None

    def start_move(self, request_id: str, direction: MoveDirection, *, reserve_blocks: int = 0) -> KVMove | None:
        table = self._tables[request_id]
        self._require_still(request_id, table)
        if table.tier is not _SOURCE[direction]:
            raise RuntimeError(f"request {request_id} cannot move {direction}: its KV is on the {table.tier} tier")
        pool = self._pools[_TARGET[direction]]
        if pool.num_free - len(table.blocks) < reserve_blocks:
            return None
        target = pool.take(len(table.blocks))
        if target is None:
            return None
        table.move = KVMove(
            request_id=request_id,
            move_id=next(self._move_ids),
            direction=direction,
            src_block_ids=tuple(table.blocks),
            dst_block_ids=tuple(target),
        )
        self._moves[table.move.move_id] = request_id
        return table.move

    def abandon_move(self, move_id: int) -> None:
        request_id = self._moves[move_id]
        move = self._tables[request_id].move
        assert move is not None and move.direction is MoveDirection.TO_HOST, f"move {move_id} cannot be abandoned"
        del self._moves[move_id], self._tables[request_id]
        self._pools[Tier.DEVICE].give_back(reversed(move.src_block_ids))
        self._abandoned[move_id] = move

    def finish_move(self, move_id: int, *, succeeded: bool) -> None:
        if (abandoned := self._abandoned.pop(move_id, None)) is not None:
            self._pools[Tier.HOST].give_back(reversed(abandoned.dst_block_ids))
            return
        table = self._tables[self._moves.pop(move_id)]
        move = table.move
        assert move is not None and move.move_id == move_id, f"move {move_id} does not belong to its request"
        target = _TARGET[move.direction]
        table.move = None
        if succeeded:
            self._pools[table.tier].give_back(reversed(table.blocks))
            table.tier, table.blocks = target, list(move.dst_block_ids)
        else:
            self._pools[target].give_back(reversed(move.dst_block_ids))

    def num_free(self, tier: Tier) -> int:
        return self._pools[tier].num_free

    def free_block_ids(self, tier: Tier) -> list[int]:
        return self._pools[tier].free_ids()

    def num_blocks(self, request_id: str) -> int:
        table = self._tables.get(request_id)
        return len(table.blocks) if table is not None else 0

    def usage(self) -> KVUsage:
        device, host = self._pools[Tier.DEVICE], self._pools[Tier.HOST]
        return KVUsage(
            device_used=device.num_blocks - device.num_free,
            device_total=device.num_blocks,
            host_used=host.num_blocks - host.num_free,
            host_total=host.num_blocks,
        )

    def check_integrity(self) -> None:
        owned: dict[Tier, list[int]] = {Tier.DEVICE: [], Tier.HOST: []}
        for table in self._tables.values():
            owned[table.tier] += table.blocks
            if table.move is not None:
                owned[_TARGET[table.move.direction]] += table.move.dst_block_ids
        for move in self._abandoned.values():
            owned[Tier.HOST] += move.dst_block_ids
        for tier, pool in self._pools.items():
            pool.check(owned[tier])
        assert sorted(self._moves) == sorted(t.move.move_id for t in self._tables.values() if t.move is not None)

    @staticmethod
    def _require_still(request_id: str, table: _Table) -> None:
        if table.move is not None:
            raise RuntimeError(f"request {request_id} is moving {table.move.direction}: its blocks cannot change now")
