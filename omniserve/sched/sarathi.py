"""``sarathi``: LS first, chunked prefill under a fixed token budget, BE fills the rest (the papers' Sarathi-P)."""

from __future__ import annotations

from omniserve.plan import StepPlan
from omniserve.request import ServiceClass
from omniserve.sched.base import SCHEDULERS
from omniserve.sched.batch import Batch
from omniserve.sched.policy import BE, LS, RequestScheduler
from omniserve.sched.state import Phase


@SCHEDULERS.register("sarathi")
class SarathiScheduler(RequestScheduler):
    """Decodes before prefills, LS before BE; device only. BE gives way, by recomputing, when memory is short.

    Paper: omniserve 5.1.3.
    """

    def schedule(self, now_s: float) -> StepPlan:
        batch = Batch(self.kv, self.limits.max_step_tokens)
        self._run_admitted(batch, LS, victims=(BE, LS))
        for state in self.waiting[LS]:
            self.make_room(self.blocks_for(state), batch, (BE,))
            if not self.admit(batch, state):
                break
        self._run_admitted(batch, BE, victims=(BE,))
        if not self.waiting[LS]:  # a BE prompt must not take the memory that an LS one waits for
            for state in self.waiting[BE]:
                if not self.admit(batch, state):
                    break
        return self.make_plan(batch, now_s)

    def _run_admitted(self, batch: Batch, kind: ServiceClass, victims: tuple[ServiceClass, ...]) -> None:
        for decodes in (True, False):
            for state in self.device[kind]:
                if state.phase is Phase.DEVICE and state.decodes is decodes and state not in batch:
                    self.run_or_preempt(batch, state, victims)
