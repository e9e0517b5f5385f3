"""One load of LS requests and BE work, at any rate, for every policy the same."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

from benchmarks.common.client import BE_TIER, LS_TIER, LoadRequest
from benchmarks.common.loads import Arrivals, TraceSlice, random_tokens
from omniserve.simulate.load import TraceRequest, fixed_lengths, read_trace, requests


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
