"""Which decodes of a step carry drafts, and how many: speculative decoding, under any policy.

A decode may be followed by drafts of the tokens behind its newest one. On the device all of them pass the step as one
chunk; on the host tier they leave and join as one, a seat for each. The sampler tells how many were right: those are
new tokens, at the price of rows instead of steps. What comes out does not depend on the drafts.

They are added to a step that is complete otherwise, from what it leaves: tokens of the budget, seats, time within the
bound, free blocks. Nothing gives way to them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from omniserve.core.plan import PENDING_TOKEN, DeviceChunk, PiggybackEntry, PiggybackJoin
from omniserve.kv.base import KVManager
from omniserve.sched.speculation import MAX_DRAFTS, Speculation
from omniserve.sched.state import RequestState
from omniserve.sched.step_cost import StepCost, seat_bucket

MAX_DRAFTS_WITHOUT_FORECAST = 4
"""Most drafts of a request in a step where no latency model tells what they cost."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """A decode of the step, and drafts that may follow it."""

    state: RequestState
    chunk: DeviceChunk
    drafts: Sequence[int]
    speculation: Speculation


def with_drafts(
    chunks: Sequence[DeviceChunk], states: Sequence[RequestState], kv: KVManager, *, cost: StepCost | None,
    bound_s: float, tokens_left: int, max_model_len: int, without: Collection[str],
) -> dict[str, DeviceChunk]:  # fmt: skip
    """Return the chunks of a step that get drafts, by request, and add them to the cost.

    Args:
        chunks: All of the step's.
        states: The request of each.
        cost: The step with them; None: nothing predicts what drafts cost.
        bound_s: Most seconds of the step; a longer one gets no drafts.
        tokens_left: Most drafts in all.
        without: Requests that get none.
    """
    offers = []
    for chunk, state in zip(chunks, states, strict=True):
        speculation = state.speculation
        if speculation is None or not _is_plain_decode(chunk, state) or chunk.request_id in without:
            continue
        most = min(tokens_left, _most(state, speculation, max_model_len, has_forecast=cost is not None))
        if drafts := speculation.draft(state.token_ids, state.num_tokens, most):
            offers.append(_Offer(state, chunk, drafts, speculation))
    offers.sort(key=lambda offer: -offer.speculation.chance)
    work = _work(cost, chunks)
    found: dict[str, DeviceChunk] = {}
    for offer in offers:
        count = min(len(offer.drafts), tokens_left)
        if cost is not None and count:
            count = _num_that_pay(cost, offer, count, work=work, bound_s=bound_s)
        for num_drafts in _fitting(offer, count, kv.block_size):
            block_ids = kv.stretch(offer.state.request_id, offer.state.num_tokens + num_drafts)
            if block_ids is None:
                continue
            token_ids = (*offer.chunk.token_ids, *offer.drafts[:num_drafts])
            found[offer.chunk.request_id] = dataclasses.replace(
                offer.chunk, token_ids=token_ids, block_ids=block_ids, num_drafts=num_drafts
            )
            if cost is not None:
                cost.add_drafts(offer.chunk.start, num_drafts)
            tokens_left -= num_drafts
            work += offer.speculation.expected(num_drafts)
            break
        else:
            offer.speculation.decline(offer.state.num_tokens)
    return found


def _most(state: RequestState, speculation: Speculation, max_model_len: int, *, has_forecast: bool) -> int:
    """Return the most drafts that are worth asking for."""
    # One token is certain, and there may be no draft of what would end the request by its length.
    limit = min(state.max_num_tokens, max_model_len) - state.num_tokens - 1
    if not has_forecast:
        return min(limit, speculation.num_likely, MAX_DRAFTS_WITHOUT_FORECAST)
    # Where it is known what they cost, more are considered than are likely to be right all together.
    return min(limit, 2 * speculation.num_likely, MAX_DRAFTS)


def _work(cost: StepCost | None, chunks: Sequence[DeviceChunk]) -> float:
    """Return the tokens that a step computes or brings; a host row passes one layer of its token."""
    work = float(sum(len(chunk.token_ids) for chunk in chunks))
    if cost is not None:
        work += cost.features.piggyback_rows / cost.shape.num_layers + cost.features.pipelined_rows
    return work


def _is_plain_decode(chunk: DeviceChunk, state: RequestState) -> bool:
    """Tell whether a chunk is a request's newest token alone, which is known, and passes all layers in the step."""
    return (
        len(chunk.token_ids) == 1
        and chunk.samples
        and state.num_output_tokens > 0
        and chunk.token_ids[0] != PENDING_TOKEN
        and chunk.from_layer == 0
        and chunk.scores is None
    )


