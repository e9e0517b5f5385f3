"""Scenario: what comes at which rate, from the words of the command line; and the highest rate that goes well."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omniserve.simulate.load import (
    Lengths,
    Load,
    TraceRequest,
    fixed_lengths,
    gamma,
    lognormal_lengths,
    poisson,
    read_lengths,
    requests,
    sampled_lengths,
    square_wave,
)

Arrivals = Callable[[float, float, random.Random], list[float]]
"""(rate, duration_s, rng) -> times."""
_PILE = 1000  # lengths of a backlog; then they repeat
_TOLERANCE = 0.05  # of the highest rate
_MOST_DOUBLINGS = 16


def parse_lengths(text: str) -> Lengths:
    """Return the lengths of ``IN:OUT`` (fixed), ``lognormal:IN:OUT[:SIGMA]`` (medians) or a CSV file.

    Raises:
        ValueError: It is none of these.
        OSError: The file cannot be read.
    """
    kind, *parts = text.split(":")
    try:
        if kind == "lognormal" and len(parts) in (2, 3):
            sigma = float(parts[2]) if len(parts) == 3 else 1.0
            return lognormal_lengths(float(parts[0]), float(parts[1]), sigma=sigma)
        if len(parts) == 1 and kind.isdigit():
            return fixed_lengths(int(kind), int(parts[0]))
    except ValueError as error:
        raise ValueError(f"lengths {text!r}: {error}") from error
    if not Path(text).is_file():
        raise ValueError(
            f"lengths must be IN:OUT, lognormal:IN:OUT[:SIGMA] or a CSV file with input_tokens,output_tokens; {text!r} "
            "is none of these"
        )
    return sampled_lengths(read_lengths(text))


def parse_arrivals(text: str) -> Arrivals:
    """Return the arrival process of ``poisson``, ``gamma:CV`` or ``square:RATIO:PERIOD_S`` (high rate over low one).

    Raises:
        ValueError: It is none of these.
    """
    kind, *parts = text.split(":")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if text == "poisson":
        return poisson
    if kind == "gamma" and len(numbers) == 1 and numbers[0] > 0:
        return lambda rate, duration_s, rng: gamma(rate, numbers[0], duration_s, rng)
    if kind == "square" and len(numbers) == 2 and numbers[0] >= 1 and numbers[1] > 0:
        ratio, period_s = numbers

        def wave(rate: float, duration_s: float, rng: random.Random) -> list[float]:
            low = 2 * rate / (1 + ratio)
            return square_wave(low, ratio * low, period_s, duration_s, rng)

        return wave
    raise ValueError(f"arrivals must be poisson, gamma:CV or square:RATIO:PERIOD_S, such as square:4:60; got {text!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A load with an LS rate that can be chosen."""

    arrivals: Arrivals = poisson
    ls_lengths: Lengths | None = None
    """Lengths of LS requests; needed without a trace."""
    ls_trace: tuple[TraceRequest, ...] = ()
    """A trace of LS requests: its times are stretched to the rate, its lengths kept. A trace that is too short repeats
    with other texts."""
    backlog: int = 0
    be_rate: float = 0.0
    """Best-effort arrivals a second, Poisson."""
    be_lengths: Lengths | None = None
    """Lengths of BE requests, of a backlog or at a rate."""
    be_trace: tuple[TraceRequest, ...] = ()
    """A trace of BE requests, which is used as it is."""
    be_deadline_s: float | None = None
    """Seconds within which each BE request is to have its whole output; None: it may take any time."""
    hash_tokens: int = 512
    """Tokens that one of a request's ``hash_ids`` stands for, as in Load."""
    warm_up: float = 0.0
    """Share of the time that figures leave out, in [0, 1)."""

    @property
    def trace_rate(self) -> float | None:
        """The LS trace's own rate; None without one."""
        if not self.ls_trace:
            return None
        return len(self.ls_trace) / max(self.ls_trace[-1].arrival_s, 1e-9)

    @property
    def has_best_effort(self) -> bool:
        return bool(self.backlog or self.be_rate or self.be_trace)

    def load(self, rate: float, duration_s: float, seed: int, *, best_effort: bool = True) -> Load:
        """Draw the load: the same seed and rate give the same LS requests, with or without best-effort work."""
        rng = random.Random(f"{seed} LS")
        if self.ls_trace:
            ls = self._stretched(rate, duration_s)
        else:
            assert self.ls_lengths is not None, "without a trace, a scenario needs ls_lengths"
            ls = requests(self.arrivals(rate, duration_s, rng), self.ls_lengths, rng)
        warm_up_s = self.warm_up * duration_s
        load = Load(latency_sensitive=ls, duration_s=duration_s, warm_up_s=warm_up_s, hash_tokens=self.hash_tokens)
        if not best_effort:
            return load
        rng = random.Random(f"{seed} BE")
        be = [request for request in self.be_trace if request.arrival_s < duration_s]
        if self.be_lengths is not None:
            times = [0.0] * _PILE if self.backlog else poisson(self.be_rate, duration_s, rng)
            be = requests(times, self.be_lengths, rng)
        if self.be_deadline_s is not None:
            be = [dataclasses.replace(request, deadline_s=self.be_deadline_s) for request in be]
        return dataclasses.replace(load, best_effort=be, backlog=self.backlog)

    def _stretched(self, rate: float, duration_s: float) -> list[TraceRequest]:
        assert self.trace_rate is not None
        span_s = len(self.ls_trace) / rate  # of one pass at this rate
        scale = self.trace_rate / rate
        stretched: list[TraceRequest] = []
        begin_s, first_id = 0.0, 0
        all_ids = (request.hash_ids for request in (*self.ls_trace, *self.be_trace))
        num_ids = 1 + max(itertools.chain.from_iterable(all_ids), default=0)
        while begin_s < duration_s:
            for request in self.ls_trace:
                arrival_s = begin_s + request.arrival_s * scale
                if arrival_s >= duration_s:
                    return stretched
                ids = tuple(first_id + number for number in request.hash_ids)
                stretched.append(dataclasses.replace(request, arrival_s=arrival_s, hash_ids=ids))
            begin_s += span_s
            first_id += num_ids
        return stretched


def highest_rate(meets: Callable[[float], bool], start: float, *, least: float) -> float:
    """Return the highest rate (to within 5 %) that meets the objectives; 0 if none from ``least`` on does.

    Args:
        meets: Whether a rate does; it is taken to fail above the first rate that fails.
        start: A rate to begin at, > 0.
        least: Lower rates are not tried: they bring too few requests to judge by.

    Raises:
        ValueError: Every rate up to 65,536 times ``start`` meets them: the load is not what was meant.
    """
    low, high = 0.0, start
    if meets(start):
        for _ in range(_MOST_DOUBLINGS):
            low, high = high, 2 * high
            if not meets(high):
                break
        else:
            raise ValueError(f"even {high:g} requests a second meet the objectives: begin with a higher rate")
    else:
        while high / 2 >= least:
            if meets(high / 2):
                low = high / 2
                break
            high /= 2
    while low > 0 and high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        if meets(middle):
            low = middle
        else:
            high = middle
    return low
