"""Policies for which a prompt's KV is there already: a step can be timed without the prefill that leads to it.

Their names for ``EngineConfig.scheduler`` are ``PRIMED`` and ``PRIMED_CONSERVE``. What the KV holds is not the
prompt's: fill it with something finite (``engines.open_engine`` does).
"""

from __future__ import annotations

from omniserve.core.plan import MoveDirection
from omniserve.sched.conserve import ConServePolicy
from omniserve.sched.omniserve import OmniServePolicy
from omniserve.sched.policy import Policy
from omniserve.sched.state import BE, Phase, RequestState

PRIMED = "benchmarks.gpu.primed:PrimedOmniServe"
PRIMED_CONSERVE = "benchmarks.gpu.primed:PrimedConServe"


class Primed(Policy):
    """Puts a request where it decodes, as if all of its prompt but the last token had been computed.

    BE requests decode on the host tier if there is one, all others on the device.
    """

    def on_arrival(self, state: RequestState, now_s: float) -> float | None:
        predicted_s = super().on_arrival(state, now_s)
        requests = self.requests
        to_host = state.kind is BE and requests.host_is_up
        if to_host and requests.residents.num_free_slots == 0:
            raise ValueError(f"the host tier has no slot for {state.request_id}: raise max_host_requests")
        if self.kv.allocate(state.request_id, state.num_tokens) is None:
            raise ValueError(f"the device pool has no room for the {state.num_tokens} tokens of {state.request_id}")
        if to_host:
            assert requests.mover is not None
            move = requests.mover.start_move(state.request_id, MoveDirection.TO_HOST)
            if move is None:
                raise ValueError(f"the host pool has no room for the {state.num_tokens} tokens of {state.request_id}")
            requests.mover.finish_move(move.move_id, succeeded=True)
            requests.residents.take_slot(state)
        requests.waiting[state.kind].remove(state)
        state.num_computed_tokens = state.num_tokens - 1
        state.phase = Phase.HOST if to_host else Phase.DEVICE
        (requests.residents.queue if to_host else requests.device[state.kind]).add(state)
        return predicted_s


class PrimedOmniServe(Primed, OmniServePolicy):
    """``omniserve``."""


class PrimedConServe(Primed, ConServePolicy):
    """``conserve``."""
