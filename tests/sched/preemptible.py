"""Policies whose rows leave a step whenever they are asked to."""

from __future__ import annotations

import dataclasses
import random

from omniserve.core.plan import StepPlan
from omniserve.core.request import SLO, ClassSpec, Request
from omniserve.sched.baselines import SarathiPolicy
from omniserve.sched.omniserve import OmniServePolicy
from omniserve.sched.options import LayerPreemptionOptions
from omniserve.sched.state import BE

NAME = "tests.sched.preemptible:PreemptibleSarathi"
DEFERRING = "tests.sched.preemptible:DeferringOmniServe"
CLASSES = tuple(
    ClassSpec(name=name, kind=kind) for name, kind in {"GOLD": "LS", "SILVER": "LS", "BRONZE": "LS", "BE": "BE"}.items()
)


class PreemptibleSarathi(SarathiPolicy):
    """``sarathi`` with safepoints."""

    options_type = LayerPreemptionOptions

    def schedule(self, now_s: float) -> StepPlan:
        plan = super().schedule(now_s)
        states = self.requests.states
        chunks = (dataclasses.replace(c, is_preemptible=states[c.request_id].kind is BE) for c in plan.chunks)
        return dataclasses.replace(plan, chunks=tuple(chunks))

    def to_preempt(self, request: Request, slo: SLO, waited_s: float, now_s: float) -> frozenset[str]:
        return frozenset(self.requests.states)


class DeferringOmniServe(OmniServePolicy):
    """``omniserve`` with ``defer_classes``; beside the rows that must leave, others do, whatever their slack."""

    def set_up(self) -> None:
        super().set_up()
        self._rng = random.Random(0)

    def to_preempt(self, request: Request, slo: SLO, waited_s: float, now_s: float) -> frozenset[str]:
        share = self._rng.choice([0.0, 0.3, 1.0])
        others = {request_id for request_id in self.requests.states if self._rng.random() < share}
        return super().to_preempt(request, slo, waited_s, now_s) | others
