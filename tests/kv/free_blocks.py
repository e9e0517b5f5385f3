"""The blocks that hold no KV of any request, which tests poison: nothing but a KV manager's pools knows them."""

from __future__ import annotations

from omniserve.kv import KVManager, PagedKVManager
from omniserve.kv.base import Tier
from omniserve.kv.two_tiers import TwoTierKVManager


def free_block_ids(kv: KVManager, tier: Tier) -> list[int]:
    """Return the ids of a tier's free blocks; device blocks that only evicted requests use are not among them.

    Raises:
        TypeError: The manager keeps its pools elsewhere: say here where.
    """
    if isinstance(kv, PagedKVManager):
        return kv._pool.free_ids() if tier is Tier.DEVICE else []
    if isinstance(kv, TwoTierKVManager):
        return kv._tables.pools[tier].free_ids()
    raise TypeError(f"where does {type(kv).__name__} keep its free blocks?")
