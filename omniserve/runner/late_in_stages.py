"""Late joins of a model in stages: each stage finds out which results have come to its layers, and tells those behind.

A rank looks at the host tier of its own layers. A result is there if all ranks of the stage have it. The stages behind
need to know which joins have missed the step: the seats of those at the stage's last layer are empty in the next stage,
too, and rank 0, in the last stage, tells the scheduler (``StepOutput.missed``). A result that has joined is told to the
scheduler all the same, which drops it (``AwayTokens.take_used``).

Paper: omniserve 3.2.3; apex 6 (the device comes to a layer once for each step in flight).
"""

from __future__ import annotations

from collections.abc import Sequence

from omniserve.core.plan import PiggybackJoin, StepPlan
from omniserve.host.arrived_results import StageEvents
from omniserve.ops import collectives
from omniserve.runner.late_results import LateJoins, LateStep, ResultCheck
from omniserve.runner.layer_loop import HeldEvents, StepHooks, StepRun
from omniserve.runner.staged_loop import StagedLoop
from omniserve.runner.step_inputs import LayersOutput


class StageResults(ResultCheck):
    """Tells which results are there by now on all ranks of a stage."""

    def __init__(self, events: StageEvents, held: HeldEvents) -> None:
        self._events, self._held = events, held

    def settle(self, joins: Sequence[PiggybackJoin], *, as_one: bool) -> list[bool]:
        self._held.events += self._events.poll()
        arrived = self._events.arrived
        came = collectives.on_all_ranks([join.is_ready or arrived.has(join) for join in joins])
        return came if all(came) or not as_one else [False] * len(joins)


class StagedLateJoins(LateJoins):
    """The strategy of steps with late joins, in a stage."""

    def __init__(self, loop: StagedLoop, results: ResultCheck) -> None:
        super().__init__(loop, results)
        self._stage = loop

    def hooks(self, plan: StepPlan) -> StepHooks | None:
        """Return the hooks of a step with late joins at any layer of the model; None: it has none."""
        return StagedLateStep(self._stage, self._results, plan) if plan.doubtful else None


class StagedLateStep(LateStep):
    """The late joins of a step in one stage."""

    def __init__(self, loop: StagedLoop, results: ResultCheck, plan: StepPlan) -> None:
        super().__init__(loop, results, plan)
        self._link, self._here = loop.link, loop.model.layers
        self._doubtful = sorted(
            (join.layer, join.request_id) for join in plan.joins if join.request_id in plan.doubtful
        )

    def begin(self, run: StepRun) -> None:
        """Empty the seats into which rows would have come at the last layer of the stage before."""
        super().begin(run)
        if earlier := self._before(self._here.start):
            is_absent = self._link.receive_flags(len(earlier))
            run.absent.update(request_id for request_id, here in zip(earlier, is_absent, strict=True) if here)
        last = self._here.start - 1
        if (joins := self.unsettled.pop(last, None)) is not None:
            self.empty_seats(run, last, [join.request_id not in run.absent for join in joins], joins)

    def finish(self, run: StepRun, output: LayersOutput) -> LayersOutput:
        """Tell the next stage which joins have missed the step; the last one returns them with its output."""
        if self._link.is_last:
            return super().finish(run, output)
        if settled := self._before(self._here.stop):
            self._link.send_flags([request_id in run.absent for request_id in settled])
        return output

    def _before(self, layer: int) -> list[str]:
        """Return the requests of doubtful joins at layers before one, in an order that all ranks have."""
        return [request_id for at, request_id in self._doubtful if at < layer]
