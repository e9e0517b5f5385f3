"""PrefixQueue: requests that begin alike are admitted one after another, while the cache has the KV they share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Set

from omniserve.sched.state import Phase, RequestQueue, RequestState

MOST_PASSED = 64
"""Most requests that may go before the oldest one."""

_Group = tuple[int, bytes]
"""The rank of a class, and the key of a block: the requests that have all blocks up to it in common."""


class PrefixQueue(RequestQueue):
    """A queue with a second order, by prefix: the request that shares most blocks with the last admitted one is next.

    Requests that begin with the same 1, 2, 4, 8 ... blocks are a group, so the number of blocks that two requests share
    is known within a factor of two. To find the next request takes one lookup for each group of the last prompt,
    however many requests wait.
    """

    def __init__(self, hidden: Set[RequestState] = frozenset()) -> None:
        super().__init__(hidden)
        self._groups: dict[_Group, RequestQueue] = {}
        self._chosen: RequestState | None = None
        """The request that was yielded last."""
        self._last: list[_Group] = []
        """The groups of the request that went last, the smallest first."""
        self._num_passed = 0
        """Requests that went before the oldest one."""

    def add(self, state: RequestState) -> None:
        super().add(state)
        for group in _groups_of(state):
            self._groups.setdefault(group, RequestQueue(self._hidden)).add(state)

    def remove(self, state: RequestState) -> None:
        groups, is_oldest = _groups_of(state), state is self.first
        super().remove(state)
        for group in groups:
            queue = self._groups[group]
            queue.remove(state)
            if not queue:
                del self._groups[group]
        if state is self._chosen:
            self._num_passed = 0 if is_oldest else self._num_passed + 1
            self._chosen, self._last = None, groups[::-1]

    def by_prefix(self) -> Iterator[RequestState]:
        """Yield the next request by prefix, until one stays in the queue.

        It is the oldest of the best class, of those that share most with the one that went last. An oldest request that
        has begun before or has a due time comes first, and so does one that ``MOST_PASSED`` others have passed.
        """
        while (oldest := self.first) is not None:
            self._chosen = state = self._next(oldest)
            yield state
            if state.phase is Phase.WAITING:
                return

    def _next(self, oldest: RequestState) -> RequestState:
        if self._num_passed < MOST_PASSED and oldest.first_scheduled_s is None and not oldest.has_due_time:
            for group in self._last:
                queue = self._groups.get(group) if group[0] == oldest.priority_key[0] else None
                if queue is not None and queue.first is not None:
                    return queue.first
        return oldest


def _groups_of(state: RequestState) -> list[_Group]:
    """Return a request's groups by its prompt, the largest first; none if there is no cache."""
    if state.prefix is None:
        return []
    keys = state.prefix.keys
    num_blocks = len(state.request.prompt_token_ids) // keys.block_size
    known = keys.up_to(state.token_ids, num_blocks)
    sizes = itertools.takewhile(lambda size: size <= num_blocks, (1 << power for power in itertools.count()))
    return [(state.priority_key[0], known[size - 1]) for size in sizes]
