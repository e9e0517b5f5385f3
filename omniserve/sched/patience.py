"""Patience: which requests have waited for longer than they were to, before any step had them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from omniserve.sched.state import RequestState

_MOST_GONE = 64  # requests that need not be looked at any more, beside as many as there are unfinished ones


class Patience:
    """Keeps the times until which requests wait at most (``Request.max_queue_s``).

    Args:
        states: All unfinished requests, by id.
    """

    def __init__(self, states: Mapping[str, RequestState]) -> None:
        self._states = states
        self._until: list[tuple[float, int, RequestState]] = []
        """A heap of the times, with the requests; some have begun or ended."""

    def note(self, state: RequestState) -> None:
        """Take note of a new request."""
        if state.request.max_queue_s is None:
            return
        if len(self._until) > 2 * len(self._states) + _MOST_GONE:
            self._until = [entry for entry in self._until if self._waits(entry[2])]
            heapq.heapify(self._until)
        heapq.heappush(self._until, (state.arrival_s + state.request.max_queue_s, state.order, state))

    def ended(self, now_s: float) -> list[RequestState]:
        """Return, once, the requests whose time is over."""
        ended: list[RequestState] = []
        while self._until and self._until[0][0] <= now_s:
            _, _, state = heapq.heappop(self._until)
            if self._waits(state):
                ended.append(state)
        return ended

    def _waits(self, state: RequestState) -> bool:
        return self._states.get(state.request_id) is state and state.first_scheduled_s is None
