"""LeavableGraphRunner: rows may leave a captured step between its pieces, and the other layers run without them.

Legend: T device rows, P piggyback seats, L layers, N query heads, H head size.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import Tensor

from omniserve.core.plan import StepPlan
from omniserve.core.setup import RunnerSetup
from omniserve.runner.cuda_graphs.capture import Attend, PiecewiseStep
from omniserve.runner.cuda_graphs.graph_runner import CudaGraphRunner
from omniserve.runner.cuda_graphs.inputs import StaticInputs
from omniserve.runner.late_results import LateStep
from omniserve.runner.layer_loop import LayerLoop, StepHooks
from omniserve.runner.rank_broadcast import RankBroadcast
from omniserve.runner.safepoint import Safepoints
from omniserve.runner.step_inputs import LayersOutput


class LeavableGraphRunner(CudaGraphRunner):
    """Asks before the attention of each layer of a PIECEWISE step whether rows must leave it.

    If they must, the replay ends there: the step has kept what went into the layer, from which ``LayerLoop`` goes on.
    """

    keeps_layer_input = True

    def __init__(self, setup: RunnerSetup, *, loop: LayerLoop, broadcast: RankBroadcast) -> None:
        super().__init__(setup, loop=loop, broadcast=broadcast)
        self.num_steps_left = 0
        """Counter: steps in a constant shape that rows left before their end."""

    def _is_one_graph(self, plan: StepPlan) -> bool:
        return not plan.stops and super()._is_one_graph(plan)

    def _run_pieces(
        self,
        plan: StepPlan,
        hooks: Sequence[StepHooks],
        inputs: StaticInputs,
        replay_with: PiecewiseStep,
        attend: Attend,
    ) -> LayersOutput:
        safepoints = next((each for each in hooks if isinstance(each, Safepoints)), None)
        if safepoints is None:
            return super()._run_pieces(plan, hooks, inputs, replay_with, attend)

        def attend_or_leave(layer: int, q_TNH: Tensor) -> Tensor:
            if layer and (leaving := safepoints.leaving(layer)):
                raise _RowsLeave(layer, leaving)
            return attend(layer, q_TNH)

        try:
            hidden_TD = replay_with(attend_or_leave)
        except _RowsLeave as stop:
            return self._go_on(plan, hooks, inputs, safepoints, stop)
        return self._output(plan, inputs, hidden_TD)

    def _go_on(
        self, plan: StepPlan, hooks: Sequence[StepHooks], inputs: StaticInputs, safepoints: Safepoints, stop: _RowsLeave
    ) -> LayersOutput:
        """Run the layers that are left of a step, without padding and without the rows that leave.

        No row of the step begins behind its first layer. Rows of the host tier that leave the device at the layer have
        been sent.
        """
        self.num_steps_left += 1
        input_TD, num_seats = inputs.layer_input_TD, plan.num_piggyback_seats
        assert input_TD is not None, "rows leave a step that has not kept what goes into its layers"
        of_rows, of_seats = input_TD[: plan.num_device_tokens], input_TD[inputs.shape.rows :]
        run = self._loop.begin_at(plan, stop.layer, torch.cat([of_rows, of_seats[:num_seats]]))
        for each in hooks:
            each.begin(run)
        late = next((each for each in hooks if isinstance(each, LateStep)), None)
        assert late is not None or all(join.is_ready for join in plan.joins), "late joins have hooks"
        # A copy, as the next step writes to the same memory.
        for earlier, joined_P in enumerate(inputs.joined_LP[: stop.layer, :num_seats].clone()):
            seats = run.inputs.joining.pop(earlier, None)  # without it, no row is sent at the layer behind it once more
            if seats is not None and late is not None and late.unsettled.pop(earlier, None) is not None:
                late.found[earlier] = joined_P
        run.hidden_TD = safepoints.leave(stop.request_ids, stop.layer, run.hidden_TD)
        return self._loop.go_on(run, hooks, first_layer=stop.layer)


class _RowsLeave(Exception):
    """Ends the replay of a step at the attention of a layer, as rows of some requests must leave before the layer."""

    def __init__(self, layer: int, request_ids: Set[str]) -> None:
        super().__init__(layer)
        self.layer, self.request_ids = layer, request_ids