def _num_that_pay(cost: StepCost, offer: _Offer, most: int, *, work: float, bound_s: float) -> int:
    """Return how many of up to ``most`` drafts bring most tokens a second within the bound; 0 if none bring more.

    ``work`` is the tokens that the step computes or brings, on average.
    """
    best, best_rate = 0, work / cost.seconds()
    count = most
    while count:
        trial = cost.copy()
        trial.add_drafts(offer.chunk.start, count)
        seconds = trial.seconds()
        rate = (work + offer.speculation.expected(count)) / seconds
        if seconds <= bound_s and rate > best_rate:
            best, best_rate = count, rate
        count //= 2
    return best


def _fitting(offer: _Offer, count: int, block_size: int) -> Iterator[int]:
    """Yield so many drafts, then as many of them as the request's last block has slots for, if any."""
    in_last_block = -offer.state.num_tokens % block_size
    if count:
        yield count
    if 0 < in_last_block < count:
        yield in_last_block


# -- on the host tier ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostSeats:
    """What a step has for host rows."""

    taken: int
    """Seats that it has without drafts."""
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
    drafts: Sequence[int]
    chance: float

    @property
    def layer(self) -> int:
        """Where it needs its seats; -1: where tokens enter."""
        return self.row.layer if isinstance(self.row, PiggybackJoin) else -1


def with_host_drafts(
    entries: Sequence[PiggybackEntry], joins: Sequence[PiggybackJoin], states: Mapping[str, RequestState],
    kv: KVManager, seats: HostSeats, *, cost: StepCost | None, bound_s: float, chunks: Sequence[DeviceChunk],
    max_model_len: int, reserve_blocks: int,
) -> tuple[list[PiggybackEntry], list[PiggybackJoin]]:  # fmt: skip
    """Return a step's entries and joins with the drafts that they take along, and add these to the cost.

    A token that enters may get drafts; those that entered with it join with it, as long as they find seats. Certain
    rows have theirs first, then the drafts that are likeliest right.

    Args:
        entries: Tokens that enter, without drafts.
        joins: Tokens that join, without drafts.
        states: By request.
        seats: What the step has for them.
        cost: The step with these rows; None: nothing predicts what drafts cost.
        bound_s: Most seconds of the step; drafts do not lengthen one beyond it.
        chunks: The step's device rows.
        reserve_blocks: Host blocks that stay free for tokens that are certain.
    """
    units = [_entering(entry, states[entry.request_id], seats, max_model_len, cost) for entry in entries]
    units += [_joining(join, states[join.request_id]) for join in joins]
    if not any(unit.drafts for unit in units):
        return list(entries), list(joins)
    counts = _num_taken(units, seats, cost=cost, bound_s=bound_s, work=_work(cost, chunks))
    rows: list[PiggybackEntry | PiggybackJoin] = []
    for unit, count in zip(units, counts, strict=True):
        row, state = unit.row, states[unit.row.request_id]
        if isinstance(row, PiggybackEntry) and count:
            count, block_ids = _stretched(row, state, count, kv, reserve_blocks)
            row = dataclasses.replace(row, block_ids=block_ids)
        rows.append(dataclasses.replace(row, draft_ids=tuple(unit.drafts[:count])))
    if cost is not None:
        drafts = [(unit.layer, len(row.draft_ids)) for unit, row in zip(units, rows, strict=True)]
        last = cost.shape.num_layers - 1
        cost.add_host_drafts(
            num_seats(rows, seats.most), sum(n for _, n in drafts), sum(n for layer, n in drafts if layer == last)
        )
    return (
        [row for row in rows if isinstance(row, PiggybackEntry)],
        [row for row in rows if isinstance(row, PiggybackJoin)],
    )


