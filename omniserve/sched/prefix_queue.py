"""PrefixQueue: requests that begin alike are admitted one after another, while the cache has the KV they share."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Set

from omniserve.sched.fairness import Account
from omniserve.sched.request_queue import RequestQueue
from omniserve.sched.state import Phase, RequestState

MOST_PASSED = 64
"""Most requests of an account that may go before its oldest one."""

_Group = tuple[Account, bytes]
"""An account, and the key of a block: its requests that have all blocks up to it in common."""


class PrefixQueue(RequestQueue):
    """A queue with a second order, by prefix: of the account whose turn it is, the request that shares most blocks with
    the last admitted one is next.

    Requests that begin with the same 1, 2, 4, 8 ... blocks are a group, so the number of blocks that two requests share
    is known within a factor of two. To find the next request takes one lookup for each group of the last prompt,
    however many requests wait.
    """

    def __init__(self, hidden: Set[RequestState] = frozenset()) -> None:
        super().__init__(hidden)
        self._groups: dict[_Group, RequestQueue] = {}
        self._chosen: RequestState | None = None
        """The request that was yielded last."""
        self._last: list[bytes] = []
        """The blocks by which the request that went last is grouped, the smallest group first."""
        self._num_passed: Counter[Account] = Counter()
        """Requests of an account that went before its oldest one; none of those without requests."""

    def add(self, state: RequestState) -> None:
        super().add(state)
        for group in _groups_of(state):
            self._groups.setdefault(group, RequestQueue(self._hidden)).add(state)

    def remove(self, state: RequestState) -> None:
        groups, account = _groups_of(state), state.account
        is_oldest = state is self.oldest_of(account)
        super().remove(state)
        for group in groups:
            queue = self._groups[group]
            queue.remove(state)
            if not queue:
                del self._groups[group]
        if state is self._chosen:
            self._num_passed[account] = 0 if is_oldest else self._num_passed[account] + 1
            self._chosen, self._last = None, [key for _, key in reversed(groups)]
        if account not in self.accounts:
            del self._num_passed[account]  # of a Counter: also if there is none

    def by_prefix(self) -> Iterator[RequestState]:
        """Yield the next request by prefix, until one stays in the queue.

        Of the account whose turn it is, it is the oldest of those that share most with the one that went last. An
        oldest request that has begun before or has a due time comes first, and so does one that ``MOST_PASSED`` others
        have passed.
        """
        while (oldest := self.first) is not None:
            self._chosen = state = self._next(oldest)
            yield state
            if state.phase is Phase.WAITING:
                return

    def _next(self, oldest: RequestState) -> RequestState:
        num_passed = self._num_passed[oldest.account]
        if num_passed < MOST_PASSED and oldest.first_scheduled_s is None and not oldest.has_due_time:
            for key in self._last:
                queue = self._groups.get((oldest.account, key))
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
    return [(state.account, known[size - 1]) for size in sizes]
