"""Which host residents form the second sub-batch of asymmetric pipelining, and how many. See ``StepPlan.pipelined``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from omniserve.core.plan import PiggybackEntry, PiggybackJoin
from omniserve.sched.load import StepLoad
from omniserve.sched.residents import HostResidents
from omniserve.sched.state import RequestState

Allocate = Callable[[RequestState], tuple[int, ...] | None]


def candidates(residents: HostResidents) -> list[RequestState]:
    """Return the residents whose token can run: those furthest through the layers first (apex 3.4), then the oldest."""
    waiting = [s for s in residents.queue if s.away is None or s.away.ready]
    return sorted(waiting, key=lambda s: -s.away.layer if s.away is not None else 1)


def most_per_second(
    load: StepLoad, states: Sequence[RequestState], *, num_layers: int, num_requests: int, bound_s: float
) -> int:
    """Return how many of ``states``, from the first on, let most requests advance a second; 0 if none pay.

    NEO compares what a step with a second sub-batch brings with what one without brings, by predicted times.

    Args:
        load: The step without them.
        states: In order of preference.
        num_layers: L.
        num_requests: Requests that the step without them lets advance.
        bound_s: Longest step.
    """
    if not states:
        return 0
    seconds = load.seconds()
    best, best_rate = 0, num_requests / seconds if seconds > 0 else 0.0
    for count in _ladder(len(states)):
        total_s = seconds_with(load, states[:count], num_layers=num_layers)
        if total_s > bound_s:
            break
        if (rate := (num_requests + count) / total_s) >= best_rate:
            best, best_rate = count, rate
    return best


def seconds_with(load: StepLoad, states: Sequence[RequestState], *, num_layers: int) -> float:
    """Return the step's seconds with these states as its second sub-batch."""
    trial = load.copy()
    put(trial, states, num_layers=num_layers)
    return trial.seconds()


def put(load: StepLoad, states: Sequence[RequestState], *, num_layers: int) -> None:
    """Make these states the second sub-batch of a load."""
    layers = sum(num_layers - (s.away.layer if s.away is not None else 0) for s in states)
    keys = sum(load.keys_seen(s.num_tokens - 1) for s in states)
    load.set_pipelined(len(states), keys, layers / len(states) if states else 0.0)


def rows_of(
    residents: HostResidents, states: Sequence[RequestState], allocate: Allocate
) -> list[PiggybackEntry | PiggybackJoin]:
    """Return the plan's rows for these states, entries first and then joins by layer.

    Args:
        residents: Where they are.
        states: From ``candidates``.
        allocate: Returns the host blocks for a request's newest token, or None: it stays out.
    """
    chosen = {state.request_id for state in states}
    entries = residents.plan_entries(
        lambda state: allocate(state) if state.request_id in chosen else None, max_entries=len(states)
    )
    joins = [residents.join_of(state) for state in states if state.away is not None]
    return [*entries, *sorted(joins, key=lambda join: join.layer)]


def _ladder(most: int) -> list[int]:
    """Return 1, 2, 4, ... and ``most``: a step's time is nearly linear in between."""
    powers = itertools.takewhile(lambda n: n < most, (1 << i for i in itertools.count()))
    return [*powers, most]
