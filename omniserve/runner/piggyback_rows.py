"""PiggybackRows: moves rows between the tiers: results that join a step, and rows that leave it for the host tier.

Legend: T rows of the step, D hidden, N query heads, K KV heads, H head size, P piggyback seats, S rows of all host
slots together: a slot has a row for its token, and one for each draft that its token may take along.
Paper: omniserve 3.2.3, 4.

On a GPU the step does not wait for the host, nor the host for the step's end: one copy beside the step before brings
the results to the device, and a row that leaves is written to page-locked memory, where a thread of the host tier
finds it (``HostTier.expect``). Without a GPU both tiers share the memory, and a call hands the rows over.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from operator import attrgetter

import torch
from torch import Tensor

from omniserve.core.plan import PiggybackEntry, PiggybackJoin, StepPlan
from omniserve.host.tier import HostTier
from omniserve.layers.patched_model import PatchedModel, Rotary
from omniserve.ops.streams import upload
from omniserve.runner.step_inputs import SeatRows, StepInputs, rows_of

_piggyback_concat = torch.ops.omniserve.piggyback_concat.default
_residual_fetch = torch.ops.omniserve.residual_fetch.default
_residual_store = torch.ops.omniserve.residual_store.default
_piggyback_send = torch.ops.omniserve.piggyback_send.default
_piggyback_receive = torch.ops.omniserve.piggyback_receive.default


class PiggybackRows:
    """Brings rows to the device and takes them away, layer by layer; without a tier, none."""

    def __init__(self, model: PatchedModel, tier: HostTier | None, num_slots: int) -> None:
        spec, device = model.spec, model.device
        self._model, self._tier = model, tier
        self.max_rows = tier.max_rows if tier is not None else 1
        """Rows of a slot."""
        num_rows = num_slots * self.max_rows
        self.residuals_SD = torch.zeros(num_rows, spec.hidden_size, dtype=model.dtype, device=device)
        """The residual store: the residual of each row that is away on the host tier."""
        width = spec.num_heads * spec.head_size
        self.no_results = torch.empty(0, width, dtype=model.dtype, device=device)
        """An empty tensor of attention rows, ``[0, N * H]``."""
        self.results_SD = self.no_results
        """Results of the host tier, ``[S, N * H]``. ``bring`` fills the rows that join a step."""
        self._step = 0
        self._step_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._stream: torch.cuda.Stream | None = None
        self._host_results_SD = tier.results_SMD.view(num_rows, width) if tier is not None else self.no_results
        if tier is not None and device.type == "cuda":
            self.results_SD = torch.zeros(num_rows, width, dtype=model.dtype, device=device)
            self._stream = torch.cuda.Stream(device)
            self._gather(torch.tensor([-1]))  # compiles the kernel, which is part of no captured graph
        elif tier is not None:
            self.results_SD = self._host_results_SD

    def bring(self, plan: StepPlan) -> None:
        """Copy the results that join a step to the device; the step's stream waits for the copy, the host does not."""
        if self._stream is None:
            return
        here = self._model.layers
        rows = rows_of([join for join in plan.joins if join.is_ready and join.layer in here], self.max_rows)
        if not rows:
            return
        self._gather(torch.tensor(rows))
        torch.cuda.current_stream(self._model.device).wait_stream(self._stream)

    def _gather(self, rows: Tensor) -> None:
        from omniserve.ops.kernels.rows import gather_rows

        assert self._tier is not None
        with torch.cuda.stream(self._stream):
            # The copy may run beside the step before, which uses none of these rows: a result joins one step only.
            gather_rows(self._host_results_SD, upload(rows, self._model.device), self.results_SD)

    def announce(self, plan: StepPlan) -> None:
        """Tell the host tier which tokens will leave this step for it, at which layers, and with how many rows."""
        if self._tier is None or self._tier.mailbox_SW is None:
            return
        here = self._model.layers
        joins = sorted((join for join in plan.joins if join.layer + 1 in here), key=attrgetter("layer"))
        entries = plan.entries if here.start == 0 else ()
        self._step += 1
        self._step_1.fill_(self._step)
        if entries or joins:
            layers = [0] * len(entries) + [join.layer + 1 for join in joins]
            leaving: list[PiggybackEntry | PiggybackJoin] = [*entries, *joins]
            tokens = [(token.slot, token.num_rows) for token in leaving]
            slots_R, widths_R = torch.tensor(tokens).t().contiguous().unbind()
            # A token is skipped where its result of the layer before is not there.
            self._tier.expect(self._step, torch.tensor(layers), slots_R, widths_R, may_skip=True)

    def leave(
        self, layer: int, seats: SeatRows, hidden_TD: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor
    ) -> None:
        """Send the rows in the seats, which are the last P, to the host tier, and their residuals to the store."""
        assert self._tier is not None
        if self._tier.mailbox_SW is not None:
            self.post(seats.rows_P, hidden_TD, q_TNH, k_TKH, v_TKH)
            return
        _residual_store(hidden_TD, self.residuals_SD, seats.rows_P)
        first = hidden_TD.shape[0] - seats.rows_P.shape[0]
        q_PNH, k_PKH, v_PKH = (rows[first:].contiguous() for rows in (q_TNH, k_TKH, v_TKH))
        self._tier.submit(layer, seats.slots_P, q_PNH, k_PKH, v_PKH)

    @property
    def device_looks(self) -> bool:
        """True if the device looks for results that come while a step runs; else the host does, between layers."""
        return self._tier is not None and self._tier.mailbox_SW is not None

    def receive(self, rows_P: Tensor, wanted_P: Tensor, as_one_1: Tensor, joined_P: Tensor) -> None:
        """Find out which joins of a layer have their results by now, and write the rows of these to ``joined``.

        Arguments as of ``piggyback_receive``; on a GPU the results of late joins come into ``results_SD``.
        """
        tier = self._tier
        assert tier is not None and tier.result_flags_S is not None and tier.skips_S is not None
        _piggyback_receive(
            rows_P,
            wanted_P,
            as_one_1,
            self._step_1,
            tier.result_flags_S,
            self._host_results_SD,
            self.results_SD,
            tier.skips_S,
            joined_P,
        )

    def post(self, rows_P: Tensor, hidden_TD: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> None:
        """Do the same through the mailbox, for the rows of slots that ``announce`` has named."""
        tier = self._tier
        assert tier is not None and tier.mailbox_SW is not None and tier.flags_S is not None
        _piggyback_send(
            hidden_TD, q_TNH, k_TKH, v_TKH, rows_P, self.residuals_SD, tier.mailbox_SW, tier.flags_S, self._step_1
        )

    def join(self, rows_P: Tensor, attn_TD: Tensor, hidden_TD: Tensor) -> Tensor:
        """Return the device's attention rows with the host tier's results in the seats behind them.

        The last P rows of the layer's input ``hidden_TD`` become the residuals that the rows in the seats left in the
        store. ``rows_P`` is the row of each seat there, int64 on the device, -1 where it is empty.
        """
        attn_TD = _piggyback_concat(attn_TD, self.results_SD, rows_P)
        _residual_fetch(self.residuals_SD, rows_P, hidden_TD)
        return attn_TD

    def empty_seats(self, num_seats: int) -> Tensor:
        """Return the rows of empty seats, ``[P]`` int64 on the device."""
        return torch.full((num_seats,), -1, dtype=torch.int64, device=self._model.device)

    def rotary_per_layer(self, inputs: StepInputs) -> Iterator[Rotary]:
        """Yield (cos, sin) ``[T, H]`` for each layer's pre-attention in a step with seats."""
        n = inputs.num_device_rows
        leaving = [inputs.leaving(layer) for layer in range(self._model.num_layers)]
        seat_positions = [p for seats in leaving if seats is not None for p in seats.positions]
        seats_T = upload(torch.tensor(seat_positions, dtype=torch.int64), inputs.positions_T.device)
        rotary = self._model.rotary(torch.cat([inputs.positions_T[:n], seats_T]))
        if rotary is None:
            yield from repeat((None, None), len(leaving))
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
