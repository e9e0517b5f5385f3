"""BlockGrowth: finds device blocks for a request that grows, where an LS and a BE request may share a block.

Paper: bros 5.2 (allocation).
"""

from __future__ import annotations

from collections.abc import Iterator

from omniserve.core.plan import SlotCopy
from omniserve.kv.base import Tier
from omniserve.kv.bidirectional.evicted import EvictedRequests
from omniserve.kv.bidirectional.pool import DirectedTables, SharedBlockPool


class BlockGrowth:
    """Finds device blocks: free ones, then empty slots of a BE request's last block, then evicted requests' blocks."""

    def __init__(
        self,
        device: SharedBlockPool,
        evicted: EvictedRequests,
        directed: DirectedTables,
        block_size: int,
    ) -> None:
        self._device = device
        self._evicted = evicted
        self._directed = directed
        self._block_size = block_size
        self._relocations: list[SlotCopy] = []
        self.num_shared_blocks = 0
        """Counter: blocks that an LS request moved into beside a BE request."""
        self.num_relocated_blocks = 0
        """Counter: shared blocks that one of the two outgrew and left."""

    def grow(self, request_id: str, held: list[int], num_tokens: int, reserve_blocks: int) -> bool:
        """Extend ``held``, a request's device blocks, to hold ``num_tokens``; False, and unchanged, if it cannot.

        Args:
            reserve_blocks: Device blocks that must still be free afterwards, if any is taken; those of evicted requests
                count as free.
        """
        num_in_tail = min(self._block_size, num_tokens - (len(held) - 1) * self._block_size)
        leaves_tail = bool(held) and not self._fits(request_id, held[-1], num_in_tail)
        num_blocks = -(-num_tokens // self._block_size)
        missing = num_blocks - len(held) + leaves_tail
        num_in_last = num_tokens - (num_blocks - 1) * self._block_size
        found = self._find(request_id, missing, num_in_last, reserve_blocks) if missing > 0 else []
        if found is None:
            return False
        if leaves_tail:
            num_moving = self.num_in_tail(request_id)
            self._relocate(request_id, held.pop(), found[0], num_moving)
        elif held and held[-1] in self._device.sharers and request_id not in self._directed.best_effort:
            # It fits beside a BE request at rest; an evicted one loses what is in the way.
            _, other = self._device.sharers[held[-1]]
            if other in self._evicted:
                self._evicted.cut_beside(other, num_in_tail)
        held += found
        return True

    def take_relocations(self) -> tuple[SlotCopy, ...]:
        """Return the copies for requests that have left a shared block, in order, and forget them."""
        relocations, self._relocations = tuple(self._relocations), []
        return relocations

    def num_in_tail(self, request_id: str) -> int:
        """Return how many slots of its last device block a request needs."""
        if request_id in self._evicted:
            return self._evicted.num_in_tail(request_id)
        num_full = len(self._directed.tables[request_id].blocks) - 1
        return self._directed.num_tokens[request_id] - num_full * self._block_size

    def crowded(self, num_slots: int) -> Iterator[str]:
        """Yield the evicted requests that share a block in which fewer than ``num_slots`` slots are empty."""
        for ls, be in self._device.sharers.values():
            if be in self._evicted and self._block_size - self.num_in_tail(ls) - self.num_in_tail(be) < num_slots:
                yield be

    # -- leaving -------------------------------------------------------------------------------------------------

    def _fits(self, request_id: str, block: int, num_tokens: int) -> bool:
        """Tell whether a request's last block can hold ``num_tokens``, beside those of the other request."""
        sharers = self._device.sharers.get(block)
        if sharers is None:
            return True
        ls, be = sharers
        if request_id == ls and be in self._evicted:
            return True
        return num_tokens + self.num_in_tail(be if request_id == ls else ls) <= self._block_size

    def _relocate(self, request_id: str, source: int, target: int, num_tokens: int) -> None:
        from_right = request_id in self._directed.best_effort
        begin, end = (self._block_size - num_tokens, self._block_size) if from_right else (0, num_tokens)
        self._relocations.append(SlotCopy(source_block=source, target_block=target, begin=begin, end=end))
        self.num_relocated_blocks += 1
        self._device.give_back([source])

    # -- finding -------------------------------------------------------------------------------------------------

    def _find(self, request_id: str, count: int, num_in_last: int, reserve_blocks: int) -> list[int] | None:
        """Take ``count`` >= 1 blocks, ``num_in_last`` slots of the last; None, and unchanged, if it cannot."""
        num_free = self._device.num_free
        num_takeable = num_free + self._evicted.num_reclaimable(spare=request_id) - reserve_blocks
        may_share = num_free < count and num_in_last < self._block_size and request_id not in self._directed.best_effort
        if num_takeable < count:
            # To move in beside a request on the device takes no block that was free.
            is_enough = may_share and (count == 1 or num_takeable >= count - 1)
            if not is_enough or self._most_empty(num_in_last, among_evicted=False) is None:
                return None
        num_whole = count - 1 if may_share else count
        blocks = self._take(request_id, num_whole)
        if may_share:
            other = self._most_empty(num_in_last, among_evicted=num_takeable >= count)
            blocks += (
                [self._move_in(request_id, other, num_in_last)] if other is not None else self._take(request_id, 1)
            )
        return blocks

    def _take(self, request_id: str, count: int) -> list[int]:
        """Take whole blocks, if need be from evicted requests; the caller knows that there are enough."""
        self._evicted.reclaim(count - self._device.num_free, spare=request_id)
        blocks = self._device.take(count)
        assert blocks is not None, f"no room for {count} blocks of {request_id}"
        return blocks

    def _most_empty(self, num_tokens: int, *, among_evicted: bool) -> str | None:
        """Return the BE request with the most empty slots in its last block, at least ``num_tokens``, or None.

        Args:
            among_evicted: Consider evicted requests, too: they lose the tokens that are in the way.
        """
        best, most = None, -1
        for request_id in filter(self._directed.best_effort.__contains__, (*self._directed.tables, *self._evicted)):
            num_empty = -1
            table = self._directed.tables.get(request_id)
            if request_id in self._evicted:
                if among_evicted and self._evicted.num_takeable(request_id) > 0:
                    has_guest = self._evicted.has_guest(request_id)
                    num_empty = 0 if has_guest else self._block_size - self.num_in_tail(request_id)
            elif table is not None and table.tier is Tier.DEVICE and table.move is None:
                is_shared = table.blocks[-1] in self._device.sharers
                fitting = self._block_size - self.num_in_tail(request_id)
                num_empty = fitting if fitting >= num_tokens and not is_shared else -1
            if num_empty > most:
                best, most = request_id, num_empty
        return best

    def _move_in(self, ls: str, be: str, num_tokens: int) -> int:
        """Give an LS request the left of a BE request's last block; an evicted one loses its tokens there."""
        evicted = self._evicted.get(be)
        if evicted is not None:
            if self._evicted.has_guest(be):
                self._evicted.cut(be, (len(evicted.blocks) - 1) * self._block_size)
            self._evicted.cut_beside(be, num_tokens)
        block = evicted.blocks[-1] if evicted is not None else self._directed.tables[be].blocks[-1]
        self._device.share(block, ls, be)
        self.num_shared_blocks += 1
        return block

    # -- checks --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError if a shared block does not end both an LS and a BE request, or is too small for them."""
        for block, (ls, be) in self._device.sharers.items():
            assert be in self._directed.best_effort and ls not in self._directed.best_effort, (block, ls, be)
            left = self._directed.tables[ls].blocks
            right = self._evicted[be].blocks if be in self._evicted else self._directed.tables[be].blocks
            assert left[-1] == right[-1] == block, f"{ls} and {be} do not end in block {block}"
            num_slots = self.num_in_tail(ls) + self.num_in_tail(be)
            assert num_slots <= self._block_size, f"{ls} and {be} have {num_slots} tokens in block {block}"
