"""LayerLoop: all layers of a step as its rows are, in shapes of their own; rows may leave and rejoin between layers.

In layer l a seat holds, up to the attention, the token that came through layer l-1 (or, at layer 0, one that enters);
from the attention on, a token whose attention at l came back from the host tier. Between the layers a second sub-batch
may run (``pipelining``). Layers at which nobody is are left out. Paper: omniserve 3.2, 4.

Legend: T rows, D hidden, N query heads, K KV heads, H head size, P seats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from omniserve import ops  # noqa: F401  registers torch.ops.omniserve
from omniserve.core.plan import PromptScores, StepPlan
from omniserve.kv.storage import DeviceKVStorage
from omniserve.layers.patching import PatchedModel
from omniserve.ops.attention import DeviceAttention
from omniserve.runner.pending_tokens import PendingTokens
from omniserve.runner.piggyback_rows import PiggybackRows
from omniserve.runner.pipelining import SecondBatch
from omniserve.runner.safepoint import HaltedRows, LayerPace, until_layer, without
from omniserve.runner.step_inputs import StepInputs, make_step_inputs

# Looked up once: the attribute chain costs as much as a small operator.
_store_kv = torch.ops.omniserve.store_kv.default
_piggyback_concat = torch.ops.omniserve.piggyback_concat.default
_residual_fetch = torch.ops.omniserve.residual_fetch.default


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersOutput:
    """What the layers made of a step."""

    hidden_TD: Tensor
    """The rows after the last layer."""
    sampling_rows: Tensor
    """Those of them that become logits, int64."""
    sampling_request_ids: tuple[str, ...]
    scores: tuple[tuple[str, int, PromptScores], ...]
    """See StepInputs."""
    halted: dict[str, int]
    """Request -> the layer before which its chunk left."""


class LayerLoop:
    """Runs the layers of any plan.

    Args:
        model: The patched model.
        storage: The device tier's KV.
        attend: Device attention.
        rows: Who changes tiers.
        halted: Takes rows that leave a step between two layers, and has them when they go on.
        pending: Knows tokens that the host does not know yet.
        safepoint: Asked between the layers of a step with preemptible rows: must they leave? None: they never do.
    """

    def __init__(
        self,
        *,
        model: PatchedModel,
        storage: DeviceKVStorage,
        attend: DeviceAttention,
        rows: PiggybackRows,
        halted: HaltedRows,
        pending: PendingTokens,
        safepoint: Callable[[], bool] | None,
    ) -> None:
        self._model = model
        self._storage = storage
        self._attend = attend
        self._rows = rows
        self._halted = halted
        self._pending = pending
        self.safepoint = safepoint
        """See the class."""

    def _inputs(self, plan: StepPlan) -> StepInputs:
        return make_step_inputs(
            plan,
            block_size=self._storage.block_size,
            num_layers=self._model.num_layers,
            device=self._model.device,
        )

    def run(self, plan: StepPlan, second: SecondBatch | None) -> LayersOutput:
        """Run a step's layers, and those of a second sub-batch, if there is one, between them."""
        model, num_seats = self._model, plan.num_piggyback_slots
        halted: dict[str, int] = {}
        going_on = {chunk.from_layer for chunk in plan.chunks if chunk.from_layer}
        present = until_layer(plan, 0) if going_on else plan
        inputs = self._inputs(present)
        self._pending.fill(inputs.token_ids_T, present)
        pace = LayerPace(model.device)
        hidden_TD = model.embed(inputs.token_ids_T, inputs.positions_T)
        attn_dev_TD = self._rows.no_results
        rotary_per_layer = self._rows.rotary_per_layer(inputs, num_seats)
        for layer in range(model.num_layers):
            if going_on or plan.preemptible:
                before = present
                if layer and plan.preemptible and self._must_leave(present, pace):
                    present, hidden_TD = self._leave(present, inputs, layer, hidden_TD, halted)
                    later = (c for c in plan.chunks if c.from_layer >= layer and c.request_id in plan.preemptible)
                    halted |= {chunk.request_id: chunk.from_layer for chunk in later}  # they stay where they are
                    plan = without(plan, halted)
                if layer in going_on:
                    present, hidden_TD = self._rejoin(plan, layer, hidden_TD)
                if present is not before:
                    inputs, attn_dev_TD = self._inputs(present), self._rows.no_results
                    rotary_per_layer = islice(self._rows.rotary_per_layer(inputs, num_seats), layer, None)
            num_device_rows, rotary = inputs.num_device_rows, next(rotary_per_layer)
            leaving = inputs.joining.get(layer - 1) if layer else inputs.entering
            joining = inputs.joining.get(layer)
            if second is not None:
                second.begin_layer(layer)
            # With device rows every layer runs; without, only those that somebody is at.
            if num_device_rows or leaving is not None:
                q_TNH, k_TKH, v_TKH = model.pre_attention(layer, hidden_TD, *rotary)
                if leaving is not None:
                    self._rows.leave(layer, leaving, hidden_TD, q_TNH, k_TKH, v_TKH)
                if num_device_rows:
                    attn_dev_TD = self._attend_device(layer, inputs, q_TNH, k_TKH, v_TKH)
            if num_device_rows or joining is not None:
                attn_TD = attn_dev_TD
                if num_seats:
                    slots_P = joining.slots_P if joining is not None else self._rows.empty_seats(num_seats)
                    attn_TD = _piggyback_concat(attn_dev_TD, self._rows.results_SD, slots_P)
                    _residual_fetch(self._rows.residuals_SD, slots_P, hidden_TD)
                hidden_TD = model.post_attention(layer, attn_TD, hidden_TD)
            if second is not None:
                second.end_layer(layer)
        return LayersOutput(
            hidden_TD=hidden_TD,
            sampling_rows=inputs.sampling_rows,
            sampling_request_ids=inputs.sampling_request_ids,
            scores=inputs.scores,
            halted=halted,
        )

    # -- rows that leave between layers, and go on there later (conserve 4.3) ------------------------------------------

    def _must_leave(self, plan: StepPlan, pace: LayerPace) -> bool:
        is_there = any(chunk.request_id in plan.preemptible for chunk in plan.chunks)
        if not is_there or self.safepoint is None:
            return False
        pace.keep()
        return self.safepoint()

    def _leave(
        self, plan: StepPlan, inputs: StepInputs, layer: int, hidden_TD: Tensor, halted: dict[str, int]
    ) -> tuple[StepPlan, Tensor]:
        """Halt the preemptible chunks; return the plan and the rows without them."""
        kept: list[Tensor] = []
        row = 0
        for chunk in plan.chunks:
            rows_TD = hidden_TD[row : row + len(chunk.token_ids)]
            row += len(chunk.token_ids)
            if chunk.request_id in plan.preemptible:
                halted[chunk.request_id] = self._halted.halt(chunk, layer, rows_TD)
            else:
                kept.append(rows_TD)
        return without(plan, halted), torch.cat([*kept, hidden_TD[inputs.num_device_rows :]])

    def _rejoin(self, plan: StepPlan, layer: int, hidden_TD: Tensor) -> tuple[StepPlan, Tensor]:
        """Put the rows that left an earlier step before this layer behind the other device rows."""
        present = until_layer(plan, layer)
        back = [self._halted.take(chunk) for chunk in present.chunks if chunk.from_layer == layer]
        n = sum(len(chunk.token_ids) for chunk in present.chunks) - sum(map(len, back))
        return present, torch.cat([hidden_TD[:n], *back, hidden_TD[n:]])

    def _attend_device(self, layer: int, inputs: StepInputs, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        n = inputs.num_device_rows
        if n < q_TNH.shape[0]:
            q_TNH, k_TKH, v_TKH = q_TNH[:n], k_TKH[:n], v_TKH[:n]
        k_cache, v_cache = self._storage.k_layers[layer], self._storage.v_layers[layer]
        _store_kv(k_TKH, v_TKH, k_cache, v_cache, inputs.slot_mapping)
        out_TNH = self._attend(q_TNH, k_cache, v_cache, inputs.attention, self._model.spec.attention[layer])
        return out_TNH.view(n, -1)
