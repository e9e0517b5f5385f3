"""``tiered``: block tables on the device and on the host, whole-request moves between them, and checkpoints.

A request that the host of this machine has no room for moves to a host on the network, if there is one; checkpoints and
prefixes stay on this machine.

With ``checkpoint_kv``, full blocks of BE requests are copied to the host ahead of need (``kv.checkpoints``), so that a
move copies the rest (``kv.tables``).

Paper: omniserve 3.2.4, conserve 4.4.
"""

from __future__ import annotations

from typing import Unpack

from omniserve.kv.base import KV_MANAGERS, KVAbilities
from omniserve.kv.checkpoints import TierCheckpoints
from omniserve.kv.retained import RetainedCopies
from omniserve.kv.table import Table
from omniserve.kv.two_tiers import CacheSettings, TierPools, TwoTierKVManager


@KV_MANAGERS.register("tiered")
class TieredKVManager(TwoTierKVManager):
    """Paged KV on two tiers, and prefixes on a third, the disk."""

    abilities = KVAbilities(moves=True, prefixes=True, disk=True, network=True)

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
        super().__init__(
            tables,
            pools,
            RetainedCopies(tables, pools.host, pools.copies),
            block_size=block_size,
            cpu_hosts=cpu_hosts,
            leaves_checkpoint=pools.copies.prefixes is None,
        )
        self.checkpoints = TierCheckpoints(self._tables, self.moves, pools.copies)
