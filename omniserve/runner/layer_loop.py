"""LayerLoop: all layers of a step whose rows are not padded.

In layer l a seat holds, up to the attention, the token that came through layer l-1 (or, at layer 0, one that enters);
from the attention on, a token whose attention at l came back from the host tier. Paper: omniserve 3.2, 4.

Legend: T rows, D hidden, N query heads, K KV heads, H head size, P seats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, repeat

import torch
from torch import Tensor

from omniserve import ops  # noqa: F401  registers torch.ops.omniserve
from omniserve.core.plan import StepPlan
from omniserve.kv.storage import DeviceKVStorage
from omniserve.layers.patching import PatchedModel, Rotary
from omniserve.ops.attention import DeviceAttention
from omniserve.runner.piggyback_rows import PiggybackRows
from omniserve.runner.pipelining import SecondBatch
from omniserve.runner.safepoint import HaltedRows, Safepoints
from omniserve.runner.step_inputs import PendingTokens, SampledRows, StepInputs, make_step_inputs

# Looked up once: the attribute chain costs as much as a small operator.
_store_kv = torch.ops.omniserve.store_kv.default


@dataclass(frozen=True, slots=True)
class LayersOutput:
    """The rows of a step after the last layer."""

    hidden_TD: Tensor
    sampled: SampledRows
    halted: Mapping[str, int] = field(default_factory=dict)
    """Request -> the layer before which its chunk left the step."""


def stops_between_layers(plan: StepPlan) -> bool:
    """Tell whether rows may leave or rejoin a step between its layers, or a second sub-batch runs there."""
    return bool(plan.preemptible or plan.pipelined or any(chunk.from_layer for chunk in plan.chunks))


@dataclass(kw_only=True, slots=True)
class LayerLoop:
    """Runs the layers of any plan."""

    model: PatchedModel
    storage: DeviceKVStorage
    attend: DeviceAttention
    rows: PiggybackRows
    halted: HaltedRows
    """Holds the rows that leave a step between two layers until a later step goes on with them."""
    pending: PendingTokens
    safepoint: Callable[[], bool] | None
    """Asked between the layers of a step with preemptible rows whether these must leave. None: they never do."""

    def run(self, plan: StepPlan) -> LayersOutput:
        """Run the layers of a step whose rows are the same in all of them."""
        inputs, rotary, hidden_TD = self._begin(plan)
        hidden_TD = self._run_layers(range(self.model.num_layers), inputs, rotary, hidden_TD)
        return LayersOutput(hidden_TD, inputs.sampled)

    def run_one_by_one(self, plan: StepPlan, second: SecondBatch | None) -> LayersOutput:
        """Run a step's layers, stopping at each of them.

        Rows may leave the step and rejoin it before a layer. A second sub-batch runs its pre-attention before the layer
        and its post-attention after it.
        """
        safepoints = Safepoints(plan, halted=self.halted, must_leave=self.safepoint, device=self.model.device)
        present = safepoints.present
        inputs, rotary, hidden_TD = self._begin(present)
        for layer in range(self.model.num_layers):
            hidden_TD = safepoints.before_layer(layer, hidden_TD)
            if safepoints.present is not present:
                present = safepoints.present
                inputs = self._inputs(present)
                rotary = islice(self._rotary(inputs), layer, None)
            if second is not None:
                second.begin_layer(layer)
            hidden_TD = self._run_layers(range(layer, layer + 1), inputs, rotary, hidden_TD)
            if second is not None:
                second.end_layer(layer)
        return LayersOutput(hidden_TD, inputs.sampled, safepoints.left)

    def _begin(self, plan: StepPlan) -> tuple[StepInputs, Iterator[Rotary], Tensor]:
        """Return the inputs of a plan, the rotary tables of its layers, and what the first layer is given."""
        inputs = self._inputs(plan)
        self.pending.fill(inputs.token_ids_T, plan)
        hidden_TD = self.model.embed(inputs.token_ids_T, inputs.positions_T)
        return inputs, self._rotary(inputs), hidden_TD

    def _inputs(self, plan: StepPlan) -> StepInputs:
        block_size, num_layers = self.storage.block_size, self.model.num_layers
        return make_step_inputs(plan, block_size=block_size, num_layers=num_layers, device=self.model.device)

    def _rotary(self, inputs: StepInputs) -> Iterator[Rotary]:
        """Return (cos, sin) ``[T, H]`` of each layer's pre-attention; in the seats each layer has other tokens."""
        if inputs.num_seats:
            return self.rows.rotary_per_layer(inputs)
        return repeat(self.model.rotary(inputs.positions_T) or (None, None), self.model.num_layers)

    def _run_layers(self, layers: range, inputs: StepInputs, rotary: Iterator[Rotary], hidden_TD: Tensor) -> Tensor:
        if not inputs.num_device_rows:
            return self._run_seats(layers, inputs, rotary, hidden_TD)
        attend = self._attend_with_seats if inputs.num_seats else self._attend_device
        return self.model.run_layers(layers, hidden_TD, rotary, partial(attend, inputs))

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
        joining = inputs.joining.get(layer)
        slots_P = joining.slots_P if joining is not None else self.rows.empty_seats(inputs.num_seats)
        return self.rows.join(slots_P, attn_TD, hidden_TD)

    def _run_seats(self, layers: range, inputs: StepInputs, rotary: Iterator[Rotary], hidden_TD: Tensor) -> Tensor:
        """Run only the halves that rows in seats need, in a step without device rows."""
        for layer, (cos, sin) in zip(layers, rotary, strict=False):
            if (leaving := inputs.leaving(layer)) is not None:
                q_TNH, k_TKH, v_TKH = self.model.pre_attention(layer, hidden_TD, cos, sin)
                self.rows.leave(layer, leaving, hidden_TD, q_TNH, k_TKH, v_TKH)
            if (joining := inputs.joining.get(layer)) is not None:
                attn_TD = self.rows.join(joining.slots_P, self.rows.no_results, hidden_TD)
                hidden_TD = self.model.post_attention(layer, attn_TD, hidden_TD)
        return hidden_TD
