"""SavedBlocks: host copies of single blocks that requests lose on the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from omniserve.kv.block_pool import BlockPool
from omniserve.kv.tiers import MoveResult


@dataclass(slots=True)
class BlockCopy:
    """A host block, and how many tokens of a request's block it has."""

    block: int
    num_tokens: int


@dataclass(slots=True)
class _Flight:
    request_id: str
    copies: dict[int, BlockCopy]  # by index in the request's table
    is_wanted: bool = True


class SavedBlocks:
    """Copies by request and index in its table, and those under way. KV is only appended to, so a copy stays true."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._saved: defaultdict[str, dict[int, BlockCopy]] = defaultdict(dict)
        self._flights: dict[int, _Flight] = {}

    def copies(self, request_id: str) -> Mapping[int, BlockCopy]:
        """Return a request's copies by index."""
        return self._saved.get(request_id, {})

    def request_ids(self) -> list[str]:
        """Return the requests that have copies."""
        return list(self._saved)

    def num_held(self, request_id: str) -> int:
        """Return how many blocks hold a request's copies, those under way for it included."""
        return len(self.copies(request_id)) + sum(len(f.copies) for f in self._wanted_flights(request_id))

    def has(self, request_id: str, index: int, num_tokens: int) -> bool:
        """Tell whether that many tokens of a block are copied, or being copied."""
        copies = (self.copies(request_id), *(f.copies for f in self._wanted_flights(request_id)))
        return any(index in held and held[index].num_tokens >= num_tokens for held in copies)

    def put(self, request_id: str, copies: Mapping[int, BlockCopy]) -> None:
        """Keep copies; of two of the same block, the one with more of its tokens."""
        saved = self._saved[request_id]
        for index, copy in copies.items():
            old = saved.get(index)
            if old is not None and old.num_tokens >= copy.num_tokens:
                self._pool.give_back([copy.block])
                continue
            if old is not None:
                self._pool.give_back([old.block])
            saved[index] = copy

    def take(self, request_id: str, indices: Iterable[int]) -> dict[int, BlockCopy]:
        """Hand over copies: their blocks are the caller's."""
        return {index: self._saved[request_id].pop(index) for index in indices}

    def drop(self, request_id: str) -> None:
        """Forget all of a request's copies."""
        self._pool.give_back([copy.block for copy in self._saved.pop(request_id, {}).values()])
        self.forget_flights(request_id)

    def reclaim(self, num_blocks: int, of: Iterable[str]) -> None:
        """Free that many blocks, or all there are, of copies of these requests, each from its end."""
        for request_id in of:
            saved = self._saved.get(request_id, {})
            for index in sorted(saved, reverse=True):
                if num_blocks <= 0:
                    return
                self._pool.give_back([saved.pop(index).block])
                num_blocks -= 1

    def num_reclaimable(self, spare: str) -> int:
        """Return how many blocks copies of others hold."""
        return sum(len(copies) for request_id, copies in self._saved.items() if request_id != spare)

    # -- copies under way ----------------------------------------------------------------------------------------

    def begin(self, move_id: int, request_id: str, copies: dict[int, BlockCopy]) -> None:
        """Note that a move copies these blocks."""
        self._flights[move_id] = _Flight(request_id, copies)

    def cut(self, request_id: str, num_tokens: int, block_size: int) -> None:
        """Note that the device has only the first ``num_tokens``: of a copy under way the others do not count."""
        for flight in self._wanted_flights(request_id):
            for index, copy in flight.copies.items():
                copy.num_tokens = max(0, min(copy.num_tokens, num_tokens - index * block_size))

    def forget_flights(self, request_id: str) -> None:
        """Stop counting copies under way: from now on the blocks that they read may be overwritten."""
        for flight in self._wanted_flights(request_id):
            flight.is_wanted = False

    def finish(self, move_id: int, *, succeeded: bool) -> MoveResult:
        """End a copy: keep the blocks that are of use, free the others."""
        flight = self._flights.pop(move_id)
        of_use = {i: c for i, c in flight.copies.items() if succeeded and flight.is_wanted and c.num_tokens > 0}
        self._pool.give_back([copy.block for index, copy in flight.copies.items() if index not in of_use])
        if of_use:
            self.put(flight.request_id, of_use)
            return MoveResult.ARRIVED
        return MoveResult.UNUSED if succeeded else MoveResult.STAYED

    def owned_blocks(self) -> Iterator[int]:
        """Yield all blocks that are held here; for checks."""
        for copies in (*self._saved.values(), *(flight.copies for flight in self._flights.values())):
            yield from (copy.block for copy in copies.values())

    def _wanted_flights(self, request_id: str) -> Iterator[_Flight]:
        return (f for f in self._flights.values() if f.is_wanted and f.request_id == request_id)
