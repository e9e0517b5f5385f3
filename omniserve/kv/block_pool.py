"""Pools of block ids, one of which keeps neighbours together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise


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


class RunPool(BlockPool):
    """Hands out the ids ``[0, num_blocks)`` in ascending runs, as long as it can and from low ids up.

    A host kernel reads a request's blocks in order, and a longer run of memory at a higher speed (measured with random
    pieces: 8 KiB at a third to a half of the read bandwidth, 128 KiB at 0.8 to 0.9, 256 KiB at 0.9 to 0.97).

    Free ids are kept as maximal runs, in bins by the power of two of their length. ``take`` carves from a run of the
    smallest bin that surely has one long enough, so that long runs are kept for requests that need them; only if there
    is none does it put several together, the longest first.
    """

    def __init__(self, num_blocks: int, name: str) -> None:
        self.num_blocks = num_blocks
        self.name = name
        self._num_free = 0
        self._ends: dict[int, int] = {}  # free run [start, end), and the other way round
        self._starts: dict[int, int] = {}
        self._bins: list[dict[int, None]] = [{} for _ in range(num_blocks.bit_length() + 1)]  # starts, by bit length
        self._is_free = bytearray(num_blocks)
        if num_blocks:
            self._add_run(0, num_blocks)

    @property
    def num_free(self) -> int:
        return self._num_free

    def free_ids(self) -> list[int]:
        return [block for start, end in self._ends.items() for block in range(start, end)]

    def take(self, count: int, after: int | None = None) -> list[int] | None:
        if count > self._num_free:
            return None
        taken: list[int] = []
        if after is not None and after + 1 in self._ends:
            taken += self._carve(after + 1, count)
        while len(taken) < count:
            missing = count - len(taken)
            taken += self._carve(self._best_run(missing), missing)
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        ordered = sorted(blocks)
        if not ordered:
            return
        for block, following in pairwise([*ordered, -1]):
            if self._is_free[block] or block == following:
                raise RuntimeError(f"{self.name} block {block} was freed twice")
        start = ordered[0]
        for block, following in pairwise([*ordered, -1]):
            if following != block + 1:
                self._join_run(start, block + 1)
                start = following

    def _best_run(self, count: int) -> int:
        """Return the start of a run of at least ``count`` ids if there surely is one, else of a longest one."""
        exact = count.bit_length()
        for start in list(self._bins[exact])[:8]:  # of this length some are long enough and some are not
            if self._ends[start] - start >= count:
                return start
        for bin_ in self._bins[exact + 1 :]:
            if bin_:
                return next(iter(bin_))
        for bin_ in reversed(self._bins[: exact + 1]):
            if bin_:
                return next(iter(bin_))
        raise AssertionError(f"{self.name} pool: {self._num_free} free, but no run")

    def _carve(self, start: int, most: int) -> list[int]:
        end = self._remove_run(start)
        cut = min(end, start + most)
        if cut < end:
            self._add_run(cut, end)
        return list(range(start, cut))

    def _join_run(self, start: int, end: int) -> None:
        if start in self._starts:
            start = self._starts[start]
            self._remove_run(start)
        if end in self._ends:
            end = self._remove_run(end)
        self._add_run(start, end)

    def _add_run(self, start: int, end: int) -> None:
        self._ends[start], self._starts[end] = end, start
        self._bins[(end - start).bit_length()][start] = None
        self._is_free[start:end] = b"\1" * (end - start)
        self._num_free += end - start

    def _remove_run(self, start: int) -> int:
        end = self._ends.pop(start)
        del self._starts[end], self._bins[(end - start).bit_length()][start]
        self._is_free[start:end] = bytes(end - start)
        self._num_free -= end - start
        return end
