"""``fcfs``: arrival order, whatever the class (vLLM's default policy)."""

from __future__ import annotations

from omniserve.core.plan import StepPlan
from omniserve.sched.batch import Batch
from omniserve.sched.policy import SCHEDULERS, Policy
from omniserve.sched.state import by_arrival


@SCHEDULERS.register("fcfs")
class FCFSPolicy(Policy):
    """Continuous batching with chunked prefill; the youngest request is recomputed when memory is short."""

    def schedule(self, now_s: float) -> StepPlan:
        batch, requests = Batch(self.requests, now_s), self.requests
        preemptions = requests.num_preemptions
        batch.run_by_arrival(requests.device)
        if requests.num_preemptions == preemptions:
            for state in by_arrival(requests.waiting.values()):
                if batch.admit(state) is not None:
                    break
        return batch.plan()
