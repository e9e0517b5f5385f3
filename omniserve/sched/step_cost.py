"""StepCost: what a step consists of while a policy puts it together, how long it would take, and how long it may.

The last part chooses how many piggyback rows a step takes, and in how many seats. Paper: omniserve 3.3.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from omniserve.core.plan import Bound, Decision, LeftOut, PiggybackEntry, PiggybackJoin
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

    __slots__ = ("_predictor", "host")

    def __init__(
        self, predictor: Predictor, shape: ModelShape, features: BatchFeatures, host: HostSpeed | None = None
    ) -> None:
        super().__init__(shape, features)
        self._predictor = predictor
        self.host = host
        """Speed of the host tier, which attends for the step's host rows beside it; None: not known."""

    def copy(self) -> StepCost:
        """Return an independent copy."""
        return StepCost(self._predictor, self.shape, copy.copy(self.features), self.host)

    def seconds(self) -> float:
        """Return the predicted seconds of the step as it is; 0 for nothing."""
        return 0.0 if self.features.is_empty else self._predictor.step_s(self.features)

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


def ttft_left_s(state: RequestState, now_s: float) -> float:
    """Return the seconds until a request's first token is due; infinite without an objective.

    That of a scaled objective is due at once: the request comes later than its class's objective has it in any case.
    """
    if state.slo.ttft_s is None:
        return math.inf
    if state.has_scaled_ttft:
        return min(0.0, state.arrival_s - now_s)
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
    """Return why a step is what it is; best-effort work was added up to ``bound``."""
    return Decision(
        predicted_s=cost.seconds() if cost is not None else None,
        predicted_ls_s=ls_s,
        bound_s=bound.seconds if bound.seconds < math.inf else None,
        bound_by=bound.by,
        left_out=tuple(left_out),
    )


# -- piggyback rows (omniserve 3.3.6) -------------------------------------------------------------------------------


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
    """Put piggyback rows into a step, lowest layer first, and return how many they are.

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
    ``be_work`` is what the step's device rows bring, in output tokens; the other parameters are those of ``fill``.
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
    """Return the most rows within the bound, and the step's seconds with them; the parameters are those of ``fill``."""

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
