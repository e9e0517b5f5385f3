"""The order in which the prompts of LS requests are computed: best class first, then fair between its tenants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from omniserve.sched.fairness import Account
from omniserve.sched.state import RequestState


def prefill_order(states: Iterable[RequestState], now_s: float) -> list[RequestState]:
    """Return LS requests with prefill left in the order in which it goes on.

    With one tenant in each class that is by ``prefill_key``. Otherwise it is by start tag in a class: of the tenant as
    its prompt was counted, or, while the prompt waits, when those before it have been. A prompt with a scaled TTFT
    is behind all others of its class, of all tenants, until it is due.
    """
    ordered = sorted(states, key=lambda state: state.prefill_key)
    if not _compete(ordered):
        return ordered
    virtual_times = {state.account: state.account.virtual_time for state in ordered}
    places: list[tuple[int, bool, float]] = []
    for state in ordered:
        places.append((state.priority_key[0], now_s < state.arrival_s + state.later_s, _tag(state, virtual_times)))
    by_place = sorted(zip(places, ordered, strict=True), key=lambda placed: placed[0])
    return [state for _, state in by_place]


def _compete(states: Sequence[RequestState]) -> bool:
    """Tell whether two of these requests are of one class and of different tenants."""
    accounts = {state.account for state in states}
    return len(accounts) > 1 and len(accounts) > len({account.of_class for account in accounts})


def _tag(state: RequestState, virtual_times: dict[Account, float]) -> float:
    """Return a prompt's start tag; one that waits moves on the virtual time of its account."""
    if state.start_tag is not None:
        return state.start_tag
    tag = virtual_times[state.account]
    virtual_times[state.account] += state.next_cost / state.account.weight
    return tag


def ahead_of(new: RequestState, others: Iterable[RequestState], now_s: float) -> list[RequestState]:
    """Return which of the LS requests with prefill left are computed before a new one."""
    prompts = [*others, new]
    if not _compete(prompts):
        key = new.prefill_key
        return [state for state in prompts if state.prefill_key < key]
    ordered = prefill_order(prompts, now_s)
    return ordered[: ordered.index(new)]
