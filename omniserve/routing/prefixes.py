"""SentPrefixes: what of a prompt an engine is likely to have cached, from the prompts that it was sent.

The engine's cache is not asked: it would take a step's time to answer. This is a model of it, of the same size and with
the same order (the least recently used leaves), in coarser blocks.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 64
"""Tokens of a block here."""


def block_hashes(token_ids: Sequence[int], salt: str) -> list[int]:
    """Return a hash of each full block of a prompt, which stands for all tokens up to the block's end.

    ``salt`` keeps prompts apart whose caches are. The last token is left out, as an engine always computes it.
    """
    data = array("q", token_ids).tobytes()
    size = BLOCK * 8
    hashes = []
    before = hash(salt)
    for end in range(size, len(data) - 7, size):
        before = hash((before, data[end - size : end]))
        hashes.append(before)
    return hashes


class SentPrefixes:
    """The blocks of prompts that an engine was sent.

    Args:
        num_tokens: Tokens that the engine's cache holds.
    """

    def __init__(self, num_tokens: int) -> None:
        self._most = max(1, num_tokens // BLOCK)
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def num_cached(self, hashes: Sequence[int]) -> int:
        """Return how many tokens of a prompt, from its first on, the engine is likely to have."""
        blocks = self._blocks
        if not hashes or hashes[0] not in blocks:
            return 0
        low, high = 1, len(hashes)  # hashes[:low] are there; of a prompt's blocks the later ones leave first
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in blocks:
                low = middle + 1
            else:
                high = middle
        return low * BLOCK

    def add(self, hashes: Sequence[int]) -> None:
        """Note a prompt that was sent. Its later blocks leave before its earlier ones."""
        for each in reversed(hashes):
            self._blocks[each] = None
            self._blocks.move_to_end(each)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget all: the engine was started again."""
        self._blocks.clear()
