"""``paged``: block tables on the device only."""

from __future__ import annotations

from omniserve.core.plan import KVMove, MoveDirection
from omniserve.kv.base import KV_MANAGERS, KVManager, KVUsage, MoveResult, Tier
from omniserve.kv.block_pool import BlockPool


@KV_MANAGERS.register("paged")
class PagedKVManager(KVManager):
    """Paged KV on the device; nothing ever moves. What does not fit is recomputed (vLLM's default)."""

    uses_host = False

    def __init__(self, *, num_device_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_device_blocks, "device")
        self._tables: dict[str, list[int]] = {}

    def allocate(self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0) -> tuple[int, ...] | None:
        table = self._tables.setdefault(request_id, [])
        if not grow_table(table, self._pool, num_tokens, self.block_size, reserve_blocks):
            if not table:
                del self._tables[request_id]
            return None
        return tuple(table)

    def free(self, request_id: str) -> None:
        self._pool.give_back(reversed(self._tables.pop(request_id, [])))

    def tier(self, request_id: str) -> Tier | None:
        return Tier.DEVICE if request_id in self._tables else None

    def start_move(
        self, request_id: str, direction: MoveDirection, *, reserve_blocks: int = 0, keep_tokens: int = 0
    ) -> KVMove | None:
        return None

    def abandon_move(self, move_id: int) -> None:
        raise RuntimeError(f"move {move_id} is unknown: the paged KV manager moves nothing")

    def finish_move(self, move_id: int, *, succeeded: bool) -> MoveResult:
        raise RuntimeError(f"move {move_id} is unknown: the paged KV manager moves nothing")

    def num_free(self, tier: Tier) -> int:
        return self._pool.num_free if tier is Tier.DEVICE else 0

    def free_block_ids(self, tier: Tier) -> list[int]:
        return self._pool.free_ids() if tier is Tier.DEVICE else []

    def num_blocks(self, request_id: str) -> int:
        return len(self._tables.get(request_id, ()))

    def usage(self) -> KVUsage:
        total = self._pool.num_blocks
        return KVUsage(device_used=total - self._pool.num_free, device_total=total, host_used=0, host_total=0)

    def check_integrity(self) -> None:
        self._pool.check(block for table in self._tables.values() for block in table)


def grow_table(table: list[int], pool: BlockPool, num_tokens: int, block_size: int, reserve_blocks: int) -> bool:
    """Append blocks of ``pool`` to ``table`` until it holds ``num_tokens``; False, and unchanged, if it cannot."""
    missing = -(-num_tokens // block_size) - len(table)
    if missing <= 0:
        return True
    if pool.num_free - missing < reserve_blocks:
        return False
    taken = pool.take(missing, after=table[-1] if table else None)
    if taken is None:
        return False
    table.extend(taken)
    return True
