"""StepCost: what a step consists of while a policy puts it together, how long it would take, and how long it may.

Paper: omniserve 3.3.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

from omniserve.core.plan import Bound, Decision, LeftOut
from omniserve.latency import BatchFeatures, HostSpeed, ModelShape, Predictor, StepRows
from omniserve.latency.profile import Profile
from omniserve.sched.state import RequestState

_SEARCH_ROUNDS = 6
_CLOSE_ENOUGH = 0.02  # of the bound: a chunk that fills the step to 98 % is not searched further


@dataclass(frozen=True, slots=True)
class Forecast:
    """The predictors of latencies that a policy asks."""

    predictor: Predictor
    shape: ModelShape
    host_has_own_cores: bool = False
    """The host tier's threads take nothing from the device tier."""
    host: HostSpeed | None = None
    """Speed of the host tier's attention; None: there is no host tier."""

    @classmethod
    def of_profile(cls, profile: Profile, predictor: Predictor) -> Self:
        """Return the forecast of a profiled machine by one of the models that were fitted to its profile."""
        return cls(
            predictor,
            profile.shape,
            host_has_own_cores=profile.fingerprint.host_has_own_cores,
            host=HostSpeed.from_profile(profile),
        )

    def step(self, *, host_works: bool = False, at_best: bool = False) -> StepCost:
        """Return an empty step; ``at_best``: on the machine without what has slowed steps lately."""
        predictor = self.predictor.at_best if at_best else self.predictor
        return StepCost(predictor, self.shape, BatchFeatures(host_works=host_works), self.host)


class StepCost(StepRows):
    """A step as it grows, and the latency that is predicted for it (omniserve 3.3.1)."""

    __slots__ = ("_beside_s", "_predictor", "host")

    def __init__(
        self, predictor: Predictor, shape: ModelShape, features: BatchFeatures, host: HostSpeed | None = None
    ) -> None:
        super().__init__(shape, features)
        self._predictor = predictor
        self._beside_s = 0.0
        self.host = host
        """Speed of the host tier, which attends for the step's host rows beside it; None: not known."""

    def copy(self) -> StepCost:
        """Return an independent copy."""
        step = StepCost(self._predictor, self.shape, copy.copy(self.features), self.host)
        step._beside_s = self._beside_s
        return step

    def replace(self, step: StepCost, *, beside_s: float) -> None:
        """Become another step, which takes ``beside_s`` longer for rows that pass only some of its layers."""
        self.features, self._beside_s = copy.copy(step.features), beside_s

    def seconds(self) -> float:
        """Return the predicted seconds of the step as it is; 0 for nothing."""
        return self._beside_s + (0.0 if self.features.is_empty else self._predictor.step_s(self.features))

    def seconds_with(self, start: int, count: int, *, samples: int) -> float:
        """Return the seconds with one more chunk."""
        return self.seconds_after(lambda step: step.add_chunk(start, count, samples=samples))

    def seconds_after(self, add: Callable[[StepCost], object]) -> float:
        """Return the seconds with what ``add`` puts into a copy."""
        trial = self.copy()
        add(trial)
        return trial.seconds()

    def largest_chunk(self, start: int, most: int, bound_s: float, *, samples: Callable[[int, int], int]) -> int:
        """Return the most tokens, up to ``most`` >= 1, that a chunk may have within the bound; 0 if none (3.3.4).

        ``samples`` tells how many rows of a chunk, by its start and count, become logits.
        """
        return largest(lambda n: self.seconds_with(start, n, samples=samples(start, n)), most, bound_s)


