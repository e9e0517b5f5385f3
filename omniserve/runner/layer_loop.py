"""LayerLoop: runs the layers of a step in shapes of its own.

What some steps do beside passing their rows through the layers is told by hooks, which have a module each
(``strategies``). The loop knows none of them.

Legend: T rows, D hidden, N query heads, K KV heads, H head size, P seats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from typing import Protocol

import torch
from torch import Tensor

from omniserve.core.plan import StepPlan
from omniserve.core.work import HostEvent
from omniserve.kv.storage import DeviceKVStorage
from omniserve.layers.patched_model import BetweenHook, PatchedModel, Rotary
from omniserve.ops.attention import DeviceAttention
from omniserve.runner.piggyback_rows import PiggybackRows
from omniserve.runner.states import StepStates
from omniserve.runner.step_inputs import (
    LayersOutput,
    PendingTokens,
    SampledRows,
    SeatRows,
    StepInputs,
    make_step_inputs,
    sampled_rows,
)

# Looked up once: the attribute chain costs as much as a small operator.
_store_kv = torch.ops.omniserve.store_kv.default


@dataclass(kw_only=True, slots=True)
class StepRun:
    """A step on its way through the layers; hooks change it."""

    plan: StepPlan
    """The plan of the rows that are in the step now."""
    inputs: StepInputs
    rotary: Iterator[Rotary]
    """The rotary tables of the next layer and those behind it."""
    hidden_TD: Tensor
    between: BetweenHook | None
    attend: Callable[[StepRun, int, Tensor, Tensor, Tensor, Tensor], Tensor]
    """Attention of the rows, with the arguments of an ``AttentionHook`` behind the step."""
    joining: Callable[[StepRun, int], SeatRows | None]
    """Returns the seats into which results come at a layer; None if all stay empty."""
    absent: set[str]
    """Requests whose host rows are in the plan and do not go on with the step, as far as that is known."""


class HeldEvents:
    """Host events that a step comes upon before the scheduler asks for them."""

    def __init__(self) -> None:
        self.events: list[HostEvent] = []

    def hold(self, event: HostEvent) -> None:
        """Hold an event for the scheduler."""
        self.events.append(event)

    def take(self) -> list[HostEvent]:
        """Return, once, the events that are held, in their order."""
        events, self.events = self.events, []
        return events


class StepHooks:
    """Changes the way of one step through the layers. Each method may be overridden; these do nothing."""

    stops = False
    """The layers are run one by one, for ``before_layer`` and ``after_layer``."""
    fits_graphs = False
    """The step may also run in a captured shape, without these hooks unless ``cuda_graphs`` calls them."""

    def first_rows(self, plan: StepPlan) -> StepPlan:
        """Return the plan of the rows that pass the first layer."""
        return plan

    def begin(self, run: StepRun) -> None:
        """Set how the step attends, before its first layer."""

    def before_layer(self, run: StepRun, layer: int) -> None:
        """Act before a layer."""

    def after_layer(self, run: StepRun, layer: int) -> None:
        """Act behind a layer."""

    def finish(self, run: StepRun, output: LayersOutput) -> LayersOutput:
        """Return the output of the layers, with what these hooks add to it."""
        return output


class StepStrategy(Protocol):
    """A kind of steps that need hooks. A runner is given it if its settings can ask for such steps (``strategies``)."""

    def hooks(self, plan: StepPlan) -> StepHooks | None:
        """Return the hooks of a step that begins; None: it is no such step."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request, which has ended."""
        ...


