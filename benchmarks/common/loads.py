"""Loads of random tokens: LS requests that come as a process or a trace says, and BE work beside them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common.client import BE_TIER, LoadRequest
from omniserve.simulate.load import TraceRequest, fixed_lengths, gamma, poisson, requests, square_wave

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


def random_tokens(
    rows: Sequence[TraceRequest], rng: random.Random, *, tier: str, vocab_size: int,
    slo: tuple[float, float] | None = None,
) -> list[LoadRequest]:  # fmt: skip
    """Return requests of these times and lengths for random tokens from ``[1, vocab_size)``."""
    return [
        LoadRequest(
            send_at_s=row.arrival_s, prompt=[rng.randrange(1, vocab_size) for _ in range(row.input_tokens)],
            max_tokens=row.output_tokens, service_tier=tier, slo=slo,
        )
        for row in rows
    ]  # fmt: skip


def poisson_stream(
    rng: random.Random, *, rate: float, seconds: float, prompt: int, output: int, tier: str, vocab_size: int,
    slo: tuple[float, float] | None = None,
) -> list[LoadRequest]:  # fmt: skip
    """Return a Poisson stream of requests of one size."""
    rows = requests(poisson(rate, seconds, rng), fixed_lengths(prompt, output), rng)
    return random_tokens(rows, rng, tier=tier, vocab_size=vocab_size, slo=slo)


def backlog(rng: random.Random, *, count: int, prompt: int, output: int, vocab_size: int) -> list[LoadRequest]:
    """Return BE requests of one size that are all there from the start."""
    rows = requests([0.0] * count, fixed_lengths(prompt, output), rng)
    return random_tokens(rows, rng, tier=BE_TIER, vocab_size=vocab_size)
