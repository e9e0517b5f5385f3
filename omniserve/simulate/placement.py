"""Placement: which host of the simulated host tier has a request's KV.

The KV manager has one pool of blocks over all hosts. Here each host has its part of the pool, and a request is on one
host, if any has room for all its blocks. If only the pool has, its host borrows what is missing from the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass


def split_blocks(num_blocks: int, shares: Sequence[float]) -> list[int]:
    """Return how many blocks of a pool each host has, by its share; their sum is the pool."""
    ends = [round(num_blocks * share / sum(shares)) for share in itertools.accumulate(shares)]
    return [end - begin for begin, end in itertools.pairwise([0, *ends])]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request's KV is from now on."""

    host: int
    num_relocated: int = 0
    """Blocks that come there from the host where the request was before."""
    source: int = 0
    """That host."""


class Placement:
    """Places requests on the first host, the device's own, while it has room, then evenly on the others.

    A request that has outgrown its host goes to another one that has room, with all its blocks.

    Args:
        capacities: Blocks of each host.
        held: Returns how many blocks of the pool a request holds now; 0: it has no KV on any host.

    Paper: omniserve 4, "Distributed CPU Attention".
    """

    def __init__(self, capacities: Sequence[int], held: Callable[[str], int]) -> None:
        self._capacities = tuple(capacities)
        self._held = held
        self._hosts: dict[str, int] = {}
        # What each request held when it was last looked at: it may have given blocks back since.
        self._blocks: dict[str, int] = {}
        self._used = [0] * len(capacities)
        self._counts = [0] * len(capacities)

    def host_of(self, request_id: str) -> int:
        """Return the host of a request that has been placed."""
        return self._hosts[request_id]

    def arrive(self, request_id: str, num_blocks: int) -> Place:
        """Place a request of which so many blocks come from the device; the same as ``grow`` if it has others there."""
        if self._held(request_id) == num_blocks:
            self.forget(request_id)
        return self.grow(request_id)

    def grow(self, request_id: str) -> Place:
        """Return the place for all blocks that a request holds now: where it is, if that has room, else another one."""
        num_blocks, before = self._held(request_id), self._hosts.get(request_id)
        known = self._blocks.get(request_id, 0)
        if before is not None and num_blocks <= known:
            return Place(before)
        self.forget(request_id)
        preferred = 0 if before is None else before
        if self._num_free(preferred) < num_blocks:
            self._look_again()
        host = self._choose(num_blocks, before)
        self._put(request_id, host, num_blocks)
        return Place(host) if before is None or host == before else Place(host, known, before)

    def forget(self, request_id: str) -> None:
        """Forget a request that has no KV on a host any more; an unknown one is no error."""
        host = self._hosts.pop(request_id, None)
        if host is not None:
            self._used[host] -= self._blocks.pop(request_id)
            self._counts[host] -= 1

    def _num_free(self, host: int) -> int:
        return self._capacities[host] - self._used[host]

    def _choose(self, num_blocks: int, before: int | None) -> int:
        hosts = range(len(self._capacities))
        has_room = [host for host in hosts if self._num_free(host) >= num_blocks]
        for host in (before, 0):
            if host in has_room:
                return host
        if has_room:
            return min(has_room, key=lambda host: self._counts[host])
        return before if before is not None else max(hosts, key=self._num_free)

    def _put(self, request_id: str, host: int, num_blocks: int) -> None:
        self._hosts[request_id], self._blocks[request_id] = host, num_blocks
        self._used[host] += num_blocks
        self._counts[host] += 1

    def _look_again(self) -> None:
        """Take note of blocks that requests have given back, or taken, since they were last looked at."""
        for request_id, host in list(self._hosts.items()):
            self.forget(request_id)
            if num_blocks := self._held(request_id):
                self._put(request_id, host, num_blocks)
