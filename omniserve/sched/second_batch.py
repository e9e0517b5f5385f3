"""SecondBatch: host residents that pass all layers in one step, which waits for each (``StepPlan.pipelined``).

Source: NEO (Jiang et al., MLSys 2025), section 4; apex 3.4.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Container, Sequence

from omniserve.core.plan import Bound, PiggybackEntry, PiggybackJoin
from omniserve.core.request import ServiceClass
from omniserve.sched.batch import Batch
from omniserve.sched.host_rows import HostRows
from omniserve.sched.state import Phase, RequestState
from omniserve.sched.step_cost import StepCost, left_out
from omniserve.sched.view import RequestView

_MOST_FOR_HOST_ROWS = 0.5


class SecondBatch:
    """Chooses host residents that run a token through its layers in one step, while the device waits for each.

    Args:
        furthest_first: The furthest through the layers come first, else the oldest.
        kinds: Those of the residents that it looks at; others have a place among the ``most`` all the same.
        most: Most rows of the sub-batch; None: ``max_piggyback_seats``.
    """

    def __init__(
        self,
        view: RequestView,
        *,
        furthest_first: bool = True,
        kinds: Container[ServiceClass] = tuple(ServiceClass),
        most: int | None = None,
    ) -> None:
        self._view, self._host, self._furthest_first, self._kinds = view, view.host, furthest_first, kinds
        self._most = most if most is not None else view.limits.config.max_piggyback_seats
        self.hybrid_share = 0.0
        """Share of the rows that are in the first sub-batch, as far as they begin a token (apex figure 2)."""

    def candidates(self) -> list[RequestState]:
        """Return residents that can run, the oldest first, or those furthest through the layers first (apex 3.4)."""
        if not self._view.host_is_up:
            return []
        waiting = [s for s in self._host.queue if s.away is None or s.away.ready]
        if self._furthest_first:
            waiting.sort(key=lambda s: -s.away.layer if s.away is not None else 1)
        return [state for state in waiting[: self._most] if state.kind in self._kinds]

    def reserve_s(self, batch: Batch, bound_s: float) -> float:
        """Return the seconds of a step within a bound that device work leaves for the candidates."""
        states = self.candidates()
        if batch.cost is None or bound_s == math.inf or not states:
            return 0.0
        cost_s = batch.cost.seconds()
        # Device work is the better half of a step: it is never kept out for more host rows than that.
        return min(self.seconds_with(batch.cost, states) - cost_s, _MOST_FOR_HOST_ROWS * max(0.0, bound_s - cost_s))

    def seconds_with(self, cost: StepCost, states: Sequence[RequestState]) -> float:
        """Return the step's seconds with these states as its second sub-batch."""
        return cost.seconds_after(lambda step: self._put(step, states))

    def most_per_second(
        self, cost: StepCost, states: Sequence[RequestState], *, num_requests: int, bound_s: float
    ) -> int:
        """Return how many of ``states``, from the first on, let most requests advance a second; 0 if none pay.

        NEO compares what a step with a second sub-batch brings with what one without brings, by predicted times. The
        step without them lets ``num_requests`` advance.
        """
        if not states:
            return 0
        seconds = cost.seconds()
        best, best_rate = 0, num_requests / seconds if seconds > 0 else 0.0
        for count in _ladder(len(states)):
            total_s = self.seconds_with(cost, states[:count])
            if total_s > bound_s:
                break
            if (rate := (num_requests + count) / total_s) >= best_rate:
                best, best_rate = count, rate
        return best

    def run_through(self, batch: Batch, states: Sequence[RequestState], count: int) -> HostRows:
        """Make a second sub-batch of the first ``count`` candidates, as far as they get host blocks."""
        chosen = states[:count]
        rows = self._rows_of(batch, chosen)
        if count > 0 and not rows and all(state.phase is Phase.HOST for state in chosen):
            # Residents with seats are the oldest, and wait for blocks: the youngest, which has no seat, gives way.
            batch.preempt(next(state for state in reversed(self._host.queue) if state.away is None))
        taken = {row.request_id for row in rows}
        running = [state for state in states if state.request_id in taken]
        if batch.cost is not None:
            self._put(batch.cost, running)
        hybrid = {state.request_id for state in self._hybrid(running)}
        rows = [
            dataclasses.replace(row, is_hybrid=True)
            if isinstance(row, PiggybackEntry) and row.request_id in hybrid
            else row
            for row in rows
        ]
        kept_out = left_out("pipelined row", count - len(rows), Bound.HOST_MEMORY)
        kept_out += left_out("pipelined row", len(states) - count, Bound.TIME)
        return HostRows(pipelined=rows, left_out=kept_out)

    def _hybrid(self, states: Sequence[RequestState]) -> Sequence[RequestState]:
        """Return the states whose rows are in the first sub-batch: the last ones, which begin a token.

        Tokens that have come some way through the layers are for the second sub-batch (apex 3.4).
        """
        beginning = [state for state in states if state.away is None]
        count = min(int(self.hybrid_share * len(states)), len(beginning))
        return beginning[len(beginning) - count :]

    def _put(self, cost: StepCost, states: Sequence[RequestState]) -> None:
        rows = [(s.num_tokens - 1, s.away.layer if s.away is not None else 0) for s in states]
        cost.add_pipelined(rows, len(self._hybrid(states)))

    def _rows_of(self, batch: Batch, states: Sequence[RequestState]) -> list[PiggybackEntry | PiggybackJoin]:
        """Return the plan's rows for these states, entries first and then joins by layer."""
        entries = batch.plan_entries(len(states), among={state.request_id for state in states})
        joins = [self._host.join_of(state) for state in states if state.away is not None]
        return [*entries, *sorted(joins, key=lambda join: join.layer)]


def _ladder(most: int) -> list[int]:
    """Return 1, 2, 4, ... and ``most``: a step's time is nearly linear in between."""
    powers = itertools.takewhile(lambda n: n < most, (1 << i for i in itertools.count()))
    return [*powers, most]
