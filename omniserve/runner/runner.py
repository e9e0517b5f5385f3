"""ModelRunner: StepPlan -> layers -> token ids, whatever the policy. Paper: omniserve 3.2, 4.

Batch rows are ``[device rows | P piggyback seats]``. They pass the layers in constant shapes where such were captured
(``cuda_graphs``), else in shapes of their own (``layer_loop``).

Legend: T rows, D hidden, P seats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from omniserve.core.plan import HostEvent, PiggybackEntry, StepOutput, StepPlan
from omniserve.host.cores import CoreSplit
from omniserve.host.tier import HostTier
from omniserve.kv.storage import DeviceKVStorage
from omniserve.layers.patching import PatchedModel
from omniserve.ops.attention import DeviceAttention
from omniserve.ops.device_copies import Mark
from omniserve.runner.cuda_graphs.graph_runner import CudaGraphRunner
from omniserve.runner.layer_loop import LayerLoop, LayersOutput, stops_between_layers
from omniserve.runner.piggyback_rows import PiggybackRows
from omniserve.runner.pipelining import SecondBatch
from omniserve.runner.safepoint import HaltedRows
from omniserve.runner.step_inputs import PendingTokens
from omniserve.sampling.prompt_scores import score_prompts
from omniserve.sampling.sampler import PendingSample, Sampler


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device has been given."""

    output: StepOutput
    """What is known of it already: all but the tokens."""
    sample: PendingSample | None
    """None: it samples nothing."""
    end: Mark | None = None
    """Of one that computes something and samples nothing: where it ends."""


class ModelRunner:
    """Executes plans.

    Args:
        model: The patched model.
        storage: The device tier's KV.
        attend: Device attention.
        sampler: Knows every request that may sample.
        tier: The host tier, or None.
        rows: Moves rows between the tiers.
        cores: Told before each step whether the host tier works.
        graphs: Runs the steps that fit a captured shape; None: nothing is captured.
        keep_halted: Keep what rows that leave a step between two layers had computed.
        safepoint: Asked between the layers of a step with preemptible rows: must they leave? None: they never do.
    """

    def __init__(
        self,
        *,
        model: PatchedModel,
        storage: DeviceKVStorage,
        attend: DeviceAttention,
        sampler: Sampler,
        tier: HostTier | None,
        rows: PiggybackRows,
        cores: CoreSplit,
        graphs: CudaGraphRunner | None = None,
        keep_halted: bool = True,
        safepoint: Callable[[], bool] | None = None,
    ) -> None:
        self._model = model
        self._storage = storage
        self._sampler = sampler
        self._tier = tier
        self._cores = cores
        self.host_works = False
        """The host tier attended, or was given something to, when the last step began. Moves do not count: a copy takes
        a small part of a step, and would cost all of it half of the cores."""
        self._early_events: list[HostEvent] = []
        self.halted = HaltedRows(keep=keep_halted)
        """Rows that left a step between two layers."""
        self._rows = rows
        self._pending = PendingTokens(model.device)
        self.graphs = graphs
        """Runs the steps that fit a captured shape."""
        self.loop = LayerLoop(
            model=model, storage=storage, attend=attend, rows=rows, halted=self.halted, pending=self._pending,
            safepoint=safepoint,
        )  # fmt: skip
        """Runs the others."""

    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one step to its end."""
        return self.collect(self.launch(plan))

    def collect(self, step: LaunchedStep) -> StepOutput:
        """Wait for a launched step's end or tokens, and for nothing that was launched after it; to be called once.

        A step without tokens is waited for, too, or the host would run ahead of the device by any number of them, and
        a request that comes then would wait for all.
        """
        if step.end is not None:
            step.end.wait()
        if step.sample is None:
            return step.output
        tokens, failed = step.sample.result()
        return dataclasses.replace(step.output, tokens=tokens, failed={**step.output.failed, **failed})

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Give the device all of a step; the CPU has run it then.

        Waits for the host tier only if the plan has a second sub-batch, and for the device if there is something to
        decide between its layers, or a prompt's log-probabilities to tell.
        """
        self._storage.copy_slots(plan.relocations)
        self._hand_over(plan)
        if plan.is_empty:
            return LaunchedStep(StepOutput(), None)
        self._rows.announce(plan)
        self._rows.bring(plan)
        has_host_rows = bool(plan.entries or plan.joins or plan.pipelined)
        self.host_works = has_host_rows or (self._tier is not None and self._tier.attends)
        self._cores.apply(host_works=self.host_works)
        self.halted.forget(chunk.request_id for chunk in plan.chunks if not chunk.from_layer)
        second = self._second_batch(plan)
        layers = self._run_layers(plan, second)
        scores, unscored = (
            score_prompts(self._model.logits, layers.hidden_TD, layers.scores) if layers.scores else ({}, {})
        )
        hidden_TD, halted = layers.hidden_TD[layers.sampling_rows], layers.halted
        request_ids, lost = list(layers.sampling_request_ids), frozenset[str]()
        if second is not None:
            second_TD, second_ids, lost = second.result()
            hidden_TD, request_ids = torch.cat([hidden_TD, second_TD]), request_ids + second_ids
        output = StepOutput(prompt_logprobs=scores, failed=unscored, halted=halted, lost=lost)
        if not request_ids:
            return LaunchedStep(output, None, end=Mark(self._model.device))
        sample = self._sampler.launch(self._model.logits(hidden_TD), request_ids)
        self._pending.note(request_ids, sample.tokens_R)
        return LaunchedStep(output, sample)

    def _run_layers(self, plan: StepPlan, second: SecondBatch | None) -> LayersOutput:
        if self.graphs is not None and (shape := self.graphs.shape_for(plan)) is not None:
            return self.graphs.run(plan, shape, self._pending)
        if stops_between_layers(plan):
            return self.loop.run_one_by_one(plan, second)
        return self.loop.run(plan)

    def take_events(self) -> list[HostEvent]:
        """Return, once, the host tier's events that came while a step waited for others."""
        events, self._early_events = self._early_events, []
        return events

    def _second_batch(self, plan: StepPlan) -> SecondBatch | None:
        if not plan.pipelined:
            return None
        assert self._tier is not None
        return SecondBatch(
            plan.pipelined,
            model=self._model,
            tier=self._tier,
            residuals_SD=self._rows.residuals_SD,
            keep=self._early_events.append,
        )

    def _hand_over(self, plan: StepPlan) -> None:
        """Tell the host tier what does not depend on this step's layers."""
        if self._tier is None:
            return
        for slot in plan.cancels:
            self._tier.cancel(slot)
        for move in plan.moves:
            self._tier.start_move(move, self._storage.k_LBKSH, self._storage.v_LBKSH)
        pipelined = (row for row in plan.pipelined if isinstance(row, PiggybackEntry))
        for entry in (*plan.entries, *pipelined):
            self._tier.begin_token(entry.slot, entry.epoch, entry.position, entry.block_ids)
