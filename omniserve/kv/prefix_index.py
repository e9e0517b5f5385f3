"""PrefixIndex: finds the blocks of the prefix cache, on the device and below, for requests that begin alike.

``kv.prefix_cache`` says what is cached. A KV manager makes an index of its pools and tables if it is asked to keep a
cache.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from omniserve.core.work import KVMove, MoveDirection
from omniserve.kv.host_prefixes import HostPrefixes, PrefixCopies
from omniserve.kv.prefix_cache import CachingPool
from omniserve.kv.table import Table
from omniserve.kv.tables import TableMoves, TierTables
from omniserve.kv.tiers import CopyEnds, MoveResult, Tier

if TYPE_CHECKING:
    from omniserve.kv.disk_prefix_index import DiskPrefixIndex
    from omniserve.kv.sessions import Sessions

_REUSE_RATE = 1 / 32
_LEAST_REUSE = 0.01
"""Marked blocks are protected while LS prompts find at least this share of their tokens; forgotten blocks count as
found. The share is a running average, in which a new prompt has the weight ``_REUSE_RATE``."""


class DeviceTables(Protocol):
    """The block tables of requests on the device."""

    def put(self, request_id: str, blocks: list[int]) -> None:
        """Make device blocks the table of a request that has none."""

    def device_blocks(self, request_id: str) -> Sequence[int]:
        """Return the table of a request that is at rest on the device."""


class HasRequestId(Protocol):
    """An object that names a request."""

    @property
    def request_id(self) -> str:
        """Return the request's id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forgotten:
    """Blocks of the prefix cache that were freed on request."""

    device: int
    host: int = 0
    disk_slots: Sequence[int] = ()
    """Slots of the disk tier's file that held some; what is in them is to be erased."""