def num_seats(rows: Sequence[PiggybackEntry | PiggybackJoin], most: int) -> int:
    """Return P, the bucket of seats that holds a step's host rows in each layer; at most ``most``."""
    per_layer: Counter[int] = Counter()
    for row in rows:
        per_layer[row.layer if isinstance(row, PiggybackJoin) else -1] += row.num_rows
    return seat_bucket(max(per_layer.values(), default=0), most)


def _entering(
    entry: PiggybackEntry, state: RequestState, seats: HostSeats, max_model_len: int, cost: StepCost | None
) -> _Unit:
    speculation = state.speculation
    if speculation is None or entry.token_id == PENDING_TOKEN or not seats.most_drafts:
        return _Unit(entry, (), 0.0)
    most = min(seats.most_drafts, _most(state, speculation, max_model_len, has_forecast=cost is not None))
    return _Unit(entry, speculation.draft(state.token_ids, state.num_tokens, most), speculation.chance)


def _joining(join: PiggybackJoin, state: RequestState) -> _Unit:
    assert state.away is not None
    chance = state.speculation.chance if state.speculation is not None else 0.0
    return _Unit(join, state.away.draft_ids, chance)


def _num_taken(
    units: Sequence[_Unit], seats: HostSeats, *, cost: StepCost | None, bound_s: float, work: float
) -> list[int]:
    """Return how many drafts each unit takes, with as many seats as let the step bring most tokens a second."""
    # The second draft counts if the first one was right, and so on.
    values = [(unit.chance ** (i + 1), number) for number, unit in enumerate(units) for i in range(len(unit.drafts))]
    values.sort(key=lambda value: -value[0])

    def taken(num_seats: int) -> tuple[list[int], float]:
        left: defaultdict[int, int] = defaultdict(lambda: num_seats)
        for unit in units:
            left[unit.layer] -= 1
        counts, value, rows_left = [0] * len(units), 0.0, seats.most_rows - len(units)
        for each, number in values:
            if rows_left > 0 and left[units[number].layer] > 0:
                counts[number] += 1
                left[units[number].layer] -= 1
                rows_left -= 1
                value += each
        return counts, value

    if cost is None:
        return taken(seats.most)[0]
    last = cost.shape.num_layers - 1
    best, best_rate = [0] * len(units), work / cost.seconds()
    num_seats = seats.taken
    while True:
        counts, value = taken(num_seats)
        trial = cost.copy()
        num_sampled = sum(count for unit, count in zip(units, counts, strict=True) if unit.layer == last)
        trial.add_host_drafts(num_seats, sum(counts), num_sampled)
        seconds = trial.seconds()
        rate = (work + value / cost.shape.num_layers) / seconds
        if seconds <= bound_s and rate > best_rate:
            best, best_rate = counts, rate
        if num_seats >= seats.most:
            return best
        num_seats = min(2 * num_seats, seats.most)


def _stretched(
    entry: PiggybackEntry, state: RequestState, count: int, kv: KVManager, reserve_blocks: int
) -> tuple[int, tuple[int, ...]]:
    """Return how many of up to ``count`` drafts there are host blocks for, and the request's blocks."""
    block_ids = kv.stretch(state.request_id, state.num_tokens + count, reserve_blocks=reserve_blocks)
    if block_ids is not None:
        return count, block_ids
    return min(count, -state.num_tokens % kv.block_size), entry.block_ids
