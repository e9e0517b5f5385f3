"""``round-robin``: a step of LS requests, then a step of BE requests, each in arrival order.

Paper: bros 2.2 and 7.1 (the RR baseline): two FCFS queues, served in turn, iteration by iteration. A kind that has
nobody leaves its turn to the other, so no step is empty while a request is there.

Departures: prefill is chunked under the step's token budget. The paper does not say how the queues share memory: here
it goes by arrival, whatever the class. Who finds no block for the next token has the youngest of all recomputed, and a
request is not admitted past an older one of the other kind that lacks memory: steps in turn would otherwise let small
requests of one kind take, turn by turn, what a long prompt of the other waits for. Classes of one kind count as one.
"""

from __future__ import annotations

from omniserve.core.plan import Bound, StepPlan
from omniserve.core.request import ServiceClass
from omniserve.kv.base import KVManager
from omniserve.sched.base import SCHEDULERS, SchedulerLimits
from omniserve.sched.batch import Batch
from omniserve.sched.load import Forecast
from omniserve.sched.policy import BE, LS, RequestScheduler
from omniserve.sched.state import Phase, RequestState


@SCHEDULERS.register("round-robin")
class RoundRobinScheduler(RequestScheduler):
    """LS steps and BE steps in turn; FCFS with chunked prefill in each."""

    def __init__(self, *, limits: SchedulerLimits, kv: KVManager, forecast: Forecast | None = None) -> None:
        super().__init__(limits=limits, kv=kv, forecast=forecast)
        self._turn = LS
        self._lacks_memory: dict[ServiceClass, RequestState | None] = {LS: None, BE: None}

    def schedule(self, now_s: float) -> StepPlan:
        batch = Batch(self.kv, self.limits.max_step_tokens)
        first, second = (LS, BE) if self._turn is LS else (BE, LS)
        kind = next((kind for kind in (first, second) if self._serve(batch, kind)), second)
        self._turn = BE if kind is LS else LS
        return self.make_plan(batch, now_s)

    def _serve(self, batch: Batch, kind: ServiceClass) -> bool:
        """Put the requests of one kind into a batch; return whether it has any."""
        preemptions = self.num_preemptions
        for state in self.in_arrival_order([self.device[kind]]):
            if state.phase is Phase.DEVICE:
                self.run_or_preempt_youngest(batch, state)
        if self.num_preemptions == preemptions:
            self._admit(batch, kind)
        return bool(batch.chunks)

    def _admit(self, batch: Batch, kind: ServiceClass) -> None:
        other = self._lacks_memory[BE if kind is LS else LS]
        self._lacks_memory[kind] = None
        for state in self.in_arrival_order([self.waiting[kind]]):
            if other is not None and other.phase is Phase.WAITING and other.order < state.order:
                return
            if not self.admit(batch, state):
                if batch.refused_by is Bound.MEMORY:
                    self._lacks_memory[kind] = state
                return
