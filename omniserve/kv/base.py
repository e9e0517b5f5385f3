"""The contract of a KV manager."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass

from omniserve.plan import KVMove, MoveDirection
from omniserve.registry import Registry


class Tier(enum.StrEnum):
    """Where KV is."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, kw_only=True, slots=True)
class KVUsage:
    """Blocks in use and in all, by tier."""

    device_used: int
    device_total: int
    host_used: int
    host_total: int


class KVManager(ABC):
    """Owns the block ids of both tiers. A request's table lives on one tier, or on two while it moves.

    Out of blocks is a result (None), not an exception; the scheduler decides who gives way.

    Args:
        num_device_blocks: Blocks of the device pool, >= 1.
        num_host_blocks: Blocks of the host pool; 0: no host tier.
        block_size: Tokens per block.
    """

    @abstractmethod
    def __init__(self, *, num_device_blocks: int, num_host_blocks: int, block_size: int) -> None: ...

    @abstractmethod
    def allocate(self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0) -> tuple[int, ...] | None:
        """Grow the request's table, on the tier where it lives (a new one: the device), to hold ``num_tokens``.

        Args:
            reserve_blocks: Blocks of that tier that must still be free afterwards, if any block is taken at all.

        Returns:
            The whole table, or None (and nothing has changed) if there are not enough free blocks.

        Raises:
            RuntimeError: The request is moving.
        """

    @abstractmethod
    def free(self, request_id: str) -> None:
        """Give back all blocks of a request; one without blocks is no error.

        Raises:
            RuntimeError: The request is moving: a copy still reads or writes its blocks.
        """

    @abstractmethod
    def tier(self, request_id: str) -> Tier | None:
        """Return where the request's KV is (while moving: the source), None if it has none."""

    @abstractmethod
    def start_move(self, request_id: str, direction: MoveDirection, *, reserve_blocks: int = 0) -> KVMove | None:
        """Allocate the destination of a whole-request move; None if it does not fit or there is no such tier.

        Source and destination stay allocated until ``finish_move``.
        """

    @abstractmethod
    def abandon_move(self, move_id: int) -> None:
        """Take the device blocks back from a move to the host that is under way; the request then has no KV.

        The copy may go on reading them while they are written: its result is not used. The destination stays
        allocated until ``finish_move``.
        """

    @abstractmethod
    def finish_move(self, move_id: int, *, succeeded: bool) -> None:
        """Free the source of a move or, when the copy failed or the move was abandoned, its destination."""

    @abstractmethod
    def num_free(self, tier: Tier) -> int:
        """Return the number of free blocks of a tier."""

    @abstractmethod
    def free_block_ids(self, tier: Tier) -> list[int]:
        """Return the ids that nobody owns; tests poison them."""

    @abstractmethod
    def num_blocks(self, request_id: str) -> int:
        """Return the length of the request's table."""

    @abstractmethod
    def usage(self) -> KVUsage:
        """Return blocks in use and in all."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Verify that every block is either free or owned exactly once.

        Raises:
            AssertionError: With the numbers that do not add up.
        """


KV_MANAGERS: Registry[type[KVManager]] = Registry("KV manager", package="omniserve.kv")
