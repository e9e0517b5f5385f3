"""TierCheckpoints: copies full blocks of requests on the device to the host ahead of need.

Paper: conserve 4.4 (incremental checkpoints).
"""

from __future__ import annotations

from collections.abc import Iterable

from omniserve.core.work import KVMove, MoveDirection
from omniserve.kv.host_copies import HostCopies
from omniserve.kv.tables import TableMoves, TierTables
from omniserve.kv.tiers import Tier


class TierCheckpoints:
    """Begins the copies; see ``KVCheckpoints``.

    Args:
        tables: Block tables.
        moves: Makes and ends the copies.
        copies: Keeps what they bring.
    """

    def __init__(self, tables: TierTables, moves: TableMoves, copies: HostCopies) -> None:
        self._tables, self._moves, self._copies = tables, moves, copies

    def start(
        self,
        request_id: str,
        num_computed_tokens: int,
        *,
        max_blocks: int,
        reserve_blocks: int = 0,
        give_way: Iterable[str] = (),
    ) -> KVMove | None:
        table = self._tables.by_request.get(request_id)
        if table is None or table.tier is not Tier.DEVICE or table.move is not None:
            raise RuntimeError(f"request {request_id} cannot be checkpointed: its KV is not at rest on the device")
        num_full = num_computed_tokens // self._tables.block_size
        assert num_full <= len(table.blocks), f"{num_computed_tokens} tokens are more than {request_id} has blocks for"
        checkpoints, host = self._copies.checkpoints, self._tables.pools[Tier.HOST]
        if checkpoints.is_copying(request_id):
            return None
        first = checkpoints.num_blocks(request_id)
        count = min(num_full - first, max_blocks)
        shortage = min(count, count + reserve_blocks - host.num_free)
        if shortage > 0 and self._copies.prefixes is not None:
            self._copies.prefixes.reclaim(shortage)
            shortage = min(count, count + reserve_blocks - host.num_free)
        if shortage > 0:
            checkpoints.reclaim(shortage, [other for other in give_way if self.num_blocks(other)])
            count = min(count, host.num_free - reserve_blocks)
        if count <= 0:
            return None
        target = self._tables.take(Tier.HOST, count, after=checkpoints.last_block(request_id))
        source = table.blocks[first : first + count]
        move = self._moves.make(request_id, MoveDirection.TO_HOST, source, target, is_checkpoint=True)
        checkpoints.begin_copy(request_id, move)
        return self._moves.begin_copy(move, checkpoints.end_copy)

    def num_blocks(self, request_id: str) -> int:
        return self._copies.checkpoints.num_blocks(request_id)
