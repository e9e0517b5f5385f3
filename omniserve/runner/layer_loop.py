"""LayerLoop: runs the layers of a step in shapes of its own, at once or one by one.

Legend: T rows, D hidden, N query heads, K KV heads, H head size, P seats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, repeat

import torch
from torch import Tensor

from omniserve.core.plan import StepPlan
from omniserve.kv.storage import DeviceKVStorage
from omniserve.layers.patching import BetweenHook, PatchedModel, Rotary
from omniserve.ops.attention import DeviceAttention
from omniserve.ops.stage_link import StageLink
from omniserve.ops.streams import upload
from omniserve.runner.late_results import LateResults, MissedJoins
from omniserve.runner.piggyback_rows import PiggybackRows
from omniserve.runner.pipelining import HybridRows, SecondBatch, with_seats
from omniserve.runner.safepoint import HaltedRows, Safepoints
from omniserve.runner.states import StepStates
from omniserve.runner.step_inputs import (
    LayersOutput,
    PendingTokens,
    SeatRows,
    StepInputs,
    make_step_inputs,
    sampled_rows,
    wanted_flags,
)

# Looked up once: the attribute chain costs as much as a small operator.
_store_kv = torch.ops.omniserve.store_kv.default


@dataclass(kw_only=True, slots=True)
class LayerLoop:
    """Runs the layers of any plan."""

    model: PatchedModel
    storage: DeviceKVStorage
    attend: DeviceAttention
    rows: PiggybackRows
    late_results: LateResults
    halted: HaltedRows
    """Holds the rows that leave a step between two layers until a later step goes on with them."""
    pending: PendingTokens
    states: StepStates
    safepoint: Callable[[], Set[str]] | None
    """Asked between the layers of a step with preemptible rows which requests' rows must leave. None: they never do."""
    stage: StageLink = field(default_factory=StageLink)
    """The rows' way from and to other stages, if the model's layers are those of one stage of several."""

    def run(self, plan: StepPlan) -> LayersOutput:
        """Run the layers of a step whose rows are the same in all of them."""
        inputs, rotary, hidden_TD = self._begin(plan)
        between = self.states.of_plan(plan, inputs.missed)
        hidden_TD = self._run_layers(self.model.layers, inputs, rotary, between, hidden_TD)
        self.stage.send(hidden_TD)
        return self._output(plan, inputs, hidden_TD)

    def run_one_by_one(self, plan: StepPlan, second: SecondBatch | None) -> LayersOutput:
        """Run a step's layers, stopping at each of them.

        Rows may leave the step and rejoin it before a layer. A second sub-batch runs its pre-attention before the layer
        and its post-attention after it.
        """
        safepoints = self.safepoints(plan)
        inputs, rotary, hidden_TD = self._begin(safepoints.present)
        return self._stop_at_each(0, safepoints, safepoints.present, inputs, rotary, hidden_TD, second)

    def safepoints(self, plan: StepPlan) -> Safepoints:
        """Return the safepoints of a step."""
        return Safepoints(plan, halted=self.halted, must_leave=self.safepoint, device=self.model.device)

    def go_on(
        self, plan: StepPlan, safepoints: Safepoints, *, leaving: Set[str], layer: int, hidden_TD: Tensor,
        joined_LP: Tensor,
    ) -> LayersOutput:  # fmt: skip
        """Run the rest of a step of constant shape, from the layer on before which the rows of ``leaving`` leave.

        Args:
            plan: The whole step, of which no row begins behind its first layer.
            safepoints: The step's; it has not been told yet that rows leave.
            leaving: Requests with preemptible rows.
            layer: The layer. Rows of the host tier that leave the device there have been sent.
            hidden_TD: What goes into the layer: all rows of the step, without padding.
            joined_LP: The slots of the rows that joined at each layer before it; -1 in other seats.
        """
        inputs = self._inputs(plan)
        for earlier, joined_P in enumerate(joined_LP):
            seats = inputs.joining.pop(earlier, None)  # without it, no row is sent at the layer behind it once more
            if seats is not None and seats.late:
                inputs.found[earlier] = joined_P
        hidden_TD = safepoints.leave(leaving, layer, hidden_TD)
        rotary = islice(self._rotary(inputs), layer, None)
        return self._stop_at_each(layer, safepoints, plan, inputs, rotary, hidden_TD, None)

    def _stop_at_each(
        self, first_layer: int, safepoints: Safepoints, present: StepPlan, inputs: StepInputs,
        rotary: Iterator[Rotary], hidden_TD: Tensor, second: SecondBatch | None,
    ) -> LayersOutput:  # fmt: skip
        """Run the layers from the first one on; ``inputs`` and ``rotary`` are of the rows of ``present``."""
        between = self.states.of_plan(present, inputs.missed)
        for layer in range(first_layer, self.model.num_layers):
            hidden_TD = safepoints.before_layer(layer, hidden_TD)
            if safepoints.present is not present:
                present, before = safepoints.present, inputs
                # The seats are the same as before, and so is what is known of late joins.
                inputs = dataclasses.replace(
                    self._inputs(present), joining=before.joining, missed=before.missed, found=before.found
                )
                rotary = islice(self._rotary(inputs), layer, None)
                between = self.states.of_plan(present, inputs.missed)
            if second is not None:
                second.begin_layer(layer)
            hidden_TD = self._run_layers(range(layer, layer + 1), inputs, rotary, between, hidden_TD)
            if second is not None:
                second.end_layer(layer)
        return self._output(present, inputs, hidden_TD, safepoints.left)

    def run_hybrid(self, plan: StepPlan, second: SecondBatch | None, hybrid: HybridRows) -> LayersOutput:
        """Run the layers of a step whose first sub-batch has host rows; see ``pipelining``."""
        plan = with_seats(plan, self.model.num_layers)
        inputs, rotary, hidden_TD = self._begin(plan)
        attend = partial(self._attend_hybrid, inputs, hybrid)
        between = self.states.of_plan(plan, frozenset())
        hidden_TD = self.model.run_layers(range(self.model.num_layers), hidden_TD, rotary, attend, between=between)
        if second is not None:
            second.end_layer(self.model.num_layers - 1)
        inputs.missed.update(hybrid.lost)
        output = self._output(plan, inputs, hidden_TD)
        return dataclasses.replace(output, lost=output.missed, missed=frozenset())

    def _attend_hybrid(
        self, inputs: StepInputs, hybrid: HybridRows, layer: int, hidden_TD: Tensor, q_TNH: Tensor, k_TKH: Tensor,
        v_TKH: Tensor,
    ) -> Tensor:  # fmt: skip
        n = inputs.num_device_rows
        hybrid.send(layer, q_TNH[n:], k_TKH[n:], v_TKH[n:])
        attn_TD = self._attend_device(inputs, layer, hidden_TD, q_TNH[:n], k_TKH[:n], v_TKH[:n])
        return torch.cat([attn_TD, hybrid.results(layer, hidden_TD.device)])

    def _output(
        self, plan: StepPlan, inputs: StepInputs, hidden_TD: Tensor, halted: Mapping[str, int] | None = None
    ) -> LayersOutput:
        sampled, missed = inputs.sampled, frozenset(inputs.missed)
        if missed:
            sampled = sampled_rows(
                plan, num_layers=self.model.num_layers, first_seat=inputs.num_device_rows, device=self.model.device,
                missed=missed,
            )  # fmt: skip
        doubtful: MissedJoins | None = None
        if inputs.found:
            doubtful = MissedJoins(plan, inputs.found.keys(), torch.stack([*inputs.found.values()]))
        return LayersOutput(hidden_TD, sampled, halted or {}, missed, doubtful)

    def _begin(self, plan: StepPlan) -> tuple[StepInputs, Iterator[Rotary], Tensor]:
        """Return the inputs of a plan, the rotary tables of the layers here, and what the first of them is given."""
        inputs = self._inputs(plan)
        rotary = islice(self._rotary(inputs), self.model.layers.start, None)
        if not self.stage.is_first:
            return inputs, rotary, self.stage.receive(len(inputs.token_ids_T))
        self.pending.fill(inputs.token_ids_T, plan)
        return inputs, rotary, self.model.embed(inputs.token_ids_T, inputs.positions_T)

    def _inputs(self, plan: StepPlan) -> StepInputs:
        block_size, num_layers = self.storage.block_size, self.model.num_layers
        return make_step_inputs(
            plan, block_size=block_size, num_layers=num_layers, max_host_rows=self.rows.max_rows,
            device=self.model.device,
        )  # fmt: skip

    def _rotary(self, inputs: StepInputs) -> Iterator[Rotary]:
        """Return (cos, sin) ``[T, H]`` of each layer's pre-attention; in the seats each layer has other tokens."""
        if inputs.num_seats:
            return self.rows.rotary_per_layer(inputs)
        return repeat(self.model.rotary(inputs.positions_T) or (None, None), self.model.num_layers)

    def _run_layers(
        self, layers: range, inputs: StepInputs, rotary: Iterator[Rotary], between: BetweenHook | None,
        hidden_TD: Tensor,
    ) -> Tensor:  # fmt: skip
        if not inputs.num_device_rows:
            return self._run_seats(layers, inputs, rotary, between, hidden_TD)
        attend = self._attend_with_seats if inputs.num_seats else self._attend_device
        return self.model.run_layers(layers, hidden_TD, rotary, partial(attend, inputs), between=between)

    def _attend_device(
        self, inputs: StepInputs, layer: int, hidden_TD: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor
    ) -> Tensor:
        k_cache, v_cache = self.storage.k_layers[layer], self.storage.v_layers[layer]
        _store_kv(k_TKH, v_TKH, k_cache, v_cache, inputs.slot_mapping)
        out_TNH = self.attend(q_TNH, k_cache, v_cache, inputs.attention, self.model.spec.attention[layer])
        return out_TNH.view(inputs.num_device_rows, -1)

    def _attend_with_seats(
        self, inputs: StepInputs, layer: int, hidden_TD: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor
    ) -> Tensor:
        if (leaving := inputs.leaving(layer)) is not None:
            self.rows.leave(layer, leaving, hidden_TD, q_TNH, k_TKH, v_TKH)
        n = inputs.num_device_rows
        attn_TD = self._attend_device(inputs, layer, hidden_TD, q_TNH[:n], k_TKH[:n], v_TKH[:n])
        joining = self._joining(inputs, layer)
        rows_P = joining.rows_P if joining is not None else self.rows.empty_seats(inputs.num_seats)
        return self.rows.join(rows_P, attn_TD, hidden_TD)

    def _joining(self, inputs: StepInputs, layer: int) -> SeatRows | None:
        """Return the seats into which results come at a layer; None if all stay empty. Late joins are settled here."""
        seats = inputs.joining.get(layer)
        if seats is None or not seats.late:
            return seats
        if self.rows.device_looks:
            inputs.joining[layer] = self._receive(inputs, layer, seats)
        else:
            inputs.settle(layer, self.late_results.settle(seats.late, as_one=inputs.joins_as_one))
        return inputs.joining.get(layer)

    def _receive(self, inputs: StepInputs, layer: int, seats: SeatRows) -> SeatRows:
        """Let the device find out which joins of a layer have their results, and return the seats of these."""
        joined_P = torch.empty_like(seats.rows_P)
        wanted = wanted_flags(seats.late)
        wanted += [0] * (inputs.num_seats - len(wanted))
        told = upload(torch.tensor([*wanted, inputs.joins_as_one], dtype=torch.int64), joined_P.device)
        self.rows.receive(seats.rows_P, told[:-1], told[-1:], joined_P)
        inputs.found[layer] = joined_P
        return SeatRows(rows_P=joined_P, slots_P=seats.slots_P, positions=seats.positions)

    def _run_seats(
        self, layers: range, inputs: StepInputs, rotary: Iterator[Rotary], between: BetweenHook | None,
        hidden_TD: Tensor,
    ) -> Tensor:  # fmt: skip
        """Run only the halves that rows in seats need, in a step without device rows."""
        for layer, (cos, sin) in zip(layers, rotary, strict=False):
            if (leaving := inputs.leaving(layer)) is not None:
                if between is not None:
                    hidden_TD = between(layer, hidden_TD)
                q_TNH, k_TKH, v_TKH = self.model.pre_attention(layer, hidden_TD, cos, sin)
                self.rows.leave(layer, leaving, hidden_TD, q_TNH, k_TKH, v_TKH)
            if (joining := self._joining(inputs, layer)) is not None:
                attn_TD = self.rows.join(joining.rows_P, self.rows.no_results, hidden_TD)
                hidden_TD = self.model.post_attention(layer, attn_TD, hidden_TD)
        if between is not None and layers.stop - 1 in inputs.joining and layers.stop == self.model.num_layers:
            hidden_TD = between(layers.stop, hidden_TD)
        return hidden_TD
