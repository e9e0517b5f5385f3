"""A policy whose best-effort rows leave a step whenever they are asked to."""

from __future__ import annotations

import dataclasses

from omniserve.core.plan import StepPlan
from omniserve.core.request import SLO, Request
from omniserve.sched.baselines import SarathiPolicy
from omniserve.sched.options import LayerPreemptionOptions
from omniserve.sched.state import BE

NAME = "tests.sched.preemptible:PreemptibleSarathi"


class PreemptibleSarathi(SarathiPolicy):
    """``sarathi`` with safepoints."""

    options_type = LayerPreemptionOptions

    def schedule(self, now_s: float) -> StepPlan:
        plan = super().schedule(now_s)
        ids = frozenset(c.request_id for c in plan.chunks if self.requests.states[c.request_id].kind is BE)
        return dataclasses.replace(plan, preemptible=ids)

    def to_preempt(self, request: Request, slo: SLO, waited_s: float, now_s: float) -> frozenset[str]:
        return frozenset(self.requests.states)
