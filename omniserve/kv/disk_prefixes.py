"""DiskPrefixes: which blocks of the prefix cache are in the disk tier's file, and where.

The file has a slot for each block (``host/disk_file.py``), and threads copy between it and the host pool
(``host/disk.py``). What the host gets is written in the order in which it came.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Sequence

from omniserve.core.work import DiskCopy


class DiskPrefixes:
    """Slots of the file by the keys of ``kv.prefix_cache``. A new block replaces the one that was used longest ago.

    Args:
        num_slots: Slots in the file.
        entries: Keys and slots of the blocks that are in it; the first are the first to give way.
    """

    def __init__(self, num_slots: int, entries: Iterable[tuple[bytes, int]] = ()) -> None:
        self.num_slots = num_slots
        self._slots: OrderedDict[bytes, int] = OrderedDict(entries)
        """Key -> slot, the last used last."""
        used = set(self._slots.values())
        self._free = [slot for slot in range(num_slots - 1, -1, -1) if slot not in used]
        self._readers: Counter[bytes] = Counter()
        """Copies that read the slot of a key; it stays meanwhile."""
        self._writing: dict[bytes, int] = {}
        self.wanted: dict[bytes, None] = {}
        """Keys of host blocks that are to be written, the first that came first."""

    def is_known(self, key: bytes) -> bool:
        """Tell whether a slot has the block of this key, or it is being written."""
        return key in self._slots or key in self._writing

    def match(self, keys: Iterable[bytes]) -> int:
        """Return how many of these keys, from the first one on, are those of blocks on disk."""
        return sum(1 for _ in itertools.takewhile(self._slots.__contains__, keys))

    def want(self, keys: Iterable[bytes]) -> None:
        """Have host blocks of these keys written, but those that the disk has or will have."""
        for key in keys:
            if not self.is_known(key):
                self.wanted[key] = None

    def cancel_write(self, key: bytes) -> None:
        """Note that the host has the block of this key no more: it cannot be written."""
        self.wanted.pop(key, None)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that a prefix with these blocks is used, wherever it was found."""
        for key in reversed(keys):
            if key in self._slots:
                self._slots.move_to_end(key)

    def demote(self, keys: Iterable[bytes]) -> None:
        """Have the blocks of these keys replaced before all others, the last of these first."""
        for key in keys:
            if key in self._slots:
                self._slots.move_to_end(key, last=False)

    def forget(self, keys: Iterable[bytes] | None) -> list[int]:
        """Forget the blocks of these keys, or all, but those that are being read; return the slots that had them.

        Those that are being written stay.
        """
        chosen = [*self._slots] if keys is None else [key for key in keys if key in self._slots]
        slots = [self._slots.pop(key) for key in chosen if key not in self._readers]
        self._free += slots
        return slots

    @property
    def num_used(self) -> int:
        """Slots that hold a block, or will."""
        return self.num_slots - len(self._free)

    def begin_write(self, keys: Sequence[bytes]) -> list[int]:
        """Return slots to write blocks of these keys to; fewer, for the first of them, if so many are being read."""
        slots: list[int] = []
        for key in keys:
            assert not self.is_known(key)
            if not self._free:
                last = next((other for other in self._slots if other not in self._readers), None)
                if last is None:
                    break
                self._free.append(self._slots.pop(last))
            self._writing[key] = self._free.pop()
            slots.append(self._writing[key])
        return slots

    def begin_read(self, keys: Sequence[bytes]) -> list[int]:
        """Return the slots of these keys, which stay until the copy ends."""
        self.touch(keys)
        self._readers.update(keys)
        return [self._slots[key] for key in keys]

    def end(self, copy: DiskCopy, *, succeeded: bool) -> None:
        """Book the end of a copy. If a read has failed, all blocks of the copy are forgotten."""
        if copy.to_disk:
            for key in copy.keys:
                slot = self._writing.pop(key)
                if succeeded:
                    self._slots[key] = slot
                else:
                    self._free.append(slot)
            return
        self._readers.subtract(copy.keys)
        self._readers = +self._readers
        if not succeeded:
            for key in copy.keys:
                if key in self._slots and key not in self._readers:
                    self._free.append(self._slots.pop(key))

    def check(self, on_host: Container[bytes] = ()) -> None:
        """Verify that each slot is free, used or being written, and that what is to be written is on the host.

        Raises:
            AssertionError: With the slots or the keys of which that is not true.
        """
        lost = [key for key in self.wanted if key not in on_host]
        assert not lost, lost
        slots = sorted([*self._free, *self._slots.values(), *self._writing.values()])
        assert slots == [*range(self.num_slots)], slots
        assert self._readers.keys() <= self._slots.keys()
