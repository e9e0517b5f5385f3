"""``sarathi``: LS first, chunked prefill under a fixed token budget, BE fills the rest (the papers' Sarathi-P)."""

from __future__ import annotations

from omniserve.core.plan import StepPlan
from omniserve.sched.batch import Batch
from omniserve.sched.policy import SCHEDULERS, Policy
from omniserve.sched.state import BE, LS


@SCHEDULERS.register("sarathi")
class SarathiPolicy(Policy):
    """Decodes before prefills, LS before BE; device only. BE gives way, by recomputing, when memory is short.

    Paper: omniserve 5.1.3, conserve 6.1 (Sarathi-Preemptive).
    """

    def schedule(self, now_s: float) -> StepPlan:
        batch = Batch(self.requests, now_s)
        batch.run_admitted(LS, victims=(BE, LS))
        batch.admit_waiting(LS, victims=(BE,))
        batch.run_admitted(BE, victims=(BE,))
        if not self.requests.waiting[LS]:  # a BE prompt must not take the memory that an LS one waits for
            batch.admit_waiting(BE)
        return batch.plan()
