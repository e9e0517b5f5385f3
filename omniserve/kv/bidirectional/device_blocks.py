"""DeviceBlocks: the device blocks, where an LS and a BE request may share one, and where evicted requests keep theirs.

Paper: bros 5.2 (allocation; the preemption table; a preempted request, there "pending", keeps its blocks until others
overwrite them).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice

from omniserve.core.work import SlotCopy
from omniserve.kv.bidirectional.saved_blocks import SavedBlocks
from omniserve.kv.block_pool import BlockPool
from omniserve.kv.table import Table
from omniserve.kv.tiers import Tier


@dataclass(slots=True)
class Evicted:
    """The blocks on the device of an evicted request: always a prefix."""

    num_tokens: int
    """Tokens [0, num_tokens) have their KV on the device."""
    blocks: list[int]
    """The blocks that hold them."""


class DeviceBlocks(BlockPool):
    """A pool that gets a shared block back when the second of its two requests gives it up.

    For a request that grows it finds free blocks, then empty slots of a BE request's last block, then blocks of evicted
    requests.

    Args:
        tables: Block tables of the requests that are not evicted; the manager keeps them.
        saved: Host copies; told of what the device loses.
    """

    def __init__(self, num_blocks: int, block_size: int, tables: Mapping[str, Table], saved: SavedBlocks) -> None:
        super().__init__(num_blocks, "device")
        self._block_size = block_size
        self._tables = tables
        self._saved = saved
        self._relocations: list[SlotCopy] = []
        self.num_tokens: dict[str, int] = {}
        """Tokens that each of the tables is for."""
        self.best_effort: set[str] = set()
        """BE requests: their tokens run from the right of their device blocks."""
        self.sharers: dict[int, tuple[str, str]] = {}
        """Block -> (the request on its left, LS; the one on its right, BE)."""
        self.evicted: dict[str, Evicted] = {}
        """Evicted requests, by id, in the order of their eviction."""
        # Counters.
        self.num_shared_blocks = 0
        """Blocks that an LS request moved into beside a BE request."""
        self.num_relocated_blocks = 0
        """Shared blocks that one of the two outgrew and left."""
        self.num_overwritten_tokens = 0
        """Tokens of evicted requests that were given up."""

    def give_back(self, blocks: Iterable[int]) -> None:
        super().give_back([block for block in blocks if self.sharers.pop(block, None) is None])

    def take_relocations(self) -> tuple[SlotCopy, ...]:
        """Return the copies for requests that have left a shared block, in order, and forget them."""
        relocations, self._relocations = tuple(self._relocations), []
        return relocations

    def num_in_tail(self, request_id: str) -> int:
        """Return how many slots of its last device block a request needs."""
        evicted = self.evicted.get(request_id)
        if evicted is not None:
            return evicted.num_tokens - (len(evicted.blocks) - 1) * self._block_size
        return self.num_tokens[request_id] - (len(self._tables[request_id].blocks) - 1) * self._block_size

    # -- growth --------------------------------------------------------------------------------------------------

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
        elif held and held[-1] in self.sharers and request_id not in self.best_effort:
            # It fits beside a BE request at rest; an evicted one loses what is in the way.
            _, other = self.sharers[held[-1]]
            if other in self.evicted:
                self._cut_beside(other, num_in_tail)
        held += found
        return True

    def _fits(self, request_id: str, block: int, num_tokens: int) -> bool:
        """Tell whether a request's last block can hold ``num_tokens``, beside those of the other request."""
        sharers = self.sharers.get(block)
        if sharers is None:
            return True
        ls, be = sharers
        if request_id == ls and be in self.evicted:
            return True
        return num_tokens + self.num_in_tail(be if request_id == ls else ls) <= self._block_size

    def _relocate(self, request_id: str, source: int, target: int, num_tokens: int) -> None:
        from_right = request_id in self.best_effort
        begin, end = (self._block_size - num_tokens, self._block_size) if from_right else (0, num_tokens)
        self._relocations.append(SlotCopy(source_block=source, target_block=target, begin=begin, end=end))
        self.num_relocated_blocks += 1
        self.give_back([source])

    def _find(self, request_id: str, count: int, num_in_last: int, reserve_blocks: int) -> list[int] | None:
        """Take ``count`` >= 1 blocks, ``num_in_last`` slots of the last; None, and unchanged, if it cannot."""
        num_takeable = self.num_free + self.num_reclaimable(spare=request_id) - reserve_blocks
        may_share = self.num_free < count and num_in_last < self._block_size and request_id not in self.best_effort
        if num_takeable < count:
            # To move in beside a request on the device takes no block that was free.
            is_enough = may_share and (count == 1 or num_takeable >= count - 1)
            if not is_enough or self._most_empty(num_in_last, among_evicted=False) is None:
                return None
        if not may_share:
            return self._take(request_id, count)
        blocks = self._take(request_id, count - 1)
        other = self._most_empty(num_in_last, among_evicted=num_takeable >= count)
        if other is None:
            return blocks + self._take(request_id, 1)
        return [*blocks, self._move_in(request_id, other, num_in_last)]

    def _take(self, request_id: str, count: int) -> list[int]:
        """Take whole blocks, if need be from evicted requests; the caller knows that there are enough."""
        self.reclaim(count - self.num_free, spare=request_id)
        blocks = self.take(count)
        assert blocks is not None, f"no room for {count} blocks of {request_id}"
        return blocks

    def _most_empty(self, num_tokens: int, *, among_evicted: bool) -> str | None:
        """Return the BE request with the most empty slots in its last block, at least ``num_tokens``, or None.

        Args:
            among_evicted: Consider evicted requests, too: they lose the tokens that are in the way.
        """
        best, most = None, -1
        for request_id in filter(self.best_effort.__contains__, (*self._tables, *self.evicted)):
            num_empty = -1
            table = self._tables.get(request_id)
            if request_id in self.evicted:
                if among_evicted and self._num_takeable(request_id) > 0:
                    num_empty = 0 if self._has_guest(request_id) else self._block_size - self.num_in_tail(request_id)
            elif table is not None and table.tier is Tier.DEVICE and table.move is None:
                is_shared = table.blocks[-1] in self.sharers
                fitting = self._block_size - self.num_in_tail(request_id)
                num_empty = fitting if fitting >= num_tokens and not is_shared else -1
            if num_empty > most:
                best, most = request_id, num_empty
        return best

    def _move_in(self, ls: str, be: str, num_tokens: int) -> int:
        """Give an LS request the left of a BE request's last block; an evicted one loses its tokens there."""
        evicted = self.evicted.get(be)
        if evicted is not None:
            if self._has_guest(be):
                self._cut(be, (len(evicted.blocks) - 1) * self._block_size)
            self._cut_beside(be, num_tokens)
        block = evicted.blocks[-1] if evicted is not None else self._tables[be].blocks[-1]
        assert block not in self.sharers, f"block {block} is shared by {self.sharers[block]} already"
        self.sharers[block] = (ls, be)
        self.num_shared_blocks += 1
        return block

    # -- evicted requests ----------------------------------------------------------------------------------------

    def resume(self, request_id: str) -> None:
        """Forget that a request was evicted: its blocks are the caller's now, and no longer taken."""
        del self.evicted[request_id]
        self._saved.forget_flights(request_id)

    def num_restorable(self, request_id: str) -> int:
        """Return the length of the prefix of an evicted request that the device and the host have together."""
        num_tokens = self.evicted[request_id].num_tokens
        saved = self._saved.copies(request_id)
        while (copy := saved.get(num_tokens // self._block_size)) is not None:
            end = num_tokens // self._block_size * self._block_size + copy.num_tokens
            if end <= num_tokens:
                break
            num_tokens = end
        return num_tokens

    def num_reclaimable(self, spare: str) -> int:
        """Return how many blocks of all evicted requests but ``spare`` may be taken."""
        return sum(self._num_takeable(request_id) for request_id in self.evicted if request_id != spare)

    def reclaim(self, num_blocks: int, spare: str) -> None:
        """Free that many blocks, or all that may be taken, but none of the request ``spare``."""
        for request_id, index in list(islice(self._next_taken(spare), max(0, num_blocks))):
            self._cut(request_id, index * self._block_size)

    def unsaved(self, *, slots_ahead: int, num_ahead: int, max_blocks: int) -> dict[str, dict[int, int]]:
        """Return what BE requests are about to lose and have no copy of: by request, {index of a block: its tokens}.

        Args:
            slots_ahead: A request is about to lose slots of its last block if fewer than so many are empty beside its
                guest.
            num_ahead: Of the device blocks that would be taken next, so many are looked at; free ones are the first.
            max_blocks: Most blocks to return.
        """
        crowded = (
            be
            for ls, be in self.sharers.values()
            if be in self.evicted and self._block_size - self.num_in_tail(ls) - self.num_in_tail(be) < slots_ahead
        )
        shrinking = ((request_id, len(self.evicted[request_id].blocks) - 1) for request_id in crowded)
        next_blocks = islice(self._next_taken(), max(0, num_ahead - self.num_free))
        unsaved: dict[str, dict[int, int]] = {}
        for request_id, index in chain(shrinking, next_blocks):
            if max_blocks <= 0:
                break
            if request_id not in self.best_effort or index in unsaved.get(request_id, {}):
                continue
            num_tokens = min(self._block_size, self.evicted[request_id].num_tokens - index * self._block_size)
            if not self._saved.has(request_id, index, num_tokens):
                unsaved.setdefault(request_id, {})[index] = num_tokens
                max_blocks -= 1
        return unsaved

    def _has_guest(self, request_id: str) -> bool:
        """Tell whether an LS request shares an evicted request's last block."""
        blocks = self.evicted[request_id].blocks
        return bool(blocks) and blocks[-1] in self.sharers

    def _num_takeable(self, request_id: str) -> int:
        """Return how many of an evicted request's blocks may be taken: all but one that an LS request shares."""
        return len(self.evicted[request_id].blocks) - self._has_guest(request_id)

    def _next_taken(self, spare: str = "") -> Iterator[tuple[str, int]]:
        """Yield ``(request, index of its block)`` of all blocks that may be taken, in the order in which they are.

        BE requests come before LS ones. Of each kind, partly filled last blocks come first, those with the most empty
        slots before others; then full blocks, from the end of the request that was evicted first. The blocks of the
        request ``spare`` are left out.
        """
        takeable = {r: self._num_takeable(r) for r in self.evicted if r != spare}
        for is_best_effort in (True, False):
            of_kind = [r for r, n in takeable.items() if (r in self.best_effort) is is_best_effort and n > 0]
            num_empty = {
                r: self._block_size - self.num_in_tail(r)
                for r in of_kind
                if takeable[r] == len(self.evicted[r].blocks)  # else its last block has a guest, the others are full
            }
            partial = sorted((r for r, n in num_empty.items() if n > 0), key=lambda r: -num_empty[r])
            for request_id in partial:
                yield request_id, takeable[request_id] - 1
            for request_id in of_kind:
                for index in reversed(range(takeable[request_id] - (num_empty.get(request_id, 0) > 0))):
                    yield request_id, index

    def _cut(self, request_id: str, num_tokens: int) -> None:
        """Give up what the device has of an evicted request past ``num_tokens``."""
        evicted = self.evicted[request_id]
        if num_tokens >= evicted.num_tokens:
            return
        self.num_overwritten_tokens += evicted.num_tokens - num_tokens
        evicted.num_tokens = num_tokens
        num_blocks = -(-num_tokens // self._block_size)
        self.give_back(reversed(evicted.blocks[num_blocks:]))
        del evicted.blocks[num_blocks:]
        self._saved.cut(request_id, num_tokens, self._block_size)

    def _cut_beside(self, request_id: str, num_ls_tokens: int) -> None:
        """Cut an evicted request to what ``num_ls_tokens`` in its last block leave of it."""
        num_before = (len(self.evicted[request_id].blocks) - 1) * self._block_size
        self._cut(request_id, num_before + self._block_size - num_ls_tokens)

    # -- checks --------------------------------------------------------------------------------------------------

    def check(self, owned: Iterable[int]) -> None:
        """Verify that ``owned`` are the ids that are not free, and what is particular to shared and evicted ones."""
        counts = Counter(owned)
        counts.subtract(self.sharers.keys())
        super().check(counts.elements())
        for request_id, evicted in self.evicted.items():
            assert request_id not in self._tables, "an evicted request has a table"
            assert len(evicted.blocks) == -(-evicted.num_tokens // self._block_size), (request_id, evicted)
        for block, (ls, be) in self.sharers.items():
            assert be in self.best_effort and ls not in self.best_effort, (block, ls, be)
            left = self._tables[ls].blocks
            right = self.evicted[be].blocks if be in self.evicted else self._tables[be].blocks
            assert left[-1] == right[-1] == block, f"{ls} and {be} do not end in block {block}"
            num_slots = self.num_in_tail(ls) + self.num_in_tail(be)
            assert num_slots <= self._block_size, f"{ls} and {be} have {num_slots} tokens in block {block}"
