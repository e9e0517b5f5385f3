"""StateSlots: which slot holds a request's recurrent states, for models with layers that have state instead of KV."""

from __future__ import annotations

from omniserve.core.config import EngineConfig
from omniserve.core.spec import ModelSpec
from omniserve.core.work import StateLoad
from omniserve.sched.side_work import SideWorkQueue
from omniserve.sched.state import Phase, RequestState


class StateSlots:
    """Gives a slot to each request that has computed tokens. Without slots the model has no such states."""

    def __init__(self, num_slots: int, side_work: SideWorkQueue) -> None:
        self.num_slots, self._side_work = num_slots, side_work
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def of(self, state: RequestState) -> int:
        """Return a request's slot, which it takes if it has none; -1 if the model has no states."""
        if state.state_slot < 0 and self.num_slots:
            state.state_slot = self._free.pop()  # never empty: see ``num_state_slots``
        return state.state_slot

    def release(self, state: RequestState) -> None:
        """Take back the slot of a request that has ended or starts anew; steps that were launched may still use it.

        The next request begins without a state, so it reads nothing of what they leave there.
        """
        if state.state_slot >= 0:
            self._free.append(state.state_slot)
            state.state_slot = -1

    def load(self, state: RequestState, states: bytes) -> None:
        """Have the next step begin with these states in a request's slot."""
        self._side_work.begin(StateLoad(state_slot=self.of(state), states=states))

    def check(self, states: list[RequestState]) -> None:
        """Verify that just the requests with KV hold a slot each.

        Raises:
            AssertionError: They do not.
        """
        held = [state.state_slot for state in states if state.state_slot >= 0]
        assert sorted(held + self._free) == list(range(self.num_slots)), (sorted(held), sorted(self._free))
        for state in states:
            has_tokens = state.phase not in (Phase.WAITING, Phase.LOADING, Phase.ENDING)
            assert (state.state_slot >= 0) == (has_tokens and self.num_slots > 0), (state.request_id, state.phase)


def num_state_slots(config: EngineConfig, spec: ModelSpec, *, has_host_tier: bool) -> int:
    """Return the most requests that can have computed tokens at a time; 0 if the model keeps no states of them.

    That is as many on the device for each kind as for all (see ``MemoryRules.is_full``), and those of the host tier.
    """
    if not spec.state_bytes:
        return 0
    return 2 * config.max_num_seqs + (config.max_host_requests if has_host_tier else 0)
