"""A policy whose best-effort rows leave a step whenever they are asked to."""

from __future__ import annotations

from typing import Any

from omniserve.core.plan import StepPlan
from omniserve.core.request import SLO, Request
from omniserve.sched import SarathiScheduler
from omniserve.sched.batch import Batch
from omniserve.sched.policy import BE

NAME = "tests.sched.preemptible:PreemptibleSarathi"


class PreemptibleSarathi(SarathiScheduler):
    """``sarathi`` with safepoints."""

    def make_plan(self, batch: Batch, now_s: float, **others: Any) -> StepPlan:
        ids = frozenset(c.request_id for c in batch.chunks if self.states[c.request_id].kind is BE)
        return super().make_plan(batch, now_s, preemptible=ids, **others)

    def must_preempt(self, request: Request, slo: SLO, waited_s: float, now_s: float) -> bool:
        return True
