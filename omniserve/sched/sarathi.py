"""``sarathi``: LS first, chunked prefill under a fixed token budget, BE fills the rest (the papers' Sarathi-P)."""

from __future__ import annotations

from omniserve.core.plan import StepPlan
from omniserve.sched.base import SCHEDULERS
from omniserve.sched.batch import Batch
from omniserve.sched.policy import BE, LS, RequestScheduler


@SCHEDULERS.register("sarathi")
class SarathiScheduler(RequestScheduler):
    """Decodes before prefills, LS before BE; device only. BE gives way, by recomputing, when memory is short.

    Paper: omniserve 5.1.3, conserve 6.1 (Sarathi-Preemptive).
    """

    def schedule(self, now_s: float) -> StepPlan:
        batch = Batch(self.kv, self.limits.max_step_tokens)
        self.run_admitted(batch, LS, victims=(BE, LS))
        self.admit_waiting(batch, LS, victims=(BE,))
        self.run_admitted(batch, BE, victims=(BE,))
        if not self.waiting[LS]:  # a BE prompt must not take the memory that an LS one waits for
            self.admit_waiting(batch, BE)
        return self.make_plan(batch, now_s)
