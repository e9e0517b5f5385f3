"""Runs steps for a scheduler without an engine: each to its end, or launched while the one before it runs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from omniserve.core.plan import StepOutput, StepPlan
from omniserve.core.request import RequestOutput
from omniserve.sched import Scheduler


class Stepping:
    """Runs each plan to its end.

    Args:
        scheduler: Made the plans.
        execute: Runs one.
    """

    def __init__(self, scheduler: Scheduler, execute: Callable[[StepPlan], StepOutput]) -> None:
        self._scheduler = scheduler
        self._execute = execute

    def step(self, plan: StepPlan, now_s: float, seconds: float) -> tuple[float, list[RequestOutput]]:
        """Run a plan that was made at ``now_s``; return the time and the outputs."""
        now_s += seconds
        return now_s, self._scheduler.update(plan, self._execute(plan), now_s)

    @property
    def is_idle(self) -> bool:
        """No step is in flight."""
        return True


class OverlappingStepping(Stepping):
    """Leaves each certain plan in flight until the next one is launched, as ``Engine.step`` does."""

    def __init__(self, scheduler: Scheduler, execute: Callable[[StepPlan], StepOutput]) -> None:
        super().__init__(scheduler, execute)
        self._in_flight: tuple[StepPlan, StepOutput, float] | None = None
        self.num_overtaken = 0

    def step(self, plan: StepPlan, now_s: float, seconds: float) -> tuple[float, list[RequestOutput]]:
        scheduler, before, outputs = self._scheduler, self._in_flight, []
        self._in_flight = None
        overlaps = scheduler.is_certain(plan)
        if before is not None and not overlaps:
            now_s, outputs = self._settle(before, now_s)
            before, plan = None, scheduler.refresh(plan)
        result = self._execute(plan)
        if not overlaps:
            now_s += seconds
            scheduler.policy.busy_until_s = -math.inf
            return now_s, outputs + scheduler.update(plan, result, now_s)
        scheduler.advance(plan)
        begin_s = now_s
        if before is not None:
            self.num_overtaken += 1
            now_s, outputs = self._settle(before, now_s)
            begin_s = now_s
        self._in_flight = plan, result, begin_s + seconds
        scheduler.policy.busy_until_s = begin_s + seconds
        return now_s, outputs

    def _settle(self, flight: tuple[StepPlan, StepOutput, float], now_s: float) -> tuple[float, list[RequestOutput]]:
        plan, result, end_s = flight
        now_s = max(now_s, end_s)
        return now_s, self._scheduler.settle(plan, result, now_s)

    @property
    def is_idle(self) -> bool:
        return self._in_flight is None


class StagedStepping(Stepping):
    """Leaves as many plans in flight as a model has stages, and then runs the oldest, as an engine in stages does."""

    def __init__(self, scheduler: Scheduler, execute: Callable[[StepPlan], StepOutput], num_stages: int) -> None:
        super().__init__(scheduler, execute)
        self._num_stages = num_stages
        self._in_flight: deque[StepPlan] = deque()
        self.num_in_stages = 0
        """Plans that were made while another one was in flight."""

    def step(self, plan: StepPlan, now_s: float, seconds: float) -> tuple[float, list[RequestOutput]]:
        flights, outputs = self._in_flight, []
        assert self._scheduler.is_certain(plan)
        self.num_in_stages += bool(flights) and not plan.is_empty
        self._scheduler.advance(plan)
        flights.append(plan)
        now_s += seconds
        if plan.is_empty or len(flights) == self._num_stages:
            outputs += self._settle(now_s)
        while flights and flights[0].is_empty:
            outputs += self._settle(now_s)
        return now_s, outputs

    def _settle(self, now_s: float) -> list[RequestOutput]:
        plan = self._in_flight.popleft()
        return self._scheduler.settle(plan, self._execute(plan), now_s)

    @property
    def is_idle(self) -> bool:
        return not self._in_flight
