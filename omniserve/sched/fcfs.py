"""``fcfs``: arrival order, whatever the class (vLLM's default policy)."""

from __future__ import annotations

from omniserve.core.plan import StepPlan
from omniserve.sched.base import SCHEDULERS
from omniserve.sched.batch import Batch
from omniserve.sched.policy import RequestScheduler
from omniserve.sched.state import Phase


@SCHEDULERS.register("fcfs")
class FCFSScheduler(RequestScheduler):
    """Continuous batching with chunked prefill; the youngest request is recomputed when memory is short."""

    def schedule(self, now_s: float) -> StepPlan:
        batch = Batch(self.kv, self.limits.max_step_tokens)
        preemptions = self.num_preemptions
        for state in self.in_arrival_order(self.device.values()):
            if state.phase is Phase.DEVICE:
                self.run_or_preempt_youngest(batch, state)
        if self.num_preemptions == preemptions:
            for state in self.in_arrival_order(self.waiting.values()):
                if not self.admit(batch, state):
                    break
        return self.make_plan(batch, now_s)