def largest(seconds: Callable[[int], float], most: int, bound_s: float) -> int:
    """Return the largest count in ``[0, most]`` (to within 2 % of the bound) with seconds within the bound.

    Latency does not fall with the count, and is nearly linear, so the next guess is interpolated. What is returned was
    evaluated, unless it is 0. ``most`` is at least 1.
    """
    at_most = seconds(most)
    if at_most <= bound_s:
        return most
    low, high, at_low, at_high = 0, most, 0.0, at_most
    for round_ in range(_SEARCH_ROUNDS + most.bit_length()):
        if high - low <= 1 or (low and at_low >= (1 - _CLOSE_ENOUGH) * bound_s):
            break
        if low == 0 and round_ == 0:
            guess = 1  # what one costs is the other end of the line
        elif round_ < _SEARCH_ROUNDS and at_high > at_low:
            guess = low + int((high - low) * (bound_s - at_low) / (at_high - at_low))
        else:
            guess = (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
        at_guess = seconds(guess)
        if at_guess <= bound_s:
            low, at_low = guess, at_guess
        else:
            high, at_high = guess, at_guess
    return low


LS_HEADROOM = 0.03
"""Share of a TPOT that LS prefill leaves for what no latency model knows (the way to the client, a busy machine)."""
BE_HEADROOM = 0.1
"""Share of a TPOT that BE work leaves. It is more, so that decodes run ahead of their schedules and can lend their lead
to prompts."""
TTFT_HEADROOM = 0.2
"""Share of a TTFT that BE work leaves: a TTFT is a few steps and not the mean of many, so nothing averages out."""


@dataclass(frozen=True, slots=True)
class Headrooms:
    """Shares of objectives that are left for what no latency model knows."""

    ls: float = LS_HEADROOM
    be: float = BE_HEADROOM
    ttft: float = TTFT_HEADROOM

    @classmethod
    def of(cls, are_left: bool) -> Self:
        """Return the usual ones, or none."""
        return cls() if are_left else cls(0.0, 0.0, 0.0)


USUAL_HEADROOMS = Headrooms()


MAX_LENT_STEPS = 4.0
"""Most TPOTs that a step may take with ``slack="deadline"``: a stream must not stutter."""


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


def next_token_due_s(state: RequestState, now_s: float, slack: str) -> float:
    """Return the seconds until the next token of a request is due; it has an objective for it, and ``slack`` is as in
    ``tpot_bound``."""
    if state.num_output_tokens == 0:
        return ttft_left_s(state, now_s)
    assert state.slo.tpot_s is not None and state.first_token_s is not None and state.last_token_s is not None
    tpot_s = (1 - LS_HEADROOM) * state.slo.tpot_s
    if slack == "step":
        return state.last_token_s + tpot_s - now_s
    due_s = state.first_token_s + state.num_output_tokens * tpot_s
    return min(due_s, state.last_token_s + MAX_LENT_STEPS * tpot_s) - now_s


def ttft_left_s(state: RequestState, now_s: float, headroom: float = TTFT_HEADROOM) -> float:
    """Return the seconds until a request's first token is due; infinite without an objective.

    ``headroom`` is the share of its TTFT that is left. With a scaled objective the token is due at once: the request
    comes later than its class's objective has it in any case.
    """
    if state.slo.ttft_s is None:
        return math.inf
    if state.has_scaled_ttft:
        return min(0.0, state.arrival_s - now_s)
    return state.arrival_s + (1 - headroom) * state.slo.ttft_s - now_s


def left_out(work: str, num_requests: int, bound: Bound | None, first_request_id: str = "") -> tuple[LeftOut, ...]:
    """Return what to note of work that stays out of a step: nothing if it is none."""
    if num_requests <= 0:
        return ()
    bound = bound or Bound.ORDER
    return (LeftOut(work=work, num_requests=num_requests, first_request_id=first_request_id, bound=bound),)


def decision_of(
    cost: StepCost | None, ls_s: float | None, bound: TimeBound, left_out: Iterable[LeftOut] = ()
) -> Decision:
    """Return why a step is what it is; best-effort work was added up to ``bound``."""
    return Decision(
        predicted_s=cost.seconds() if cost is not None else None,
        predicted_ls_s=ls_s,
        bound_s=bound.seconds if bound.seconds < math.inf else None,
        bound_by=bound.by,
        left_out=tuple(left_out),
    )
