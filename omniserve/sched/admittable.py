"""Tells how many more LS requests a second admission would let in now, by its own predictions."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable

from omniserve.core.request import ClassSpec, Request, SamplingParams
from omniserve.sched.fairness import Account
from omniserve.sched.state import LS, RequestState
from omniserve.sched.step_cost import largest

MOST = 32
"""Most requests at once that are reckoned with; if all of them would be admitted, their pace goes on."""
UNKNOWN_PROMPT_TOKENS, UNKNOWN_MAX_TOKENS = 256, 128
"""Lengths of a request before any has come."""


def made_up(spec: ClassSpec, rank: int, lengths: tuple[int, int], now_s: float, account: Account) -> RequestState:
    """Return the state of a request that comes now, behind all others of its class and tenant.

    Args:
        spec: Its class.
        rank: The rank of the class.
        lengths: Tokens of its prompt, and its ``max_tokens``.
        account: Its tenant's in the class.
    """
    num_prompt_tokens, max_tokens = lengths
    request = Request(
        prompt_token_ids=(0,) * num_prompt_tokens,
        sampling=SamplingParams(max_tokens=max_tokens),
        service_class=spec.name,
    )
    return RequestState(
        request_id="",
        request=request,
        slo=spec.slo,
        kind=LS,
        priority_key=(rank, math.inf, sys.maxsize),
        account=account,
        arrival_s=now_s,
        token_ids=list(request.prompt_token_ids),
    )


def earlier_ones(state: RequestState) -> list[RequestState]:
    """Return as many requests as are reckoned with, like a made-up one and before it."""
    rank, due_s, order = state.priority_key
    return [
        dataclasses.replace(state, token_ids=state.token_ids, priority_key=(rank, due_s, order - MOST + number))
        for number in range(MOST - 1)
    ]


def admittable_per_s(first_token_s: Callable[[int], float], within_s: float, *, is_idle: bool) -> float:
    """Return how many requests a second would be admitted.

    It is the number of equal requests that would all be admitted if they came at once, over the time that admission
    lets their first tokens take. It falls as work waits or decodes, and is 0 where the next one would be refused.

    Args:
        first_token_s: Returns the seconds until the first token of the last of so many equal requests that come now.
        within_s: Most seconds with which the last one is admitted.
        is_idle: There is no LS request; then the first one is admitted in any case.
    """
    count = largest(first_token_s, MOST, within_s)
    if count == MOST:
        return MOST / first_token_s(MOST)
    return max(count, int(is_idle)) / within_s
