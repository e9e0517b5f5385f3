"""``non-preemptive``: LS first in every queue, but a BE request that runs is never stopped for an LS one.

Paper: conserve 6.1, "Non-Preemptive (Throughput Optimal)": online requests go first, offline ones fill the rest of a
chunked prefill's fixed budget, and those that run are not preempted when online ones arrive. So whoever runs has tokens
before whoever waits, and BE requests keep their memory to their end: an LS prompt waits for both.

Departures: the paper does not say who gives way when running requests outgrow the memory together (vLLM would recompute
the last by priority, a BE request). Here each kind recomputes its own, the youngest first, so that LS growth stops no
BE request either. The request limit does not count BE requests against LS ones, as everywhere in this engine.
"""

from __future__ import annotations

from omniserve.plan import StepPlan
from omniserve.sched.base import SCHEDULERS
from omniserve.sched.batch import Batch
from omniserve.sched.policy import BE, LS, RequestScheduler


@SCHEDULERS.register("non-preemptive")
class NonPreemptiveScheduler(RequestScheduler):
    """Running LS, running BE, waiting LS, waiting BE, under a fixed token budget."""

    def schedule(self, now_s: float) -> StepPlan:
        batch = Batch(self.kv, self.limits.max_step_tokens)
        preemptions = self.num_preemptions
        for kind in (LS, BE):
            self.run_admitted(batch, kind, victims=(kind,))
        # Whoever gave way in this step would only take back what the others need for their next tokens.
        if self.num_preemptions == preemptions and self.admit_waiting(batch, LS):
            self.admit_waiting(batch, BE)
        return self.make_plan(batch, now_s)
