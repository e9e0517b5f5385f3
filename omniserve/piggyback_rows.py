"""PiggybackRows: the rows of a step that change tiers: results that join it, and rows that leave for the host tier.

Legend: T rows of the step, D hidden, N query heads, K KV heads, H head size, P piggyback seats, R results that join.
Paper: omniserve 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from omniserve.host.tier import HostTier
from omniserve.patching import PatchedModel
from omniserve.step_inputs import SeatRows, StepInputs


@dataclass(slots=True)
class Parcel:
    """Rows that left for the host tier at one layer."""

    layer: int
    seats: SeatRows
    q_PNH: Tensor
    k_PKH: Tensor
    v_PKH: Tensor


class PiggybackRows:
    """Brings rows to the device and takes them away, layer by layer.

    Args:
        model: The patched model.
        tier: The host tier; None: no row changes tiers.
    """

    def __init__(self, model: PatchedModel, tier: HostTier | None) -> None:
        self._model = model
        self._tier = tier
        self.no_results = torch.empty(
            0, model.spec.num_heads * model.spec.head_size, dtype=model.dtype, device=model.device
        )
        """Attention rows of nobody, ``[0, N * H]``."""

    def stage(self, inputs: StepInputs) -> tuple[Tensor, dict[int, Tensor]]:
        """Bring the results that join this step to the device: the tensor, and by layer the row of each seat.

        Without a GPU the host tier's own buffer serves. With one, all rows go up in one copy before the first layer.
        """
        if not inputs.joining:
            return self.no_results, {}
        assert self._tier is not None
        if self._model.device.type == "cpu":
            return self._tier.results_SD, {layer: seats.slots_P for layer, seats in inputs.joining.items()}
        slots_cpu = torch.cat([seats.host_slots_P for seats in inputs.joining.values()])
        staged = self._tier.results_SD[slots_cpu.clamp(min=0)].pin_memory()
        first_rows = torch.arange(len(slots_cpu)).masked_fill(slots_cpu < 0, -1).to(self._model.device)
        rows = first_rows.view(len(inputs.joining), -1).unbind(0)
        return staged.to(self._model.device, non_blocking=True), dict(zip(inputs.joining, rows, strict=True))

    def send(self, parcel: Parcel, deferred: list[Parcel]) -> None:
        """Put rows into the host tier's input queue: now, or (from a GPU) after the step, so its stream never waits."""
        if self._model.device.type == "cpu":
            self._submit(parcel.layer, parcel.seats, parcel.q_PNH, parcel.k_PKH, parcel.v_PKH)
        else:
            deferred.append(parcel)

    def send_deferred(self, parcels: list[Parcel]) -> None:
        """Put what was deferred into the host tier's input queue, in one copy; the step's layers are over."""
        if not parcels:
            return
        q, k, v = (torch.stack([getattr(p, name) for p in parcels]).cpu() for name in ("q_PNH", "k_PKH", "v_PKH"))
        for i, parcel in enumerate(parcels):
            self._submit(parcel.layer, parcel.seats, q[i], k[i], v[i])

    def _submit(self, layer: int, seats: SeatRows, q_PNH: Tensor, k_PKH: Tensor, v_PKH: Tensor) -> None:
        assert self._tier is not None
        self._tier.submit(layer, seats.host_slots_P, q_PNH.contiguous(), k_PKH.contiguous(), v_PKH.contiguous())

    def empty_seats(self, num_seats: int) -> Tensor:
        """Return the slots of seats that nobody has, ``[P]`` int64 on the device."""
        return torch.full((num_seats,), -1, dtype=torch.int64, device=self._model.device)

    def rotary_per_layer(self, inputs: StepInputs, num_seats: int) -> Iterator[tuple[Tensor | None, Tensor | None]]:
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
