"""Chooses the tokens on the host tier that take drafts along, and how many: several tokens a trip, under any policy.

A token and its drafts enter, leave and join as one, a seat for each. After the last layer the sampler tells how many
were right. As on the device (``draft_rows.py``) drafts are added to a step that is complete otherwise, from what it
leaves: seats, time within the bound, free host blocks, and the host threads' time, as results that they do not have
ready by the next step bring their tokens later.

Certain rows have seats first; then as many drafts, the likeliest first, as bring most tokens a second within the bound.
Where the host's threads need longer than the step, its tokens come at their pace, so a draft must be worth its share of
that, too (``HostSpeed.per_draft_key_s``, measured with the profile). A draft that finds no seat at some layer is
dropped, with those behind it: the token goes on (``PiggybackJoin.draft_ids``, ``submit`` with fewer seats). A late
token's drafts do as it does. Host blocks come from ``allocate_lookahead``, which leaves residents room to grow, and go
back with ``trim``. On a GPU there are as many drafts as its rows of the residual store have a small share of its memory
for (``engine/capacity.py``).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from omniserve.core.plan import PENDING_TOKEN, DeviceChunk, PiggybackEntry, PiggybackJoin
from omniserve.kv.base import KVManager
from omniserve.sched.features.base import OpenStep
from omniserve.sched.features.draft_rows import most_drafts
from omniserve.sched.features.speculation import speculation_of
from omniserve.sched.host_rows import HostRows
from omniserve.sched.options import SchedulerLimits
from omniserve.sched.seats import num_seats
from omniserve.sched.state import RequestState
from omniserve.sched.step_cost import StepCost


@dataclass(frozen=True, slots=True)
class HostSeats:
    """The seats and rows that a step has for host rows."""

    taken: int
    """Seats that the step has without drafts."""
    most: int
    """Most seats."""
    most_rows: int
    """Most rows over all layers."""
    most_drafts: int
    """Most drafts of a token; 0: none has any."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """A host row of the step, and the drafts that may be beside it."""

    row: PiggybackEntry | PiggybackJoin
    layer: int
    """Layer at which the row joins, and needs its seats; -1: it enters."""
    drafts: Sequence[int] = ()
    chance: float = 0.0


class _Rates:
    """The rate of a step, in output tokens a second, with some drafts.

    The host attends beside the device. Where it needs longer than the step, its tokens come at its own pace.
    """

    def __init__(self, cost: StepCost, chunks: Sequence[DeviceChunk], units: Sequence[_Unit]) -> None:
        self._cost, self._num_layers = cost, cost.shape.num_layers
        self._device_work = sum([len(chunk.token_ids) for chunk in chunks]) + cost.features.pipelined_rows
        self._rows = cost.features.piggyback_rows
        # At the last layer rows join for good; the others are attended for, at the next layer.
        self._last = self._num_layers - 1
        self._layers = [unit.layer for unit in units]
        self._keys = [0.0] * len(units)
        self.least = [0.0] * len(units)
        """The chance from which on a draft of each unit is worth the host's time: its share of what a row takes."""
        host = cost.host
        if host is not None:
            seen = cost.shape.keys_seen
            self._keys = [seen(unit.row.position, 1) if unit.layer < self._last else 0.0 for unit in units]
            self._num_leaving = sum([layer < self._last for layer in self._layers])
            self._all_keys = sum(self._keys)
            busy_s = host(self._num_leaving, self._all_keys)
            if busy_s > cost.seconds():
                share = self._rows * host.per_draft_key_s / host.threads / busy_s
                self.least = [share * keys for keys in self._keys]

    def __call__(self, seats: int, counts: Sequence[int], value: float) -> tuple[float, float]:
        """Return the rate with ``counts`` drafts of the units, ``value`` of which are right, and the step's seconds."""
        step = self._cost
        if num_drafts := sum(counts):
            step = step.copy()
            last = self._last
            num_sampled = sum([n for layer, n in zip(self._layers, counts, strict=True) if layer == last])
            step.add_host_drafts(seats, num_drafts, num_sampled)
        step_s = host_s = step.seconds()
        if step.host is not None:
            draft_keys = sum([keys * n for keys, n in zip(self._keys, counts, strict=True)])
            host_s = max(step_s, step.host(self._num_leaving, self._all_keys, draft_keys))
        # A row passes one layer of its token.
        host_work = (self._rows + value) / self._num_layers
        return self._device_work / step_s + host_work / host_s, step_s


