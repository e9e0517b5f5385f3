"""Fairness: the tenants of a class share by weight what the class is given, in virtual time.

A tenant's account in a class counts the tokens that were computed for it, in and out, over its weight. Whatever a
step has room for next, be it a prompt that waits or a best-effort decode, is of the tenant with the smallest count; the
order within a tenant is that of ``RequestState.priority_key``. A prompt is counted as it is admitted, an output token
as it comes. A tenant that had nothing waiting begins at the count of those that wait: time in which it asked for
nothing earns it nothing, and what it used while the others asked for nothing costs it nothing. So the counts of two
tenants that always have work waiting differ by the cost of the requests in hand at most, however many either has sent.

With one tenant in a class the order is that of arrival, as without tenants.

Paper: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), Algorithm 2 (virtual token counter), with
weights. Departures: prompt tokens that the prefix cache has cost nothing; what a preemption loses is computed again at
no cost to the tenant; a start tag keeps a request's place while it is computed in chunks.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from omniserve.core.request import INPUT_COST, OUTPUT_COST

MOST_ACCOUNTS = 4096
"""Accounts of a class above which those without requests are forgotten, but for some that are ahead of the others."""
_MOST_AHEAD = MOST_ACCOUNTS // 2


class ClassAccounts:
    """The accounts of a class, by tenant."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self.level = 0.0
        """The largest virtual time at which a request was admitted."""
        self.unfinished: set[Account] = set()
        """Accounts with unfinished requests."""
        self._most = MOST_ACCOUNTS

    def of(self, tenant: str, weight: float) -> Account:
        """Return a tenant's account, with the weight that it has now."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account(tenant, self)
        account.weight = weight
        return account

    def at_entry(self, tenant: str, waiting: Iterable[Account]) -> Account:
        """Return a tenant's account as a request that came to wait now would find it, and change nothing.

        It is a copy if the tenant has none, or would begin later than it stands.
        """
        account = self._accounts.get(tenant) or Account(tenant, self)
        if (time := account.time_at_entry(waiting)) == account.virtual_time:
            return account
        entered = copy.copy(account)
        entered.virtual_time = time
        return entered

    def __iter__(self) -> Iterator[Account]:
        yield from self._accounts.values()

    def level_now(self) -> float:
        """Return the virtual time at which a tenant begins while nothing of the class waits."""
        return max(self.level, min((each.virtual_time for each in self.unfinished), default=0.0))

    def forget_idle(self) -> None:
        """Forget accounts that would begin again where they are now, if there are many, and those ahead by least."""
        if len(self._accounts) <= self._most:
            return
        kept = [*self.unfinished]
        ahead = (each for each in self if each not in self.unfinished and each.virtual_time > self.level)
        kept += heapq.nlargest(_MOST_AHEAD, ahead, key=lambda account: account.virtual_time)
        self._accounts = {each.tenant: each for each in kept}
        self._most = max(MOST_ACCOUNTS, 2 * len(kept))


class Account:
    """What one tenant of a class was given."""

    __slots__ = ("num_unfinished", "of_class", "output_tokens", "prompt_tokens", "tenant", "virtual_time", "weight")

    def __init__(self, tenant: str, of_class: ClassAccounts) -> None:
        self.tenant, self.of_class = tenant, of_class
        self.weight = 1.0
        self.virtual_time = 0.0
        """Cost of the tokens over the weight."""
        self.num_unfinished = 0
        self.prompt_tokens = 0
        """Counter: prompt tokens that were counted."""
        self.output_tokens = 0

    def enter(self, waiting: Iterable[Account]) -> None:
        """Take note of a request that comes to wait; ``waiting`` are the accounts with requests that wait already."""
        self.virtual_time = self.time_at_entry(waiting)
        self.num_unfinished += 1
        self.of_class.unfinished.add(self)

    def time_at_entry(self, waiting: Iterable[Account]) -> float:
        """Return the virtual time with which a request that comes to wait now finds the account; see ``enter``."""
        of_class = [account for account in waiting if account.of_class is self.of_class]
        if self in of_class:
            return self.virtual_time
        level = min((account.virtual_time for account in of_class), default=None)
        return max(self.virtual_time, self.of_class.level_now() if level is None else level)

    def leave(self) -> None:
        """Take note of the end of a request."""
        self.num_unfinished -= 1
        if not self.num_unfinished:
            self.of_class.unfinished.remove(self)
            self.of_class.forget_idle()

    def admit(self, num_tokens: int) -> float:
        """Count the prompt tokens that are to be computed for a request; return its start tag."""
        tag = self.virtual_time
        self.of_class.level = max(self.of_class.level, tag)
        self.prompt_tokens += num_tokens
        self.virtual_time += INPUT_COST * num_tokens / self.weight
        return tag

    def put_out(self, num_tokens: int) -> None:
        """Count output tokens."""
        self.output_tokens += num_tokens
        self.virtual_time += OUTPUT_COST * num_tokens / self.weight


class Served(Protocol):
    """A request, as far as its place in the order goes."""

    @property
    def priority_key(self) -> tuple[int, float, int]: ...

    @property
    def next_cost(self) -> float: ...


S = TypeVar("S", bound=Served)

_Lane = tuple[int, float, tuple[int, float, int], int, Account, Sequence[S]]
"""Rank of a lane's class, start tag and key of its next request, the request's index, the account and its requests."""


def in_turn(lanes: Mapping[Account, Sequence[S]]) -> Iterator[S]:
    """Return the requests of several accounts: the best class first, in it by start tag.

    A start tag is the virtual time of the account when the requests before it in its lane have been served.

    Args:
        lanes: The requests of each account in their own order; none is empty, and they do not change meanwhile.
    """
    heads: list[_Lane[S]] = [
        (states[0].priority_key[0], account.virtual_time, states[0].priority_key, 0, account, states)
        for account, states in lanes.items()
    ]
    heapq.heapify(heads)
    return _merge(heads)


def _merge(heads: list[_Lane[S]]) -> Iterator[S]:
    while heads:
        rank, tag, _, index, account, states = heads[0]
        others = heads[1:3]  # the children of a heap's root
        if not others or min(others)[0] != rank:
            heapq.heappop(heads)
            yield from states[index:]
            continue
        state, after = states[index], index + 1
        if after < len(states):
            tag += state.next_cost / account.weight
            heapq.heapreplace(heads, (rank, tag, states[after].priority_key, after, account, states))
        else:
            heapq.heappop(heads)
        yield state
