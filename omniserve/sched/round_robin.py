"""``round-robin``: a step of LS requests, then a step of BE requests, each in arrival order.

Paper: bros 2.2 and 7.1 (the RR baseline): two FCFS queues, served in turn, iteration by iteration. A kind without
requests leaves its turn to the other, so no step is empty while there is a request.

Departures: prefill is chunked under the step's token budget. The paper does not say how the queues share memory: here
it goes by arrival, whatever the class. If a request finds no block for its next token, the youngest of all is
recomputed, and a request is not admitted past an older one of the other kind that lacks memory: small requests of one
kind would otherwise take, turn by turn, the memory that a long prompt of the other waits for. Classes of one kind count
as one.
"""

from __future__ import annotations

from omniserve.core.plan import Bound, StepPlan
from omniserve.core.request import ServiceClass
from omniserve.sched.batch import Batch
from omniserve.sched.policy import SCHEDULERS, Policy
from omniserve.sched.state import BE, LS, Phase, RequestState, by_arrival


@SCHEDULERS.register("round-robin")
class RoundRobinPolicy(Policy):
    """LS steps and BE steps in turn; FCFS with chunked prefill in each."""

    def set_up(self) -> None:
        self._turn = LS
        self._lacks_memory: dict[ServiceClass, RequestState | None] = {LS: None, BE: None}

    def schedule(self, now_s: float) -> StepPlan:
        batch = Batch(self.requests, now_s)
        first, second = (LS, BE) if self._turn is LS else (BE, LS)
        kind = next((kind for kind in (first, second) if self._serve(batch, kind)), second)
        self._turn = BE if kind is LS else LS
        return batch.plan()

    def _serve(self, batch: Batch, kind: ServiceClass) -> bool:
        """Put the requests of one kind into a batch; return whether it has any."""
        preemptions = self.requests.num_preemptions
        batch.run_by_arrival([kind])
        if self.requests.num_preemptions == preemptions:
            self._admit(batch, kind)
        return bool(batch.chunks)

    def _admit(self, batch: Batch, kind: ServiceClass) -> None:
        other = self._lacks_memory[BE if kind is LS else LS]
        self._lacks_memory[kind] = None
        for state in by_arrival([self.requests.waiting[kind]]):
            if other is not None and other.phase is Phase.WAITING and other.order < state.order:
                return
            refused_by = batch.admit(state)
            if refused_by is Bound.MEMORY:
                self._lacks_memory[kind] = state
            if refused_by is not None:
                return
