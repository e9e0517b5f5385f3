"""Seats: how many piggyback rows a step takes, and in how many seats. Paper: omniserve 3.3.6."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from omniserve.core.plan import PiggybackEntry, PiggybackJoin
from omniserve.sched.step_cost import StepCost


def seat_bucket(count: int, largest: int) -> int:
    """Return P for ``count`` rows: 0, or the smallest power of two that holds them, at most ``largest``."""
    return min(1 << (count - 1).bit_length(), largest) if count else 0


def num_seats(entries: Sequence[PiggybackEntry], joins: Sequence[PiggybackJoin], most: int) -> int:
    """Return P, the bucket of seats that holds a step's host rows in each layer; at most ``most``."""
    per_layer = Counter([join.layer for join in joins])
    for join in joins:
        if join.draft_ids:
            per_layer[join.layer] += len(join.draft_ids)
    num_entering = sum([entry.num_rows for entry in entries])
    return seat_bucket(max(num_entering, *per_layer.values(), 0), most)


@dataclass(frozen=True, slots=True)
class PiggybackPlan:
    """The piggyback rows to take."""

    seats: int = 0
    """Most rows a layer."""
    rows: int = 0
    """Most rows over all layers, counted from the lowest layer up; entries come before joins."""


def fill(cost: StepCost, num_entries: int, ready: Sequence[int], *, seats: int, max_rows: int) -> int:
    """Put piggyback rows into a step, lowest layer first, and return their number.

    Args:
        num_entries: Tokens that may enter at layer 0.
        ready: Results that wait, by layer.
        seats: Most rows of one layer.
        max_rows: Most rows in all.
    """
    entries = min(num_entries, seats, max_rows)
    rows_left, joins = max_rows - entries, []
    for count in ready:
        joins.append(min(count, seats, rows_left))
        rows_left -= joins[-1]
    cost.add_piggyback(seat_bucket(max(entries, *joins), seats), entries, joins)
    return max_rows - rows_left


def choose(
    cost: StepCost,
    num_entries: int,
    ready: Sequence[int],
    *,
    bound_s: float,
    max_seats: int,
    max_rows: int,
    be_work: float,
) -> PiggybackPlan:
    """Return the piggyback rows that bring most best-effort work a second within the bound.

    Every seat costs a row of the dense halves in each layer, taken or not, so as many seats as the fullest layer wants
    are not always best. With the seats chosen, rows are taken from the lowest layer up until the bound is reached.
    ``be_work`` is what the step's device rows bring, in output tokens; the other parameters are as in ``fill``.
    """
    most = seat_bucket(min(max(num_entries, max(ready, default=0)), max_rows), max_seats)
    best, best_rate = PiggybackPlan(), -1.0
    seats = most
    while seats:
        rows, seconds = rows_within(cost, num_entries, ready, seats=seats, max_rows=max_rows, bound_s=bound_s)
        if rows:
            # A row passes one layer: so many of them are a token.
            rate = (be_work + rows / (len(ready) + 1)) / seconds
            if rate > best_rate:
                best, best_rate = PiggybackPlan(seats, rows), rate
        seats = 1 << (seats - 1).bit_length() - 1 if seats > 1 else 0
    return best


def rows_within(
    cost: StepCost, num_entries: int, ready: Sequence[int], *, seats: int, max_rows: int, bound_s: float
) -> tuple[int, float]:
    """Return the most rows within the bound, and the step's seconds with them; the parameters are as in ``fill``."""

    def seconds(rows: int) -> float:
        return cost.seconds_after(lambda step: fill(step, num_entries, ready, seats=seats, max_rows=rows))

    trial = cost.copy()
    rows = fill(trial, num_entries, ready, seats=seats, max_rows=max_rows)
    all_s = trial.seconds()
    if all_s <= bound_s or rows == 0:
        return rows, all_s
    if bound_s == math.inf or seconds(1) > bound_s:
        return 0, all_s
    low, high = 1, rows
    while high - low > 1:
        middle = (low + high) // 2
        if seconds(middle) <= bound_s:
            low = middle
        else:
            high = middle
    return low, seconds(low)
