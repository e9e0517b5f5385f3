"""Schedulers for which a prompt's KV is there already: a step can be timed without the prefill that leads to it.

Their names for ``EngineConfig.scheduler`` are ``PRIMED`` and ``PRIMED_CONSERVE``. What the KV holds is not the
prompt's: fill it with something finite (``engines.open_engine`` does).
"""

from __future__ import annotations

from omniserve.core.plan import MoveDirection
from omniserve.core.request import SLO, Request
from omniserve.sched.conserve import ConServeScheduler
from omniserve.sched.omniserve import OmniServeScheduler
from omniserve.sched.policy import BE, RequestScheduler
from omniserve.sched.state import Phase, RequestState

PRIMED = "benchmarks.gpu.primed:PrimedScheduler"
PRIMED_CONSERVE = "benchmarks.gpu.primed:PrimedConServe"


class Primed(RequestScheduler):
    """Puts a request where it decodes, as if all of its prompt but the last token had been computed.

    BE requests decode on the host tier if there is one, all others on the device.
    """

    def add(
        self, request_id: str, request: Request, slo: SLO, now_s: float, *, arrival_s: float | None = None
    ) -> float | None:
        predicted_s = super().add(request_id, request, slo, now_s, arrival_s=arrival_s)
        state = self.states[request_id]
        try:
            self._prime(state)
        except ValueError:
            self.abort(request_id, now_s)
            raise
        return predicted_s

    def _prime(self, state: RequestState) -> None:
        to_host = state.kind is BE and self.host_is_up
        if to_host and self.residents.num_free_slots == 0:
            raise ValueError(f"the host tier has no slot for {state.request_id}: raise max_host_requests")
        if self.kv.allocate(state.request_id, state.num_tokens) is None:
            raise ValueError(f"the device pool has no room for the {state.num_tokens} tokens of {state.request_id}")
        if to_host:
            move = self.kv.start_move(state.request_id, MoveDirection.TO_HOST)
            if move is None:
                raise ValueError(f"the host pool has no room for the {state.num_tokens} tokens of {state.request_id}")
            self.kv.finish_move(move.move_id, succeeded=True)
            self.residents.take_slot(state)
        self.waiting[state.kind].remove(state)
        state.num_computed_tokens = state.num_tokens - 1
        state.phase = Phase.HOST if to_host else Phase.DEVICE
        (self.residents.queue if to_host else self.device[state.kind]).add(state)


class PrimedScheduler(Primed, OmniServeScheduler):
    """``omniserve``."""


class PrimedConServe(Primed, ConServeScheduler):
    """``conserve``."""
