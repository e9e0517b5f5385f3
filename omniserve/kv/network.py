"""NetworkPools: pools of blocks on CPU hosts on the network, and the choice among them.

The local pool comes first, then the host with most memory and speed left.

Paper: omniserve 4 (distributed CPU attention), which deals requests out evenly, whatever a host's memory and speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from omniserve.core.work import HOST_BLOCKS
from omniserve.kv.block_pool import BlockPool, RunPool


class NetworkPool(RunPool):
    """The blocks of a host, from its first connection until it is lost. If it comes back, it has another pool."""

    def __init__(self, host: int, num_blocks: int, speed: float) -> None:
        super().__init__(num_blocks, f"host {host}")
        self.host = host
        self.speed = speed
        self.is_lost = False
        self._first = host * HOST_BLOCKS

    def has_room(self, count: int, reserve_blocks: int) -> bool:
        """Tell whether ``count`` blocks can be taken, and ``reserve_blocks`` are free then."""
        return not self.is_lost and self.num_free >= count + reserve_blocks

    def free_ids(self) -> list[int]:
        return [self._first + block for block in super().free_ids()]

    def take(self, count: int, after: int | None = None) -> list[int] | None:
        taken = super().take(count, None if after is None else after - self._first)
        return None if taken is None else [self._first + block for block in taken]

    def give_back(self, blocks: Iterable[int]) -> None:
        super().give_back([block - self._first for block in blocks])

    def check(self, owned: Iterable[int]) -> None:
        taken = sorted(set(range(self._first, self._first + self.num_blocks)) - set(self.free_ids()))
        assert sorted(owned) == taken, f"{self.name}: owned {sorted(owned)[:16]}, taken {taken[:16]}"


class NetworkPools:
    """The pools of all hosts that are there; see ``NetworkKV``.

    Args:
        pool_of: Returns the pool of the host that a request is on; None: it is on none.
    """

    def __init__(self, pool_of: Callable[[str], NetworkPool | None]) -> None:
        self._pool_of = pool_of
        self._pools: dict[int, NetworkPool] = {}

    def add_host(self, host: int, num_blocks: int, speed: float) -> None:
        assert host not in self._pools, f"host {host} is there already"
        self._pools[host] = NetworkPool(host, num_blocks, speed)

    def lose_host(self, host: int) -> None:
        # Requests with blocks there give them back to its pool all the same.
        self._pools.pop(host).is_lost = True

    def host_of(self, request_id: str) -> int:
        pool = self._pool_of(request_id)
        return pool.host if pool is not None else 0

    def is_lost(self, request_id: str) -> bool:
        pool = self._pool_of(request_id)
        return pool is not None and pool.is_lost

    def choose(self, num_blocks: int, reserve_blocks: int) -> NetworkPool | None:
        """Return the host that is to take ``num_blocks``: the one that then has the least KV for its speed.

        ``reserve_blocks`` are for requests to grow into, on all hosts; each keeps the share of its memory.
        """
        total = max(1, self.num_blocks)
        fitting = [
            pool
            for pool in self._pools.values()
            if pool.has_room(num_blocks, -(-reserve_blocks * pool.num_blocks // total))
        ]
        return min(fitting, key=lambda pool: (_used(pool) + num_blocks) / pool.speed, default=None)

    @property
    def num_blocks(self) -> int:
        return sum(pool.num_blocks for pool in self._pools.values())

    @property
    def num_used(self) -> int:
        """Blocks that are not free."""
        return sum(map(_used, self._pools.values()))

    def check(self, owned: Sequence[tuple[BlockPool, Sequence[int]]]) -> None:
        """Verify that, in each pool, the blocks in use are those in ``owned``.

        Raises:
            AssertionError: They are not.
        """
        for pool in self._pools.values():
            pool.check([block for owner, blocks in owned if owner is pool for block in blocks])


def _used(pool: NetworkPool) -> int:
    return pool.num_blocks - pool.num_free
