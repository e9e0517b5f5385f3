"""StepInputs, the tensors that a StepPlan's layers need, and PendingTokens, which brings tokens into the next step.

Legend: T packed rows (device rows, then piggyback seats), R device requests, M blocks per request, P piggyback seats,
D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain, repeat

import numpy as np
import torch
from torch import Tensor

from omniserve.core.plan import (
    PENDING_TOKEN,
    PiggybackEntry,
    PiggybackJoin,
    PromptScores,
    StepOutput,
    StepPlan,
    joins_by_layer,
)
from omniserve.ops.attention import AttentionMetadata, HostLengths
from omniserve.ops.streams import upload


@dataclass(frozen=True, kw_only=True, slots=True)
class SeatRows:
    """The rows in the P piggyback seats between two layers."""

    rows_P: Tensor
    """Row of each seat in the residual store and in the host tier's results, int64 on the device; -1: it is empty."""
    slots_P: Tensor
    """Host slot of each seat, int64 on the CPU; -1: it is empty."""
    positions: tuple[int, ...]
    """Positions of the seats that were planned, which are the first ones."""


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows of a step that become logits after the last layer."""

    rows: Tensor
    """Rows that sample a token, int64 on the device: device rows, then seats."""
    request_ids: tuple[str, ...]
    """The request of each of these rows; one may have several, which follow one another."""
    scores: tuple[tuple[str, int, PromptScores], ...]
    """Chunks of which log-probabilities of the prompt are wanted: request, first row, and which."""
    pooled: tuple[tuple[str, range, int | None], ...] = ()
    """Chunks with rows that are pooled: request, these rows, and ``PooledRows.total``."""


@dataclass(frozen=True, slots=True)
class LayersOutput:
    """The rows of a step after the last layer."""

    hidden_TD: Tensor
    sampled: SampledRows
    outcome: StepOutput = field(default_factory=StepOutput)
    """What is known of the step without its tokens."""
    amend: Callable[[StepOutput], StepOutput] | None = None
    """Waits for the step, and returns its output with what is known only then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRows:
    """The n device rows of a plan, of R requests, as arrays on the host; int64 unless said otherwise."""

    token_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    """``[n]``: block * block_size + offset."""
    query_start_loc: np.ndarray
    """``[R + 1]`` prefix sums."""
    seq_lens: np.ndarray
    """``[R]``: context after this step."""
    block_table: np.ndarray
    """``[R, M]`` int32, padded with 0."""
    is_reversed: np.ndarray | None
    """``[R]`` bool; None: no block runs from the right."""
    lora_slots: np.ndarray | None
    """``[n]``: slots of the rows' adapters; None: no row has one."""

    def attention_metadata(self, device: torch.device) -> AttentionMetadata:
        """Return the metadata of these rows for attention on ``device``."""
        reversed_RM: Tensor | None = None
        if self.is_reversed is not None:
            reversed_RM = _on(device, np.repeat(self.is_reversed[:, None], self.block_table.shape[1], axis=1))
        return AttentionMetadata(
            block_table_RM=_on(device, self.block_table),
            query_start_loc_R1=_on(device, self.query_start_loc.astype(np.int32)),
            seq_lens_R=_on(device, self.seq_lens.astype(np.int32)),
            host_lengths=HostLengths(
                query_lens=tuple(np.diff(self.query_start_loc).tolist()), seq_lens=tuple(self.seq_lens.tolist())
            ),
            reversed_RM=reversed_RM,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """The inputs of all layers of one step."""

    num_device_rows: int
    num_seats: int
    token_ids_T: Tensor
    """int64; the seats hold the tokens that enter, 0 where they are empty."""
    positions_T: Tensor
    lora_slots_T: Tensor | None
    """int64: slots of the rows' adapters, in the seats of tokens that enter; None: none has one."""
    slot_mapping: Tensor
    """``[num_device_rows]`` int64: block * block_size + offset."""
    attention: AttentionMetadata
    """Attention metadata of the device rows."""
    entering: SeatRows | None
    """The seats at layer 0; None if no token enters."""
    joining: dict[int, SeatRows]
    """Layer -> the seats into which results of the host tier come there; hooks may change it as the step runs."""
    sampled: SampledRows
    """Rows that are sampled, if all joins join."""

    def leaving(self, layer: int) -> SeatRows | None:
        """Return the seats whose rows go to the host tier at a layer; None if all are empty."""
        return self.joining.get(layer - 1) if layer else self.entering


def make_device_rows(plan: StepPlan, *, block_size: int) -> DeviceRows:
    """Turn the ids and counts of a plan's chunks into arrays."""
    chunks = plan.chunks
    lengths = np.fromiter((len(c.token_ids) for c in chunks), np.int64, len(chunks))
    starts = np.fromiter((c.start for c in chunks), np.int64, len(chunks))
    query_start_loc = np.zeros(len(chunks) + 1, np.int64)
    np.cumsum(lengths, out=query_start_loc[1:])
    num_rows = int(query_start_loc[-1])
    # The position of a row is its chunk's start plus its index inside the chunk.
    positions = np.arange(num_rows) + np.repeat(starts - query_start_loc[:-1], lengths)
    token_ids = np.fromiter(chain.from_iterable(c.token_ids for c in chunks), np.int64, num_rows)

    widest = max((len(c.block_ids) for c in chunks), default=0)
    block_table = np.zeros((len(chunks), widest), np.int32)
    for row, chunk in enumerate(chunks):
        block_table[row, : len(chunk.block_ids)] = chunk.block_ids
    blocks = block_table[np.repeat(np.arange(len(chunks)), lengths), positions // block_size]
    offsets = positions % block_size
    slots = np.fromiter((c.lora_slot for c in chunks), np.int64, len(chunks))
    is_reversed = np.fromiter((c.is_reversed for c in chunks), np.bool_, len(chunks))
    if is_directed := bool(is_reversed.any()):
        offsets = np.where(np.repeat(is_reversed, lengths), block_size - 1 - offsets, offsets)
    return DeviceRows(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=blocks.astype(np.int64) * block_size + offsets,
        query_start_loc=query_start_loc,
        seq_lens=starts + lengths,
        block_table=block_table,
        is_reversed=is_reversed if is_directed else None,
        lora_slots=np.repeat(slots, lengths) if slots.any() else None,
    )


def rows_of(tokens: Sequence[PiggybackEntry | PiggybackJoin], max_host_rows: int) -> list[int]:
    """Return the rows of host tokens, all rows of a token side by side, as in ``SeatRows.rows_P``."""
    if all([token.num_rows == 1 for token in tokens]):
        return [token.slot * max_host_rows for token in tokens]
    return [token.slot * max_host_rows + i for token in tokens for i in range(token.num_rows)]


def positions_of(tokens: Sequence[PiggybackEntry | PiggybackJoin]) -> list[int]:
    """Return the positions of the rows of host tokens."""
    if all([token.num_rows == 1 for token in tokens]):
        return [token.position for token in tokens]
    return [token.position + i for token in tokens for i in range(token.num_rows)]


def sampled_rows(
    plan: StepPlan, *, num_layers: int, first_seat: int, device: torch.device, absent: Set[str] = frozenset()
) -> SampledRows:
    """Return the rows of a plan that become logits; ``first_seat`` is the row of the first seat.

    ``absent`` are the requests whose joins did not join; their seats are empty.
    """
    sampled: list[int] = []
    request_ids: list[str] = []
    scores: list[tuple[str, int, PromptScores]] = []
    pooled: list[tuple[str, range, int | None]] = []
    first_row = 0
    for chunk in plan.chunks:
        if chunk.scores is not None:
            scores.append((chunk.request_id, first_row + chunk.scores.first_row, chunk.scores))
        end = first_row + len(chunk.token_ids)
        if chunk.pooled is not None:
            pooled.append((chunk.request_id, range(first_row + chunk.pooled.first_row, end), chunk.pooled.total))
        first_row = end
        if num_sampled := chunk.num_sampled_rows:
            sampled += range(first_row - num_sampled, first_row)
            request_ids += repeat(chunk.request_id, num_sampled)
    seat, last = first_seat, num_layers - 1
    for join in [join for join in plan.joins if join.layer == last]:
        if join.request_id not in absent:
            sampled += range(seat, seat + join.num_rows)
            request_ids += repeat(join.request_id, join.num_rows)
        seat += join.num_rows
    rows = upload(torch.tensor(sampled, dtype=torch.int64), device)
    return SampledRows(rows, tuple(request_ids), tuple(scores), tuple(pooled))


def make_step_inputs(
    plan: StepPlan, *, block_size: int, num_layers: int, device: torch.device, max_host_rows: int = 1
) -> StepInputs:
    """Turn ids and counts into tensors on ``device``; the host tier has ``max_host_rows`` rows of each slot."""
    rows = make_device_rows(plan, block_size=block_size)
    num_rows, seats = len(rows.token_ids), plan.num_piggyback_seats
    positions, token_ids = np.zeros((2, num_rows + seats), np.int64)
    positions[:num_rows], token_ids[:num_rows] = rows.positions, rows.token_ids
    lora_slots: np.ndarray | None = None
    if rows.lora_slots is not None or any([entry.lora_slot for entry in plan.entries]):
        lora_slots = np.zeros(num_rows + seats, np.int64)
        lora_slots[:num_rows] = 0 if rows.lora_slots is None else rows.lora_slots
    seat = num_rows
    for entry in plan.entries:
        end = seat + entry.num_rows
        token_ids[seat:end] = entry.token_ids
        if lora_slots is not None:
            lora_slots[seat:end] = entry.lora_slot
        positions[seat:end] = np.arange(entry.position, entry.position + entry.num_rows)
        seat = end
    entering, joining = _seats(plan, max_host_rows, device) if seats else (None, {})
    return StepInputs(
        num_device_rows=num_rows,
        num_seats=seats,
        token_ids_T=_on(device, token_ids),
        positions_T=_on(device, positions),
        lora_slots_T=None if lora_slots is None else _on(device, lora_slots),
        slot_mapping=_on(device, rows.slot_mapping),
        attention=rows.attention_metadata(device),
        entering=entering,
        joining=joining,
        sampled=sampled_rows(plan, num_layers=num_layers, first_seat=num_rows, device=device),
    )


class PendingTokens:
    """Brings the tokens that a step sampled into the next one on the device, before the host knows them.

    It holds the tokens of the step that was launched last; each token that is pending in a plan is one of them.
    Legend: R rows that were sampled.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._request_ids: Sequence[str] = ()
        self._tokens_R = torch.empty(0, dtype=torch.int64, device=device)

    def note(self, request_ids: Sequence[str], tokens_R: Tensor) -> None:
        """Hold the tokens that a step sampled, int64 on the device, in place of those of the step before."""
        self._request_ids, self._tokens_R = request_ids, tokens_R

    def fill(self, token_ids_T: Tensor, plan: StepPlan, *, first_seat: int | None = None) -> None:
        """Write the tokens into the rows of a plan that wait for them, if any do; the host waits for nothing.

        Call this before the rows are embedded, or before the replay of a captured graph that embeds them.

        Args:
            token_ids_T: int64 on the device: the rows of the plan's chunks, then its seats. It is changed in place.
            plan: The step.
            first_seat: Row of the first seat; None means the row behind the chunks.

        Raises:
            RuntimeError: The last step did not sample what the plan waits for.
        """
        rows: list[int] = []
        wanted: list[str] = []
        end = 0
        for chunk in plan.chunks:
            end += len(chunk.token_ids)
            if chunk.token_ids[-1] == PENDING_TOKEN:
                rows.append(end - 1)
                wanted.append(chunk.request_id)
        row = end if first_seat is None else first_seat
        for entry in plan.entries:
            if entry.token_id == PENDING_TOKEN:
                rows.append(row)
                wanted.append(entry.request_id)
            row += entry.num_rows
        if not rows:
            return
        index = {request_id: i for i, request_id in enumerate(self._request_ids)}
        if missing := [request_id for request_id in wanted if request_id not in index]:
            raise RuntimeError(f"step {plan.step_id} waits for tokens of {missing}, which the last step did not sample")
        sources = [index[request_id] for request_id in wanted]
        rows_W, sources_W = upload(torch.tensor([rows, sources]), self._device).unbind(0)
        token_ids_T.index_copy_(0, rows_W, self._tokens_R.index_select(0, sources_W))


def _seats(plan: StepPlan, max_host_rows: int, device: torch.device) -> tuple[SeatRows | None, dict[int, SeatRows]]:
    """Return the seats of a step whose rows enter, None if none does, and those that results come into, by layer."""
    by_layer = joins_by_layer(plan)
    groups: list[Sequence[PiggybackEntry | PiggybackJoin]] = [plan.entries, *by_layer.values()]
    rows = np.full((len(groups), plan.num_piggyback_seats), -1, np.int64)
    for group, tokens in enumerate(groups):
        taken = rows_of(tokens, max_host_rows)
        rows[group, : len(taken)] = taken
    slots = rows // max_host_rows  # an empty seat's stays -1
    positions = [tuple(positions_of(tokens)) for tokens in groups]
    parts = zip(_on(device, rows).unbind(0), torch.from_numpy(slots).unbind(0), positions, strict=True)
    entering, *joining = [SeatRows(rows_P=rows_P, slots_P=slots_P, positions=some) for rows_P, slots_P, some in parts]
    return entering if plan.entries else None, dict(zip(by_layer, joining, strict=True))


def _on(device: torch.device, array: np.ndarray) -> Tensor:
    return upload(torch.from_numpy(array), device)
