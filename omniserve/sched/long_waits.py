"""LongWaits: best-effort requests that have waited for as long as the operator lets them go before other such work."""

from __future__ import annotations

import itertools

from omniserve.sched.batch import Batch
from omniserve.sched.state import BE, Phase, RequestState
from omniserve.sched.view import RequestView

_LOOKS = 16
"""Looks at the queues in the course of a bound; a request counts as late at the look before."""


class LongWaits:
    """Finds the BE requests that have got no token for ``bound_s``, and makes room for them.

    A wait begins with the arrival, the first chunk or the newest token, whichever was last.
    """

    def __init__(self, view: RequestView, bound_s: float) -> None:
        self._view, self._memory = view, view.memory
        self._bound_s, self._between_s = bound_s, bound_s / _LOOKS
        self._next_look_s = 0.0
        self._late: list[RequestState] = []

    def late(self, now_s: float) -> list[RequestState]:
        """Return late requests, those on the device first, as many as there are places on it at most."""
        latest_s = now_s + self._between_s - self._bound_s
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + self._between_s
            everyone = itertools.chain(self._view.device[BE], self._view.waiting[BE])
            late = (state for state in everyone if _since_s(state) <= latest_s)
            self._late = [*itertools.islice(late, self._view.limits.config.max_num_seqs)]
        reachable = (state for state in self._late if state.phase in (Phase.DEVICE, Phase.WAITING))
        return [state for state in reachable if _since_s(state) <= latest_s and state not in self._view.hidden]

    def make_room(self, batch: Batch, state: RequestState) -> bool:
        """Preempt BE requests that are not late until there are memory and a place for one; False: they do not do."""
        shortage = self._memory.blocks_for(state) - self._memory.num_blocks(state)
        shortage += self._memory.reserve_for_ls(state) - self._memory.num_free
        num_places = int(state.phase is Phase.WAITING and self._memory.is_full(BE))
        freed_by = self._memory.freed_by()
        chosen: list[RequestState] = []
        for victim in reversed(self._view.device[BE]):
            if shortage <= 0 and len(chosen) >= num_places:
                break
            if victim.phase is Phase.DEVICE and victim not in batch and victim not in self._late:
                chosen.append(victim)
                shortage -= freed_by(victim)
        if shortage > 0 or len(chosen) < num_places:
            return False
        for victim in chosen:
            batch.preempt(victim)
        return bool(chosen)


def _since_s(state: RequestState) -> float:
    times = (state.arrival_s, state.first_scheduled_s, state.last_token_s)
    return max(time_s for time_s in times if time_s is not None)
