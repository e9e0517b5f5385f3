"""DiskPrefixIndex: finds prefixes on disk, and begins the copies between the disk and host memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence

from omniserve.core.work import DiskCopy
from omniserve.kv.disk_prefixes import DiskPrefixes
from omniserve.kv.host_prefixes import HostPrefixes
from omniserve.kv.tiers import CopyEnds, MoveResult


class DiskPrefixIndex:
    """Finds blocks of prefixes on disk, and copies them to and from host memory.

    Args:
        disk: What is on disk.
        prefixes: What is in host memory.
        ends: Ends the copies.
    """

    def __init__(self, disk: DiskPrefixes, prefixes: HostPrefixes, ends: CopyEnds) -> None:
        self._disk, self._prefixes, self._ends = disk, prefixes, ends
        self._reading: dict[bytes, int] = {}
        """Key -> the copy from disk under way that brings its block."""

    @property
    def num_blocks(self) -> int:
        """Slots in all."""
        return self._disk.num_slots

    def match(self, keys: Iterable[bytes]) -> int:
        """Return for how many of these keys in a row, from the first one on, there is a block on disk."""
        return self._disk.match(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that a prefix with these blocks is used, wherever it was found."""
        self._disk.touch(keys)

    def demote(self, keys: Iterable[bytes]) -> None:
        """Have the blocks of these keys replaced before all others, the last of these first."""
        self._disk.demote(keys)

    def forget(self, keys: Iterable[bytes] | None) -> list[int]:
        """Forget the blocks of these keys, or all, but those that are being copied; return the slots that had them."""
        return self._disk.forget(keys)

    def reading(self, key: bytes) -> int | None:
        """Return the id of the copy that is bringing the block of this key from disk; None: there is none."""
        return self._reading.get(key)

    def write(self, *, max_blocks: int) -> DiskCopy | None:
        """Begin to copy host blocks of prefixes that the disk has not, at most ``max_blocks``; None: there is none.

        ``KVMoves.finish`` ends the copy.
        """
        move_id, wanted = self._ends.next_id(), self._disk.wanted
        if not wanted:
            return None
        keys = [*itertools.islice(wanted, max_blocks)]
        slots = self._disk.begin_write(keys)
        keys = keys[: len(slots)]
        if not keys:
            return None
        for key in keys:
            del wanted[key]
        blocks = tuple(self._prefixes.pin(keys))
        copy = DiskCopy(move_id=move_id, to_disk=True, host_block_ids=blocks, slots=tuple(slots), keys=tuple(keys))
        self._ends.expect(move_id, functools.partial(self._end_write, copy))
        return copy

    def read(
        self, host_keys: Sequence[bytes], disk_keys: Sequence[bytes], *, reserve_blocks: int = 0
    ) -> DiskCopy | None:
        """Begin to copy blocks from disk into host memory: the first of ``disk_keys``, as many as it has room for.

        ``KVMoves.finish`` ends the copy.

        Args:
            host_keys: Keys of the host blocks before them, which stay until the copy ends.
            reserve_blocks: Host blocks that must still be free afterwards, those of prefixes counted as free.

        Returns:
            None if there is no room.
        """
        move_id = self._ends.next_id()
        blocks = self._prefixes.begin_filling(move_id, host_keys, disk_keys, least=1, reserve=reserve_blocks)
        if blocks is None:
            return None
        keys = disk_keys[: len(blocks)]
        slots = tuple(self._disk.begin_read(keys))
        copy = DiskCopy(move_id=move_id, to_disk=False, host_block_ids=tuple(blocks), slots=slots, keys=tuple(keys))
        self._reading |= dict.fromkeys(keys, move_id)
        self._ends.expect(move_id, functools.partial(self._end_read, copy))
        return copy

    def _end_write(self, copy: DiskCopy, *, succeeded: bool) -> MoveResult:
        self._disk.end(copy, succeeded=succeeded)
        self._prefixes.end_reading(copy.keys)
        return MoveResult.ARRIVED if succeeded else MoveResult.STAYED

    def _end_read(self, copy: DiskCopy, *, succeeded: bool) -> MoveResult:
        self._disk.end(copy, succeeded=succeeded)
        for key in copy.keys:
            if self._reading.get(key) == copy.move_id:
                del self._reading[key]
        self._prefixes.end_filling(copy.move_id, len(copy.keys) if succeeded else 0)
        return MoveResult.ARRIVED if succeeded else MoveResult.STAYED

    def usage(self) -> tuple[int, int]:
        """Return how many slots hold a block or will, and how many there are."""
        return self._disk.num_used, self._disk.num_slots
