"""RequestQueue: requests of one kind in the order in which they are served."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence, Set
from operator import attrgetter

from omniserve.sched.fairness import Account, in_turn
from omniserve.sched.state import RequestState

_PRIORITY_KEY = attrgetter("priority_key")


def _place(state: RequestState) -> tuple[int, float, tuple[int, float, int]]:
    """Return the place of the first request of an account; see ``fairness.in_turn``."""
    return state.priority_key[0], state.account.virtual_time, state.priority_key


class RequestQueue:
    """Requests of one kind by class, and then as ``fairness`` says: of one tenant by due time and then arrival.

    Requests in the set ``hidden``, which others may change at any time, count, but only ``everyone`` returns them.
    """

    def __init__(self, hidden: Set[RequestState] = frozenset()) -> None:
        self._hidden = hidden
        self._lanes: dict[Account, list[RequestState]] = {}
        """The requests of each account by ``priority_key``; no lane is empty."""
        self._size = 0

    def add(self, state: RequestState) -> None:
        bisect.insort(self._lanes.setdefault(state.account, []), state, key=_PRIORITY_KEY)
        self._size += 1

    def remove(self, state: RequestState) -> None:
        lane = self._lanes.get(state.account, [])
        index = bisect.bisect_left(lane, state.priority_key, key=_PRIORITY_KEY)
        if index == len(lane) or lane[index] is not state:
            raise KeyError(state.request_id)
        del lane[index]
        if not lane:
            del self._lanes[state.account]
        self._size -= 1

    @property
    def accounts(self) -> Iterable[Account]:
        """The accounts with requests here."""
        return self._lanes.keys()

    @property
    def first(self) -> RequestState | None:
        """The first that is shown; None: there is none."""
        heads = [head for head in map(self._first_shown, self._lanes.values()) if head is not None]
        return min(heads, key=_place) if heads else None

    def _first_shown(self, lane: Sequence[RequestState]) -> RequestState | None:
        hidden = self._hidden
        return next((state for state in lane if state not in hidden), None) if hidden else lane[0]

    def oldest_of(self, account: Account) -> RequestState:
        """Return the first of the requests of an account, which has some."""
        return self._lanes[account][0]

    def __iter__(self) -> Iterator[RequestState]:
        """Yield requests in their order, over a snapshot: the queue may change meanwhile."""
        return self._in_order(self._hidden)

    def __reversed__(self) -> Iterator[RequestState]:
        return reversed(tuple(self))

    def _in_order(self, without: Set[RequestState]) -> Iterator[RequestState]:
        if len(self._lanes) == 1:
            (lane,) = self._lanes.values()
            return iter([state for state in lane if state not in without] if without else tuple(lane))
        lanes: dict[Account, Sequence[RequestState]] = {account: tuple(lane) for account, lane in self._lanes.items()}
        if without:
            shown = ((account, [s for s in lane if s not in without]) for account, lane in lanes.items())
            lanes = {account: lane for account, lane in shown if lane}
        return in_turn(lanes)

    def __contains__(self, state: object) -> bool:
        if not isinstance(state, RequestState):
            return False
        lane = self._lanes.get(state.account, [])
        index = bisect.bisect_left(lane, state.priority_key, key=_PRIORITY_KEY)
        return index < len(lane) and lane[index] is state

    def everyone(self) -> tuple[RequestState, ...]:
        """Return all, in the same order."""
        return tuple(self._in_order(frozenset()))

    def hidden(self) -> list[RequestState]:
        """Return those that are hidden, in the same order."""
        return [state for state in self.everyone() if state in self._hidden] if self._hidden else []

    def __len__(self) -> int:
        return self._size


def by_arrival(queues: Iterable[Iterable[RequestState]]) -> list[RequestState]:
    """Merge queues, oldest request first, whatever its class."""
    return sorted(itertools.chain(*queues), key=lambda state: state.order)
