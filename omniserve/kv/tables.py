"""TierTables and TableMoves: the block tables of two tiers, the pools below them, and the moves between them.

A move keeps both copies until it is done; a failed move changes nothing. Full blocks of a request may have been copied
to the host before: a move copies the rest, and gives the device blocks of what was copied back at once; if the rest
fails to copy, the request is recomputed. If an LS prompt needs memory that a slow move to the host still holds, the
move is *abandoned*: its device blocks are free at once, and its result is not used.

Paper: omniserve 3.2.4 (swap-out beside the step; when to swap in is the scheduler's decision), conserve 4.4.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence, Set
from typing import TYPE_CHECKING

from omniserve.core.work import KVMove, MoveDirection
from omniserve.kv.block_pool import BlockPool
from omniserve.kv.host_copies import HostCopies
from omniserve.kv.retained import RetainedKV
from omniserve.kv.table import Table
from omniserve.kv.tiers import CopyEnds, MoveResult, Tier

if TYPE_CHECKING:
    from omniserve.kv.network import NetworkPool, NetworkPools

_SOURCE = {MoveDirection.TO_HOST: Tier.DEVICE, MoveDirection.TO_DEVICE: Tier.HOST}
_TARGET = {MoveDirection.TO_HOST: Tier.HOST, MoveDirection.TO_DEVICE: Tier.DEVICE}


class TierTables:
    """The block tables of all requests that have one, and the pools that their blocks are from.

    Args:
        by_request: The tables; empty at first.
        pools: The pools of this machine.
        copies: Copies in the host pool, some of which count as free.
        retained: KV that gives way for tables.
    """

    def __init__(
        self,
        by_request: dict[str, Table],
        pools: dict[Tier, BlockPool],
        *,
        block_size: int,
        copies: HostCopies,
        retained: RetainedKV,
    ) -> None:
        self.by_request, self.pools, self.block_size = by_request, pools, block_size
        self._copies, self._retained = copies, retained

    # -- tables --------------------------------------------------------------------------------------------------

    def at_rest(self, request_id: str) -> Table:
        """Return the table of a request.

        Raises:
            RuntimeError: The request is moving.
        """
        table = self.by_request[request_id]
        table.require_still()
        return table

    def put(self, request_id: str, blocks: list[int]) -> None:
        """Make device blocks the table of a request, in the place of one that it has."""
        self.by_request[request_id] = Table(Tier.DEVICE, blocks)

    def device_blocks(self, request_id: str) -> Sequence[int]:
        """Return the table of a request that is at rest on the device."""
        table = self.at_rest(request_id)
        assert table.tier is Tier.DEVICE, f"the blocks of {request_id} are on the {table.tier} tier"
        return table.blocks

    def allocate(self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0) -> tuple[int, ...] | None:
        """Grow a table, or make one on the device; see ``KVManager.allocate``."""
        table = self.by_request.get(request_id)
        if table is None:
            table = Table(Tier.DEVICE, [])
        elif table.move is not None:
            table.require_still()
        missing = -(-num_tokens // self.block_size) - len(table.blocks)
        if missing > 0:
            after = table.blocks[-1] if table.blocks else None
            if table.network is not None:
                taken = table.network.take(missing, after) if table.network.has_room(missing, reserve_blocks) else None
                if taken is None:
                    return None
                table.blocks += taken
            elif not self.make_room(table.tier, missing, reserve_blocks, request_id):
                return None
            else:
                table.blocks += self.take(table.tier, missing, after)
        self.by_request[request_id] = table
        return tuple(table.blocks)

    def has_unused(self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0) -> bool:
        """Tell whether a table at rest can grow to ``num_tokens`` without blocks of checkpoints or evicted requests.

        ``reserve_blocks``: free blocks that must be left, if any is needed at all.
        """
        table = self.at_rest(request_id)
        missing = -(-num_tokens // self.block_size) - len(table.blocks)
        if missing <= 0:
            return True
        num_free = self.pool_of(table).num_free
        if table.tier is Tier.HOST and table.network is None:
            num_free += self._copies.num_idle
        return missing + reserve_blocks <= num_free

    def trim(self, request_id: str, num_tokens: int) -> None:
        """Give back the blocks that the first ``num_tokens`` of a request at rest do not need."""
        table, num_needed = self.at_rest(request_id), -(-num_tokens // self.block_size)
        self.pool_of(table).give_back(reversed(table.blocks[num_needed:]))
        del table.blocks[num_needed:]

    def num_blocks(self, request_id: str) -> int:
        """Return the length of a table; while it moves, that of its target."""
        table = self.by_request.get(request_id)
        if table is None:
            return 0
        moved = table.move.dst_block_ids if table.move is not None else table.blocks
        return len(table.arrived) + len(moved) + len(table.behind)

    def num_held(self, request_id: str, tier: Tier) -> int:
        """Return how many blocks of a tier a table has, in both its places while it moves."""
        table = self.by_request.get(request_id)
        if table is None:
            return 0
        num_held = len(table.blocks) if table.tier is tier else 0
        if table.move is not None and _TARGET[table.move.direction] is tier:
            num_held += len(table.target)
        return num_held

    def network_pool(self, request_id: str) -> NetworkPool | None:
        """Return the pool of the host on the network that a request is on; None: it is on none."""
        table = self.by_request.get(request_id)
        return table.network if table is not None else None

    # -- pools ---------------------------------------------------------------------------------------------------

    def pool_of(self, table: Table) -> BlockPool:
        """Return the pool of a table's blocks."""
        return table.network or self.pools[table.tier]

    def take(self, tier: Tier, count: int, after: int | None) -> list[int]:
        """Take blocks of which the caller knows that they are free, behind the block ``after``."""
        taken = self.pools[tier].take(count, after)
        assert taken is not None, f"the {tier} tier has {self.pools[tier].num_free} free blocks, {count} are needed"
        return taken

    def make_room(self, tier: Tier, num_blocks: int, reserve_blocks: int, request_id: str) -> bool:
        """Reclaim KV of others until ``num_blocks`` are free; False, and nothing has changed, if in vain."""
        shortage = num_blocks - self.pools[tier].num_free
        if shortage + reserve_blocks <= 0:
            return True
        if self._retained.num_reclaimable(tier, spare=request_id) < shortage + reserve_blocks:
            return False
        self._retained.reclaim(tier, shortage, spare=request_id)
        return True

    def owned_blocks(self) -> Iterator[tuple[BlockPool, Sequence[int]]]:
        """Yield the blocks of tables, with their pools; for checks."""
        for table in self.by_request.values():
            yield self.pool_of(table), table.blocks
            if table.move is None:
                assert not table.arrived and not table.behind and not table.num_kept and not table.going_to, table
            else:
                yield table.going_to or self.pools[_TARGET[table.move.direction]], table.target


