"""StepInputs: the tensors of a StepPlan.

Legend: T packed rows (device rows, then piggyback seats), R device requests, M blocks per request, P piggyback seats.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from omniserve.ops.attention import HostLengths
from omniserve.plan import PiggybackEntry, PiggybackJoin, PromptScores, StepPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class SeatRows:
    """Who sits in the P piggyback seats between two layers."""

    slots_P: Tensor
    """Host slot of each seat, int64 on the device; -1: empty."""
    host_slots_P: Tensor
    """The same on the CPU."""
    positions: tuple[int, ...]
    """Positions of the occupied seats, which are the first ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """What the layers of one step need, made once before the first."""

    num_device_rows: int
    token_ids_T: Tensor
    """int64; the seats hold the tokens that enter, 0 where empty."""
    positions_T: Tensor
    """int64, likewise."""
    slot_mapping: Tensor
    """``[num_device_rows]`` int64: block * block_size + offset."""
    block_table_RM: Tensor
    """int32, padded with 0."""
    reversed_RM: Tensor | None
    """The direction table, bool; None: no block runs from the right."""
    query_start_R1: Tensor
    """int32 prefix sums."""
    seq_lens_R: Tensor
    """int32: context after this step."""
    lengths: HostLengths
    """Query and context lengths once more, on the host."""
    entering: SeatRows | None
    """Seats before pre-attention of layer 0; None if nobody enters."""
    joining: dict[int, SeatRows]
    """Layer -> seats that results of the host tier take there."""
    sampling_rows: Tensor
    """Rows whose hidden state after the last layer becomes logits, int64."""
    sampling_request_ids: tuple[str, ...]
    scores: tuple[tuple[str, int, PromptScores], ...]
    """Request, first row and what to tell, for chunks with log-probabilities of the prompt."""


def make_step_inputs(plan: StepPlan, *, block_size: int, num_layers: int, device: torch.device) -> StepInputs:
    """Turn ids and counts into tensors on ``device``."""
    chunks = plan.chunks
    lengths = np.fromiter((len(c.token_ids) for c in chunks), np.int64, len(chunks))
    starts = np.fromiter((c.start for c in chunks), np.int64, len(chunks))
    query_start = np.zeros(len(chunks) + 1, np.int64)
    np.cumsum(lengths, out=query_start[1:])
    num_rows = int(query_start[-1])
    seats = plan.num_piggyback_slots

    # Position of each device row: its chunk's start plus its index inside the chunk.
    positions = np.zeros(num_rows + seats, np.int64)
    positions[:num_rows] = np.arange(num_rows) + np.repeat(starts - query_start[:-1], lengths)
    token_ids = np.zeros(num_rows + seats, np.int64)
    token_ids[:num_rows] = np.fromiter(chain.from_iterable(c.token_ids for c in chunks), np.int64, num_rows)
    for seat, entry in enumerate(plan.entries):
        token_ids[num_rows + seat] = entry.token_id
        positions[num_rows + seat] = entry.position

    widest = max((len(c.block_ids) for c in chunks), default=0)
    block_table = np.zeros((len(chunks), widest), np.int32)
    for row, chunk in enumerate(chunks):
        block_table[row, : len(chunk.block_ids)] = chunk.block_ids
    device_positions = positions[:num_rows]
    blocks = block_table[np.repeat(np.arange(len(chunks)), lengths), device_positions // block_size]
    offsets = device_positions % block_size
    is_reversed = np.fromiter((c.is_reversed for c in chunks), np.bool_, len(chunks))
    if is_directed := bool(is_reversed.any()):
        offsets = np.where(np.repeat(is_reversed, lengths), block_size - 1 - offsets, offsets)
    slot_mapping = blocks.astype(np.int64) * block_size + offsets

    joining: defaultdict[int, list[PiggybackJoin]] = defaultdict(list)
    for join in plan.joins:
        joining[join.layer].append(join)
    sampling = [(int(query_start[i + 1]) - 1, c.request_id) for i, c in enumerate(chunks) if c.samples]
    sampling += [(num_rows + seat, j.request_id) for seat, j in enumerate(joining.get(num_layers - 1, ()))]

    def to_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return StepInputs(
        num_device_rows=num_rows,
        token_ids_T=to_device(token_ids),
        positions_T=to_device(positions),
        slot_mapping=to_device(slot_mapping),
        block_table_RM=to_device(block_table),
        reversed_RM=to_device(is_reversed[:, None].repeat(widest, axis=1)) if is_directed else None,
        query_start_R1=to_device(query_start.astype(np.int32)),
        seq_lens_R=to_device((starts + lengths).astype(np.int32)),
        lengths=HostLengths(query_lens=tuple(lengths.tolist()), seq_lens=tuple((starts + lengths).tolist())),
        entering=_seat_rows(plan.entries, seats, device) if plan.entries else None,
        joining={layer: _seat_rows(joins, seats, device) for layer, joins in joining.items()},
        sampling_rows=to_device(np.array([row for row, _ in sampling], np.int64)),
        sampling_request_ids=tuple(request_id for _, request_id in sampling),
        scores=tuple(
            (c.request_id, int(query_start[i]) + c.scores.first_row, c.scores)
            for i, c in enumerate(chunks)
            if c.scores is not None
        ),
    )


def _seat_rows(
    rows: list[PiggybackJoin] | tuple[PiggybackEntry, ...], num_seats: int, device: torch.device
) -> SeatRows:
    slots = np.full(num_seats, -1, np.int64)
    slots[: len(rows)] = [row.slot for row in rows]
    host_slots_P = torch.from_numpy(slots)
    return SeatRows(
        slots_P=host_slots_P.to(device),
        host_slots_P=host_slots_P,
        positions=tuple(row.position for row in rows),
    )
