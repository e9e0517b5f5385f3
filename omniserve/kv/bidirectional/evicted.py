"""EvictedRequests: what the device still has of evicted requests, and which of their blocks are taken next.

Paper: bros 5.2 (a preempted request, there "pending", keeps its blocks until others overwrite them).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

from omniserve.kv.bidirectional.pool import DirectedTables, SharedBlockPool
from omniserve.kv.bidirectional.saved_blocks import SavedBlocks


@dataclass(slots=True)
class Evicted:
    """What the device has of an evicted request: always a prefix."""

    num_tokens: int
    """Tokens [0, num_tokens) have their KV on the device."""
    blocks: list[int]
    """The blocks that hold them."""


class EvictedRequests(dict[str, Evicted]):
    """Evicted requests by id, in the order of their eviction."""

    def __init__(self, device: SharedBlockPool, saved: SavedBlocks, directed: DirectedTables, block_size: int) -> None:
        super().__init__()
        self._device = device
        self._saved = saved
        self._directed = directed
        self._block_size = block_size
        self.num_overwritten_tokens = 0
        """Counter: tokens that were given up on the device."""

    def resume(self, request_id: str) -> None:
        """Forget a request that resumes: its blocks are the caller's now, and no longer taken."""
        del self[request_id]
        self._saved.forget_flights(request_id)

    def drop(self, request_id: str) -> None:
        """Give back what a request has on the device, if it is evicted."""
        evicted = self.pop(request_id, None)
        if evicted is not None:
            self._device.give_back(reversed(evicted.blocks))

    # -- what is left --------------------------------------------------------------------------------------------

    def num_in_tail(self, request_id: str) -> int:
        """Return how many slots of its last device block a request uses."""
        evicted = self[request_id]
        return evicted.num_tokens - (len(evicted.blocks) - 1) * self._block_size

    def has_guest(self, request_id: str) -> bool:
        """Tell whether an LS request shares a request's last block."""
        blocks = self[request_id].blocks
        return bool(blocks) and blocks[-1] in self._device.sharers

    def num_takeable(self, request_id: str) -> int:
        """Return how many of a request's blocks may be taken: all but one that an LS request shares."""
        return len(self[request_id].blocks) - self.has_guest(request_id)

    def num_reclaimable(self, spare: str) -> int:
        """Return how many blocks of all requests but ``spare`` may be taken."""
        return sum(self.num_takeable(request_id) for request_id in self if request_id != spare)

    def num_restorable(self, request_id: str) -> int:
        """Return the length of the prefix that the device and the host have together."""
        num_tokens = self[request_id].num_tokens
        saved = self._saved.copies(request_id)
        while (copy := saved.get(num_tokens // self._block_size)) is not None:
            end = num_tokens // self._block_size * self._block_size + copy.num_tokens
            if end <= num_tokens:
                break
            num_tokens = end
        return num_tokens

    # -- what is taken --------------------------------------------------------------------------------------------

    def cut(self, request_id: str, num_tokens: int) -> None:
        """Give up what a request has on the device past ``num_tokens``."""
        evicted = self[request_id]
        if num_tokens >= evicted.num_tokens:
            return
        self.num_overwritten_tokens += evicted.num_tokens - num_tokens
        evicted.num_tokens = num_tokens
        num_blocks = -(-num_tokens // self._block_size)
        self._device.give_back(reversed(evicted.blocks[num_blocks:]))
        del evicted.blocks[num_blocks:]
        self._saved.cut(request_id, num_tokens, self._block_size)

    def cut_beside(self, request_id: str, num_ls_tokens: int) -> None:
        """Cut a request to what so many LS tokens in its last block leave of it."""
        num_before = (len(self[request_id].blocks) - 1) * self._block_size
        self.cut(request_id, num_before + self._block_size - num_ls_tokens)

    def reclaim(self, num_blocks: int, spare: str) -> None:
        """Free that many blocks, or all that may be taken, but none of the request ``spare``."""
        for request_id, index in list(islice(self.next_taken(spare), max(0, num_blocks))):
            self.cut(request_id, index * self._block_size)

    def next_taken(self, spare: str = "") -> Iterator[tuple[str, int]]:
        """Yield ``(request, index of its block)`` of all blocks that may be taken, in the order in which they are.

        BE requests come before LS ones. Of each kind, partly filled last blocks come first, those with the most empty
        slots before others; then full blocks, from the end of the request that was evicted first. The blocks of the
        request ``spare`` are left out.
        """
        takeable = {r: self.num_takeable(r) for r in self if r != spare}
        for is_best_effort in (True, False):
            of_kind = [r for r, n in takeable.items() if (r in self._directed.best_effort) is is_best_effort and n > 0]
            num_empty = {
                r: self._block_size - self.num_in_tail(r)
                for r in of_kind
                if takeable[r] == len(self[r].blocks)  # else its last block has a guest, the others are full
            }
            partial = sorted((r for r, n in num_empty.items() if n > 0), key=lambda r: -num_empty[r])
            for request_id in partial:
                yield request_id, takeable[request_id] - 1
            for request_id in of_kind:
                for index in reversed(range(takeable[request_id] - (num_empty.get(request_id, 0) > 0))):
                    yield request_id, index

    def unsaved(self, crowded: Iterable[str], *, num_ahead: int, max_blocks: int) -> dict[str, dict[int, int]]:
        """Return what BE requests are about to lose and have no copy of: by request, {index of a block: its tokens}.

        Args:
            crowded: BE requests that are about to lose slots of their last block to its guest.
            num_ahead: Of the device blocks that would be taken next, so many are looked at; free ones are the first.
            max_blocks: Return at most so many blocks.
        """
        shrinking = ((request_id, len(self[request_id].blocks) - 1) for request_id in crowded)
        next_blocks = islice(self.next_taken(), max(0, num_ahead - self._device.num_free))
        unsaved: dict[str, dict[int, int]] = {}
        for request_id, index in chain(shrinking, next_blocks):
            if max_blocks <= 0:
                break
            if request_id not in self._directed.best_effort or index in unsaved.get(request_id, {}):
                continue
            num_tokens = min(self._block_size, self[request_id].num_tokens - index * self._block_size)
            if not self._saved.has(request_id, index, num_tokens):
                unsaved.setdefault(request_id, {})[index] = num_tokens
                max_blocks -= 1
        return unsaved

    # -- checks --------------------------------------------------------------------------------------------------

    def owned_blocks(self) -> Iterator[int]:
        """Yield all device blocks that are held here; for checks."""
        for evicted in self.values():
            yield from evicted.blocks

    def check(self) -> None:
        """Raise AssertionError if a request has other blocks than its tokens need."""
        for request_id, evicted in self.items():
            assert len(evicted.blocks) == -(-evicted.num_tokens // self._block_size), (request_id, evicted)
