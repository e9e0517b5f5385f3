"""StaticInputs: the inputs of a step as tensors with constant addresses and shapes, which each step overwrites.

Legend: T device rows, P piggyback seats, L layers, M blocks per request, all of a bucket.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from omniserve.core.plan import StepPlan, joins_by_layer
from omniserve.ops.attention import AttentionMetadata
from omniserve.ops.streams import upload
from omniserve.runner.cuda_graphs.shapes import StepShape
from omniserve.runner.late_results import wanted_flags
from omniserve.runner.step_inputs import DeviceRows, positions_of, rows_of


class InputMemory:
    """The memory that the inputs of all shapes share; it holds one step's at a time.

    ``largest`` has the most rows and the most seats of any shape, ``max_blocks`` is M, the blocks of the longest
    request. With ``is_directed`` blocks may run from the right. ``layer_input`` is D and the dtype of hidden states, if
    the input of the running layer is to be kept.
    """

    def __init__(
        self,
        largest: StepShape,
        *,
        num_layers: int,
        max_blocks: int,
        device: torch.device,
        is_directed: bool = False,
        layer_input: tuple[int, torch.dtype] | None = None,
        max_host_rows: int = 1,
    ) -> None:
        self.num_layers, self.device = num_layers, device
        self.max_host_rows = max_host_rows
        """Rows that the host tier has of each slot."""
        self.longs = torch.zeros(sum(_long_sizes(largest, num_layers)), dtype=torch.int64, device=device)
        self.joined = torch.full((num_layers * largest.seats,), -1, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(largest.rows, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(largest.rows, max_blocks, dtype=torch.int32, device=device)
        self.reversed_blocks: Tensor | None = None
        if is_directed:
            self.reversed_blocks = torch.zeros(largest.rows, max_blocks, dtype=torch.bool, device=device)
        self.layer_input: Tensor | None = None
        if layer_input is not None:
            hidden_size, dtype = layer_input
            self.layer_input = torch.zeros(largest.rows + largest.seats, hidden_size, dtype=dtype, device=device)
        self.query_start_loc = torch.arange(largest.rows + 1, dtype=torch.int32, device=device)


class StaticInputs:
    """The inputs of one shape: views of the shared memory, which ``fill`` writes by two copies from the host.

    A device row that only pads is token 0 at position 0; its K and V are not stored (slot -1) and it attends to no key
    (length 0). An empty seat has slot -1.
    """

    def __init__(self, shape: StepShape, memory: InputMemory) -> None:
        rows, seats, num_layers = shape.rows, shape.seats, memory.num_layers
        self.shape = shape
        self._memory = memory
        self._longs = memory.longs[: sum(_long_sizes(shape, num_layers))]
        token_ids, positions, lora_slots, slots, seat_rows, seat_positions, wanted, as_one = self._longs.split(
            _long_sizes(shape, num_layers)
        )
        self.token_ids_T: Tensor = token_ids
        """``[T + P]``; the seats hold the tokens that enter."""
        self.positions_T: Tensor = positions
        self.lora_slots_T: Tensor = lora_slots
        """``[T + P]``; 0: the row has no adapter."""
        self.slot_mapping_T: Tensor = slots
        self._seat_rows = seat_rows.view(num_layers + 1, seats)
        self.seat_positions: Tensor = seat_positions
        """``[L * P]``: positions of the tokens in the seats before the attention of each layer."""
        self._wanted_LP = wanted.view(num_layers, seats)
        self.as_one_1: Tensor = as_one
        """A flag, ``[1]``; not 0: a late join that misses its layer keeps all others of the layer away, too."""
        self.joined_LP: Tensor = memory.joined[: num_layers * seats].view(num_layers, seats)
        """The step writes here the rows that have joined at each layer but the last; -1: none has."""
        self.layer_input_TD: Tensor | None = None
        """``[T + P, D]``: the step writes here what goes into each layer, for rows that leave before it."""
        if memory.layer_input is not None:
            self.layer_input_TD = memory.layer_input[: rows + seats]
        self.attention = AttentionMetadata(
            block_table_RM=memory.block_table[:rows],
            query_start_loc_R1=memory.query_start_loc[: rows + 1],
            seq_lens_R=memory.seq_lens[:rows],
            reversed_RM=memory.reversed_blocks[:rows] if memory.reversed_blocks is not None else None,
            one_query_each=True,
        )
        """The metadata of a step of decodes. If blocks may run from the right it always has a direction table."""

    def rows_leaving(self, layer: int) -> Tensor:
        """Return the rows ``[P]`` that leave at a layer: those that joined the one before, or enter (``SeatRows``)."""
        return self.joined_LP[layer - 1] if layer else self._seat_rows[0]

    def rows_joining(self, layer: int) -> Tensor:
        """Return the rows ``[P]`` that are planned to join at a layer."""
        return self._seat_rows[layer + 1]

    def wanted(self, layer: int) -> Tensor:
        """Return the flags ``[P]`` of the results that late joins of a layer wait for (``wanted_flags``)."""
        return self._wanted_LP[layer]

    def fill(self, plan: StepPlan, rows: DeviceRows, *, decodes: bool) -> None:
        """Write the inputs of a plan that fits the shape; the copies are queued on the current stream.

        With ``decodes`` every request has one device row, and ``attention`` is written, too; otherwise the caller has
        metadata of its own.
        """
        num_rows, seats = len(rows.token_ids), self.shape.seats
        longs = self._host_buffer(self._longs)
        token_ids, positions, lora_slots, slots, seat_rows, seat_positions, wanted, as_one = (
            part.numpy() for part in longs.split(_long_sizes(self.shape, self._memory.num_layers))
        )
        token_ids[:] = positions[:] = lora_slots[:] = 0
        seat_positions[:] = wanted[:] = 0
        as_one[:] = plan.joins_as_one
        slots[:] = seat_rows[:] = -1
        token_ids[:num_rows], positions[:num_rows], slots[:num_rows] = rows.token_ids, rows.positions, rows.slot_mapping
        if rows.lora_slots is not None:
            lora_slots[:num_rows] = rows.lora_slots
        if seats:
            first = self.shape.rows
            rows_LP, positions_LP = seat_rows.reshape(-1, seats), seat_positions.reshape(-1, seats)
            wanted_LP = wanted.reshape(-1, seats)
            entering = [token_id for entry in plan.entries for token_id in entry.token_ids]
            count = len(entering)
            token_ids[first : first + count] = entering
            lora_slots[first : first + count] = [entry.lora_slot for entry in plan.entries for _ in entry.token_ids]
            positions[first : first + count] = positions_LP[0, :count] = positions_of(plan.entries)
            rows_LP[0, :count] = rows_of(plan.entries, self._memory.max_host_rows)
            for layer, joins in joins_by_layer(plan).items():
                joining = rows_of(joins, self._memory.max_host_rows)
                count = len(joining)
                rows_LP[layer + 1, :count] = joining
                wanted_LP[layer, :count] = wanted_flags(joins)
                if layer + 1 < self._memory.num_layers:
                    positions_LP[layer + 1, :count] = positions_of(joins)
        self._longs.copy_(longs, non_blocking=True)
        if decodes and self.shape.rows:
            self._fill_tables(rows)

    def _fill_tables(self, rows: DeviceRows) -> None:
        num_rows, num_blocks = rows.block_table.shape
        width = max(1, num_blocks)
        # One copy, no wider than the step needs, as the longest possible request has thousands of blocks. Entries
        # behind a request's last block are never read and may have any value.
        table = np.zeros((self.shape.rows, 2 + width), np.int32)
        table[:num_rows, 0] = rows.seq_lens
        if rows.is_reversed is not None:
            table[:num_rows, 1] = rows.is_reversed
        table[:num_rows, 2 : 2 + num_blocks] = rows.block_table
        on_device = upload(torch.from_numpy(table), self._memory.device)
        self.attention.seq_lens_R.copy_(on_device[:, 0])
        self.attention.block_table_RM[:, :width].copy_(on_device[:, 2:])
        if self.attention.reversed_RM is not None:
            self.attention.reversed_RM[:, :width].copy_(on_device[:, 1:2])  # all blocks of a request run the same way

    def _host_buffer(self, target: Tensor) -> Tensor:
        # A new buffer each time: torch reuses a page-locked one only when the copies from it are over.
        return torch.empty(target.shape, dtype=target.dtype, pin_memory=target.device.type == "cuda")


def _long_sizes(shape: StepShape, num_layers: int) -> list[int]:
    """Return the lengths of: token ids, positions, slots of adapters, slots of rows, rows of seats, positions of seats,
    flags that late joins wait for, whether they join as one.
    """
    rows, seats = shape.rows, shape.seats
    of_layers = [(num_layers + 1) * seats, num_layers * seats, num_layers * seats]
    return [rows + seats, rows + seats, rows + seats, rows, *of_layers, 1]
