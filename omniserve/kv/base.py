"""The interface of KV managers, and of the objects through which some of them offer more.

A manager that lacks an ability has None for its object. ``KVAbilities`` tells the same of a class, before a manager is
made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from omniserve.core.registry import Registry
from omniserve.core.request import ServiceClass
from omniserve.core.stats import KVUsage
from omniserve.core.work import KVMove, MoveDirection, SlotCopy
from omniserve.kv.prefix_index import PrefixIndex
from omniserve.kv.tiers import MoveResult, Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class KVAbilities:
    """What managers of a class can do beyond ``KVManager``.

    Prefixes, disk and network are there only if the constructor is asked for them.
    """

    moves: bool = False
    """Requests move between the tiers: an engine with such a manager has a host tier (``host_kv_bytes``)."""
    prefixes: bool = False
    """There can be a prefix cache: the constructor takes ``prefix_cache`` and ``num_protected_blocks``, and with a host
    tier ``host_prefixes``."""
    disk: bool = False
    """Prefixes can be on disk: the constructor takes ``disk``, a ``kv.disk_prefixes.DiskPrefixes``."""
    evictions: bool = False
    """Preempted requests keep KV, in host memory, too; see ``KVEvictions``."""
    sharing: bool = False
    """Blocks can run from the right, and have two requests in them; see ``BlockSharing``."""
    network: bool = False
    """Requests can move to CPU hosts on the network: the constructor takes ``cpu_hosts``."""


class KVMoves(Protocol):
    """Moves of whole requests between the tiers, and the ends of all copies that a manager has begun."""

    def start(
        self,
        request_id: str,
        direction: MoveDirection,
        *,
        keys: Sequence[bytes] = (),
        reserve_blocks: int = 0,
        keep_tokens: int = 0,
    ) -> KVMove | None:
        """Allocate the destination of a whole-request move; None if it does not fit or there is no such tier.

        Source and destination stay allocated until ``finish``. To the host, only what has no copy there is copied (it
        may be nothing: the move is then empty), and the device blocks that have one are free at once.

        Args:
            keys: To the host: keys of the request's first, full blocks. With prefixes on the host, those that it has
                are shared, not copied, and the others can be shared once they are there.
            reserve_blocks: Blocks of the target tier that must still be free afterwards; those that only checkpoints of
                others hold count as free.
            keep_tokens: To the device: the host blocks that these first tokens fill stay, as a checkpoint.

        Raises:
            RuntimeError: The request is moving, or its KV is not on the source tier.
        Paper: omniserve 3.2.4, 3.3.5.
        """

    def abandon(self, move_id: int) -> None:
        """Take the device blocks back from a move to the host that is under way; the request then has no table.

        The copy may go on reading them while they are written: its result is not used. The destination stays
        allocated until ``finish``.
        """

    def finish(self, move_id: int, *, succeeded: bool) -> MoveResult:
        """Free the source of a move or, when the copy failed or is not needed any more, its destination.

        The caller calls this once for each move, restore and copy that it started, those of prefixes, too.
        """


class KVCheckpoints(Protocol):
    """Copies the first, full blocks of device requests to the host ahead of need: their *checkpoint*.

    The host blocks of a checkpoint are reclaimed when a request needs them.
    """

    def start(
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
        that other requests write. The target is held until ``KVMoves.finish``. A request has one copy under way at a
        time.

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

    def num_blocks(self, request_id: str) -> int:
        """Return how many of the request's first blocks have a copy on the host, those under way not counted."""