def with_host_drafts(step: OpenStep, kv: KVManager, limits: SchedulerLimits) -> HostRows:
    """Return the host rows of a step with the drafts that they take along, and add these to its cost.

    A token that enters may get drafts; those that entered with it join with it, as long as they find seats. Certain
    rows have theirs first, then the drafts that are likeliest right.
    """
    entries, joins, states, cost = step.host_rows.entries, step.host_rows.joins, step.states, step.cost
    most_seats, max_rows = limits.config.max_piggyback_seats, step.host_rows.max_rows
    seats = HostSeats(
        taken=num_seats(entries, joins, most_seats),
        most=most_seats,
        most_rows=most_seats * (limits.num_layers + 1) if max_rows is None else max_rows,
        most_drafts=limits.max_host_drafts,
    )
    max_model_len, reserve_blocks = limits.max_model_len, step.reserve_host_blocks
    units = [_entering(entry, states[entry.request_id], seats, max_model_len, cost) for entry in entries]
    away = [states[join.request_id].away for join in joins]
    if not any([unit.drafts for unit in units]) and not any([token is not None and token.draft_ids for token in away]):
        return step.host_rows
    units += [_joining(join, states[join.request_id]) for join in joins]
    rates = _Rates(cost, tuple(step.chunks.values()), units) if cost is not None else None
    counts = _num_taken(units, seats, rates, bound_s=step.bound_s)
    taken = [
        _with_drafts(unit, states[unit.row.request_id], count, kv, reserve_blocks) if count else unit.row
        for unit, count in zip(units, counts, strict=True)
    ]
    entries = [row for row in taken if isinstance(row, PiggybackEntry)]
    joins = [row for row in taken if isinstance(row, PiggybackJoin)]
    if cost is not None:
        last = cost.shape.num_layers - 1
        cost.add_host_drafts(
            num_seats(entries, joins, seats.most),
            sum([len(row.draft_ids) for row in taken]),
            sum([len(join.draft_ids) for join in joins if join.layer == last]),
        )
    return dataclasses.replace(step.host_rows, entries=entries, joins=joins)


def _entering(
    entry: PiggybackEntry, state: RequestState, seats: HostSeats, max_model_len: int, cost: StepCost | None
) -> _Unit:
    speculation = speculation_of(state)
    if speculation is None or entry.token_id == PENDING_TOKEN or not seats.most_drafts:
        return _Unit(entry, -1)
    most = min(seats.most_drafts, most_drafts(state, speculation, max_model_len, has_forecast=cost is not None))
    return _Unit(entry, -1, speculation.draft(state.token_ids, state.num_tokens, most), speculation.chance)


def _joining(join: PiggybackJoin, state: RequestState) -> _Unit:
    assert state.away is not None
    speculation = speculation_of(state)
    if speculation is None or not state.away.draft_ids:
        return _Unit(join, join.layer)
    return _Unit(join, join.layer, state.away.draft_ids, speculation.chance)


def _num_taken(units: Sequence[_Unit], seats: HostSeats, rates: _Rates | None, *, bound_s: float) -> list[int]:
    """Return how many drafts each unit takes, with as many seats as let the step bring most tokens a second."""
    least = rates.least if rates is not None else [0.0] * len(units)
    # The second draft counts if the first one was right, and so on. (-chance, unit): the likeliest come first.
    ranked = sorted(
        (-chance, number)
        for number, unit in enumerate(units)
        for i in range(len(unit.drafts))
        if (chance := unit.chance ** (i + 1)) >= least[number]
    )
    if rates is None:
        return _within(units, ranked, seats.most, seats.most_rows)[0]
    best = [0] * len(units)
    best_rate, _ = rates(seats.taken, best, 0.0)
    count = seats.taken
    while ranked:
        counts, value = _within(units, ranked, count, seats.most_rows)
        rate, seconds = rates(count, counts, value)
        if seconds <= bound_s and rate > best_rate:
            best, best_rate = counts, rate
        if count >= seats.most or sum(counts) == len(ranked):
            break
        count = min(2 * count, seats.most)
    return best


def _within(
    units: Sequence[_Unit], ranked: Sequence[tuple[float, int]], most_seats: int, most_rows: int
) -> tuple[list[int], float]:
    """Return how many drafts each unit takes, the first of the ``ranked``, and how many are right on average."""
    taken = Counter([unit.layer for unit in units])
    counts, expected, rows_left = [0] * len(units), 0.0, most_rows - len(units)
    for value, number in ranked:
        if rows_left <= 0:
            break
        layer = units[number].layer
        if taken[layer] < most_seats:
            counts[number] += 1
            taken[layer] += 1
            rows_left -= 1
            expected -= value
    return counts, expected


def _with_drafts(
    unit: _Unit, state: RequestState, count: int, kv: KVManager, reserve_blocks: int
) -> PiggybackEntry | PiggybackJoin:
    """Return a unit's row with up to ``count`` drafts: as many as there are host blocks for."""
    row = unit.row
    if isinstance(row, PiggybackEntry):
        count, block_ids = _stretched(row, state, count, kv, reserve_blocks)
        row = dataclasses.replace(row, block_ids=block_ids)
    return dataclasses.replace(row, draft_ids=tuple(unit.drafts[:count]))


def _stretched(
    entry: PiggybackEntry, state: RequestState, count: int, kv: KVManager, reserve_blocks: int
) -> tuple[int, tuple[int, ...]]:
    """Return how many of up to ``count`` drafts there are host blocks for, and the request's blocks."""
    block_ids = kv.allocate_lookahead(state.request_id, state.num_tokens + count, reserve_blocks=reserve_blocks)
    if block_ids is not None:
        return count, block_ids
    return min(count, -state.num_tokens % kv.block_size), entry.block_ids
