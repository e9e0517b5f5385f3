"""KV managers: which request owns which block on which tier. Ids only; the tensors are in ``storage``."""

from omniserve.kv.base import (
    KV_MANAGERS,
    CanCache,
    CanCheckpoint,
    CanEvict,
    CanMove,
    CanShare,
    CanSpread,
    KeepsPrefixesOnDisk,
    KVManager,
    KVUsage,
    MoveResult,
    Tier,
)
from omniserve.kv.paged import PagedKVManager
from omniserve.kv.tiered import TieredKVManager

__all__ = [
    "KV_MANAGERS",
    "CanCache",
    "CanCheckpoint",
    "CanEvict",
    "CanMove",
    "CanShare",
    "CanSpread",
    "KVManager",
    "KVUsage",
    "KeepsPrefixesOnDisk",
    "MoveResult",
    "PagedKVManager",
    "Tier",
    "TieredKVManager",
]

KV_MANAGERS.register_at("bidirectional", "omniserve.kv.bidirectional.manager:BidirectionalKVManager")
KV_MANAGERS.register_at("incremental", "omniserve.kv.incremental:IncrementalKVManager")
