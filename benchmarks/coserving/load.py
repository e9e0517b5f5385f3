"""One load of LS requests, which come as a process or a trace says, and of BE work: for every policy the same."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common.client import BE_TIER, LS_TIER, LoadRequest, random_tokens
from omniserve.simulate.load import TraceRequest, fixed_lengths, gamma, poisson, read_trace, requests, square_wave

PROCESSES = ("poisson", "gamma", "square")


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """An arrival process whose mean rate is chosen later."""

    process: str
    """One of PROCESSES."""
    cv: float = 2.0
    """``gamma``: coefficient of variation of the gaps; 1 is a Poisson process, more is burstier."""
    period_s: float = 10.0
    """``square``: length of a period, half of it low and half high."""
    low_share: float = 0.2
    """``square``: the low rate over the mean rate, in [0, 1]."""

    def __post_init__(self) -> None:
        if self.process not in PROCESSES:
            raise ValueError(f"an arrival process is one of {', '.join(PROCESSES)}; got {self.process!r}")
        if not 0 <= self.low_share <= 1:
            raise ValueError(f"the low rate is a share of the mean rate, in [0, 1]; got {self.low_share}")

    def times_s(self, rate: float, duration_s: float, rng: random.Random) -> list[float]:
        """Return arrival times in ``[0, duration_s)``; ``rate`` is the mean a second, over whole periods."""
        if self.process == "gamma":
            return gamma(rate, self.cv, duration_s, rng)
        if self.process == "square":
            low, high = self.low_share * rate, (2 - self.low_share) * rate
            return square_wave(low, high, self.period_s, duration_s, rng)
        return poisson(rate, duration_s, rng)


@dataclass(frozen=True, kw_only=True)
class TraceSlice:
    """What of a trace is sent, how fast, and at which size."""

    start_s: float = 0.0
    """In the trace's time."""
    seconds: float
    """Length of the load, in its own time: the slice is ``seconds * scale`` of the trace."""
    scale: float = 1.0
    """How many times as fast as recorded."""
    length_scale: float = 1.0
    """Factor of both lengths."""
    max_input: int
    max_output: int
    """Longer ones, after the factor, are cut off there."""

    def __post_init__(self) -> None:
        if self.start_s < 0:
            raise ValueError(f"a slice starts at 0 s of its trace or later, got {self.start_s}")
        numbers = (self.seconds, self.scale, self.length_scale, self.max_input, self.max_output)
        if min(numbers) <= 0:
            raise ValueError(f"length, scales and maxima of a slice of a trace must be > 0, got {self}")

    def of(self, trace: Sequence[TraceRequest]) -> list[TraceRequest]:
        """Return the slice, its arrivals counted from its own start.

        Raises:
            ValueError: Nothing of the trace falls into it.
        """
        end_s = self.start_s + self.seconds * self.scale

        def scaled(tokens: int, most: int) -> int:
            return max(1, min(most, round(tokens * self.length_scale)))

        chosen = [
            TraceRequest((row.arrival_s - self.start_s) / self.scale, scaled(row.input_tokens, self.max_input),
                         scaled(row.output_tokens, self.max_output))
            for row in trace
            if self.start_s <= row.arrival_s < end_s
        ]  # fmt: skip
        if not chosen:
            last_s, window = max((row.arrival_s for row in trace), default=0.0), f"[{self.start_s:g}, {end_s:g})"
            raise ValueError(f"no request of the trace is in {window} s; its last is at {last_s:g} s")
        return chosen


@dataclass(frozen=True, kw_only=True)
class CoServingLoad:
    """What is sent, but for rate and seed."""

    arrivals: Arrivals | None
    """None: LS requests are a trace's."""
    seconds: float
    ls_input: int
    ls_output: int
    ls_trace: str | None
    ls_slice: TraceSlice
    """Its scale is set by each rate."""
    be_requests: int
    be_input: int
    be_output: int
    be_trace: str | None
    be_slice: TraceSlice
    slo_ttft_s: float
    slo_tpot_s: float
    vocab_size: int
    drain_s: float

    def slo(self, scale: float) -> tuple[float, float]:
        """Return the objectives of the LS requests at ``scale``."""
        return self.slo_ttft_s * scale, self.slo_tpot_s * scale

    def ls_rows(self, point: float, rng: random.Random) -> list[TraceRequest]:
        """Return the LS requests at a rate, or at a scale of the trace."""
        if self.ls_trace is not None:
            return dataclasses.replace(self.ls_slice, scale=point).of(read_trace(self.ls_trace))
        assert self.arrivals is not None
        times_s = self.arrivals.times_s(point, self.seconds, rng)
        return requests(times_s, fixed_lengths(self.ls_input, self.ls_output), rng)

    def be_rows(self, rng: random.Random) -> list[TraceRequest]:
        """Return the BE requests."""
        if self.be_trace is not None:
            return self.be_slice.of(read_trace(self.be_trace))
        return requests([0.0] * self.be_requests, fixed_lengths(self.be_input, self.be_output), rng)

    def mean_rate(self, point: float) -> float:
        """Return the LS requests a second that ``point`` stands for."""
        if self.ls_trace is None:
            return point
        return len(self.ls_rows(point, random.Random(0))) / self.seconds

    def requests(self, point: float, seed: int, slo: tuple[float, float]) -> list[LoadRequest]:
        """Return everything to send; the BE requests depend on the seed alone."""
        ls_rng, be_rng = random.Random(seed), random.Random(seed + 10_000)
        return [
            *random_tokens(self.ls_rows(point, ls_rng), ls_rng, tier=LS_TIER, vocab_size=self.vocab_size, slo=slo),
            *random_tokens(self.be_rows(be_rng), be_rng, tier=BE_TIER, vocab_size=self.vocab_size),
        ]

    def warm_up(self, slo: tuple[float, float]) -> list[LoadRequest]:
        """Return four requests of each kind and of usual size, with loose objectives, within a second."""
        rng = random.Random(77)
        ls = requests([0.25 * i for i in range(4)], fixed_lengths(self.ls_input, self.ls_output), rng)
        be = requests([0.0] * 4, fixed_lengths(self.be_input, self.be_output), rng)
        return [
            *random_tokens(ls, rng, tier=LS_TIER, vocab_size=self.vocab_size, slo=slo),
            *random_tokens(be, rng, tier=BE_TIER, vocab_size=self.vocab_size),
        ]
