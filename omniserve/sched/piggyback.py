"""PiggybackChoice: the entries and joins of a step, from the lowest layer up. Paper: omniserve 3.3.6."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from omniserve.core.plan import Bound
from omniserve.sched.batch import Batch
from omniserve.sched.host_rows import NO_HOST_ROWS, HostRows
from omniserve.sched.options import SchedulerLimits
from omniserve.sched.seats import PiggybackPlan, fill, rows_within, seat_bucket
from omniserve.sched.step_cost import StepCost, left_out
from omniserve.sched.view import RequestView


class SeatChoice(Protocol):
    """Chooses how many piggyback rows a step takes within a bound, and in how many seats.

    ``cost`` is the batch's cost; ``num_entries`` and ``ready`` are parameters of ``seats.fill``.
    """

    def __call__(
        self, batch: Batch, cost: StepCost, num_entries: int, ready: Sequence[int], bound_s: float
    ) -> PiggybackPlan: ...


class PiggybackChoice:
    """Chooses entries and joins by a ``SeatChoice``; without a latency model, as many as find seats.

    Args:
        max_rows: Most rows of a step, over all layers.
    """

    def __init__(self, view: RequestView, max_rows: int, choose_seats: SeatChoice) -> None:
        self._view, self._host, self._limits = view, view.host, view.limits
        self._max_rows = max_rows
        self._choose_seats = choose_seats

    def reserve_s(self, batch: Batch, bound_s: float) -> float:
        """Return the seconds that device BE work leaves for results that wait (d w in the paper).

        Paper: OmniServe 3.3.4. Its text gives the stricter bound to steps *without* results; it means the others.
        """
        if batch.cost is None or not self._host.queue:
            return 0.0
        joinable = self._host.num_joinable(self._host.expected(has_device_rows=True))
        if not any(joinable):
            return 0.0
        entries = self._num_entries()
        seats = seat_bucket(max(entries, *joinable), self._limits.config.max_piggyback_seats)
        with_rows_s = batch.cost.seconds_after(
            lambda step: fill(step, entries, joinable, seats=seats, max_rows=self._max_rows)
        )
        return with_rows_s - batch.cost.seconds()

    def choose(self, batch: Batch, bound_s: float) -> HostRows:
        """Choose entries and joins within the bound, lowest layer first."""
        if not self._host.queue:
            return NO_HOST_ROWS
        num_entries, most_rows = self._num_entries(), self._max_rows
        if not (num_entries or any(self._host.num_ready) or batch.chunks):
            return NO_HOST_ROWS  # no step is begun for results that may not come
        expected = self._host.expected(has_device_rows=bool(batch.chunks))
        joinable = self._host.num_joinable(expected)
        if not num_entries and not any(joinable):
            return NO_HOST_ROWS
        if batch.cost is None:
            chosen = PiggybackPlan(self._limits.config.max_piggyback_seats, most_rows)
        else:
            if not batch.chunks:
                one_row_s = batch.cost.seconds_after(
                    lambda step: fill(step, num_entries, joinable, seats=1, max_rows=1)
                )
                bound_s = max(bound_s, one_row_s)
            chosen = self._choose_seats(batch, batch.cost, num_entries, joinable, bound_s)
        allowed = min(num_entries, chosen.seats, chosen.rows)
        entries = batch.plan_entries(allowed) if allowed else []
        joins = self._host.plan_joins(chosen.rows - len(entries), chosen.seats, expected) if chosen.seats else []
        bound = Bound.TIME if chosen.rows < min(most_rows, sum(joinable) + num_entries) else Bound.SEATS
        # Residents at a token boundary were asked in turn until the seats were taken: fewer entries lack host blocks.
        entry_bound = Bound.HOST_MEMORY if len(entries) < allowed else bound
        kept_out = left_out("piggyback entry", num_entries - len(entries), entry_bound)
        kept_out += left_out("piggyback join", sum(joinable) - len(joins), bound)
        rows = HostRows(entries=entries, joins=joins, max_rows=most_rows, left_out=kept_out)
        if batch.cost is not None:
            put_rows(batch.cost, rows, self._limits, most_rows)
        return rows

    def _num_entries(self) -> int:
        """Return how many host residents have a token that may enter."""
        return self._host.num_at_token_boundary if self._view.host_is_up else 0


def put_rows(cost: StepCost, rows: HostRows, limits: SchedulerLimits, max_rows: int) -> None:
    """Add the entries and joins that were really taken to a step: an entry without host blocks stays out."""
    per_layer = [0] * limits.num_layers
    for join in rows.joins:
        per_layer[join.layer] += 1
    fill(cost, len(rows.entries), per_layer, seats=limits.config.max_piggyback_seats, max_rows=max_rows)


class GreedySeats:
    """Chooses as many rows as the bound lets in, in seats for the fullest layer (omniserve 3.3.6; a ``SeatChoice``).

    Seats are a power of two, at most ``max_seats``: the paper does not bound the rows of a layer, but here steps have
    fixed shapes.
    """

    def __init__(self, *, max_seats: int, max_rows: int) -> None:
        self._max_seats, self._max_rows = max_seats, max_rows

    def __call__(
        self, batch: Batch, cost: StepCost, num_entries: int, ready: Sequence[int], bound_s: float
    ) -> PiggybackPlan:
        seats = seat_bucket(min(max(num_entries, *ready), self._max_rows), self._max_seats)
        rows, _ = rows_within(cost, num_entries, ready, seats=seats, max_rows=self._max_rows, bound_s=bound_s)
        return PiggybackPlan(seats, rows) if rows else PiggybackPlan()
