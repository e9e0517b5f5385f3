"""``tiered``: block tables on the device and on the host, whole-request moves between them, and checkpoints.

A request that the host of this machine has no room for moves to a host on the network, if there is one; checkpoints and
prefixes stay on this machine.

A move keeps both copies until it is done; a failed move changes nothing. With ``checkpoint_kv``, full blocks of BE
requests were copied to the host before: a move copies the rest, and gives the device blocks of what was copied back at
once; if the rest fails to copy, the request is recomputed. If an LS prompt needs memory that a slow move to the host
still holds, the move is *abandoned*: its device blocks are free at once, and its result is not used.

Paper: omniserve 3.2.4 (swap-out beside the step; when to swap in is the scheduler's decision), conserve 4.4.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omniserve.core.work import KVMove, MoveDirection
from omniserve.kv.base import KV_MANAGERS, KVManager, KVUsage, MoveResult, Tier
from omniserve.kv.block_pool import BlockPool, HostCheckpoints
from omniserve.kv.host_prefixes import HostPrefixes, KeepsPrefixes, PrefixPool
from omniserve.kv.network import NetworkPool, NetworkPools
from omniserve.kv.prefix_cache import CachingPool

if TYPE_CHECKING:
    from omniserve.kv.disk_prefixes import DiskPrefixes

_SOURCE = {MoveDirection.TO_HOST: Tier.DEVICE, MoveDirection.TO_DEVICE: Tier.HOST}
_TARGET = {MoveDirection.TO_HOST: Tier.HOST, MoveDirection.TO_DEVICE: Tier.DEVICE}


@dataclass(slots=True)
class Table:
    """A request's blocks."""

    tier: Tier
    blocks: list[int]  # while it moves: the source
    move: KVMove | None = None
    network: NetworkPool | None = None  # the blocks are on this host on the network; None: on this machine
    going_to: NetworkPool | None = None  # moving: the destination is there
    # While it moves, the target is ``arrived``, then the move's destination, then ``behind``.
    arrived: list[int] = field(default_factory=list)  # what has been there before
    behind: list[int] = field(default_factory=list)  # for what is not computed yet
    num_kept: int = 0  # moving to the device: source blocks that stay as its checkpoint
    keys: Sequence[bytes] = ()  # moving to the host: of its full blocks, for others to find them there

    @property
    def target(self) -> list[int]:
        """The blocks that it will have when its move is done."""
        assert self.move is not None
        return [*self.arrived, *self.move.dst_block_ids, *self.behind]


