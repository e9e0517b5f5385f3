"""HostPrefixes: the part of the prefix cache that is in host memory.

That is copies of device blocks, and full blocks of requests that came to the host or were preempted there. Requests on
the host share them. ``KeepsPrefixes`` lets a KV manager have them. A disk tier below has copies of these.

Full blocks of requests that move to the host get their keys there, and the next request that begins alike shares them:
its move copies what is behind them, as behind a checkpoint. The blocks of a request that is preempted on the host stay
as prefixes, and so does the checkpoint of one that is preempted on the device.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from omniserve.core.work import DiskCopy, KVMove, MoveDirection
from omniserve.kv.base import MoveResult
from omniserve.kv.block_pool import RunPool
from omniserve.kv.prefix_cache import CachesPrefixes

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

    A request may take a device block, and write it, while a copy reads it. The host block of that copy is freed then.

    Args:
        pool: The host pool.
        disk: What is on disk; None: there is no disk tier.
    """

    def __init__(self, pool: PrefixPool, disk: DiskPrefixes | None = None) -> None:
        self._pool = pool
        self.disk = disk
        self._unwritten: dict[bytes, None] = {}
        """Keys of the blocks that the disk has not, the first that came first."""
        self._disk_copies: dict[int, DiskCopy] = {}
        self._reading: dict[bytes, int] = {}
        """Key -> the copy from disk under way that brings its block."""
        self._awaiting: dict[int, Sequence[bytes]] = {}
        """Copy from disk -> keys of the blocks here that will be used with what it brings."""
        self._blocks: OrderedDict[bytes, int] = OrderedDict()
        """Key -> host block, the last used last."""
        self._readers: Counter[bytes] = Counter()
        """Moves that read the block of a key; it stays meanwhile."""
        self._coming: dict[int, tuple[Sequence[bytes], Sequence[bytes], Sequence[int]]] = {}
        """Incoming KV by move id: (keys of host blocks that it continues, its keys, its blocks)."""
        self._copies: dict[int, KVMove] = {}
        self._sources: dict[int, tuple[int, bytes]] = {}
        """Device block -> the copy under way that is of use for it, and its key."""

    def has(self, key: bytes) -> bool:
        """Tell whether a host block has this key."""
        return key in self._blocks

    def block_of(self, key: bytes) -> int | None:
        """Return the host block of this key; None: there is none."""
        return self._blocks.get(key)

    def is_copying(self, device_block: int) -> bool:
        """Tell whether a copy of a device block is under way."""
        return device_block in self._sources

    @property
    def num_reclaimable(self) -> int:
        """Blocks that ``reclaim`` could free."""
        num_read_only = sum(not self._pool.has_users(self._blocks[key]) for key in self._readers)
        return len(self._blocks) - self._pool.num_used - num_read_only

    def reclaim(self, count: int) -> None:
        """Free ``count`` of the blocks that no request uses and no copy reads, or all of these if there are fewer."""
        has_users, readers = self._pool.has_users, self._readers
        free = (key for key, block in self._blocks.items() if not has_users(block) and key not in readers)
        for key in list(itertools.islice(free, max(0, count))):
            self._pool.drop(self._blocks.pop(key))
            self._unwritten.pop(key, None)

    def begin_copy(self, move: KVMove, keys: Sequence[bytes]) -> None:
        """Note that ``move`` copies the device blocks of these keys; its target blocks are taken from the pool."""
        self._copies[move.move_id] = move
        self._sources |= {block: (move.move_id, key) for block, key in zip(move.src_block_ids, keys, strict=True)}

    def forget_source(self, device_block: int) -> None:
        """Note that a request takes a device block: the copy of it that is under way is of no use."""
        self._sources.pop(device_block, None)

    def end_copy(self, move_id: int, *, succeeded: bool) -> MoveResult:
        """Keep what a copy has made, if it succeeded, of the blocks that were not taken meanwhile."""
        move = self._copies.pop(move_id)
        unused: list[int] = []
        for source, target in reversed([*zip(move.src_block_ids, move.dst_block_ids, strict=True)]):
            of_use_for, key = self._sources.get(source, (-1, b""))
            if of_use_for == move_id:
                del self._sources[source]
            if of_use_for != move_id or not succeeded or key in self._blocks:
                unused.append(target)
            else:
                self._put(key, target)
        self._pool.give_back(unused)
        if len(unused) < len(move.dst_block_ids):
            return MoveResult.ARRIVED
        return MoveResult.UNUSED if succeeded else MoveResult.STAYED

    def publish(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Let others find the first of a request's host blocks, by these keys; not those that another block has."""
        for key, block in zip(reversed(keys), reversed(blocks[: len(keys)]), strict=True):
            if key not in self._blocks and not self._pool.is_held(block):
                self._blocks[key] = block
                self._pool.hold(block, num_users=1)

    def share(self, keys: Sequence[bytes]) -> list[int]:
        """Return the blocks of the first of these keys that are here, each of which has a user more then."""
        found = [*itertools.takewhile(self.has, keys)]
        self.touch(found)
        for key in found:
            self._want_on_disk(key)
        blocks = [self._blocks[key] for key in found]
        self._pool.use(blocks)
        return blocks

    def adopt(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Take over host blocks of a request that was preempted; the first of them have these keys."""
        self.publish(keys, blocks)
        self.touch([*filter(self.has, keys)])
        for key in keys:
            self._want_on_disk(key)
        self._pool.give_back(blocks)

    def _put(self, key: bytes, block: int) -> None:
        self._blocks[key] = block
        self._pool.hold(block, num_users=0)
        self._want_on_disk(key)

    def _want_on_disk(self, key: bytes) -> None:
        if self.disk is not None and not self.disk.is_known(key):
            self._unwritten[key] = None

    def begin_reading(self, keys: Sequence[bytes]) -> list[int]:
        """Return the blocks of these keys, which stay until ``end_reading``."""
        self.touch(keys)
        if self.disk is not None:
            self.disk.touch(keys)
        self._readers.update(keys)
        return [self._blocks[key] for key in keys]

    def end_reading(self, keys: Sequence[bytes]) -> None:
        """Note that a move that ``begin_reading`` was called for has ended."""
        self._readers.subtract(keys)
        self._readers = +self._readers

    # -- the disk tier -------------------------------------------------------------------------------------------

    def start_writing(self, move_id: int, *, max_blocks: int) -> DiskCopy | None:
        """Begin to copy blocks to disk that it has not, the first that came first; None if there is none."""
        if self.disk is None or not self._unwritten:
            return None
        keys = [*itertools.islice(self._unwritten, max_blocks)]
        slots = self.disk.begin_write(keys)
        keys = keys[: len(slots)]
        if not keys:
            return None
        for key in keys:
            del self._unwritten[key]
        self._readers.update(keys)
        blocks = tuple(self._blocks[key] for key in keys)
        copy = DiskCopy(move_id=move_id, to_disk=True, host_block_ids=blocks, slots=tuple(slots), keys=tuple(keys))
        self._disk_copies[move_id] = copy
        return copy

    def start_reading(
        self, move_id: int, host_keys: Sequence[bytes], keys: Sequence[bytes], *, reserve: int
    ) -> DiskCopy | None:
        """Begin to copy the first of these blocks from disk, as many as there is room for; None if for none.

        ``host_keys`` are of blocks here that will be used with them, and stay until the copy ends.
        """
        assert self.disk is not None
        self.begin_reading(host_keys)
        keys = keys[: max(0, self._pool.num_free + self.num_reclaimable - reserve)]
        if not keys:
            self.end_reading(host_keys)
            return None
        self._awaiting[move_id] = host_keys
        self.reclaim(len(keys) - self._pool.num_free)
        blocks = self._pool.take(len(keys))
        assert blocks is not None
        slots = tuple(self.disk.begin_read(keys))
        copy = DiskCopy(move_id=move_id, to_disk=False, host_block_ids=tuple(blocks), slots=slots, keys=tuple(keys))
        self._disk_copies[move_id] = copy
        self._reading |= dict.fromkeys(keys, move_id)
        return copy

    def start_awaiting(
        self, move_id: int, host_keys: Sequence[bytes], keys: Sequence[bytes], *, reserve: int
    ) -> Sequence[int] | None:
        """Take blocks for these keys, whose KV comes from elsewhere; None if there is no room.

        ``host_keys`` are of blocks here that will be used with them, and stay until ``end_awaiting``.
        """
        self.begin_reading(host_keys)
        if len(keys) > self._pool.num_free + self.num_reclaimable - reserve:
            self.end_reading(host_keys)
            return None
        self.reclaim(len(keys) - self._pool.num_free)
        blocks = self._pool.take(len(keys))
        assert blocks is not None
        self._coming[move_id] = (host_keys, keys, blocks)
        return blocks

    def end_awaiting(self, move_id: int, num_blocks: int) -> None:
        """Keep the first blocks of what was awaited, which have come, and free the others."""
        host_keys, keys, blocks = self._coming.pop(move_id)
        self.end_reading(host_keys)
        for number, (key, block) in reversed([*enumerate(zip(keys, blocks, strict=True))]):
            if number < num_blocks and key not in self._blocks:
                self._put(key, block)
            else:
                self._pool.give_back([block])

    def reading(self, key: bytes) -> int | None:
        """Return the copy from disk under way that brings the block of this key; None: there is none."""
        return self._reading.get(key)

    def end_disk_copy(self, move_id: int, *, succeeded: bool) -> MoveResult:
        """Keep what a copy has brought."""
        copy = self._disk_copies.pop(move_id)
        self.end_reading(self._awaiting.pop(move_id, ()))
        assert self.disk is not None
        self.disk.end(copy, succeeded=succeeded)
        if copy.to_disk:
            self.end_reading(copy.keys)
            return MoveResult.ARRIVED if succeeded else MoveResult.STAYED
        for key, block in reversed([*zip(copy.keys, copy.host_block_ids, strict=True)]):
            if self._reading.get(key) == move_id:
                del self._reading[key]
            if succeeded and key not in self._blocks:
                self._put(key, block)
            else:
                self._pool.give_back([block])
        return MoveResult.ARRIVED if succeeded else MoveResult.STAYED

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that these blocks, of a prefix in order, are used: its end is to be reclaimed first."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    @property
    def num_held(self) -> int:
        """Host blocks that no request uses, and that are not free because of prefixes or copies of some."""
        num_coming = sum(len(copy.keys) for copy in self._disk_copies.values() if not copy.to_disk)
        num_coming += sum(len(blocks) for _, _, blocks in self._coming.values())
        num_copied = sum(len(move.dst_block_ids) for move in self._copies.values())
        return len(self._blocks) - self._pool.num_used + num_copied + num_coming

    # -- for checks ----------------------------------------------------------------------------------------------

    def owned_blocks(self) -> Iterator[int]:
        """Yield the blocks that copies under way will bring; for checks."""
        for move in self._copies.values():
            yield from move.dst_block_ids
        for copy in self._disk_copies.values():
            if not copy.to_disk:
                yield from copy.host_block_ids
        for _, _, blocks in self._coming.values():
            yield from blocks

    def check(self) -> None:
        """Verify what there is beside the blocks.

        Raises:
            AssertionError: It does not fit.
        """
        assert self._unwritten.keys() <= self._blocks.keys() and self._readers.keys() <= self._blocks.keys()
        if self.disk is not None:
            self.disk.check()


class KeepsPrefixes(CachesPrefixes):
    """Implements ``KeepsPrefixesOnHost`` and ``KeepsPrefixesOnDisk``, but for restoring, beside ``CanCache``."""

    _prefixes: HostPrefixes
    _host_pool: PrefixPool
    _keeps_prefixes: bool
    """Copies are made on the host."""
    _move_ids: Iterator[int]
    _new_move: Callable[..., KVMove]
    _ends: dict[int, Callable[..., MoveResult]]
    """What ends each copy under way, by its number (``finish_move``)."""

    def begin(
        self, request_id: str, keys: Sequence[bytes], num_tokens: int, *, reserve_blocks: int = 0, marks: bool = False
    ) -> tuple[int, ...] | None:
        if self._prefixes.disk is not None:
            self._prefixes.disk.touch(keys)
        return super().begin(request_id, keys, num_tokens, reserve_blocks=reserve_blocks, marks=marks)

    def has_on_host(self, key: bytes) -> bool:
        return self._prefixes.has(key)

    def start_saving_prefixes(self, *, num_ahead: int, max_blocks: int, reserve_blocks: int = 0) -> KVMove | None:
        if self._cache is None or not self._keeps_prefixes:
            return None
        saved, pool = self._prefixes, self._host_pool
        room = min(max_blocks, pool.num_free + saved.num_reclaimable - reserve_blocks)
        unsaved = self._cache.take_unsaved(room, num_ahead=num_ahead)
        found = [(block, key) for block, key in unsaved if not (saved.has(key) or saved.is_copying(block))]
        if not found:
            return None
        saved.reclaim(len(found) - pool.num_free)
        blocks, keys = zip(*found, strict=True)
        move = self._new_move("", MoveDirection.TO_HOST, list(blocks), after=None, is_checkpoint=True)
        saved.begin_copy(move, keys)
        self._ends[move.move_id] = functools.partial(saved.end_copy, move.move_id)
        return move

    def want_copies(self, request_id: str, first: int, count: int) -> None:
        assert self._cache is not None
        self._cache.want_copies(self.device_blocks(request_id)[first : first + count])

    def host_block_of(self, key: bytes) -> int | None:
        return self._prefixes.block_of(key)

    def start_awaiting_prefix(
        self, host_keys: Sequence[bytes], keys: Sequence[bytes], *, reserve_blocks: int = 0
    ) -> tuple[int, tuple[int, ...]] | None:
        move_id = next(self._move_ids)
        blocks = self._prefixes.start_awaiting(move_id, host_keys, keys, reserve=reserve_blocks)
        return None if blocks is None else (move_id, tuple(blocks))

    def end_awaiting_prefix(self, move_id: int, num_blocks: int) -> None:
        self._prefixes.end_awaiting(move_id, num_blocks)

    def has_disk(self) -> bool:
        return self._prefixes.disk is not None and self._keeps_prefixes

    def has_on_disk(self, key: bytes) -> bool:
        disk = self._prefixes.disk
        return disk is not None and disk.has(key)

    def reading_from_disk(self, key: bytes) -> int | None:
        return self._prefixes.reading(key)

    def start_writing_prefixes(self, *, max_blocks: int) -> DiskCopy | None:
        return self._await(self._prefixes.start_writing(next(self._move_ids), max_blocks=max_blocks))

    def start_reading_prefix(
        self, host_keys: Sequence[bytes], disk_keys: Sequence[bytes], *, reserve_blocks: int = 0
    ) -> DiskCopy | None:
        move_id = next(self._move_ids)
        return self._await(self._prefixes.start_reading(move_id, host_keys, disk_keys, reserve=reserve_blocks))

    def _await(self, copy: DiskCopy | None) -> DiskCopy | None:
        if copy is not None:
            self._ends[copy.move_id] = functools.partial(self._prefixes.end_disk_copy, copy.move_id)
        return copy

    def disk_usage(self) -> tuple[int, int]:
        disk = self._prefixes.disk
        return (disk.num_used, disk.num_slots) if disk is not None else (0, 0)
