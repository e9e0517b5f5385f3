"""A pool of block ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class BlockPool:
    """Hands out the ids ``[0, num_blocks)``, the most recently freed first (its memory is the warmest)."""

    def __init__(self, num_blocks: int, name: str) -> None:
        self.num_blocks = num_blocks
        self.name = name
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = bytearray(b"\1" * num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def free_ids(self) -> list[int]:
        """Return the free ids, in no particular order."""
        return list(self._free)

    def take(self, count: int, after: int | None = None) -> list[int] | None:
        """Take ``count`` ids; None, and nothing taken, if fewer are free.

        ``after`` is the id that they will stand behind in a block table; a pool to which neighbours matter tries to
        go on there.
        """
        if count > len(self._free):
            return None
        cut = len(self._free) - count
        taken = self._free[cut:][::-1]
        del self._free[cut:]
        for block in taken:
            self._is_free[block] = 0
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        """Free ids that ``take`` handed out.

        Raises:
            RuntimeError: An id is free already.
        """
        for block in blocks:
            if self._is_free[block]:
                raise RuntimeError(f"{self.name} block {block} was freed twice")
            self._is_free[block] = 1
            self._free.append(block)

    def check(self, owned: Iterable[int]) -> None:
        """Verify that ``owned`` are exactly the ids that are not free, each owned once.

        Raises:
            AssertionError: With the ids that are lost, doubled or both free and owned.
        """
        counts = Counter(owned)
        free = Counter(self.free_ids())
        doubled = sorted(block for block, n in (counts + free).items() if n > 1)
        lost = sorted(set(range(self.num_blocks)) - counts.keys() - free.keys())
        assert not doubled and not lost, (
            f"{self.name} pool of {self.num_blocks} blocks: {sum(counts.values())} owned, {self.num_free} free; "
            f"owned twice or also free: {doubled[:16]}; lost: {lost[:16]}"
        )
