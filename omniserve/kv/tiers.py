"""Tier and MoveResult; CopyEnds: numbers for moves and copies, and callbacks for their ends."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable


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


class CopyEnds:
    """Numbers for moves and copies, and a callback for the end of each that is under way.

    The code that begins a copy sets the callback, so no other code needs to know what a number stands for.
    """

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._ends: dict[int, Callable[..., MoveResult]] = {}

    def next_id(self) -> int:
        """Return a number that no move or copy has yet."""
        return next(self._ids)

    def expect(self, move_id: int, end: Callable[..., MoveResult]) -> None:
        """Have ``end(succeeded=...)`` called as a copy ends; a later call takes the place of this one."""
        self._ends[move_id] = end

    def finish(self, move_id: int, *, succeeded: bool) -> MoveResult:
        """End a copy."""
        return self._ends.pop(move_id)(succeeded=succeeded)