@KV_MANAGERS.register("tiered")
class TieredKVManager(KeepsPrefixes, KVManager):
    """Paged KV on two tiers, and prefixes on a third, the disk."""

    def __init__(
        self,
        *,
        num_device_blocks: int,
        num_host_blocks: int,
        block_size: int,
        prefix_cache: bool = False,
        num_protected_blocks: int = 0,
        host_prefixes: bool = False,
        disk: DiskPrefixes | None = None,
    ) -> None:
        super().__init__(num_device_blocks=num_device_blocks, num_host_blocks=num_host_blocks, block_size=block_size)
        self._cache: CachingPool | None = None
        self._host_pool = host_pool = PrefixPool(num_host_blocks, "host")
        self._prefixes = HostPrefixes(host_pool, disk)
        self._keeps_prefixes = prefix_cache and host_prefixes and num_host_blocks > 0
        if prefix_cache:
            self._cache = CachingPool(
                num_device_blocks, "device", most_protected=num_protected_blocks, on_forget=self._prefixes.forget_source
            )
        self._pools: dict[Tier, BlockPool] = {
            Tier.DEVICE: self._cache or BlockPool(num_device_blocks, "device"),
            Tier.HOST: host_pool,
        }
        self._checkpoints = HostCheckpoints(self._pools[Tier.HOST])
        self._network = NetworkPools()
        self._tables: dict[str, Table] = {}
        self._moves: dict[int, str] = {}
        self._ends: dict[int, Callable[..., MoveResult]] = {}
        """Callbacks of ``finish_move``, by the number of the move or copy; each is set where that is begun."""
        self._abandoned: dict[int, tuple[KVMove, BlockPool]] = {}
        self._move_ids = itertools.count()

    def allocate(self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0) -> tuple[int, ...] | None:
        table = self._tables.get(request_id) or Table(Tier.DEVICE, [])
        self._require_still(request_id, table)
        missing = -(-num_tokens // self.block_size) - len(table.blocks)
        if missing > 0:
            after = table.blocks[-1] if table.blocks else None
            if table.network is not None:
                taken = table.network.take(missing, after) if table.network.has_room(missing, reserve_blocks) else None
                if taken is None:
                    return None
                table.blocks += taken
            elif not self._make_room(table.tier, missing, reserve_blocks, request_id):
                return None
            else:
                table.blocks += self._take(table.tier, missing, after)
        self._tables[request_id] = table
        return tuple(table.blocks)

    def stretch(self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0) -> tuple[int, ...] | None:
        table = self._at_rest(request_id)
        missing = -(-num_tokens // self.block_size) - len(table.blocks)
        num_free = self._pool(table).num_free
        if table.tier is Tier.HOST and table.network is None:
            num_free += self._prefixes.num_reclaimable
        if missing > 0 and missing + reserve_blocks > num_free:
            return None
        return self.allocate(request_id, num_tokens)

    def trim(self, request_id: str, num_tokens: int) -> None:
        table, num_needed = self._at_rest(request_id), -(-num_tokens // self.block_size)
        self._pool(table).give_back(reversed(table.blocks[num_needed:]))
        del table.blocks[num_needed:]

    def free(self, request_id: str) -> None:
        table = self._tables.get(request_id)
        if table is None:
            return
        self._require_still(request_id, table)
        del self._tables[request_id]
        self._checkpoints.drop(request_id)
        self._pool(table).give_back(reversed(table.blocks))

    def release(self, request_id: str, keys: Sequence[bytes]) -> None:
        table = self._at_rest(request_id)
        if table.tier is Tier.DEVICE and self._cache is not None:
            self._cache.want_copies(table.blocks[: len(keys)])
            if self._keeps_prefixes:
                checkpoint = self._checkpoints.take(request_id)
                self._prefixes.adopt(keys[: len(checkpoint)], checkpoint)
        elif table.tier is Tier.HOST and table.network is None and self._keeps_prefixes:
            self._prefixes.adopt(keys, table.blocks)
            table.blocks = []
        self.free(request_id)

    def tier(self, request_id: str) -> Tier | None:
        table = self._tables.get(request_id)
        return table.tier if table is not None else None

    def _adopt(self, request_id: str, blocks: list[int]) -> None:
        self._tables[request_id] = Table(Tier.DEVICE, blocks)

    def device_blocks(self, request_id: str) -> Sequence[int]:
        table = self._at_rest(request_id)
        assert table.tier is Tier.DEVICE, f"the blocks of {request_id} are on the {table.tier} tier"
        return table.blocks

    def start_move(
        self, request_id: str, direction: MoveDirection, *, reserve_blocks: int = 0, keep_tokens: int = 0
    ) -> KVMove | None:
        table = self._tables[request_id]
        self._require_still(request_id, table)
        if table.tier is not _SOURCE[direction]:
            raise RuntimeError(f"request {request_id} cannot move {direction}: its KV is on the {table.tier} tier")
        if table.network is not None and table.network.is_lost:
            return None
        num_arrived = self._checkpoints.num_blocks(request_id)  # 0 on the host
        num_copied = len(table.blocks) - num_arrived
        if not self._make_room(_TARGET[direction], num_copied, reserve_blocks, request_id):
            if direction is MoveDirection.TO_DEVICE:
                return None
            return self._start_move_to_network(request_id, table, reserve_blocks)
        if num_arrived > 0:
            self._pools[Tier.DEVICE].give_back(reversed(table.blocks[:num_arrived]))
            del table.blocks[:num_arrived]
        table.arrived = self._checkpoints.take(request_id)
        # With prefixes on the host it is found there by its keys.
        if direction is MoveDirection.TO_DEVICE and not self._keeps_prefixes and table.network is None:
            table.num_kept = min(keep_tokens // self.block_size, len(table.blocks))
        after = table.arrived[-1] if table.arrived else None
        table.move = self._new_move(request_id, direction, table.blocks, after)
        self._await_end(table.move, self._end_move)
        return table.move

    def _await_end(self, move: KVMove, end: Callable[..., MoveResult], *args: Any) -> None:
        """Have ``end(move, *args, succeeded=...)`` called as a request's move ends."""
        self._moves[move.move_id] = move.request_id
        self._ends[move.move_id] = functools.partial(end, move, *args)

    def start_move_to_host(self, request_id: str, keys: Sequence[bytes], *, reserve_blocks: int = 0) -> KVMove | None:
        is_shared = self._keeps_prefixes and not self._checkpoints.num_held(request_id)
        if is_shared:
            # As if these had been copied for this request: the move copies what is behind them.
            self._checkpoints.keep(request_id, self._prefixes.share(keys))
        move = self.start_move(request_id, MoveDirection.TO_HOST, reserve_blocks=reserve_blocks)
        if move is not None and self._keeps_prefixes and self._tables[request_id].going_to is None:
            self._tables[request_id].keys = keys
        elif is_shared:
            self._checkpoints.drop(request_id)
        return move

    def _start_move_to_network(self, request_id: str, table: Table, reserve_blocks: int) -> KVMove | None:
        """Begin to move a request to a host on the network, all of it; None if none has room."""
        pool = self._network.choose(len(table.blocks), reserve_blocks)
        if pool is None:
            return None
        self._checkpoints.drop(request_id)
        target = pool.take(len(table.blocks))
        assert target is not None
        table.going_to = pool
        table.move = KVMove(
            request_id=request_id,
            move_id=next(self._move_ids),
            direction=MoveDirection.TO_HOST,
            src_block_ids=tuple(table.blocks),
            dst_block_ids=tuple(target),
            is_reversed=self._is_reversed(request_id),
        )
        self._await_end(table.move, self._end_move)
        return table.move

    def add_host(self, host: int, num_blocks: int, speed: float) -> None:
        self._network.add(host, num_blocks, speed)

    def lose_host(self, host: int) -> None:
        self._network.lose(host)

    def host_of(self, request_id: str) -> int:
        table = self._tables.get(request_id)
        return table.network.host if table is not None and table.network is not None else 0

    def is_lost(self, request_id: str) -> bool:
        table = self._tables.get(request_id)
        return table is not None and table.network is not None and table.network.is_lost

    def abandon_move(self, move_id: int) -> None:
        request_id = self._moves[move_id]
        table = self._tables[request_id]
        move = table.move
        assert move is not None and move.direction is MoveDirection.TO_HOST, f"move {move_id} cannot be abandoned"
        del self._moves[move_id], self._tables[request_id]
        self._pools[Tier.DEVICE].give_back(reversed(table.blocks))
        self._strand(request_id, table.arrived)
        self._abandoned[move_id] = move, table.going_to or self._pools[Tier.HOST]
        self._ends[move_id] = functools.partial(self._end_abandoned, move_id)

    def finish_move(self, move_id: int, *, succeeded: bool) -> MoveResult:
        return self._ends.pop(move_id)(succeeded=succeeded)

    def _end_abandoned(self, move_id: int, *, succeeded: bool) -> MoveResult:
        copied, pool = self._abandoned.pop(move_id)
        pool.give_back(copied.dst_block_ids)
        return MoveResult.UNUSED

    def _end_restored_prefix(self, move: KVMove, host_keys: Sequence[bytes], *, succeeded: bool) -> MoveResult:
        self._prefixes.end_reading(host_keys)
        if succeeded:
            return self._end_move(move, succeeded=True)
        del self._moves[move.move_id]
        self._pools[Tier.DEVICE].give_back(reversed(self._tables.pop(move.request_id).target))
        return MoveResult.LOST

    def _end_move(self, move: KVMove, *, succeeded: bool) -> MoveResult:
        """Free a request's source, or the destination if the copy failed."""
        request_id = self._moves.pop(move.move_id)
        table = self._tables[request_id]
        assert table.move is move, f"move {move.move_id} does not belong to its request"
        source, target = self._pool(table), table.going_to or self._pools[_TARGET[move.direction]]
        if not succeeded:
            target.give_back(move.dst_block_ids)
            table.move = table.going_to = None
            if not table.arrived:
                table.num_kept = 0
                return MoveResult.STAYED
            source.give_back(reversed(table.blocks))
            del self._tables[request_id]
            self._strand(request_id, table.arrived)
            return MoveResult.LOST
        source.give_back(reversed(table.blocks[table.num_kept :]))
        self._checkpoints.keep(request_id, table.blocks[: table.num_kept])
        self._tables[request_id] = Table(_TARGET[move.direction], table.target, network=table.going_to)
        self._prefixes.publish(table.keys, table.target)
        return MoveResult.ARRIVED

    def start_restoring_prefix(
        self,
        request_id: str,
        keys: Sequence[bytes],
        host_keys: Sequence[bytes],
        num_tokens: int,
        *,
        reserve_blocks: int = 0,
        marks: bool = False,
    ) -> KVMove | None:
        assert self._cache is not None and request_id not in self._tables
        count, num_found = -(-num_tokens // self.block_size), len(keys)
        blocks = self._cache.begin(keys, count, reserve=reserve_blocks, marks=marks)
        if blocks is None:
            return None
        num_known = num_found + len(host_keys)
        move = KVMove(
            request_id=request_id,
            move_id=next(self._move_ids),
            direction=MoveDirection.TO_DEVICE,
            src_block_ids=tuple(self._prefixes.begin_reading(host_keys)),
            dst_block_ids=tuple(blocks[num_found:num_known]),
        )
        # The host blocks are not the request's: its table has none there.
        self._tables[request_id] = Table(
            Tier.HOST, [], move=move, arrived=blocks[:num_found], behind=blocks[num_known:]
        )
        self._await_end(move, self._end_restored_prefix, host_keys)
        return move

    def start_checkpoint(
        self,
        request_id: str,
        num_computed_tokens: int,
        *,
        max_blocks: int,
        reserve_blocks: int = 0,
        give_way: Iterable[str] = (),
    ) -> KVMove | None:
        table = self._tables.get(request_id)
        if table is None or table.tier is not Tier.DEVICE or table.move is not None:
            raise RuntimeError(f"request {request_id} cannot be checkpointed: its KV is not at rest on the device")
        num_full = num_computed_tokens // self.block_size
        assert num_full <= len(table.blocks), f"{num_computed_tokens} tokens are more than {request_id} has blocks for"
        if self._checkpoints.is_copying(request_id):
            return None
        start = self._checkpoints.num_blocks(request_id)
        count = min(num_full - start, max_blocks)
        shortage = min(count, count + reserve_blocks - self._pools[Tier.HOST].num_free)
        if shortage > 0:
            self._prefixes.reclaim(shortage)
            shortage = min(count, count + reserve_blocks - self._pools[Tier.HOST].num_free)
        if shortage > 0:
            self._checkpoints.reclaim(shortage, [other for other in give_way if self.num_checkpointed(other)])
            count = min(count, self._pools[Tier.HOST].num_free - reserve_blocks)
        if count <= 0:
            return None
        move = self._new_move(
            request_id,
            MoveDirection.TO_HOST,
            table.blocks[start : start + count],
            after=self._checkpoints.last_block(request_id),
            is_checkpoint=True,
        )
        self._checkpoints.begin_copy(request_id, move)
        self._ends[move.move_id] = functools.partial(self._checkpoints.end_copy, move.move_id)
        return move

    def num_checkpointed(self, request_id: str) -> int:
        return self._checkpoints.num_blocks(request_id)

    def _new_move(
        self,
        request_id: str,
        direction: MoveDirection,
        src: list[int],
        after: int | None,
        *,
        is_checkpoint: bool = False,
    ) -> KVMove:
        """Take the target blocks, which are there, behind the block ``after``."""
        target = self._take(_TARGET[direction], len(src), after)
        return KVMove(
            request_id=request_id,
            move_id=next(self._move_ids),
            direction=direction,
            src_block_ids=tuple(src),
            dst_block_ids=tuple(target),
            is_checkpoint=is_checkpoint,
            is_reversed=self._is_reversed(request_id),
        )

    def _pool(self, table: Table) -> BlockPool:
        """Return the pool of a table's blocks."""
        return table.network or self._pools[table.tier]

    def _take(self, tier: Tier, count: int, after: int | None) -> list[int]:
        """Take blocks of which the caller knows that they are free."""
        taken = self._pools[tier].take(count, after)
        assert taken is not None, f"the {tier} tier has {self._pools[tier].num_free} free blocks, {count} are needed"
        return taken

    def _make_room(self, tier: Tier, num_blocks: int, reserve_blocks: int, request_id: str) -> bool:
        """Reclaim checkpoints of others until ``num_blocks`` are free; False, and nothing has changed, if in vain."""
        shortage = num_blocks - self._pools[tier].num_free
        if shortage + reserve_blocks <= 0:
            return True
        if self._num_reclaimable(tier, spare=request_id) < shortage + reserve_blocks:
            return False
        self._reclaim(tier, shortage, spare=request_id)
        return True

    # What a manager that keeps more than this one does differently.

    def _is_reversed(self, request_id: str) -> bool:
        """Tell whether the request's device blocks run from the right."""
        return False

    def _num_reclaimable(self, tier: Tier, spare: str) -> int:
        """Return how many blocks ``_reclaim`` could free."""
        if tier is Tier.DEVICE:
            return 0
        return self._prefixes.num_reclaimable + self._checkpoints.num_reclaimable(self._give_way(spare))

    def _reclaim(self, tier: Tier, num_blocks: int, spare: str) -> None:
        """Free that many blocks of copies that may never be needed, but none of the request ``spare``."""
        if tier is Tier.HOST:
            num_before = self._pools[Tier.HOST].num_free
            self._prefixes.reclaim(num_blocks)
            num_blocks -= self._pools[Tier.HOST].num_free - num_before
            self._checkpoints.reclaim(num_blocks, self._give_way(spare))

    def _give_way(self, spare: str) -> list[str]:
        """Return the requests that may lose blocks of their checkpoint, in that order, without ``spare``."""
        return [request_id for request_id in self._checkpoints.request_ids() if request_id != spare]

    def _strand(self, request_id: str, blocks: list[int]) -> None:
        """Dispose of host copies of a request's first blocks; its other blocks are lost."""
        self._pools[Tier.HOST].give_back(blocks)

    def _num_host_copies(self, request_id: str) -> int:
        """Return how many host blocks hold, or are to hold, copies of blocks of a request that are elsewhere."""
        return self._checkpoints.num_held(request_id)

    def _num_copyable(self) -> dict[str, int]:
        """Return, of each request that may have a checkpoint, how many blocks it may be of; for checks."""
        at_rest = ((r, t) for r, t in self._tables.items() if t.tier is Tier.DEVICE and t.move is None)
        return {request_id: len(table.blocks) for request_id, table in at_rest}

    def num_free(self, tier: Tier) -> int:
        num_free = self._pools[tier].num_free
        if tier is Tier.HOST:
            return num_free + self._prefixes.num_reclaimable
        return num_free + self._num_reclaimable(tier, spare="")

    def usage(self) -> KVUsage:
        num_used = self.num_host_blocks - self._pools[Tier.HOST].num_free - self._prefixes.num_held
        return dataclasses.replace(
            super().usage(),
            host_used=num_used + self._network.num_used,
            host_total=self.num_host_blocks + self._network.num_blocks,
        )

    def num_blocks(self, request_id: str) -> int:
        table = self._tables.get(request_id)
        if table is None:
            return 0
        moved = table.move.dst_block_ids if table.move is not None else table.blocks
        return len(table.arrived) + len(moved) + len(table.behind)

    def num_held(self, request_id: str, tier: Tier) -> int:
        num_held = self._num_host_copies(request_id) if tier is Tier.HOST else 0
        table = self._tables.get(request_id)
        if table is None:
            return num_held
        if table.tier is tier:
            num_held += len(table.blocks)
        if table.move is not None and _TARGET[table.move.direction] is tier:
            num_held += len(table.target)
        return num_held

    def check_integrity(self) -> None:
        self._checkpoints.check(self._num_copyable())
        owned = self._owned()
        for tier, pool in self._pools.items():
            pool.check(owned[tier])
        self._network.check(self._owned_on_network())
        self._prefixes.check()
        assert sorted(self._moves) == sorted(t.move.move_id for t in self._tables.values() if t.move is not None)

    def _owned(self) -> dict[Tier, list[int]]:
        """Return the ids that are not free, by tier; for checks."""
        owned: dict[Tier, list[int]] = {Tier.DEVICE: [], Tier.HOST: []}
        for table in self._tables.values():
            if table.network is None:
                owned[table.tier] += table.blocks
            if table.move is None:
                assert not table.arrived and not table.behind and not table.num_kept and not table.going_to, table
            elif table.going_to is None:
                owned[_TARGET[table.move.direction]] += table.target
        for move, pool in self._abandoned.values():
            if pool is self._pools[Tier.HOST]:
                owned[Tier.HOST] += move.dst_block_ids
        owned[Tier.HOST] += self._checkpoints.owned_blocks()
        owned[Tier.HOST] += self._prefixes.owned_blocks()
        return owned

    def _owned_on_network(self) -> list[tuple[BlockPool, Sequence[int]]]:
        """Return what is not free on hosts on the network, with its pool; for checks."""
        owned: list[tuple[BlockPool, Sequence[int]]] = []
        for table in self._tables.values():
            if table.network is not None:
                owned.append((table.network, table.blocks))
            if table.move is not None and table.going_to is not None:
                owned.append((table.going_to, table.target))
        return owned + [(pool, move.dst_block_ids) for move, pool in self._abandoned.values()]

    def _at_rest(self, request_id: str) -> Table:
        table = self._tables[request_id]
        self._require_still(request_id, table)
        return table

    @staticmethod
    def _require_still(request_id: str, table: Table) -> None:
        if table.move is not None:
            raise RuntimeError(f"request {request_id} is moving {table.move.direction}: its blocks cannot change now")
