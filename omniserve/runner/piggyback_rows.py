"""PiggybackRows: the rows of a step that change tiers: results that join it, and rows that leave for the host tier.

Legend: T rows of the step, D hidden, N query heads, K KV heads, H head size, P piggyback seats, S host slots.
Paper: omniserve 3.2.3, 4.

On a GPU nothing here waits for the host, and the host does not wait for the step's end: results come up in one copy
beside the step before, and a row that leaves is written to page-locked memory, where a thread of the host tier sees it
(``HostTier.expect``). Without one both tiers share the memory, and rows are handed over by a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

import torch
from torch import Tensor

from omniserve.core.plan import StepPlan
from omniserve.host.tier import HostTier
from omniserve.layers.patching import PatchedModel, Rotary
from omniserve.ops.device_copies import upload
from omniserve.runner.step_inputs import SeatRows, StepInputs

_piggyback_concat = torch.ops.omniserve.piggyback_concat.default
_residual_fetch = torch.ops.omniserve.residual_fetch.default
_residual_store = torch.ops.omniserve.residual_store.default
_piggyback_send = torch.ops.omniserve.piggyback_send.default


class PiggybackRows:
    """Brings rows to the device and takes them away, layer by layer.

    Args:
        model: The patched model.
        tier: The host tier; None: no row changes tiers.
        num_slots: S: most requests on the host tier.
    """

    def __init__(self, model: PatchedModel, tier: HostTier | None, num_slots: int) -> None:
        spec, device = model.spec, model.device
        self._model = model
        self._tier = tier
        self.residuals_SD = torch.zeros(num_slots, spec.hidden_size, dtype=model.dtype, device=device)
        """The residual store."""
        width = spec.num_heads * spec.head_size
        self.no_results = torch.empty(0, width, dtype=model.dtype, device=device)
        """No attention rows, ``[0, N * H]``."""
        self.results_SD = self.no_results
        """Results of the host tier by slot, ``[S, N * H]``; those of a step's joins are there after ``bring``."""
        self._step = 0
        self._step_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._stream: torch.cuda.Stream | None = None
        if tier is not None and device.type == "cuda":
            self.results_SD = torch.zeros(num_slots, width, dtype=model.dtype, device=device)
            self._stream = torch.cuda.Stream(device)
            self._gather(torch.tensor([-1]))  # compiles the kernel: no graph has it
        elif tier is not None:
            self.results_SD = tier.results_SD

    def bring(self, plan: StepPlan) -> None:
        """Let the results that join a step come to the device; the layers that follow wait for them there."""
        if self._stream is None or not plan.joins:
            return
        self._gather(torch.tensor([join.slot for join in plan.joins]))
        torch.cuda.current_stream(self._model.device).wait_stream(self._stream)

    def _gather(self, slots: Tensor) -> None:
        from omniserve.ops.kernels.rows import gather_rows

        assert self._tier is not None
        with torch.cuda.stream(self._stream):
            # Beside the step before: none of these rows is in use there, as a slot's result joins one step only.
            gather_rows(self._tier.results_SD, upload(slots, self._model.device), self.results_SD)

    def announce(self, plan: StepPlan) -> None:
        """Tell the host tier which rows will leave this step for it, and at which layers."""
        if self._tier is None or self._tier.mailbox_SW is None:
            return
        last = self._model.num_layers - 1
        joins = sorted((join for join in plan.joins if join.layer < last), key=attrgetter("layer"))
        self._step += 1
        self._step_1.fill_(self._step)
        if plan.entries or joins:
            layers = [0] * len(plan.entries) + [join.layer + 1 for join in joins]
            slots = [entry.slot for entry in plan.entries] + [join.slot for join in joins]
            self._tier.expect(self._step, torch.tensor(layers), torch.tensor(slots))

    def leave(
        self, layer: int, seats: SeatRows, hidden_TD: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor
    ) -> None:
        """Send the seats' rows, the last ones, to the host tier; their residual goes to the residual store."""
        assert self._tier is not None
        if self._tier.mailbox_SW is not None:
            self.post(seats.slots_P, hidden_TD, q_TNH, k_TKH, v_TKH)
            return
        _residual_store(hidden_TD, self.residuals_SD, seats.slots_P)
        first = hidden_TD.shape[0] - seats.slots_P.shape[0]
        q_PNH, k_PKH, v_PKH = (rows[first:].contiguous() for rows in (q_TNH, k_TKH, v_TKH))
        self._tier.submit(layer, seats.host_slots_P, q_PNH, k_PKH, v_PKH)

    def post(self, slots_P: Tensor, hidden_TD: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> None:
        """Do the same through the mailbox; ``slots_P``, of which ``announce`` was told, are the seats' slots."""
        tier = self._tier
        assert tier is not None and tier.mailbox_SW is not None and tier.flags_S is not None
        _piggyback_send(
            hidden_TD, q_TNH, k_TKH, v_TKH, slots_P, self.residuals_SD, tier.mailbox_SW, tier.flags_S, self._step_1
        )

    def join(self, slots_P: Tensor, attn_TD: Tensor, hidden_TD: Tensor) -> Tensor:
        """Return attention rows with the host tier's results in the seats behind them.

        Args:
            slots_P: Host slot of each seat, int64 on the device; -1: empty.
            attn_TD: The device rows' attention, ``[num_device_rows, N * H]``.
            hidden_TD: The layer's input; its last P rows become the residuals that the seats' rows left behind.
        """
        attn_TD = _piggyback_concat(attn_TD, self.results_SD, slots_P)
        _residual_fetch(self.residuals_SD, slots_P, hidden_TD)
        return attn_TD

    def empty_seats(self, num_seats: int) -> Tensor:
        """Return the slots of empty seats, ``[P]`` int64 on the device."""
        return torch.full((num_seats,), -1, dtype=torch.int64, device=self._model.device)

    def rotary_per_layer(self, inputs: StepInputs) -> Iterator[Rotary]:
        """Yield (cos, sin) ``[T, H]`` for each layer's pre-attention: device rows keep theirs, seats change hands."""
        n = inputs.num_device_rows
        leaving = [inputs.leaving(layer) for layer in range(self._model.num_layers)]
        seat_positions = [p for seats in leaving if seats is not None for p in seats.positions]
        seats_T = upload(torch.tensor(seat_positions, dtype=torch.int64), inputs.positions_T.device)
        rotary = self._model.rotary(torch.cat([inputs.positions_T[:n], seats_T]))
        if rotary is None:
            for _ in leaving:
                yield None, None
            return
        rows = [torch.cat([table[:n], table.new_zeros(inputs.num_seats, table.shape[1])]) for table in rotary]
        first = n
        for seats in leaving:
            if seats is not None:
                count = len(seats.positions)
                for table, row in zip(rotary, rows, strict=True):
                    row[n : n + count] = table[first : first + count]
                first += count
            yield rows[0], rows[1]
