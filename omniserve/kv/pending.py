"""Requests that have given way: what the device still has of them, and what of it goes next.

Paper: bros 5.2 (a preempted request is "pending": its blocks stay until others overwrite them).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from itertools import chain, islice

from omniserve.kv.saved_blocks import SavedBlocks
from omniserve.kv.shared_pool import SharedBlockPool


@dataclass(slots=True)
class Pending:
    """What the device has of a request that has given way: always a prefix."""

    num_tokens: int
    """Tokens [0, num_tokens) have their KV on the device."""
    blocks: list[int]
    """The blocks that hold them."""


class PendingRequests:
    """Pending requests, the first evicted first.

    Args:
        device: The device's blocks.
        saved: Host copies of blocks that pending requests lose.
        best_effort: Those whose tokens run from the right; it is looked into, not copied.
        block_size: Tokens per block.
    """

    def __init__(self, device: SharedBlockPool, saved: SavedBlocks, best_effort: Set[str], block_size: int) -> None:
        self._device = device
        self._saved = saved
        self._best_effort = best_effort
        self._block_size = block_size
        self._requests: dict[str, Pending] = {}
        self.num_overwritten_tokens = 0
        """Counter: tokens that were given up on the device."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    def __getitem__(self, request_id: str) -> Pending:
        return self._requests[request_id]

    def get(self, request_id: str) -> Pending | None:
        """Return what is left of a request; None if it is not pending."""
        return self._requests.get(request_id)

    def add(self, request_id: str, num_tokens: int, blocks: list[int]) -> None:
        """Note that a request has given way and holds these blocks, of so many tokens."""
        self._requests[request_id] = Pending(num_tokens, blocks)

    def resume(self, request_id: str) -> None:
        """Note that a request is back, or on its way: its blocks are the caller's, and nobody cuts them any more."""
        del self._requests[request_id]
        self._saved.forget_flights(request_id)

    def drop(self, request_id: str) -> None:
        """Give back what a request has on the device, if it is pending."""
        pending = self._requests.pop(request_id, None)
        if pending is not None:
            self._device.give_back(reversed(pending.blocks))

    # -- what is left --------------------------------------------------------------------------------------------

    def num_in_tail(self, request_id: str) -> int:
        """Return how many slots of its last device block a request uses."""
        pending = self._requests[request_id]
        return pending.num_tokens - (len(pending.blocks) - 1) * self._block_size

    def has_guest(self, request_id: str) -> bool:
        """Tell whether an LS request sits in a request's last block."""
        blocks = self._requests[request_id].blocks
        return bool(blocks) and blocks[-1] in self._device.sharers

    def num_takeable(self, request_id: str) -> int:
        """Return how many of a request's blocks others may take: all but one with a guest."""
        return len(self._requests[request_id].blocks) - self.has_guest(request_id)

    def num_reclaimable(self, spare: str) -> int:
        """Return how many blocks others may take, but for those of ``spare``."""
        return sum(self.num_takeable(request_id) for request_id in self._requests if request_id != spare)

    def num_restorable(self, request_id: str) -> int:
        """Return the length of the prefix that the device and the host have together."""
        num_tokens = self._requests[request_id].num_tokens
        saved = self._saved.copies(request_id)
        while (copy := saved.get(num_tokens // self._block_size)) is not None:
            end = num_tokens // self._block_size * self._block_size + copy.num_tokens
            if end <= num_tokens:
                break
            num_tokens = end
        return num_tokens

    # -- what goes -----------------------------------------------------------------------------------------------

    def cut(self, request_id: str, num_tokens: int) -> None:
        """Give up what a request has on the device past ``num_tokens``."""
        pending = self._requests[request_id]
        if num_tokens >= pending.num_tokens:
            return
        self.num_overwritten_tokens += pending.num_tokens - num_tokens
        pending.num_tokens = num_tokens
        num_blocks = -(-num_tokens // self._block_size)
        self._device.give_back(reversed(pending.blocks[num_blocks:]))
        del pending.blocks[num_blocks:]
        self._saved.cut(request_id, num_tokens, self._block_size)

    def cut_beside(self, request_id: str, num_ls_tokens: int) -> None:
        """Cut a request to what so many LS tokens in its last block leave of it."""
        num_before = (len(self._requests[request_id].blocks) - 1) * self._block_size
        self.cut(request_id, num_before + self._block_size - num_ls_tokens)

    def reclaim(self, num_blocks: int, spare: str) -> None:
        """Free so many blocks, or all that others may take, but for those of ``spare``."""
        for request_id, index in list(islice(self.line(spare), max(0, num_blocks))):
            self.cut(request_id, index * self._block_size)

    def line(self, spare: str = "") -> Iterator[tuple[str, int]]:
        """Yield the blocks that others may take, but for those of ``spare``, the first to go first: (request, index).

        BE requests before LS ones; blocks with the most empty slots, then those of who was evicted first, from the end.
        """
        takeable = {r: self.num_takeable(r) for r in self._requests if r != spare}
        for is_best_effort in (True, False):
            of_kind = [r for r, n in takeable.items() if (r in self._best_effort) is is_best_effort and n > 0]
            num_empty = {
                r: self._block_size - self.num_in_tail(r)
                for r in of_kind
                if takeable[r] == len(self._requests[r].blocks)  # else its last block has a guest, the others are full
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
        shrinking = ((request_id, len(self._requests[request_id].blocks) - 1) for request_id in crowded)
        next_to_go = islice(self.line(), max(0, num_ahead - self._device.num_free))
        unsaved: dict[str, dict[int, int]] = {}
        for request_id, index in chain(shrinking, next_to_go):
            if max_blocks <= 0:
                break
            if request_id not in self._best_effort or index in unsaved.get(request_id, {}):
                continue
            num_tokens = min(self._block_size, self._requests[request_id].num_tokens - index * self._block_size)
            if not self._saved.has(request_id, index, num_tokens):
                unsaved.setdefault(request_id, {})[index] = num_tokens
                max_blocks -= 1
        return unsaved

    # -- checks --------------------------------------------------------------------------------------------------

    def owned_blocks(self) -> Iterator[int]:
        """Yield all device blocks that are held here; for checks."""
        for pending in self._requests.values():
            yield from pending.blocks

    def check(self) -> None:
        """Raise AssertionError if a request has other blocks than its tokens need."""
        for request_id, pending in self._requests.items():
            assert len(pending.blocks) == -(-pending.num_tokens // self._block_size), (request_id, pending)
