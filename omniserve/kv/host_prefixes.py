"""HostPrefixes: the part of the prefix cache that is in host memory.

That is copies of device blocks, and full blocks of requests that came to the host or were preempted there. Requests on
the host share them. A disk tier below has copies of these.

Full blocks of requests that move to the host get their keys there, and the next request that begins alike shares them:
its move copies what is behind them, as behind a checkpoint. The blocks of a request that is preempted on the host stay
as prefixes, and so does the checkpoint of one that is preempted on the device.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from omniserve.core.work import KVMove
from omniserve.kv.block_pool import RunPool
from omniserve.kv.tiers import MoveResult

if TYPE_CHECKING:
    from omniserve.kv.disk_prefixes import DiskPrefixes


class PrefixPool(RunPool):
    """A host pool, of which some blocks are *held* for their KV.

    A held block may have several users. To give it back takes one user from it; without users it stays, and is free
    when it is dropped.
    """

    def __init__(self, num_blocks: int, name: str) -> None:
        super().__init__(num_blocks, name)
        self._num_users: dict[int, int] = {}
        self.num_used = 0
        """Held blocks that have users."""

    def has_users(self, block: int) -> bool:
        """Tell whether a held block has users."""
        return self._num_users[block] > 0

    def is_held(self, block: int) -> bool:
        """Tell whether a block is held."""
        return block in self._num_users

    def hold(self, block: int, *, num_users: int) -> None:
        """Hold a block that is taken, and has ``num_users`` users."""
        assert block not in self._num_users, f"{self.name} block {block} is held already"
        self._num_users[block] = num_users
        self.num_used += num_users > 0

    def use(self, blocks: Iterable[int]) -> None:
        """Add a user to each of these held blocks."""
        for block in blocks:
            self.num_used += not self._num_users[block]
            self._num_users[block] += 1

    def drop(self, block: int) -> None:
        """Free a held block that has no user."""
        assert not self._num_users.pop(block), f"{self.name} block {block} has users"
        super().give_back([block])

    def give_back(self, blocks: Iterable[int]) -> None:
        if not self._num_users:
            super().give_back(blocks)
            return
        others: list[int] = []
        for block in blocks:
            num_users = self._num_users.get(block)
            if num_users is None:
                others.append(block)
                continue
            if not num_users:
                raise RuntimeError(f"{self.name} block {block} was freed twice")
            self._num_users[block] = num_users - 1
            self.num_used -= num_users == 1
        super().give_back(others)

    def check(self, owned: Iterable[int]) -> None:
        """Verify that ``owned`` has each held block as often as it has users, and each other one that is taken once."""
        counts = Counter(owned)
        wrong = [block for block, num_users in self._num_users.items() if counts[block] != num_users]
        assert not wrong, f"{self.name} blocks with other users than those that own them: {wrong[:16]}"
        assert self.num_used == sum(num_users > 0 for num_users in self._num_users.values())
        others = (block for block in counts.elements() if block not in self._num_users)
        super().check([*others, *self._num_users])


class HostPrefixes:
    """Host blocks by the keys of ``kv.prefix_cache``; the one that was used longest ago is the first to be reclaimed.

    Args:
        pool: The host pool.
        disk: What is on disk; None: there is no disk tier.
    """

    def __init__(self, pool: PrefixPool, disk: DiskPrefixes | None = None) -> None:
        self.pool = pool
        self._disk = disk
        self.blocks: OrderedDict[bytes, int] = OrderedDict()
        """Key -> host block, the last used last."""
        self.filling: dict[int, Sequence[int]] = {}
        """Number of a copy under way -> host blocks that it fills."""
        self._expected: dict[int, tuple[Sequence[bytes], Sequence[bytes]]] = {}
        """Number of a copy -> (keys of the host blocks before the KV that comes, keys of that KV)."""
        self._readers: Counter[bytes] = Counter()
        """Copies that read the block of a key; it stays meanwhile."""
        self.kept: Counter[int] = Counter()
        """Blocks that have users for requests that are to use them, and how many (``HostPrefixIndex.keep``)."""

    @property
    def num_reclaimable(self) -> int:
        """Blocks that ``reclaim`` could free."""
        num_read_only = sum(not self.pool.has_users(self.blocks[key]) for key in self._readers)
        return len(self.blocks) - self.pool.num_used - num_read_only

    def reclaim(self, count: int, keys: Iterable[bytes] | None = None) -> int:
        """Free ``count`` of the blocks that no request uses and no copy reads, or all of these if there are fewer.

        Args:
            keys: Those that may be freed; None: all, the one that was used longest ago first.

        Returns:
            How many were freed.
        """
        blocks, has_users, readers = self.blocks, self.pool.has_users, self._readers
        items = blocks.items() if keys is None else ((key, blocks[key]) for key in keys if key in blocks)
        free = (key for key, block in items if not has_users(block) and key not in readers)
        chosen = list(itertools.islice(free, max(0, count)))
        for key in chosen:
            self.pool.drop(self.blocks.pop(key))
            if self._disk is not None:
                self._disk.cancel_write(key)
        return len(chosen)

    # -- blocks that requests bring ------------------------------------------------------------------------------

    def publish(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Let others find the first of a request's host blocks, by these keys; not those that another block has."""
        for key, block in zip(reversed(keys), reversed(blocks[: len(keys)]), strict=True):
            if key not in self.blocks and not self.pool.is_held(block):
                self.blocks[key] = block
                self.pool.hold(block, num_users=1)

    def share(self, keys: Sequence[bytes]) -> list[int]:
        """Return the blocks of the first of these keys that are here, each of which has a user more then."""
        found = [*itertools.takewhile(self.blocks.__contains__, keys)]
        self._touch(found)
        self._want_on_disk(found)
        blocks = [self.blocks[key] for key in found]
        self.pool.use(blocks)
        return blocks

    def adopt(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Take over host blocks of a request that was preempted; the first of them have these keys."""
        self.publish(keys, blocks)
        self._touch([*filter(self.blocks.__contains__, keys)])
        self._want_on_disk(keys)
        self.pool.give_back(blocks)

    # -- copies that read blocks, or fill them -------------------------------------------------------------------

    def pin(self, keys: Sequence[bytes]) -> list[int]:
        """Return the blocks of these keys, which stay until ``end_reading``."""
        self._readers.update(keys)
        return [self.blocks[key] for key in keys]

    def begin_reading(self, keys: Sequence[bytes]) -> list[int]:
        """Return the blocks of these keys, as ``pin`` does, for a request that uses them."""
        self._touch(keys)
        if self._disk is not None:
            self._disk.touch(keys)
        return self.pin(keys)

    def end_reading(self, keys: Sequence[bytes]) -> None:
        """Note that a copy has ended that reads the blocks of these keys."""
        self._readers.subtract(keys)
        self._readers = +self._readers

    def begin_filling(
        self, move_id: int, host_keys: Sequence[bytes], keys: Sequence[bytes], *, least: int, reserve: int
    ) -> list[int] | None:
        """Take blocks for the first of these keys, whose KV comes from elsewhere, as many as there is room for.

        Args:
            host_keys: Blocks here that will be used with them, and stay until ``end_filling``.
            least: Fewest blocks that are of use: with less room, None is returned, and nothing has changed.
            reserve: Blocks that must still be free afterwards, those of prefixes counted as free.

        Returns:
            The blocks, or None.
        """
        self.begin_reading(host_keys)
        count = min(len(keys), max(0, self.pool.num_free + self.num_reclaimable - reserve))
        if count < least:
            self.end_reading(host_keys)
            return None
        self.reclaim(count - self.pool.num_free)
        blocks = self.pool.take(count)
        assert blocks is not None
        self.filling[move_id], self._expected[move_id] = blocks, (host_keys, keys[:count])
        return blocks

    def end_filling(self, move_id: int, num_blocks: int) -> None:
        """Keep the first ``num_blocks`` blocks, whose KV has come, and free the others."""
        blocks, (host_keys, keys) = self.filling.pop(move_id), self._expected.pop(move_id)
        self.end_reading(host_keys)
        for number, (key, block) in reversed([*enumerate(zip(keys, blocks, strict=True))]):
            if number < num_blocks and key not in self.blocks:
                self.put(key, block)
            else:
                self.pool.give_back([block])

    def put(self, key: bytes, block: int) -> None:
        """Keep a block that has been filled; there is none of this key."""
        self.blocks[key] = block
        self.pool.hold(block, num_users=0)
        self._want_on_disk([key])

    def _want_on_disk(self, keys: Sequence[bytes]) -> None:
        if self._disk is not None:
            self._disk.want(keys)

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Note that these blocks, of a prefix in order, are used: its end is to be reclaimed first."""
        for key in reversed(keys):
            self.blocks.move_to_end(key)

    @property
    def num_held(self) -> int:
        """Blocks that no request uses, and that are not free because of prefixes or copies of some."""
        return len(self.blocks) - self.pool.num_used + sum(map(len, self.filling.values()))

    # -- for checks ----------------------------------------------------------------------------------------------

    def owned_blocks(self) -> Iterator[int]:
        """Yield the blocks that copies under way will bring, and those that are kept; for checks."""
        return itertools.chain(*self.filling.values(), self.kept.elements())

    def check(self) -> None:
        """Verify the books of keys, readers and fills.

        Raises:
            AssertionError: They do not fit one another.
        """
        assert self._readers.keys() <= self.blocks.keys() and self._expected.keys() <= self.filling.keys()
        if self._disk is not None:
            self._disk.check(self.blocks)


class PrefixCopies:
    """The copies of device blocks to the host that are under way.

    A request may take a device block, and write it, while a copy reads it. The host block of that copy is freed then.

    Args:
        prefixes: Gets what the copies bring.
    """

    def __init__(self, prefixes: HostPrefixes) -> None:
        self._prefixes = prefixes
        self._copies: dict[int, KVMove] = {}
        self._sources: dict[int, tuple[int, bytes]] = {}
        """Device block -> the copy under way that is of use for it, and its key."""

    def is_copying(self, device_block: int) -> bool:
        """Tell whether a copy of a device block is under way."""
        return device_block in self._sources

    def begin(self, move: KVMove, keys: Sequence[bytes]) -> None:
        """Note that ``move`` copies the device blocks of these keys; its target blocks are taken from the pool."""
        self._copies[move.move_id] = move
        self._prefixes.filling[move.move_id] = move.dst_block_ids
        self._sources |= {block: (move.move_id, key) for block, key in zip(move.src_block_ids, keys, strict=True)}

    def forget_source(self, device_block: int) -> None:
        """Note that a request takes a device block: the copy of it that is under way is of no use."""
        self._sources.pop(device_block, None)

    def end(self, move_id: int, *, succeeded: bool) -> MoveResult:
        """Keep what a copy has made, if it succeeded, of the blocks that were not taken meanwhile."""
        move, prefixes = self._copies.pop(move_id), self._prefixes
        del prefixes.filling[move_id]
        unused: list[int] = []
        for source, target in reversed([*zip(move.src_block_ids, move.dst_block_ids, strict=True)]):
            of_use_for, key = self._sources.get(source, (-1, b""))
            if of_use_for == move_id:
                del self._sources[source]
            if of_use_for != move_id or not succeeded or key in prefixes.blocks:
                unused.append(target)
            else:
                prefixes.put(key, target)
        prefixes.pool.give_back(unused)
        if len(unused) < len(move.dst_block_ids):
            return MoveResult.ARRIVED
        return MoveResult.UNUSED if succeeded else MoveResult.STAYED
