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
from omniserve.kv.bidirectional import BidirectionalKVManager
from omniserve.kv.incremental import IncrementalKVManager
from omniserve.kv.paged import PagedKVManager
from omniserve.kv.tiered import TieredKVManager

__all__ = [
    "KV_MANAGERS",
    "BidirectionalKVManager",
    "CanCache",
    "CanCheckpoint",
    "CanEvict",
    "CanMove",
    "CanShare",
    "CanSpread",
    "IncrementalKVManager",
    "KVManager",
    "KVUsage",
    "KeepsPrefixesOnDisk",
    "MoveResult",
    "PagedKVManager",
    "Tier",
    "TieredKVManager",
]
