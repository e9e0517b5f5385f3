"""StateSlots: which slot holds a request's recurrent states, for models with layers that have state instead of KV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omniserve.core.work import StateLoad
from omniserve.sched.features.base import FeatureContext, StepFeature
from omniserve.sched.state import Phase, RequestState


class StateSlots(StepFeature):
    """Gives a slot to each request that has computed tokens.

    A slot is taken back when its request has ended or waits anew; steps that were launched may still use it. The next
    request begins without a state, so it reads nothing of what they leave there.
    """

    def __init__(self, context: FeatureContext) -> None:
        self._num_slots, self._side_work = context.limits.num_state_slots, context.side_work
        self._free = list(range(self._num_slots - 1, -1, -1))

    def on_phase(self, state: RequestState, phase: Phase) -> None:
        if phase is Phase.MOVING:
            self._take(state)
        elif phase is Phase.DEVICE:
            if (states := _take_arrived(state)) is not None:
                self._take(state)
                self._side_work.begin(StateLoad(state_slot=state.state_slot, states=states))
        elif phase is not Phase.HOST and state.state_slot >= 0:
            self._free.append(state.state_slot)
            state.state_slot = -1

    def chunk_fields(self, state: RequestState) -> Mapping[str, Any]:
        if state.phase is Phase.WAITING:
            _take_arrived(state)  # of no use: the KV was not all there any more
        self._take(state)
        return {"state_slot": state.state_slot}

    def _take(self, state: RequestState) -> None:
        if state.state_slot < 0:
            state.state_slot = self._free.pop()  # never empty: see ``options.num_state_slots``

    def stats(self) -> Mapping[str, int]:
        return {"state_slots_used": self._num_slots - len(self._free), "state_slots_total": self._num_slots}

    def check(self, states: list[RequestState]) -> None:
        """Verify that just the requests with KV hold a slot each.

        Raises:
            AssertionError: They do not.
        """
        held = [state.state_slot for state in states if state.state_slot >= 0]
        assert sorted(held + self._free) == list(range(self._num_slots)), (sorted(held), sorted(self._free))
        for state in states:
            has_tokens = state.phase not in (Phase.WAITING, Phase.LOADING, Phase.ENDING)
            assert (state.state_slot >= 0) == has_tokens, (state.request_id, state.phase)


def _take_arrived(state: RequestState) -> bytes | None:
    """Return, once, the recurrent states that have come with a request's KV; None: there are none."""
    if state.prefix is None:
        return None
    states, state.prefix.states = state.prefix.states, None
    return states