class PrefixIndex:
    """The prefix cache on the device. A block that several requests use counts for each of them.

    Args:
        pool: The device pool.
        tables: Block tables of the requests on the device.
        block_size: Tokens per block.
        host: The part of the cache in host memory; None: there is none.
        disk: The part of the cache on disk; None: there is none.
    """

    def __init__(
        self,
        pool: CachingPool,
        tables: DeviceTables,
        *,
        block_size: int,
        host: HostPrefixIndex | None = None,
        disk: DiskPrefixIndex | None = None,
    ) -> None:
        self._pool, self._tables, self._block_size = pool, tables, block_size
        self.host, self.disk = host, disk
        self._ls_reuse = 2 * _LEAST_REUSE
        self.sessions: Sessions | None = None
        """The sessions of requests; None: no request has named one yet."""

    def open_sessions(self, *, share: float) -> Sessions:
        """Begin to keep books of sessions; blocks of their newest requests are kept in up to a share of the pool."""
        from omniserve.kv.sessions import Sessions

        num_blocks = self._pool.num_blocks
        for tier in (self.host, self.disk):
            num_blocks += tier.num_blocks if tier is not None else 0
        self.sessions = Sessions(2 * num_blocks, on_change=self._revise)  # many have been forgotten meanwhile
        self._pool.standing, self._pool.most_newest = self.sessions.standing, int(share * self._pool.num_blocks)
        return self.sessions

    def begin_session(self, name: str, request_id: str, keys: Sequence[bytes], *, ttl_s: float) -> None:
        """Note that a request is the newest of a session, which ends ``ttl_s`` seconds after its last use.

        Args:
            keys: Keys of all its blocks that are full.
        """
        assert self.sessions is not None
        tiers = [tier for tier in (self.host, self.disk) if tier is not None]
        count = self._pool.match(keys)
        while count < len(keys) and any(each.match(keys[count : count + 1]) for each in (self._pool, *tiers)):
            count += 1
        for tier in tiers:
            tier.touch(keys[:count])
        self.sessions.begin(name, request_id, keys[:count], ttl_s=ttl_s)

    def _revise(self, keys: Sequence[bytes], are_older: bool) -> None:
        self._pool.revise(keys)
        if are_older:
            for tier in (self.host, self.disk):
                if tier is not None:
                    tier.demote(reversed(keys))

    def forget(self, sessions: Iterable[str] | None = None) -> Forgotten:
        """Free what no request uses and no copy reads or writes: all, or what only these sessions have used."""
        if sessions is not None:
            keys = [key for name in sessions for key in self.sessions.end(name)] if self.sessions is not None else []
        elif self.sessions is not None:
            self.sessions.clear()
        return Forgotten(
            device=self._pool.revise(None if sessions is None else keys, forgets=True),
            host=self.host.forget(None if sessions is None else keys) if self.host is not None else 0,
            disk_slots=self.disk.forget(None if sessions is None else keys) if self.disk is not None else (),
        )

    def match(self, keys: Iterable[bytes]) -> int:
        """Return for how many of these keys in a row, from the first one on, there is a device block."""
        return self._pool.match(keys)

    def num_used(self, keys: Sequence[bytes]) -> int:
        """Return how many of the cached blocks of these keys have users. Sharing such blocks takes no free block."""
        return len(keys) - self._pool.num_idle(keys)

    @property
    def num_protected(self) -> int:
        """Blocks that are without users now, and that are kept before all others for LS requests."""
        return self._pool.num_protected

    def freed_by(self) -> Callable[[KVMove | HasRequestId], int]:
        """Return a function that tells how many blocks a request on the device, or a move to the host, will free there.

        Calls build on one another: a block with two users counts as freed by the second.
        """
        count, tables = self._pool.freed_by(), self._tables
        return lambda each: count(
            each.src_block_ids if isinstance(each, KVMove) else tables.device_blocks(each.request_id)
        )

    def begin(
        self, request_id: str, keys: Sequence[bytes], num_tokens: int, *, reserve_blocks: int = 0, marks: bool = False
    ) -> tuple[int, ...] | None:
        """Give a request that has no table one on the device, which begins with the cached blocks of these keys.

        The rest is as in ``KVManager.allocate``: blocks for ``num_tokens`` in all. ``marks``: these cached blocks are
        marked.

        Returns:
            The table; None, and nothing has changed, if there is no room.
        """
        if self.disk is not None:
            self.disk.touch(keys)
        blocks = self._pool.begin(keys, -(-num_tokens // self._block_size), reserve=reserve_blocks, marks=marks)
        if blocks is None:
            return None
        self._tables.put(request_id, blocks)
        return tuple(blocks)

    def publish(
        self, request_id: str, first: int, keys: Sequence[bytes], *, marks: bool = False, session: str = ""
    ) -> None:
        """Give the device blocks of a request at rest these keys, from its block ``first`` on, and mark them or not.

        ``session``: The name of its session; "" for none.

        Steps that have been launched, or the one that is being planned, write their KV. Later rows can read it: device
        work runs in order, and a layer of a step writes the KV of all its device rows before any of them attends.
        """
        pairs = zip(self._tables.device_blocks(request_id)[first:], keys, strict=False)
        if self.sessions is None:
            for block, key in pairs:
                self._pool.publish(block, key, marks=marks)
        else:
            new = [key for block, key in pairs if self._pool.publish(block, key, marks=marks)]
            self.sessions.publish(session, request_id, first, keys, new)

    def note_ls_prompt(self, keys: Iterable[bytes], num_tokens: int) -> None:
        """Learn from a new LS prompt how much such prompts find: marked blocks are protected while it is enough.

        Args:
            keys: Keys of the blocks that it may find. Forgotten ones count as found if they were marked.
            num_tokens: Length of the prompt.
        """
        num_known = sum(1 for _ in itertools.takewhile(self._pool.knows, keys))
        share = num_known * self._block_size / num_tokens
        self._ls_reuse += _REUSE_RATE * (share - self._ls_reuse)
        self._pool.protects = self._ls_reuse >= _LEAST_REUSE


class HostPrefixIndex:
    """The prefix cache in host memory: copies of device blocks, and blocks of requests on the host.

    The host blocks are reclaimed when requests need them. ``KVMoves.finish`` ends all copies.

    Args:
        prefixes: The host blocks.
        copies: The copies from the device that are under way.
        pool: The device pool.
        tables: Block tables.
        moves: Moves and copies.
        ends: Numbers for KV that comes from elsewhere.
    """

    def __init__(
        self,
        prefixes: HostPrefixes,
        copies: PrefixCopies,
        *,
        pool: CachingPool,
        tables: TierTables,
        moves: TableMoves,
        ends: CopyEnds,
    ) -> None:
        self._prefixes, self._copies, self._pool = prefixes, copies, pool
        self._tables, self._moves, self._ends = tables, moves, ends

    def match(self, keys: Iterable[bytes]) -> int:
        """Return for how many of these keys in a row, from the first one on, there is a host block."""
        blocks, count = self._prefixes.blocks, 0
        for key in keys:
            if key not in blocks:
                break
            count += 1
        return count

    @property
    def num_blocks(self) -> int:
        """Host blocks in all."""
        return self._prefixes.pool.num_blocks

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that a prefix with these blocks is used, wherever it was found."""
        for key in reversed(keys):
            if key in self._prefixes.blocks:
                self._prefixes.blocks.move_to_end(key)

    def demote(self, keys: Iterable[bytes]) -> None:
        """Have the blocks of these keys reclaimed before all others, the last of these first."""
        for key in keys:
            if key in self._prefixes.blocks:
                self._prefixes.blocks.move_to_end(key, last=False)

    def forget(self, keys: Iterable[bytes] | None) -> int:
        """Free the blocks of these keys, or all, that no request uses and no copy reads; return their number."""
        return self._prefixes.reclaim(self.num_blocks, keys)

    def block_of(self, key: bytes) -> int | None:
        """Return the host block of this key, which stays until the next plan is made; None: the host has none."""
        return self._prefixes.blocks.get(key)

    def want_copies(self, request_id: str, first: int, count: int) -> None:
        """Note that a device request's blocks are worth a copy on the host: ``count`` from number ``first`` on."""
        self._pool.want_copies(self._tables.device_blocks(request_id)[first : first + count])

    def save(self, *, num_ahead: int, max_blocks: int, reserve_blocks: int = 0) -> KVMove | None:
        """Begin to copy blocks that may be found again. To be called once in each plan, when all else is decided.

        Args:
            num_ahead: Nothing is copied while more device blocks than this hold nothing.
            max_blocks: Most blocks to copy.
            reserve_blocks: Host blocks that must still be free afterwards, those of prefixes counted as free.

        Returns:
            None if there is nothing to copy, or no room for it.
        """
        prefixes = self._prefixes
        room = min(max_blocks, prefixes.pool.num_free + prefixes.num_reclaimable - reserve_blocks)
        unsaved = self._pool.take_unsaved(room, num_ahead=num_ahead)
        found = [(b, key) for b, key in unsaved if not (key in prefixes.blocks or self._copies.is_copying(b))]
        if not found:
            return None
        blocks, keys = zip(*found, strict=True)
        prefixes.reclaim(len(blocks) - prefixes.pool.num_free)
        target = self._tables.take(Tier.HOST, len(blocks), after=None)
        move = self._moves.make("", MoveDirection.TO_HOST, blocks, target, is_checkpoint=True)
        self._copies.begin(move, keys)
        return self._moves.begin_copy(move, self._copies.end)

    def restore(
        self,
        request_id: str,
        keys: Sequence[bytes],
        host_keys: Sequence[bytes],
        num_tokens: int,
        *,
        reserve_blocks: int = 0,
        marks: bool = False,
    ) -> KVMove | None:
        """Give a request that has no table one on the device, and copy the blocks of ``host_keys`` into it.

        It begins with the cached blocks of ``keys``; those of ``host_keys`` follow. The rest is as in
        ``PrefixIndex.begin``, and with the move as in ``KVEvictions.start_restore``: after LOST it has no table again.
        """
        assert request_id not in self._tables.by_request
        count, num_found = -(-num_tokens // self._tables.block_size), len(keys)
        blocks = self._pool.begin(keys, count, reserve=reserve_blocks, marks=marks)
        if blocks is None:
            return None
        num_known = num_found + len(host_keys)
        # The host blocks are not the request's: its table has none there.
        table = Table(Tier.HOST, [], arrived=blocks[:num_found], behind=blocks[num_known:])
        source, target = self._prefixes.begin_reading(host_keys), blocks[num_found:num_known]
        move = self._moves.make(request_id, MoveDirection.TO_DEVICE, source, target)
        return self._moves.begin(table, move, functools.partial(self._end_restore, host_keys))

    def _end_restore(self, host_keys: Sequence[bytes], move: KVMove, *, succeeded: bool) -> MoveResult:
        self._prefixes.end_reading(host_keys)
        if succeeded:
            return self._moves.end(move, succeeded=True)
        self._pool.give_back(reversed(self._moves.pop(move).target))
        return MoveResult.LOST

    def begin_awaiting(
        self, host_keys: Sequence[bytes], keys: Sequence[bytes], *, reserve_blocks: int = 0
    ) -> tuple[int, tuple[int, ...]] | None:
        """Take host blocks for KV that is to come from elsewhere; None if there is no room for all of it.

        Args:
            host_keys: Blocks on the host that will be used with them, which stay until then.
            keys: Keys of the blocks that are to come.
            reserve_blocks: Host blocks that must still be free afterwards, those of prefixes counted as free.

        Returns:
            A number for ``end_awaiting``, and the blocks. No move has that number.
        """
        move_id = self._ends.next_id()
        blocks = self._prefixes.begin_filling(move_id, host_keys, keys, least=len(keys), reserve=reserve_blocks)
        return None if blocks is None else (move_id, tuple(blocks))

    def end_awaiting(self, move_id: int, num_blocks: int) -> None:
        """Book that the first ``num_blocks`` of the blocks have come, and that no more will."""
        self._prefixes.end_filling(move_id, num_blocks)

    def keep(self, keys: Sequence[bytes]) -> list[int]:
        """Have the host blocks of these keys stay until ``let_go``, up to the first key without one; return them."""
        blocks = self._prefixes.share(keys)
        self._prefixes.kept.update(blocks)
        return blocks

    def let_go(self, blocks: Sequence[int]) -> None:
        """Let blocks be reclaimed again that ``keep`` has returned."""
        self._prefixes.kept -= Counter(blocks)
        self._prefixes.pool.give_back(blocks)