class KVEvictions(Protocol):
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

        As with a move, nothing can be done with the request until ``KVMoves.finish``: after ARRIVED it is on the
        device, with the KV of as many tokens as ``num_kept_tokens`` said of the host, and still has the checkpoint;
        after LOST it is evicted again, and most of its KV is gone.

        Args:
            num_tokens: At least as many as were computed when it was evicted.
            reserve_blocks: Device blocks that must still be free afterwards.

        Returns:
            None, and nothing has changed, if there is no room or the checkpoint has nothing that the device has not.
        Paper: conserve 4.4 (background prefetching).
        """


class BlockSharing(Protocol):
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
        """Begin to copy to the host what evicted requests are about to lose on the device; see ``KVCheckpoints``.

        Args:
            num_ahead: How many of the device blocks that would be taken next are considered.
            max_blocks: Most blocks to copy.
            reserve_blocks: Host blocks that must still be free afterwards.
        Paper: bros 5.2 (lazy checkpointing).
        """


class NetworkKV(Protocol):
    """Moves requests to CPU hosts on the network, too: all blocks of a request are on one host.

    Paper: omniserve 4.
    """

    def add_host(self, host: int, num_blocks: int, speed: float) -> None:
        """Note that a host can be used, with the blocks from ``host * HOST_BLOCKS`` on, which hold nothing.

        ``speed`` is its share of KV relative to other hosts, for example its number of threads.
        """

    def lose_host(self, host: int) -> None:
        """Note that a host is lost with its KV: nothing moves there any more."""

    def host_of(self, request_id: str) -> int:
        """Return the number of the host that a request is on; 0: it is on this machine, or moving."""

    def is_lost(self, request_id: str) -> bool:
        """Tell whether the KV of a request was on a host that is lost."""


class KVManager(ABC):
    """Owns the block ids of both tiers. A request's table lives on one tier, or on two while it moves.

    Out of blocks is a result (None), not an exception; the scheduler decides which request is preempted.

    Args:
        num_device_blocks: Blocks of the device pool, >= 1.
        num_host_blocks: Blocks of the host pool; 0: no host tier.
        block_size: Tokens per block.
    """

    abilities: ClassVar[KVAbilities] = KVAbilities()

    moves: KVMoves | None = None
    """Moves between the tiers. None here and below: the manager lacks the ability. One with checkpoints, evictions,
    shared blocks or prefixes on the host has moves: ``finish`` ends those copies, too."""
    prefixes: PrefixIndex | None = None
    """The prefix cache; None also if the manager was not asked to keep one."""
    checkpoints: KVCheckpoints | None = None
    """Copies of device requests' blocks, ahead of need."""
    evictions: KVEvictions | None = None
    """KV that is kept of preempted requests."""
    sharing: BlockSharing | None = None
    """Device blocks that two requests share."""
    network: NetworkKV | None = None
    """None also if there are no CPU hosts."""

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
    def allocate_lookahead(
        self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0
    ) -> tuple[int, ...] | None:
        """Add free blocks to the table of a request that is not moving, on its tier, for tokens that may be dropped.

        Only free blocks are taken, those with idle prefixes included: no checkpoint and no evicted request loses a
        block.

        Args:
            reserve_blocks: Such blocks of that tier that must still be there afterwards, if any block is taken at all.

        Returns:
            The whole table, or None (and nothing has changed) if that is not enough for ``num_tokens``.

        Raises:
            RuntimeError: The request is moving.
        """

    @abstractmethod
    def trim(self, request_id: str, num_tokens: int) -> None:
        """Give back the blocks that the first ``num_tokens`` of a request do not need.

        Raises:
            RuntimeError: The request is moving.
        """

    @abstractmethod
    def free(self, request_id: str, keys: Sequence[bytes] = ()) -> None:
        """Give back all blocks of a request, its checkpoint's and what an eviction kept too; none is no error.

        Args:
            keys: Keys of its first, full blocks, for others to find them. With prefixes on the host, host blocks with
                these keys stay in host memory, and device blocks with these keys are copied there, as long as no
                request needs the memory.

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

        While it moves, the blocks of both its tables count; on the host, copies made ahead of need count, too. A block
        that two requests share counts for both. Device blocks that an evicted request has left are free: they do not
        count.
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


KV_MANAGERS: Registry[type[KVManager]] = Registry("KV manager", package="omniserve.kv")
