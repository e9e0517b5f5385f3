"""``paged``: block tables on the device only."""

from __future__ import annotations

from collections.abc import Sequence

from omniserve.kv.base import KV_MANAGERS, KVAbilities, KVManager
from omniserve.kv.block_pool import BlockPool
from omniserve.kv.prefix_cache import CachingPool
from omniserve.kv.prefix_index import PrefixIndex
from omniserve.kv.tiers import Tier


class _Tables:
    """The block tables, by request."""

    def __init__(self) -> None:
        self.by_request: dict[str, list[int]] = {}

    def put(self, request_id: str, blocks: list[int]) -> None:
        self.by_request[request_id] = blocks

    def device_blocks(self, request_id: str) -> Sequence[int]:
        return self.by_request[request_id]


@KV_MANAGERS.register("paged")
class PagedKVManager(KVManager):
    """Paged KV on the device; nothing ever moves. What does not fit is recomputed (vLLM's default)."""

    abilities = KVAbilities(prefixes=True)

    def __init__(
        self,
        *,
        num_device_blocks: int,
        num_host_blocks: int,
        block_size: int,
        prefix_cache: bool = False,
        num_protected_blocks: int = 0,
    ) -> None:
        super().__init__(num_device_blocks=num_device_blocks, num_host_blocks=0, block_size=block_size)
        tables = _Tables()
        self._tables = tables.by_request
        self._pool = BlockPool(num_device_blocks, "device")
        if prefix_cache:
            self._pool = cache = CachingPool(num_device_blocks, "device", most_protected=num_protected_blocks)
            self.prefixes = PrefixIndex(cache, tables, block_size=block_size)

    def allocate(self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0) -> tuple[int, ...] | None:
        table = self._tables.get(request_id, [])
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing > 0:
            taken = self._pool.take(missing) if self._pool.num_free - missing >= reserve_blocks else None
            if taken is None:
                return None
            self._tables[request_id] = table
            table += taken
        return tuple(table)

    def allocate_lookahead(
        self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0
    ) -> tuple[int, ...] | None:
        return self.allocate(request_id, num_tokens, reserve_blocks=reserve_blocks)

    def trim(self, request_id: str, num_tokens: int) -> None:
        table, num_needed = self._tables[request_id], -(-num_tokens // self.block_size)
        self._pool.give_back(reversed(table[num_needed:]))
        del table[num_needed:]

    def free(self, request_id: str, keys: Sequence[bytes] = ()) -> None:
        self._pool.give_back(reversed(self._tables.pop(request_id, [])))

    def tier(self, request_id: str) -> Tier | None:
        return Tier.DEVICE if request_id in self._tables else None

    def num_free(self, tier: Tier) -> int:
        return self._pool.num_free if tier is Tier.DEVICE else 0

    def num_blocks(self, request_id: str) -> int:
        return len(self._tables.get(request_id, ()))

    def num_held(self, request_id: str, tier: Tier) -> int:
        return self.num_blocks(request_id) if tier is Tier.DEVICE else 0

    def check_integrity(self) -> None:
        self._pool.check(block for table in self._tables.values() for block in table)
