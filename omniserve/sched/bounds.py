"""How long a step may be: the tightest objective of the requests in it, and of those that may come."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from omniserve.core.plan import Bound, Decision, LeftOut
from omniserve.sched.state import RequestState
from omniserve.sched.step_cost import StepCost

LS_HEADROOM = 0.03
"""Share of a TPOT that LS prefill leaves for what no latency model knows (the way to the client, a busy machine)."""
BE_HEADROOM = 0.1
"""The same for BE work. It is more, so that decodes run ahead of their schedules and can lend their lead to prompts."""
TTFT_HEADROOM = 0.2
"""Share of a TTFT that BE work leaves: a TTFT is a few steps and not the mean of many, so nothing averages out."""
MAX_LENT_STEPS = 4.0
"""With ``slack="deadline"``, no step may be longer than this many TPOTs: a stream must not stutter."""


@dataclass(frozen=True, slots=True)
class TimeBound:
    """A bound in seconds, and the objective or request that it comes from."""

    seconds: float = math.inf
    by: str = ""

    def or_tighter(self, seconds: float, by: str) -> TimeBound:
        """Return the tighter of this bound and another."""
        return TimeBound(seconds, by) if seconds < self.seconds else self


def tpot_bound(decoding: Iterable[RequestState], now_s: float, slack: str, headroom: float) -> TimeBound:
    """Return S_d, the decoding objective of a step (omniserve 3.3.4), of the requests that decode in it.

    Args:
        slack: ``step``: a step is never longer than the shortest TPOT. ``deadline``: each token has a deadline,
            first token + i TPOT, so that a request ahead of its schedule lends its lead, and one behind gets it back.
    """
    tightest_s, request_id = math.inf, ""
    for state in decoding:
        tpot_s = state.slo.tpot_s
        if tpot_s is None:
            continue
        seconds = tpot_s = (1 - headroom) * tpot_s
        if slack == "deadline" and state.first_token_s is not None:
            due_s = state.first_token_s + state.num_output_tokens * tpot_s
            seconds = min(max(due_s - now_s, 0.0), MAX_LENT_STEPS * tpot_s)
        if seconds < tightest_s:
            tightest_s, request_id = seconds, state.request_id
    return TimeBound(tightest_s, f"tpot of {request_id}") if tightest_s < math.inf else TimeBound()


def ttft_left_s(state: RequestState, now_s: float) -> float:
    """Return the seconds until a request's first token is due; infinite without an objective."""
    if state.slo.ttft_s is None:
        return math.inf
    return state.arrival_s + (1 - TTFT_HEADROOM) * state.slo.ttft_s - now_s


def left_out(work: str, num_requests: int, bound: Bound | None, first_request_id: str = "") -> tuple[LeftOut, ...]:
    """Return what to note of work that stays out of a step: nothing if it is none."""
    if num_requests <= 0:
        return ()
    bound = bound or Bound.ORDER
    return (LeftOut(work=work, num_requests=num_requests, first_request_id=first_request_id, bound=bound),)


def decision_of(
    cost: StepCost | None, ls_s: float | None, bound: TimeBound, left_out: Iterable[LeftOut] = ()
) -> Decision:
    """Return why a step is what it is.

    Args:
        bound: Up to what that was added.
    """
    return Decision(
        predicted_s=cost.seconds() if cost is not None else None,
        predicted_ls_s=ls_s,
        bound_s=bound.seconds if bound.seconds < math.inf else None,
        bound_by=bound.by,
        left_out=tuple(left_out),
    )
