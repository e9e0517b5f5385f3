"""KV managers: which request owns which block on which tier. Ids only; the tensors are in ``storage``."""

from omniserve.kv.base import KV_MANAGERS, KVAbilities, KVManager
from omniserve.kv.paged import PagedKVManager
from omniserve.kv.tiered import TieredKVManager
from omniserve.kv.tiers import MoveResult, Tier

__all__ = ["KV_MANAGERS", "KVAbilities", "KVManager", "MoveResult", "PagedKVManager", "Tier", "TieredKVManager"]

KV_MANAGERS.register_at("bidirectional", "omniserve.kv.bidirectional.manager:BidirectionalKVManager")
KV_MANAGERS.register_at("incremental", "omniserve.kv.incremental:IncrementalKVManager")
