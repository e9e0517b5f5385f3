"""TwoTierKVManager: what managers with a device tier and a host tier have in common, made of parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypedDict

from omniserve.core.stats import KVUsage
from omniserve.kv.base import KVAbilities, KVManager
from omniserve.kv.block_pool import BlockPool
from omniserve.kv.host_copies import HostCopies
from omniserve.kv.host_prefixes import HostPrefixes, PrefixCopies, PrefixPool
from omniserve.kv.prefix_cache import CachingPool
from omniserve.kv.prefix_index import HostPrefixIndex, PrefixIndex
from omniserve.kv.retained import RetainedKV
from omniserve.kv.table import Table
from omniserve.kv.tables import TableMoves, TierTables
from omniserve.kv.tiers import CopyEnds, Tier

if TYPE_CHECKING:
    from omniserve.kv.disk_prefixes import DiskPrefixes
    from omniserve.kv.network import NetworkPools


class CacheSettings(TypedDict, total=False):
    """Settings of the prefix cache, and their defaults."""

    prefix_cache: bool
    """Keep a prefix cache. Default: False."""
    num_protected_blocks: int
    """Most idle blocks of LS requests that are kept before all others. Default: 0."""
    host_prefixes: bool
    """Keep prefixes in host memory, too, if there is a host tier. Default: False."""
    disk: DiskPrefixes | None
    """The disk tier. Default: None, there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TierPools:
    """The pools of both tiers, and the copies that are in the host's."""

    device: BlockPool
    host: BlockPool
    copies: HostCopies
    cache: CachingPool | None = None
    """The device pool, if it keeps a prefix cache."""
    prefix_copies: PrefixCopies | None = None
    """Copies of the cache's blocks to the host; None: the cache is on the device alone."""
    disk: DiskPrefixes | None = None

    @classmethod
    def of(
        cls,
        num_device_blocks: int,
        num_host_blocks: int,
        *,
        prefix_cache: bool = False,
        num_protected_blocks: int = 0,
        host_prefixes: bool = False,
        disk: DiskPrefixes | None = None,
    ) -> Self:
        """Make the pools of a manager that may keep a prefix cache."""
        host = PrefixPool(num_host_blocks, "host")
        if not prefix_cache:
            return cls(device=BlockPool(num_device_blocks, "device"), host=host, copies=HostCopies(host))
        prefixes = HostPrefixes(host, disk) if host_prefixes and num_host_blocks > 0 else None
        prefix_copies = PrefixCopies(prefixes) if prefixes is not None else None
        cache = CachingPool(
            num_device_blocks,
            "device",
            most_protected=num_protected_blocks,
            on_forget=prefix_copies.forget_source if prefix_copies is not None else None,
        )
        copies = HostCopies(host, prefixes)
        return cls(device=cache, host=host, copies=copies, cache=cache, prefix_copies=prefix_copies, disk=disk)

    def index(self, tables: TierTables, moves: TableMoves, ends: CopyEnds) -> PrefixIndex | None:
        """Make the index of the prefix cache; None: there is none."""
        if self.cache is None:
            return None
        host = disk = None
        if self.copies.prefixes is not None and self.prefix_copies is not None:
            host = HostPrefixIndex(
                self.copies.prefixes, self.prefix_copies, pool=self.cache, tables=tables, moves=moves, ends=ends
            )
            if self.disk is not None:
                from omniserve.kv.disk_prefix_index import DiskPrefixIndex

                disk = DiskPrefixIndex(self.disk, self.copies.prefixes, ends)
        return PrefixIndex(self.cache, tables, block_size=tables.block_size, host=host, disk=disk)