@dataclass(kw_only=True, slots=True)
class LayerLoop:
    """Runs the layers of any plan."""

    model: PatchedModel
    storage: DeviceKVStorage
    attend: DeviceAttention
    rows: PiggybackRows
    pending: PendingTokens
    states: StepStates

    def run(self, plan: StepPlan) -> LayersOutput:
        """Run the layers of a step."""
        run = self._begin(plan)
        self._run_layers(run, self.model.layers)
        return self._output(run)

    def run_with(self, plan: StepPlan, hooks: Sequence[StepHooks]) -> LayersOutput:
        """Run the layers of a step with hooks."""
        for each in hooks:
            plan = each.first_rows(plan)
        run = self._begin(plan)
        for each in hooks:
            each.begin(run)
        return self.go_on(run, hooks)

    def go_on(self, run: StepRun, hooks: Sequence[StepHooks], *, first_layer: int | None = None) -> LayersOutput:
        """Run the layers of a step that has begun, from one on; None: from the first of the layers here."""
        here = self.model.layers
        stride = 1 if any(each.stops for each in hooks) else len(here)
        for layer in range(here.start if first_layer is None else first_layer, here.stop, stride):
            for each in hooks:
                each.before_layer(run, layer)
            self._run_layers(run, range(layer, min(layer + stride, here.stop)))
            for each in hooks:
                each.after_layer(run, layer)
        output = self._output(run)
        for each in hooks:
            output = each.finish(run, output)
        return output

    def _output(self, run: StepRun) -> LayersOutput:
        """Return the rows of a step behind the last of the layers here."""
        return LayersOutput(run.hidden_TD, run.inputs.sampled)

    def begin_at(self, plan: StepPlan, layer: int, hidden_TD: Tensor) -> StepRun:
        """Return a step whose rows go into a layer, the rotary tables from there on included."""
        return self._step_run(plan, self._inputs(plan), hidden_TD, layer)

    def change_rows(self, run: StepRun, plan: StepPlan, layer: int, hidden_TD: Tensor) -> None:
        """Go on before a layer with the rows of another plan; its seats are the same, and what is known of them."""
        inputs = dataclasses.replace(self._inputs(plan), joining=run.inputs.joining)
        run.plan, run.inputs, run.hidden_TD = plan, inputs, hidden_TD
        run.rotary = islice(self._rotary(inputs), layer, None)
        run.between = self.states.of_plan(plan, run.absent)

    def sampled(self, run: StepRun) -> SampledRows:
        """Return the rows of a step that become logits, without those of absent requests."""
        return sampled_rows(
            run.plan,
            num_layers=self.model.num_layers,
            first_seat=run.inputs.num_device_rows,
            device=self.model.device,
            absent=run.absent,
        )

    def _begin(self, plan: StepPlan) -> StepRun:
        """Return a step before the first of the layers here."""
        inputs = self._inputs(plan)
        return self._step_run(plan, inputs, self._first_hidden(plan, inputs), self.model.layers.start)

    def _first_hidden(self, plan: StepPlan, inputs: StepInputs) -> Tensor:
        """Return the hidden states ``[T, D]`` that go into the first of the layers here."""
        self.pending.fill(inputs.token_ids_T, plan)
        return self.model.embed(inputs.token_ids_T, inputs.positions_T, inputs.lora_slots_T)

    def _step_run(self, plan: StepPlan, inputs: StepInputs, hidden_TD: Tensor, layer: int) -> StepRun:
        absent: set[str] = set()
        return StepRun(
            plan=plan,
            inputs=inputs,
            hidden_TD=hidden_TD,
            absent=absent,
            joining=_planned,
            rotary=islice(self._rotary(inputs), layer, None),
            between=self.states.of_plan(plan, absent),
            attend=self._attend_with_seats if inputs.num_seats else self.attend_device,
        )

    def _inputs(self, plan: StepPlan) -> StepInputs:
        block_size, num_layers = self.storage.block_size, self.model.num_layers
        return make_step_inputs(
            plan,
            block_size=block_size,
            num_layers=num_layers,
            max_host_rows=self.rows.max_rows,
            device=self.model.device,
        )

    def _rotary(self, inputs: StepInputs) -> Iterator[Rotary]:
        """Return (cos, sin) ``[T, H]`` of each layer's pre-attention; in the seats each layer has other tokens."""
        if inputs.num_seats:
            return self.rows.rotary_per_layer(inputs)
        return repeat(self.model.rotary(inputs.positions_T) or (None, None), self.model.num_layers)

    def _run_layers(self, run: StepRun, layers: range) -> None:
        if not run.inputs.num_device_rows:
            self._run_seats(run, layers)
            return
        attend = partial(run.attend, run)
        run.hidden_TD = self.model.run_layers(layers, run.hidden_TD, run.rotary, attend, between=run.between)

    def attend_device(
        self, run: StepRun, layer: int, hidden_TD: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor
    ) -> Tensor:
        """Attend for the device rows; arguments and result are theirs alone."""
        inputs = run.inputs
        k_cache, v_cache = self.storage.k_layers[layer], self.storage.v_layers[layer]
        _store_kv(k_TKH, v_TKH, k_cache, v_cache, inputs.slot_mapping)
        out_TNH = self.attend(q_TNH, k_cache, v_cache, inputs.attention, self.model.spec.attention[layer])
        return out_TNH.view(inputs.num_device_rows, -1)

    def _attend_with_seats(
        self, run: StepRun, layer: int, hidden_TD: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor
    ) -> Tensor:
        inputs = run.inputs
        if (leaving := inputs.leaving(layer)) is not None:
            self.rows.leave(layer, leaving, hidden_TD, q_TNH, k_TKH, v_TKH)
        n = inputs.num_device_rows
        attn_TD = self.attend_device(run, layer, hidden_TD, q_TNH[:n], k_TKH[:n], v_TKH[:n])
        joining = run.joining(run, layer)
        rows_P = joining.rows_P if joining is not None else self.rows.empty_seats(inputs.num_seats)
        return self.rows.join(rows_P, attn_TD, hidden_TD)

    def _run_seats(self, run: StepRun, layers: range) -> None:
        """Run only the halves that rows in seats need, in a step without device rows."""
        inputs, between, hidden_TD = run.inputs, run.between, run.hidden_TD
        for layer, (cos, sin) in zip(layers, run.rotary, strict=False):
            if (leaving := inputs.leaving(layer)) is not None:
                if between is not None:
                    hidden_TD = between(layer, hidden_TD)
                q_TNH, k_TKH, v_TKH = self.model.pre_attention(layer, hidden_TD, cos, sin)
                self.rows.leave(layer, leaving, hidden_TD, q_TNH, k_TKH, v_TKH)
            if (joining := run.joining(run, layer)) is not None:
                attn_TD = self.rows.join(joining.rows_P, self.rows.no_results, hidden_TD)
                hidden_TD = self.model.post_attention(layer, attn_TD, hidden_TD)
        if between is not None and layers.stop - 1 in inputs.joining and layers.stop == self.model.num_layers:
            hidden_TD = between(layers.stop, hidden_TD)
        run.hidden_TD = hidden_TD


def _planned(run: StepRun, layer: int) -> SeatRows | None:
    """Return the seats that the plan fills at a layer."""
    return run.inputs.joining.get(layer)


MakeLoop = Callable[..., LayerLoop]
"""Makes the loop of a runner, from the fields of ``LayerLoop``."""
