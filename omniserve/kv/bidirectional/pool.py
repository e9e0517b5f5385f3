"""SharedBlockPool: device blocks that two requests may hold, one from the left, one from the right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from omniserve.kv.block_pool import BlockPool


class SharedBlockPool(BlockPool):
    """A pool that gets a shared block back when the second of its two requests gives it up.

    Paper: bros 5.2 (the preemption table: which blocks two requests share, and which requests those are).
    """

    def __init__(self, num_blocks: int, name: str) -> None:
        super().__init__(num_blocks, name)
        self.sharers: dict[int, tuple[str, str]] = {}
        """Block -> (the request on its left, LS; the one on its right, BE)."""

    def share(self, block: int, ls: str, be: str) -> None:
        """Give ``ls`` a share of a block that only ``be`` holds."""
        assert block not in self.sharers, f"block {block} is shared by {self.sharers[block]} already"
        self.sharers[block] = (ls, be)

    def give_back(self, blocks: Iterable[int]) -> None:
        super().give_back([block for block in blocks if self.sharers.pop(block, None) is None])

    def check(self, owned: Iterable[int]) -> None:
        counts = Counter(owned)
        counts.subtract(self.sharers.keys())
        super().check(counts.elements())
