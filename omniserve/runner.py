"""ModelRunner: StepPlan -> tensors -> layers -> token ids. One loop for every policy.

Batch rows are ``[device rows | P piggyback seats]``. In layer l a seat holds, up to the attention, the token that came
through layer l-1 (or, at layer 0, one that enters); from the attention on, a token whose attention at l came back from
the host tier. Paper: omniserve 3.2, 4.

Legend: T rows, D hidden, N query heads, K KV heads, H head size, P seats, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from omniserve import ops  # noqa: F401  registers torch.ops.omniserve
from omniserve.cores import CoreSplit
from omniserve.host.tier import HostTier
from omniserve.kv.storage import DeviceKVStorage
from omniserve.ops.attention import DeviceAttention
from omniserve.patching import PatchedModel
from omniserve.plan import StepOutput, StepPlan
from omniserve.sampling import Sampler
from omniserve.step_inputs import SeatRows, StepInputs, make_step_inputs

# Looked up once: the attribute chain costs as much as a small operator.
_store_kv = torch.ops.omniserve.store_kv.default
_piggyback_concat = torch.ops.omniserve.piggyback_concat.default
_residual_store = torch.ops.omniserve.residual_store.default
_residual_fetch = torch.ops.omniserve.residual_fetch.default


@dataclass(slots=True)
class _Parcel:
    """Rows that left for the host tier at one layer."""

    layer: int
    seats: SeatRows
    q_PNH: Tensor
    k_PKH: Tensor
    v_PKH: Tensor


class ModelRunner:
    """Executes plans.

    Args:
        model: The patched model.
        storage: The device tier's KV.
        attend: Device attention.
        sampler: Knows every request that may sample.
        tier: The host tier, or None.
        num_slots: Rows of the residual store.
        cores: Told before each step whether the host tier works.
    """

    def __init__(
        self,
        *,
        model: PatchedModel,
        storage: DeviceKVStorage,
        attend: DeviceAttention,
        sampler: Sampler,
        tier: HostTier | None,
        num_slots: int,
        cores: CoreSplit,
    ) -> None:
        self._model = model
        self._storage = storage
        self._attend = attend
        self._sampler = sampler
        self._tier = tier
        self._cores = cores
        self.host_works = False
        """The host tier attended, or was given something to, when the last step began. Moves do not count: a copy takes
        a small part of a step, and would cost all of it half of the cores."""
        self._residuals_SD = torch.zeros(num_slots, model.spec.hidden_size, dtype=model.dtype, device=model.device)
        self._no_results = torch.empty(
            0, model.spec.num_heads * model.spec.head_size, dtype=model.dtype, device=model.device
        )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one step; never waits for the host tier."""
        self._hand_over(plan)
        if plan.is_empty:
            return StepOutput()
        self.host_works = bool(plan.entries or plan.joins or (self._tier is not None and self._tier.attends))
        self._cores.apply(host_works=self.host_works)
        inputs = make_step_inputs(
            plan,
            block_size=self._storage.block_size,
            num_layers=self._model.num_layers,
            device=self._model.device,
        )
        hidden_TD = self._run_layers(plan, inputs)
        if not inputs.sampling_request_ids:
            return StepOutput()
        logits_RV = self._model.logits(hidden_TD[inputs.sampling_rows])
        tokens, failed = self._sampler.sample(logits_RV, inputs.sampling_request_ids)
        return StepOutput(tokens=tokens, failed=failed)

    def _hand_over(self, plan: StepPlan) -> None:
        """Tell the host tier what does not depend on this step's layers."""
        if self._tier is None:
            return
        for slot in plan.cancels:
            self._tier.cancel(slot)
        for move in plan.moves:
            self._tier.start_move(move, self._storage.k_LBKSH, self._storage.v_LBKSH)
        for entry in plan.entries:
            self._tier.begin_token(entry.slot, entry.epoch, entry.position, entry.block_ids)

    def _run_layers(self, plan: StepPlan, inputs: StepInputs) -> Tensor:
        model = self._model
        num_device_rows, num_seats = inputs.num_device_rows, plan.num_piggyback_slots
        results_RD, result_rows = self._stage_results(inputs)
        away: list[_Parcel] = []
        hidden_TD = model.embed(inputs.token_ids_T, inputs.positions_T)
        attn_dev_TD = self._no_results
        for layer, rotary in enumerate(self._rotary_per_layer(inputs, num_seats)):
            leaving = inputs.joining.get(layer - 1) if layer else inputs.entering
            joining = inputs.joining.get(layer)
            # With device rows every layer runs; without, only those that somebody is at.
            if num_device_rows or leaving is not None:
                q_TNH, k_TKH, v_TKH = model.pre_attention(layer, hidden_TD, *rotary)
                if leaving is not None:
                    _residual_store(hidden_TD, self._residuals_SD, leaving.slots_P)
                    parcel = _Parcel(layer, leaving, q_TNH[-num_seats:], k_TKH[-num_seats:], v_TKH[-num_seats:])
                    self._send(parcel, away)
                if num_device_rows:
                    attn_dev_TD = self._attend_device(layer, inputs, q_TNH, k_TKH, v_TKH)
            if num_device_rows or joining is not None:
                attn_TD = attn_dev_TD
                if num_seats:
                    rows_P = result_rows[layer] if joining is not None else self._empty_seats(num_seats)
                    slots_P = joining.slots_P if joining is not None else rows_P
                    attn_TD = _piggyback_concat(attn_dev_TD, results_RD, rows_P)
                    _residual_fetch(self._residuals_SD, slots_P, hidden_TD)
                hidden_TD = model.post_attention(layer, attn_TD, hidden_TD)
        self._send_deferred(away)
        return hidden_TD

    def _attend_device(self, layer: int, inputs: StepInputs, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        n = inputs.num_device_rows
        if n < q_TNH.shape[0]:
            q_TNH, k_TKH, v_TKH = q_TNH[:n], k_TKH[:n], v_TKH[:n]
        k_cache, v_cache = self._storage.k_layers[layer], self._storage.v_layers[layer]
        _store_kv(k_TKH, v_TKH, k_cache, v_cache, inputs.slot_mapping)
        out_TNH = self._attend(
            q_TNH,
            k_cache,
            v_cache,
            inputs.block_table_RM,
            inputs.query_start_R1,
            inputs.seq_lens_R,
            self._model.spec.attention[layer],
            lengths=inputs.lengths,
        )
        return out_TNH.view(n, -1)

    # -- rows between the tiers ----------------------------------------------------------------------------------

    def _stage_results(self, inputs: StepInputs) -> tuple[Tensor, dict[int, Tensor]]:
        """Bring the results that join this step to the device: the tensor, and by layer the row of each seat.

        Without a GPU the host tier's own buffer serves. With one, all rows go up in one copy before the first layer.
        """
        if not inputs.joining:
            return self._no_results, {}
        assert self._tier is not None
        if self._model.device.type == "cpu":
            return self._tier.results_SD, {layer: seats.slots_P for layer, seats in inputs.joining.items()}
        slots_cpu = torch.cat([seats.host_slots_P for seats in inputs.joining.values()])
        staged = self._tier.results_SD[slots_cpu.clamp(min=0)].pin_memory()
        first_rows = torch.arange(len(slots_cpu)).masked_fill(slots_cpu < 0, -1).to(self._model.device)
        rows = first_rows.view(len(inputs.joining), -1).unbind(0)
        return staged.to(self._model.device, non_blocking=True), dict(zip(inputs.joining, rows, strict=True))

    def _send(self, parcel: _Parcel, deferred: list[_Parcel]) -> None:
        """Put rows into the host tier's input queue: now, or (from a GPU) after the step, so its stream never waits."""
        if self._model.device.type == "cpu":
            self._submit(parcel.layer, parcel.seats, parcel.q_PNH, parcel.k_PKH, parcel.v_PKH)
        else:
            deferred.append(parcel)

    def _send_deferred(self, parcels: list[_Parcel]) -> None:
        if not parcels:
            return
        q, k, v = (torch.stack([getattr(p, name) for p in parcels]).cpu() for name in ("q_PNH", "k_PKH", "v_PKH"))
        for i, parcel in enumerate(parcels):
            self._submit(parcel.layer, parcel.seats, q[i], k[i], v[i])

    def _submit(self, layer: int, seats: SeatRows, q_PNH: Tensor, k_PKH: Tensor, v_PKH: Tensor) -> None:
        assert self._tier is not None
        self._tier.submit(layer, seats.host_slots_P, q_PNH.contiguous(), k_PKH.contiguous(), v_PKH.contiguous())

    def _empty_seats(self, num_seats: int) -> Tensor:
        return torch.full((num_seats,), -1, dtype=torch.int64, device=self._model.device)

    def _rotary_per_layer(self, inputs: StepInputs, num_seats: int) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """Yield (cos, sin) ``[T, H]`` for each layer's pre-attention: device rows keep theirs, seats change hands."""
        n = inputs.num_device_rows
        leaving = [inputs.entering, *(inputs.joining.get(layer) for layer in range(self._model.num_layers - 1))]
        seat_positions = [p for seats in leaving if seats is not None for p in seats.positions]
        positions = torch.cat([inputs.positions_T[:n], torch.tensor(seat_positions, device=inputs.positions_T.device)])
        rotary = self._model.rotary(positions.long())
        if rotary is None:
            for _ in leaving:
                yield None, None
            return
        rows = [torch.cat([table[:n], table.new_zeros(num_seats, table.shape[1])]) for table in rotary]
        first = n
        for seats in leaving:
            if seats is not None:
                count = len(seats.positions)
                for table, row in zip(rotary, rows, strict=True):
                    row[n : n + count] = table[first : first + count]
                first += count
            yield rows[0], rows[1]
