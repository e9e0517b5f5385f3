"""``incremental``: like ``tiered``, but a preempted request keeps as much KV as possible; eviction copies nothing.

Its device blocks count as free, but hold their KV until other requests take them, block by block, from the end of its
tokens on. Its checkpoint stays on the host. So each of its blocks is on the device, on the host, on both, or must be
recomputed. As blocks are lost from the end, the tokens that still have their KV are always a prefix.

Any policy may evict. When the request's turn comes again, or before, if there is memory, what the device lost is copied
back beside the steps; the rest is recomputed.

Paper: conserve 4.4. The paper speaks of tokens; its pages, like the blocks here, are what is copied and discarded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

from omniserve.core.work import KVMove, MoveDirection
from omniserve.kv.base import KVAbilities
from omniserve.kv.checkpoints import TierCheckpoints
from omniserve.kv.host_copies import HostCopies
from omniserve.kv.retained import RetainedKV, device_lengths
from omniserve.kv.table import Table
from omniserve.kv.tables import TableMoves, TierTables
from omniserve.kv.tiers import MoveResult, Tier
from omniserve.kv.two_tiers import CacheSettings, TierPools, TwoTierKVManager


@dataclass(slots=True)
class EvictedRequest:
    """What is left on the device of a request without a table."""

    num_tokens: int
    """Tokens that had been computed."""
    blocks: list[int]
    """Device blocks [0, len(blocks)) of the request, which were not taken yet."""


class EvictedRequests(RetainedKV):
    """The device blocks of evicted requests, and copies on the host, which outlive an eviction.

    Args:
        tables: Block tables by request.
        pools: The pools.
        block_size: Tokens per block.
        keeps_stranded: A request that has lost its blocks in a move is evicted: its copies on the host stay.
    """

    def __init__(self, tables: Mapping[str, Table], pools: TierPools, *, block_size: int, keeps_stranded: bool) -> None:
        self._tables, self._copies, self._block_size = tables, pools.copies, block_size
        self._device, self._host = pools.device, pools.host
        self._keeps_stranded = keeps_stranded
        self.by_request: dict[str, EvictedRequest] = {}
        """Evicted requests, the first evicted first; its blocks are taken first."""

    def num_reclaimable(self, tier: Tier, spare: str) -> int:
        if tier is Tier.HOST:
            return self._copies.num_reclaimable(self._give_way(spare))
        return sum(len(evicted.blocks) for request_id, evicted in self.by_request.items() if request_id != spare)

    def reclaim(self, tier: Tier, num_blocks: int, spare: str) -> None:
        if tier is Tier.HOST:
            self._copies.reclaim(num_blocks, self._give_way(spare))
            return
        for request_id, evicted in self.by_request.items():
            if num_blocks <= 0:
                return
            if request_id == spare or not evicted.blocks:
                continue
            start = max(0, len(evicted.blocks) - num_blocks)
            cut = evicted.blocks[start:]
            del evicted.blocks[start:]
            self._device.give_back(reversed(cut))
            self._copies.checkpoints.cut_source(request_id, start)
            num_blocks -= len(cut)

    def _give_way(self, spare: str) -> Sequence[str]:
        """Return the requests that may lose blocks of their checkpoint, in that order, without ``spare``.

        A request that still has its device blocks may never need its checkpoint: it comes first.
        """
        others = (request_id for request_id in self._copies.checkpoints.request_ids() if request_id != spare)
        return sorted(others, key=self.by_request.__contains__)

    def strand(self, request_id: str, blocks: list[int]) -> None:
        if not self._keeps_stranded:
            self._host.give_back(blocks)
            return
        self._copies.checkpoints.keep(request_id, blocks)
        self.by_request[request_id] = EvictedRequest(len(blocks) * self._block_size, [])

    def drop(self, request_id: str) -> None:
        self._copies.checkpoints.drop(request_id)
        evicted = self.by_request.pop(request_id, None)
        if evicted is not None:
            self._device.give_back(reversed(evicted.blocks))

    def num_host_blocks(self, request_id: str) -> int:
        return self._copies.checkpoints.num_held(request_id)

    def owned_blocks(self, tier: Tier) -> Iterable[int]:
        if tier is Tier.HOST:
            return self._copies.owned_blocks()
        return [block for evicted in self.by_request.values() for block in evicted.blocks]

    def check(self) -> None:
        checkpoints = self._copies.checkpoints
        of_evicted = {
            request_id: len(e.blocks) if checkpoints.is_copying(request_id) else e.num_tokens // self._block_size
            for request_id, e in self.by_request.items()
        }
        self._copies.check(device_lengths(self._tables) | of_evicted)
        assert not self.by_request.keys() & self._tables.keys(), "an evicted request has a table"


class Evictions:
    """Evicts requests, and brings them back; see ``KVEvictions``.

    Args:
        evicted: The requests that are evicted.
        tables: Block tables.
        moves: Moves of requests that are restored.
        copies: Copies on the host.
    """

    def __init__(self, evicted: EvictedRequests, tables: TierTables, moves: TableMoves, copies: HostCopies) -> None:
        self._evicted, self._tables, self._moves = evicted.by_request, tables, moves
        self._checkpoints = copies.checkpoints

    def evict(self, request_id: str, num_computed_tokens: int) -> None:
        table, block_size = self._tables.at_rest(request_id), self._tables.block_size
        del self._tables.by_request[request_id]
        on_device = table.tier is Tier.DEVICE
        # On the device the last block may be partly filled; a checkpoint is of full blocks.
        num_kept = -(-num_computed_tokens // block_size) if on_device else num_computed_tokens // block_size
        if table.network is not None:
            num_kept = 0
        self._tables.pool_of(table).give_back(reversed(table.blocks[num_kept:]))
        del table.blocks[num_kept:]
        if not on_device:
            self._checkpoints.keep(request_id, table.blocks)
        self._evicted[request_id] = EvictedRequest(num_computed_tokens, table.blocks if on_device else [])

    def num_kept_tokens(self, request_id: str, tier: Tier) -> int:
        evicted = self._evicted.get(request_id)
        if evicted is None:
            return 0
        blocks = len(evicted.blocks) if tier is Tier.DEVICE else self._checkpoints.num_blocks(request_id)
        return min(evicted.num_tokens, blocks * self._tables.block_size)

    def resume(self, request_id: str, num_tokens: int, *, reserve_blocks: int) -> bool:
        """Give an evicted request a table of its device blocks; False if the device has no room for ``num_tokens``.

        What is not restored is recomputed: a checkpoint is never of more than that.
        """
        evicted = self._evicted[request_id]
        missing = self._num_missing(evicted, num_tokens)
        if missing > 0 and not self._tables.make_room(Tier.DEVICE, missing, reserve_blocks, request_id):
            return False
        del self._evicted[request_id]
        self._checkpoints.reclaim(self._checkpoints.num_blocks(request_id) - len(evicted.blocks), [request_id])
        self._tables.put(request_id, evicted.blocks)
        return True

    def start_restore(self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0) -> KVMove | None:
        evicted = self._evicted[request_id]
        num_on_device, num_on_host = len(evicted.blocks), self._checkpoints.num_blocks(request_id)
        missing = self._num_missing(evicted, num_tokens)
        if num_on_host <= num_on_device:
            return None
        if not self._tables.make_room(Tier.DEVICE, missing, reserve_blocks, request_id):
            return None
        del self._evicted[request_id]
        # The table holds the checkpoint while it is read, so that it cannot give way.
        table = Table(Tier.HOST, self._checkpoints.take(request_id), arrived=evicted.blocks, num_kept=num_on_host)
        source, after = table.blocks[num_on_device:], table.arrived[-1] if table.arrived else None
        target = self._tables.take(Tier.DEVICE, len(source), after)
        table.behind = self._tables.take(Tier.DEVICE, missing - len(target), after=target[-1])
        move = self._moves.make(request_id, MoveDirection.TO_DEVICE, source, target)
        return self._moves.begin(table, move, self._end_restore)

    def _end_restore(self, move: KVMove, *, succeeded: bool) -> MoveResult:
        if succeeded:
            return self._moves.end(move, succeeded=True)
        table, pools = self._moves.pop(move), self._tables.pools
        pools[Tier.DEVICE].give_back(table.target)
        pools[Tier.HOST].give_back(table.blocks)
        return MoveResult.LOST

    def _num_missing(self, evicted: EvictedRequest, num_tokens: int) -> int:
        assert num_tokens >= evicted.num_tokens, f"{evicted.num_tokens} tokens had been computed, now {num_tokens}"
        return -(-num_tokens // self._tables.block_size) - len(evicted.blocks)


class IncrementalKVManager(TwoTierKVManager):
    """Paged KV on two tiers; requests are evicted at no cost and restored from their checkpoints.

    With a prefix cache the scheduler frees a preempted request instead, with the keys of its blocks: the request's
    blocks and those of its checkpoint stay, and are found by their keys.
    """

    abilities = KVAbilities(moves=True, prefixes=True, disk=True, evictions=True, network=True)

    evictions: Evictions

    def __init__(
        self,
        *,
        num_device_blocks: int,
        num_host_blocks: int,
        block_size: int,
        cpu_hosts: bool = False,
        **cache: Unpack[CacheSettings],
    ) -> None:
        tables: dict[str, Table] = {}
        pools = TierPools.of(num_device_blocks, num_host_blocks, **cache)
        evicted = EvictedRequests(tables, pools, block_size=block_size, keeps_stranded=pools.cache is None)
        super().__init__(
            tables,
            pools,
            evicted,
            block_size=block_size,
            cpu_hosts=cpu_hosts,
            leaves_checkpoint=pools.copies.prefixes is None,
        )
        self.checkpoints = TierCheckpoints(self._tables, self.moves, pools.copies)
        self.evictions = Evictions(evicted, self._tables, self.moves, pools.copies)
        self._evicted = evicted.by_request

    def allocate(self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0) -> tuple[int, ...] | None:
        if request_id not in self._evicted:
            return self._tables.allocate(request_id, num_tokens, reserve_blocks=reserve_blocks)
        if not self.evictions.resume(request_id, num_tokens, reserve_blocks=reserve_blocks):
            return None
        return self._tables.allocate(request_id, num_tokens)
