"""StagedLoop: the layer loop of one stage of several, whose rows come from the stage before and go on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from omniserve.core.plan import StepPlan
from omniserve.ops.stage_link import StageLink
from omniserve.runner.layer_loop import LayerLoop, MakeLoop, StepRun
from omniserve.runner.step_inputs import LayersOutput, SampledRows, StepInputs


@dataclass(kw_only=True, slots=True)
class StagedLoop(LayerLoop):
    """Runs the layers of one stage; only the last stage has rows that are sampled."""

    link: StageLink

    def _output(self, run: StepRun) -> LayersOutput:
        """Send the rows of a step on, if there is a stage behind."""
        if self.link.is_last:
            return LayerLoop._output(self, run)
        self.link.send(run.hidden_TD)
        nothing = torch.empty(0, dtype=torch.int64, device=self.model.device)
        return LayersOutput(run.hidden_TD, SampledRows(nothing, (), ()))

    def _first_hidden(self, plan: StepPlan, inputs: StepInputs) -> Tensor:
        if self.link.is_first:
            return LayerLoop._first_hidden(self, plan, inputs)
        return self.link.receive(len(inputs.token_ids_T))


def loop_of_stage(link: StageLink) -> MakeLoop:
    """Return what makes the loop of a rank with these connections."""
    return LayerLoop if link.is_first and link.is_last else partial(StagedLoop, link=link)
