"""Policies whose rows leave a step whenever they are asked to."""

from __future__ import annotations

import dataclasses
import random

from omniserve.core.plan import StepPlan
from omniserve.core.request import SLO, ClassSpec, Request
from omniserve.sched.baselines import SarathiPolicy
from omniserve.sched.best_effort import BestEffortWork
from omniserve.sched.co_serving import CoServingPolicy, CoServingStep
from omniserve.sched.omniserve import SeatsByRate
from omniserve.sched.options import CoServingOptions, LayerPreemptionOptions
from omniserve.sched.piggyback import PiggybackChoice
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
        states = self.view.states
        chunks = (dataclasses.replace(c, is_preemptible=states[c.request_id].kind is BE) for c in plan.chunks)
        return dataclasses.replace(plan, chunks=tuple(chunks))

    def to_preempt(self, request: Request, slo: SLO, waited_s: float, now_s: float) -> frozenset[str]:
        return frozenset(self.view.states)


class DeferringOmniServe(CoServingPolicy):
    """``omniserve`` with ``defer_classes``; beside the rows that must leave, others do, whatever their slack."""

    options_type = CoServingOptions
    options: CoServingOptions

    def set_up(self) -> None:
        best_effort = BestEffortWork.of(self.view, self.options, self.forecast)
        max_seats, max_rows = self.limits.config.max_piggyback_seats, self.options.most_rows(self.limits)
        seats = SeatsByRate(best_effort, max_seats=max_seats, max_rows=max_rows)
        rows = PiggybackChoice(self.view, max_rows, seats)
        self.step = CoServingStep.of(self.view, self.options, self.forecast, best_effort, rows)
        self._rng = random.Random(0)

    def to_preempt(self, request: Request, slo: SLO, waited_s: float, now_s: float) -> frozenset[str]:
        share = self._rng.choice([0.0, 0.3, 1.0])
        others = {request_id for request_id in self.view.states if self._rng.random() < share}
        return super().to_preempt(request, slo, waited_s, now_s) | others
