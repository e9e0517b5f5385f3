"""The contract of a KV manager, and protocols for abilities that only some managers have.

``KVManager`` is the contract of all. The other classes here are protocols: a manager can do what it has the methods
for. The scheduler's request table asks once which of them that is (``isinstance``).
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from omniserve.core.registry import Registry
from omniserve.core.request import ServiceClass
from omniserve.core.work import DiskCopy, KVMove, MoveDirection, SlotCopy


class Tier(enum.StrEnum):
    """The memory that has a request's KV."""

    DEVICE = "device"
    HOST = "host"


class MoveResult(enum.StrEnum):
    """The outcome of a move or of a checkpoint's copy."""

    ARRIVED = "arrived"  # the blocks are at the target: the request lives there, or its checkpoint has grown
    STAYED = "stayed"  # it failed, and the request's KV is where it was
    LOST = "lost"  # it failed, and the request has no table any more: ``num_kept_tokens`` says what it still has
    UNUSED = "unused"  # its result is not needed: it was abandoned, or the checkpoint was dropped or used meanwhile


@dataclass(frozen=True, kw_only=True, slots=True)
class KVUsage:
    """Blocks in use and in all, by tier."""

    device_used: int
    device_total: int
    host_used: int
    host_total: int


class KVManager(ABC):
    """Owns the block ids of both tiers. A request's table lives on one tier, or on two while it moves.

    Out of blocks is a result (None), not an exception; the scheduler decides which request is preempted.

    Args:
        num_device_blocks: Blocks of the device pool, >= 1.
        num_host_blocks: Blocks of the host pool; 0: no host tier.
        block_size: Tokens per block.
    """

    def __init__(self, *, num_device_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size

    @abstractmethod
    def allocate(self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0) -> tuple[int, ...] | None:
        """Grow the request's table, on the tier where it lives (a new one: the device), to hold ``num_tokens``.

        An evicted request's table begins with its blocks that are still on the device.

        Args:
            reserve_blocks: Blocks of that tier that must still be free afterwards, if any block is taken at all; those
                that only checkpoints hold count as free.

        Returns:
            The whole table, or None (and nothing has changed) if there are not enough free blocks.

        Raises:
            RuntimeError: The request is moving.
        """

    @abstractmethod
    def stretch(self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0) -> tuple[int, ...] | None:
        """Add free blocks to the table of a request that is not moving, on its tier, for tokens that may be dropped.

        Only blocks that hold no KV are taken: nothing is evicted, reclaimed or copied.

        Args:
            reserve_blocks: Such blocks of that tier that must still be there afterwards, if any block is taken at all.

        Returns:
            The whole table, or None (and nothing has changed) if that is not enough for ``num_tokens``.
        """

    @abstractmethod
    def trim(self, request_id: str, num_tokens: int) -> None:
        """Give back the blocks that the first ``num_tokens`` of a request do not need; it is as ``stretch`` asks."""

    @abstractmethod
    def free(self, request_id: str) -> None:
        """Give back all blocks of a request, its checkpoint's and what an eviction kept too; none is no error.

        Raises:
            RuntimeError: The request is moving: a copy still reads or writes its blocks.
        """

    @abstractmethod
    def tier(self, request_id: str) -> Tier | None:
        """Return where the request's table is (while moving: the source), None if it has none."""

    @abstractmethod
    def num_blocks(self, request_id: str) -> int:
        """Return the length of the request's table; while it moves, that of the table that it will have."""

    @abstractmethod
    def num_held(self, request_id: str, tier: Tier) -> int:
        """Return how many blocks of a tier a request holds.

        While it moves that is both its tables', on the host also what is copied there ahead of need. A block that two
        requests share counts for both; device blocks that an evicted one has left are free, so they do not count.
        """

    @abstractmethod
    def num_free(self, tier: Tier) -> int:
        """Return the number of free blocks of a tier; device blocks that only evicted requests use count as free."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Verify that every block is either free or owned exactly once.

        Raises:
            AssertionError: With the numbers that do not add up.
        """

    def usage(self) -> KVUsage:
        """Return blocks that requests use, and all."""
        return KVUsage(
            device_used=self.num_device_blocks - self.num_free(Tier.DEVICE),
            device_total=self.num_device_blocks,
            host_used=self.num_host_blocks - self.num_free(Tier.HOST),
            host_total=self.num_host_blocks,
        )


@runtime_checkable
class CanMove(Protocol):
    """Moves whole requests between the tiers; an engine with such a manager has a host tier (``host_kv_bytes``)."""

    def start_move(
        self, request_id: str, direction: MoveDirection, *, reserve_blocks: int = 0, keep_tokens: int = 0
    ) -> KVMove | None:
        """Allocate the destination of a whole-request move; None if it does not fit or there is no such tier.

        Source and destination stay allocated until ``finish_move``. To the host, only what has no checkpoint is copied
        (it may be nothing: the move is then empty), and the device blocks that have one are free at once.

        Args:
            reserve_blocks: Blocks of the target tier that must still be free afterwards; those that only checkpoints of
                others hold count as free.
            keep_tokens: To the device: the host blocks that these first tokens fill stay, as a checkpoint.
        """

    def abandon_move(self, move_id: int) -> None:
        """Take the device blocks back from a move to the host that is under way; the request then has no table.

        The copy may go on reading them while they are written: its result is not used. The destination stays
        allocated until ``finish_move``.
        """

    def finish_move(self, move_id: int, *, succeeded: bool) -> MoveResult:
        """Free the source of a move or, when the copy failed or is not needed any more, its destination.

        The caller calls this once for each move, restore and checkpoint copy that it started.
        """


@runtime_checkable
class CanSpread(Protocol):
    """Moves requests to CPU hosts on the network, too: all blocks of a request are on one host."""

    def add_host(self, host: int, num_blocks: int, speed: float) -> None:
        """Note that a host can be used, with the blocks from ``host * HOST_BLOCKS`` on, which hold nothing.

        ``speed`` says how much more KV it should get than another one.
        """

    def lose_host(self, host: int) -> None:
        """Note that a host is lost, and what is there: nothing moves there any more."""

    def host_of(self, request_id: str) -> int:
        """Return the number of the host that a request is on; 0: it is on this machine, or moving."""

    def is_lost(self, request_id: str) -> bool:
        """Tell whether the KV of a request was on a host that is lost."""


@runtime_checkable
class CanCheckpoint(Protocol):
    """Copies the first, full blocks of device requests to the host ahead of need: their *checkpoint*.

    The host blocks of a checkpoint are reclaimed when a request needs them.
    """

    def start_checkpoint(
        self,
        request_id: str,
        num_computed_tokens: int,
        *,
        max_blocks: int,
        reserve_blocks: int = 0,
        give_way: Iterable[str] = (),
    ) -> KVMove | None:
        """Begin to copy the next full blocks of a device request to the host.

        The request can decode, grow, move and be freed meanwhile: a copy that is not needed any more may read blocks
        that other requests write. The target is held until ``finish_move``. A request has one copy under way at a time.

        Args:
            num_computed_tokens: Tokens with their KV written, by steps that have been launched.
            max_blocks: Most blocks to copy.
            reserve_blocks: Host blocks that must still be free afterwards.
            give_way: Other device requests; blocks of their checkpoints may be reclaimed for this one, in this order.

        Returns:
            None if there is nothing to copy now, no free host block for it, or no such tier.

        Raises:
            RuntimeError: The request is not at rest on the device.
        Paper: conserve 4.4.
        """

    def num_checkpointed(self, request_id: str) -> int:
        """Return how many of the request's first blocks have a copy on the host, those under way not counted."""


@runtime_checkable
class CanEvict(Protocol):
    """Takes a preempted request's table away, but not the KV that is left of it, which need not be recomputed.

    Copies on the host outlive an eviction: they are worth making whether or not requests move to the host.
    """

    def evict(self, request_id: str, num_computed_tokens: int) -> None:
        """Take a request's table away; nothing is copied. Its blocks count as free, but keep their KV until taken.

        Blocks are taken from the request that was evicted first, from the end of its tokens on. A checkpoint stays,
        too; the full blocks of a request on the host become one.

        Args:
            num_computed_tokens: Tokens with their KV written, by steps that have been launched.

        Raises:
            RuntimeError: The request is moving.
        Paper: conserve 4.4 (blocks are discarded on demand).
        """

    def num_kept_tokens(self, request_id: str, tier: Tier) -> int:
        """Return how many first tokens of an evicted request still have their KV on a tier; 0 if it is not evicted.

        For the host tier: how many the device will have after ``start_restore``, those included that it has now.
        """

    def start_restore(self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0) -> KVMove | None:
        """Give an evicted request device blocks for ``num_tokens`` and copy what only its checkpoint has into them.

        As with a move, nothing can be done with the request until ``finish_move``: after ARRIVED it is on the device,
        with the KV of as many tokens as ``num_kept_tokens`` said of the host, and still has the checkpoint; after LOST
        it is evicted again, and most of its KV is gone.

        Args:
            num_tokens: At least as many as were computed when it was evicted.
            reserve_blocks: Device blocks that must still be free afterwards.

        Returns:
            None, and nothing has changed, if there is no room or the checkpoint has nothing that the device has not.
        Paper: conserve 4.4 (background prefetching).
        """


@runtime_checkable
class CanCache(Protocol):
    """Keeps the KV of full device blocks for requests that begin with the same tokens; see ``kv.prefix_cache``.

    The constructor of such a manager takes ``prefix_cache`` and ``num_protected_blocks``: so many idle blocks that were
    marked are kept before all others (``kv.prefix_cache.CachingPool``), unless ``protect`` says otherwise. A block that
    several requests use counts for each.
    ``kv.prefix_cache.CachesPrefixes`` implements this.
    """

    def caches_prefixes(self) -> bool:
        """Tell whether the manager was asked to keep a cache; if not, none of the following is called."""

    def has_cached(self, key: bytes) -> bool:
        """Tell whether the device has the block of this key."""

    def knows_cached(self, key: bytes) -> bool:
        """Tell whether the device has the block of this key, or had it with a mark, not too long ago."""

    def protect(self, is_on: bool) -> None:
        """Protect marked blocks from now on, or do not."""

    def has_on_host(self, key: bytes) -> bool:
        """Tell whether the host has the block of this key; False of a manager that cannot keep prefixes there."""

    def num_used(self, keys: Sequence[bytes]) -> int:
        """Return how many of the cached blocks of these keys have users. To share these takes no free block."""

    def num_protected(self) -> int:
        """Return how many blocks are without users now, and protected."""

    def device_blocks(self, request_id: str) -> Sequence[int]:
        """Return the table of a request that is at rest on the device."""

    def freed_by(self) -> Callable[[Iterable[int]], int]:
        """Return a function that tells how many of these device blocks are free when a user of each gives it back.

        It counts on: a block with two users is free when it was asked about twice.
        """

    def begin(
        self, request_id: str, keys: Sequence[bytes], num_tokens: int, *, reserve_blocks: int = 0, marks: bool = False
    ) -> tuple[int, ...] | None:
        """Give a request that has no table one on the device, which begins with the cached blocks of these keys.

        The rest is as in ``allocate``: blocks for ``num_tokens`` in all. ``marks``: these cached blocks are marked.
        """

    def publish(self, request_id: str, first: int, keys: Sequence[bytes], *, marks: bool = False) -> None:
        """Give the device blocks of a request at rest these keys, from its block ``first`` on, and mark them or not.

        Steps that have been launched, or the one that is being planned, write their KV. Later rows can read it: device
        work runs in order, and a layer of a step writes the KV of all its device rows before any of them attends.
        """


@runtime_checkable
class KeepsPrefixesOnHost(Protocol):
    """Copies blocks of prefixes that the device may forget to the host, and back for a request that needs them.

    The constructor of such a manager takes ``host_prefixes``. The host blocks are reclaimed when requests need them.
    ``finish_move`` ends these copies, too.
    """

    def start_move_to_host(self, request_id: str, keys: Sequence[bytes], *, reserve_blocks: int = 0) -> KVMove | None:
        """Begin to move a request to the host, as ``CanMove.start_move`` does; its first blocks have these keys.

        Those that the host has are shared, not copied. The others can be shared once they are there.
        """

    def release(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Free the blocks of a preempted request, of which the first ones have these keys.

        Those on the host stay there, and those on the device are copied, as long as there is memory that no request
        needs.
        """

    def start_saving_prefixes(self, *, num_ahead: int, max_blocks: int, reserve_blocks: int = 0) -> KVMove | None:
        """Begin to copy blocks that may be found again. To be called once in each plan, when all else is decided.

        Args:
            num_ahead: Nothing is copied while more device blocks than this hold nothing.
            max_blocks: Most blocks to copy.
            reserve_blocks: Host blocks that must still be free afterwards, those of prefixes counted as free.

        Returns:
            None if there is nothing to copy, or no room for it.
        """

    def start_restoring_prefix(
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
        ``CanCache.begin``, and with the move as in ``CanEvict.start_restore``: after LOST it has no table again.
        """

    def want_copies(self, request_id: str, first: int, count: int) -> None:
        """Note that blocks of a request on the device are worth a copy on the host: ``count`` from the first on."""

    def host_block_of(self, key: bytes) -> int | None:
        """Return the host block of this key, which stays until the next plan is made; None: the host has none."""

    def start_awaiting_prefix(
        self, host_keys: Sequence[bytes], keys: Sequence[bytes], *, reserve_blocks: int = 0
    ) -> tuple[int, tuple[int, ...]] | None:
        """Take host blocks for KV that is to come from elsewhere; None if there is no room for all of it.

        Args:
            host_keys: Blocks on the host that will be used with them, which stay until then.
            keys: Keys of the blocks that are to come.
            reserve_blocks: Host blocks that must still be free afterwards, those of prefixes counted as free.

        Returns:
            A number for ``end_awaiting_prefix``, of those of moves, and the blocks.
        """

    def end_awaiting_prefix(self, move_id: int, num_blocks: int) -> None:
        """Book that the first ``num_blocks`` of the blocks have come, and that no more will."""


@runtime_checkable
class CanShare(Protocol):
    """Lets an LS and a BE request share a device block: the tokens of BE requests run from the right.

    What evicted requests are about to lose to others is copied to the host (lazy checkpointing); nothing else is.
    """

    def declare(self, request_id: str, kind: ServiceClass) -> None:
        """Tell the manager the kind of a new request, before any other call for it; a request is LS by default."""

    def runs_from_right(self, request_id: str) -> bool:
        """Tell whether offset i of the request's device blocks is their slot ``block_size - 1 - i``."""

    def take_relocations(self) -> tuple[SlotCopy, ...]:
        """Return the copies on the device that the next step must begin with, in order, and forget them."""

    def start_saving(self, *, num_ahead: int, max_blocks: int, reserve_blocks: int = 0) -> list[KVMove]:
        """Begin to copy to the host what evicted requests are about to lose on the device; see ``start_checkpoint``.

        Args:
            num_ahead: How many of the device blocks that would be taken next are considered.
            max_blocks: Most blocks to copy.
            reserve_blocks: Host blocks that must still be free afterwards.
        Paper: bros 5.2 (lazy checkpointing).
        """


@runtime_checkable
class KeepsPrefixesOnDisk(Protocol):
    """Copies blocks of prefixes from host memory to the slots of a file, and back for requests that wait.

    The constructor of such a manager takes ``disk``, a ``kv.disk_prefixes.DiskPrefixes``. ``finish_move`` ends these
    copies, too.
    """

    def has_disk(self) -> bool:
        """Tell whether there is a disk tier; if not, none of the following is called."""

    def has_on_disk(self, key: bytes) -> bool:
        """Tell whether the disk has the block of this key."""

    def reading_from_disk(self, key: bytes) -> int | None:
        """Return the id of the copy that is bringing the block of this key from disk; None: there is none."""

    def start_writing_prefixes(self, *, max_blocks: int) -> DiskCopy | None:
        """Begin to copy host blocks of prefixes that the disk has not, at most ``max_blocks``; None: there is none."""

    def start_reading_prefix(
        self, host_keys: Sequence[bytes], disk_keys: Sequence[bytes], *, reserve_blocks: int = 0
    ) -> DiskCopy | None:
        """Begin to copy blocks from disk into host memory: the first of ``disk_keys``, as many as it has room for.

        Args:
            host_keys: Blocks on the host that will be used with them, so that others make room.
            reserve_blocks: Host blocks that must still be free afterwards, those of prefixes counted as free.

        Returns:
            None if there is no room.
        """

    def disk_usage(self) -> tuple[int, int]:
        """Return the slots in use, and all."""


KV_MANAGERS: Registry[type[KVManager]] = Registry("KV manager", package="omniserve.kv")