class TableMoves:
    """Moves requests between the tiers, and ends all copies that a manager has begun; see ``KVMoves``.

    Args:
        tables: Block tables.
        copies: Copies on the host: a move there copies only what follows them.
        retained: Gets what is left of requests whose move is lost.
        ends: Ends of moves and copies.
        network: Hosts on the network, to which requests move that this machine's host has no room for.
        leaves_checkpoint: The blocks of a request that moves to the device can stay on the host, as its checkpoint.
        runs_from_right: Requests whose device blocks run from the right.
    """

    def __init__(
        self,
        tables: TierTables,
        *,
        copies: HostCopies,
        retained: RetainedKV,
        ends: CopyEnds,
        network: NetworkPools | None,
        leaves_checkpoint: bool,
        runs_from_right: Set[str] = frozenset(),
    ) -> None:
        self._tables, self._copies, self._retained, self._ends, self._network = tables, copies, retained, ends, network
        self._leaves_checkpoint, self._runs_from_right = leaves_checkpoint, runs_from_right
        self._moving: dict[int, str] = {}
        self._abandoned: dict[int, tuple[KVMove, BlockPool]] = {}

    def start(
        self,
        request_id: str,
        direction: MoveDirection,
        *,
        keys: Sequence[bytes] = (),
        reserve_blocks: int = 0,
        keep_tokens: int = 0,
    ) -> KVMove | None:
        table = self._tables.at_rest(request_id)
        if table.tier is not _SOURCE[direction]:
            raise RuntimeError(f"request {request_id} cannot move {direction}: its KV is on the {table.tier} tier")
        if direction is MoveDirection.TO_HOST:
            return self._start_to_host(request_id, table, keys, reserve_blocks)
        return self._start_to_device(request_id, table, reserve_blocks, keep_tokens)

    def _start_to_device(self, request_id: str, table: Table, reserve_blocks: int, keep_tokens: int) -> KVMove | None:
        if table.network is not None and table.network.is_lost:
            return None
        if not self._tables.make_room(Tier.DEVICE, len(table.blocks), reserve_blocks, request_id):
            return None
        if self._leaves_checkpoint and table.network is None:
            table.num_kept = min(keep_tokens // self._tables.block_size, len(table.blocks))
        target = self._tables.take(Tier.DEVICE, len(table.blocks), after=None)
        return self.begin(table, self.make(request_id, MoveDirection.TO_DEVICE, table.blocks, target), self.end)

    def _start_to_host(
        self, request_id: str, table: Table, keys: Sequence[bytes], reserve_blocks: int
    ) -> KVMove | None:
        checkpoints = self._copies.checkpoints
        shares = self._copies.share(request_id, keys)
        num_arrived = checkpoints.num_blocks(request_id)
        if not self._tables.make_room(Tier.HOST, len(table.blocks) - num_arrived, reserve_blocks, request_id):
            move = self._start_to_network(request_id, table, reserve_blocks) if self._network is not None else None
            if move is None and shares:
                checkpoints.drop(request_id)
            return move
        if num_arrived > 0:
            self._tables.pools[Tier.DEVICE].give_back(reversed(table.blocks[:num_arrived]))
            del table.blocks[:num_arrived]
        table.arrived, table.keys = checkpoints.take(request_id), keys
        target = self._tables.take(Tier.HOST, len(table.blocks), after=table.arrived[-1] if table.arrived else None)
        self._retained.drop(request_id)
        return self.begin(table, self.make(request_id, MoveDirection.TO_HOST, table.blocks, target), self.end)

    def _start_to_network(self, request_id: str, table: Table, reserve_blocks: int) -> KVMove | None:
        """Begin to move a request to a host on the network, all of it; None if none has room."""
        assert self._network is not None
        pool = self._network.choose(len(table.blocks), reserve_blocks)
        if pool is None:
            return None
        self._copies.checkpoints.drop(request_id)
        target = pool.take(len(table.blocks))
        assert target is not None
        table.going_to = pool
        return self.begin(table, self.make(request_id, MoveDirection.TO_HOST, table.blocks, target), self.end)

    def abandon(self, move_id: int) -> None:
        table = self._tables.by_request[self._moving[move_id]]
        move = table.move
        assert move is not None and move.direction is MoveDirection.TO_HOST, f"move {move_id} cannot be abandoned"
        self.pop(move)
        self._tables.pools[Tier.DEVICE].give_back(reversed(table.blocks))
        self._retained.strand(move.request_id, table.arrived)
        self._abandoned[move_id] = move, table.going_to or self._tables.pools[Tier.HOST]
        self._ends.expect(move_id, functools.partial(self._end_abandoned, move_id))

    def _end_abandoned(self, move_id: int, *, succeeded: bool) -> MoveResult:
        copied, pool = self._abandoned.pop(move_id)
        pool.give_back(copied.dst_block_ids)
        return MoveResult.UNUSED

    def finish(self, move_id: int, *, succeeded: bool) -> MoveResult:
        return self._ends.finish(move_id, succeeded=succeeded)

    # -- what begins moves, restores and copies ------------------------------------------------------------------

    def make(
        self,
        request_id: str,
        direction: MoveDirection,
        src: Sequence[int],
        dst: Sequence[int],
        *,
        is_checkpoint: bool = False,
    ) -> KVMove:
        """Describe a copy of blocks ``src`` to ``dst``, which the caller has taken, with a number of its own."""
        return KVMove(
            request_id=request_id,
            move_id=self._ends.next_id(),
            direction=direction,
            src_block_ids=tuple(src),
            dst_block_ids=tuple(dst),
            is_checkpoint=is_checkpoint,
            is_reversed=request_id in self._runs_from_right,
        )

    def begin(self, table: Table, move: KVMove, end: Callable[..., MoveResult]) -> KVMove:
        """Have a request's table move, and ``end(move, succeeded=...)`` called as that ends; return the move."""
        table.move = move
        self._tables.by_request[move.request_id] = table
        self._moving[move.move_id] = move.request_id
        self._ends.expect(move.move_id, functools.partial(end, move))
        return move

    def begin_copy(self, move: KVMove, end: Callable[..., MoveResult]) -> KVMove:
        """Have ``end(move_id, succeeded=...)`` called as a copy ends that is no move of a request; return the copy."""
        self._ends.expect(move.move_id, functools.partial(end, move.move_id))
        return move

    def pop(self, move: KVMove) -> Table:
        """Take the table away from a request that moves."""
        return self._tables.by_request.pop(self._moving.pop(move.move_id))

    def end(self, move: KVMove, *, succeeded: bool) -> MoveResult:
        """Free a request's source, or the destination if the copy failed."""
        request_id, tables, pools = self._moving.pop(move.move_id), self._tables.by_request, self._tables.pools
        table = tables[request_id]
        assert table.move is move, f"move {move.move_id} does not belong to its request"
        source, target = self._tables.pool_of(table), table.going_to or pools[_TARGET[move.direction]]
        if succeeded:
            source.give_back(reversed(table.blocks[table.num_kept :]))
            self._copies.checkpoints.keep(request_id, table.blocks[: table.num_kept])
            tables[request_id] = moved = Table(_TARGET[move.direction], table.target, network=table.going_to)
            if table.going_to is None:
                self._copies.publish(table.keys, moved.blocks)
            return MoveResult.ARRIVED
        target.give_back(move.dst_block_ids)
        if not table.arrived:
            table.move, table.going_to, table.num_kept = None, None, 0
            return MoveResult.STAYED
        source.give_back(reversed(table.blocks))
        del tables[request_id]
        self._retained.strand(request_id, table.arrived)
        return MoveResult.LOST

    # -- for checks ----------------------------------------------------------------------------------------------

    def owned_blocks(self) -> Iterator[tuple[BlockPool, Sequence[int]]]:
        """Yield the blocks that abandoned moves still write, with their pools; for checks."""
        for move, pool in self._abandoned.values():
            yield pool, move.dst_block_ids

    def check(self) -> None:
        """Verify that the moves under way are those in the tables.

        Raises:
            AssertionError: They are not.
        """
        moves = (table.move for table in self._tables.by_request.values())
        assert sorted(self._moving) == sorted(move.move_id for move in moves if move is not None)