class TwoTierKVManager(KVManager):
    """Paged KV on two tiers; a subclass says what else it can in its ``abilities``.

    Args:
        tables: The dictionary of block tables, which is empty.
        pools: The pools.
        retained: KV that no table holds, and that gives way when requests need memory.
        cpu_hosts: Requests can move to CPU hosts on the network, too.
        leaves_checkpoint: The blocks of a request that moves to the device can stay on the host, as its checkpoint.
        runs_from_right: Requests whose device blocks run from the right.
    """

    abilities = KVAbilities(moves=True)

    moves: TableMoves
    network: NetworkPools | None = None

    def __init__(
        self,
        tables: dict[str, Table],
        pools: TierPools,
        retained: RetainedKV,
        *,
        block_size: int,
        leaves_checkpoint: bool,
        cpu_hosts: bool = False,
        runs_from_right: Set[str] = frozenset(),
    ) -> None:
        super().__init__(
            num_device_blocks=pools.device.num_blocks, num_host_blocks=pools.host.num_blocks, block_size=block_size
        )
        self._copies, self._retained = pools.copies, retained
        self._tables = TierTables(
            tables,
            {Tier.DEVICE: pools.device, Tier.HOST: pools.host},
            block_size=block_size,
            copies=pools.copies,
            retained=retained,
        )
        if cpu_hosts:
            from omniserve.kv.network import NetworkPools

            self.network = NetworkPools(self._tables.network_pool)
        ends = CopyEnds()
        self.moves = TableMoves(
            self._tables,
            copies=pools.copies,
            retained=retained,
            ends=ends,
            network=self.network,
            leaves_checkpoint=leaves_checkpoint,
            runs_from_right=runs_from_right,
        )
        self.prefixes = pools.index(self._tables, self.moves, ends)

    def allocate(self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0) -> tuple[int, ...] | None:
        return self._tables.allocate(request_id, num_tokens, reserve_blocks=reserve_blocks)

    def allocate_lookahead(
        self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0
    ) -> tuple[int, ...] | None:
        has_unused = self._tables.has_unused(request_id, num_tokens, reserve_blocks=reserve_blocks)
        return self.allocate(request_id, num_tokens) if has_unused else None

    def trim(self, request_id: str, num_tokens: int) -> None:
        self._tables.trim(request_id, num_tokens)

    def free(self, request_id: str, keys: Sequence[bytes] = ()) -> None:
        table = self._tables.by_request.get(request_id)
        if table is not None:
            table.require_still()
            if keys:
                self._leave_to_others(request_id, table, keys)
            del self._tables.by_request[request_id]
        self._retained.drop(request_id)
        if table is not None:
            self._tables.pool_of(table).give_back(reversed(table.blocks))

    def _leave_to_others(self, request_id: str, table: Table, keys: Sequence[bytes]) -> None:
        """Let others find the first blocks of a request that is freed, which have these keys."""
        host, prefixes = self.prefixes.host if self.prefixes is not None else None, self._copies.prefixes
        if host is None or prefixes is None:
            return
        if table.tier is Tier.DEVICE:
            host.want_copies(request_id, 0, len(keys))
            self._copies.adopt_checkpoint(request_id, keys)
        elif table.network is None:
            prefixes.adopt(keys, table.blocks)
            table.blocks = []

    def tier(self, request_id: str) -> Tier | None:
        table = self._tables.by_request.get(request_id)
        return table.tier if table is not None else None

    def num_blocks(self, request_id: str) -> int:
        return self._tables.num_blocks(request_id)

    def num_held(self, request_id: str, tier: Tier) -> int:
        num_copies = self._retained.num_host_blocks(request_id) if tier is Tier.HOST else 0
        return num_copies + self._tables.num_held(request_id, tier)

    def num_free(self, tier: Tier) -> int:
        num_free = self._tables.pools[tier].num_free
        if tier is Tier.HOST:
            return num_free + self._copies.num_idle
        return num_free + self._retained.num_reclaimable(tier, spare="")

    def usage(self) -> KVUsage:
        num_used = self.num_host_blocks - self._tables.pools[Tier.HOST].num_free - self._copies.num_unused
        num_blocks = self.num_host_blocks
        if self.network is not None:
            num_used, num_blocks = num_used + self.network.num_used, num_blocks + self.network.num_blocks
        return dataclasses.replace(super().usage(), host_used=num_used, host_total=num_blocks)

    def check_integrity(self) -> None:
        self._retained.check()
        owned = [*self._tables.owned_blocks(), *self.moves.owned_blocks()]
        for tier, pool in self._tables.pools.items():
            blocks = [block for owner, some in owned if owner is pool for block in some]
            pool.check([*blocks, *self._retained.owned_blocks(tier)])
        if self.network is not None:
            self.network.check(owned)
        self.moves.check()
