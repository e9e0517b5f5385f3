"""RetainedKV: KV that no block table holds, and that gives way when requests need memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from omniserve.kv.block_pool import BlockPool
from omniserve.kv.host_copies import HostCopies
from omniserve.kv.table import Table
from omniserve.kv.tiers import Tier


class RetainedKV(ABC):
    """What is left of requests without a table, and copies of blocks on the host that may never be needed."""

    @abstractmethod
    def num_reclaimable(self, tier: Tier, spare: str) -> int:
        """Return how many blocks of a tier ``reclaim`` could free, without those of the request ``spare``."""

    @abstractmethod
    def reclaim(self, tier: Tier, num_blocks: int, spare: str) -> None:
        """Free that many blocks, or all there are, but none of the request ``spare``."""

    @abstractmethod
    def strand(self, request_id: str, blocks: list[int]) -> None:
        """Take over host blocks with copies of a request's first blocks.

        Its move has failed or was abandoned: its other blocks are lost, and it has no table.
        """

    @abstractmethod
    def drop(self, request_id: str) -> None:
        """Free what is left of a request, and the copies of its blocks."""

    @abstractmethod
    def num_host_blocks(self, request_id: str) -> int:
        """Return how many host blocks hold, or are to hold, copies of blocks of a request that are elsewhere."""

    @abstractmethod
    def owned_blocks(self, tier: Tier) -> Iterable[int]:
        """Return the blocks of a tier that are held here; for checks."""

    @abstractmethod
    def check(self) -> None:
        """Verify the books of retained KV.

        Raises:
            AssertionError: The retained KV does not fit the tables.
        """


class RetainedCopies(RetainedKV):
    """Copies on the host alone: a request without a table has lost its KV.

    Args:
        tables: Block tables by request.
        host: The host pool.
        copies: The copies in it.
    """

    def __init__(self, tables: Mapping[str, Table], host: BlockPool, copies: HostCopies) -> None:
        self._tables, self._host, self._copies = tables, host, copies

    def num_reclaimable(self, tier: Tier, spare: str) -> int:
        return self._copies.num_reclaimable(self._give_way(spare)) if tier is Tier.HOST else 0

    def reclaim(self, tier: Tier, num_blocks: int, spare: str) -> None:
        if tier is Tier.HOST:
            self._copies.reclaim(num_blocks, self._give_way(spare))

    def _give_way(self, spare: str) -> Sequence[str]:
        """Return the requests that may lose blocks of their checkpoint, in that order, without ``spare``."""
        return [request_id for request_id in self._copies.checkpoints.request_ids() if request_id != spare]

    def strand(self, request_id: str, blocks: list[int]) -> None:
        self._host.give_back(blocks)

    def drop(self, request_id: str) -> None:
        self._copies.checkpoints.drop(request_id)

    def num_host_blocks(self, request_id: str) -> int:
        return self._copies.checkpoints.num_held(request_id)

    def owned_blocks(self, tier: Tier) -> Iterable[int]:
        return self._copies.owned_blocks() if tier is Tier.HOST else ()

    def check(self) -> None:
        self._copies.check(device_lengths(self._tables))


def device_lengths(tables: Mapping[str, Table]) -> dict[str, int]:
    """Return how many blocks the tables have that are at rest on the device, by request."""
    at_rest = ((r, t) for r, t in tables.items() if t.tier is Tier.DEVICE and t.move is None)
    return {request_id: len(table.blocks) for request_id, table in at_rest}
