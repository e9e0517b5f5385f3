"""How a request's blocks grow on the device, where an LS and a BE request may share a block: who moves in, who leaves.

Paper: bros 5.2 (allocation).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from omniserve.core.plan import SlotCopy
from omniserve.kv.base import Tier
from omniserve.kv.pending import PendingRequests
from omniserve.kv.shared_pool import SharedBlockPool
from omniserve.kv.tiered import Table


class SharedGrowth:
    """Finds device blocks: free ones, then the empty slots of a BE request's last block, then pending requests' blocks.

    What is known of requests is looked into, not copied.

    Args:
        device: The device's blocks.
        pending: Those who have given way, and lose what others need.
        tables: The other requests' blocks.
        lengths: Tokens that each of these tables is for.
        best_effort: Those whose tokens run from the right.
        block_size: Tokens per block.
    """

    def __init__(
        self,
        device: SharedBlockPool,
        pending: PendingRequests,
        *,
        tables: Mapping[str, Table],
        lengths: Mapping[str, int],
        best_effort: Set[str],
        block_size: int,
    ) -> None:
        self._device = device
        self._pending = pending
        self._tables = tables
        self._lengths = lengths
        self._best_effort = best_effort
        self._block_size = block_size
        self._relocations: list[SlotCopy] = []
        self.num_shared_blocks = 0
        """Counter: blocks that an LS request moved into beside a BE request."""
        self.num_relocated_blocks = 0
        """Counter: shared blocks that one of the two outgrew and left."""

    def grow(self, request_id: str, held: list[int], num_tokens: int, reserve_blocks: int) -> bool:
        """Make ``held``, the device blocks of a request, hold ``num_tokens``; False, and unchanged, if in vain.

        Args:
            reserve_blocks: Device blocks that must still be free afterwards, if any is taken; those of pending requests
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
        elif held and held[-1] in self._device.sharers and request_id not in self._best_effort:
            # If it fits although that does not look so, the BE request is pending.
            _, other = self._device.sharers[held[-1]]
            if other in self._pending:
                self._pending.cut_beside(other, num_in_tail)
        held += found
        return True

    def take_relocations(self) -> tuple[SlotCopy, ...]:
        """Return, once, what those who have left a shared block are to take along, in order."""
        relocations, self._relocations = tuple(self._relocations), []
        return relocations

    def num_in_tail(self, request_id: str) -> int:
        """Return how many slots of its last device block a request needs."""
        if request_id in self._pending:
            return self._pending.num_in_tail(request_id)
        return self._lengths[request_id] - (len(self._tables[request_id].blocks) - 1) * self._block_size

    def crowded(self, num_slots: int) -> Iterator[str]:
        """Yield the pending requests in whose last block an LS request has fewer than so many empty slots to go."""
        for ls, be in self._device.sharers.values():
            if be in self._pending and self._block_size - self.num_in_tail(ls) - self.num_in_tail(be) < num_slots:
                yield be

    # -- leaving -------------------------------------------------------------------------------------------------

    def _fits(self, request_id: str, block: int, num_tokens: int) -> bool:
        """Tell whether a request can have ``num_tokens`` in this block, its last one, without moving out."""
        sharers = self._device.sharers.get(block)
        if sharers is None:
            return True
        ls, be = sharers
        if request_id == ls and be in self._pending:
            return True
        return num_tokens + self.num_in_tail(be if request_id == ls else ls) <= self._block_size

    def _relocate(self, request_id: str, source: int, target: int, num_tokens: int) -> None:
        from_right = request_id in self._best_effort
        begin, end = (self._block_size - num_tokens, self._block_size) if from_right else (0, num_tokens)
        self._relocations.append(SlotCopy(source_block=source, target_block=target, begin=begin, end=end))
        self.num_relocated_blocks += 1
        self._device.give_back([source])

    # -- finding -------------------------------------------------------------------------------------------------

    def _find(self, request_id: str, count: int, num_in_last: int, reserve_blocks: int) -> list[int] | None:
        """Take ``count`` >= 1 blocks, using so many slots of the last one; None, and unchanged, if in vain."""
        num_free = self._device.num_free
        num_takeable = num_free + self._pending.num_reclaimable(spare=request_id) - reserve_blocks
        may_share = num_free < count and num_in_last < self._block_size and request_id not in self._best_effort
        if num_takeable < count:
            # To move in beside a request on the device takes no block that was free.
            is_enough = may_share and (count == 1 or num_takeable >= count - 1)
            if not is_enough or self._most_empty(num_in_last, among_pending=False) is None:
                return None
        num_whole = count - 1 if may_share else count
        blocks = self._take(request_id, num_whole)
        if may_share:
            other = self._most_empty(num_in_last, among_pending=num_takeable >= count)
            blocks += (
                [self._move_in(request_id, other, num_in_last)] if other is not None else self._take(request_id, 1)
            )
        return blocks

    def _take(self, request_id: str, count: int) -> list[int]:
        """Take whole blocks, if need be of pending requests; there are so many."""
        self._pending.reclaim(count - self._device.num_free, spare=request_id)
        blocks = self._device.take(count)
        assert blocks is not None, f"no room for {count} blocks of {request_id}"
        return blocks

    def _most_empty(self, num_tokens: int, *, among_pending: bool) -> str | None:
        """Return the BE request with the most empty slots in the block that it can share with so many LS tokens.

        Args:
            among_pending: Also of pending requests, which may lose what stands in the way; else only of those at rest.
        """
        best, most = None, -1
        for request_id in filter(self._best_effort.__contains__, (*self._tables, *self._pending)):
            num_empty = -1
            table = self._tables.get(request_id)
            if request_id in self._pending:
                if among_pending and self._pending.num_takeable(request_id) > 0:
                    has_guest = self._pending.has_guest(request_id)
                    num_empty = 0 if has_guest else self._block_size - self.num_in_tail(request_id)
            elif table is not None and table.tier is Tier.DEVICE and table.move is None:
                is_shared = table.blocks[-1] in self._device.sharers
                fitting = self._block_size - self.num_in_tail(request_id)
                num_empty = fitting if fitting >= num_tokens and not is_shared else -1
            if num_empty > most:
                best, most = request_id, num_empty
        return best

    def _move_in(self, ls: str, be: str, num_tokens: int) -> int:
        """Let an LS request have the left of a block of a BE request, which loses what stood there."""
        pending = self._pending.get(be)
        if pending is not None:
            if self._pending.has_guest(be):
                self._pending.cut(be, (len(pending.blocks) - 1) * self._block_size)
            self._pending.cut_beside(be, num_tokens)
        block = pending.blocks[-1] if pending is not None else self._tables[be].blocks[-1]
        self._device.share(block, ls, be)
        self.num_shared_blocks += 1
        return block

    # -- checks --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError if a shared block does not end both an LS and a BE request, or is too small for them."""
        for block, (ls, be) in self._device.sharers.items():
            assert be in self._best_effort and ls not in self._best_effort, (block, ls, be)
            right = self._pending[be].blocks if be in self._pending else self._tables[be].blocks
            assert self._tables[ls].blocks[-1] == right[-1] == block, f"{ls} and {be} do not end in block {block}"
            num_slots = self.num_in_tail(ls) + self.num_in_tail(be)
            assert num_slots <= self._block_size, f"{ls} and {be} have {num_slots} tokens in block {block}"
