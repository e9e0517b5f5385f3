"""What the parts of this package share: device blocks that two requests may hold, and which side each fills."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from omniserve.kv.block_pool import BlockPool
from omniserve.kv.tiered import Table


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


@dataclass(slots=True)
class DirectedTables:
    """What is known of all requests. The manager writes it; the other parts of this package only read it."""

    tables: dict[str, Table]
    """Block tables of requests that are not evicted."""
    num_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens that each of these tables is for."""
    best_effort: set[str] = field(default_factory=set)
    """BE requests: their tokens run from the right of their device blocks."""
