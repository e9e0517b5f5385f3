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
    """The place of a request's KV from now on."""

    host: int
    num_relocated: int = 0
    """Blocks that come there from the host where the request was before."""
    source: int = 0
    """The host where the request was before."""


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
        # What each request of a host held when it was last looked at: it may have given blocks back since.
        self._blocks: list[dict[str, int]] = [{} for _ in capacities]
        self._used = [0] * len(capacities)

    def has(self, request_id: str) -> bool:
        """Tell whether a request has been placed."""
        return request_id in self._hosts

    def host_of(self, request_id: str) -> int:
        """Return the host of a request that has been placed."""
        return self._hosts[request_id]

    def arrive(self, request_id: str, num_blocks: int) -> Place:
        """Place a request of which ``num_blocks`` come from the device; the same as ``grow`` if it has others there."""
        if self._held(request_id) == num_blocks:
            self.forget(request_id)
        return self.grow(request_id)

    def grow(self, request_id: str) -> Place:
        """Return the place for all blocks that a request holds now: where it is, if that has room, else another one."""
        num_blocks, before = self._held(request_id), self._hosts.get(request_id)
        known = self._blocks[before][request_id] if before is not None else 0
        if before is not None and num_blocks <= known:
            return Place(before)
        self.forget(request_id)
        host = self._choose(num_blocks, before)
        self._put(request_id, host, num_blocks)
        return Place(host) if before is None or host == before else Place(host, known, before)

    def forget(self, request_id: str) -> None:
        """Forget a request that has no KV on a host any more; an unknown one is no error."""
        host = self._hosts.pop(request_id, None)
        if host is not None:
            self._used[host] -= self._blocks[host].pop(request_id)

    def _choose(self, num_blocks: int, before: int | None) -> int:
        for host in (0,) if before is None else (before, 0):
            if self._has_room(host, num_blocks):
                return host
        hosts = range(len(self._capacities))
        if has_room := [host for host in hosts if self._has_room(host, num_blocks)]:
            return min(has_room, key=lambda host: len(self._blocks[host]))
        return before if before is not None else max(hosts, key=lambda host: self._capacities[host] - self._used[host])

    def _has_room(self, host: int, num_blocks: int) -> bool:
        if self._used[host] + num_blocks > self._capacities[host]:
            self._look_again(host)
        return self._used[host] + num_blocks <= self._capacities[host]

    def _put(self, request_id: str, host: int, num_blocks: int) -> None:
        self._hosts[request_id] = host
        self._blocks[host][request_id] = num_blocks
        self._used[host] += num_blocks

    def _look_again(self, host: int) -> None:
        """Take note of blocks that the requests of a host have given back, or taken, since they were looked at."""
        for request_id, known in list(self._blocks[host].items()):
            if (num_blocks := self._held(request_id)) != known:
                self.forget(request_id)
                if num_blocks:
                    self._put(request_id, host, num_blocks)
