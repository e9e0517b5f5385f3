"""Loads of the papers' evaluations by name: seeded generators of like lengths, or traces of a folder where it has them.

Means are the papers'; medians and spreads, which they do not print, are those of public traces of the same data set.
"""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass
from pathlib import Path

from omniserve.simulate.load import (
    Lengths,
    Load,
    TraceRequest,
    gamma,
    poisson,
    read_lengths,
    read_trace,
    requests,
    sampled_lengths,
)

_PILE = 2000  # lengths of a backlog; then they repeat


@dataclass(frozen=True, slots=True)
class Side:
    """Tokens of prompts, or of outputs: log-normal with a mean, cut to ``[least, most]``; sigma 0: all the same."""

    mean: float
    """Mean before the cut."""
    sigma: float
    most: int
    least: int = 1

    def draw(self, rng: random.Random) -> int:
        """Return a number of tokens."""
        median = self.mean / math.exp(self.sigma**2 / 2)
        return max(self.least, min(round(median * math.exp(self.sigma * rng.gauss(0.0, 1.0))), self.most))


@dataclass(frozen=True, slots=True)
class UniformSide:
    """Tokens, uniform in ``[least, most]``."""

    least: int
    most: int

    def draw(self, rng: random.Random) -> int:
        """Return a number of tokens."""
        return rng.randint(self.least, self.most)


GENERATORS: dict[str, tuple[Side | UniformSide, Side | UniformSide]] = {
    "sharegpt": (Side(260, 1.4, 4096), Side(330, 0.8, 1024)),
    "longbench": (Side(9200, 0.35, 12000, 1000), Side(136, 0.6, 1024)),  # omniserve 5.1.1: means 8,952 and 136
    "dailymail": (Side(1964, 0.4, 8000), Side(397, 0.4, 2048)),  # omniserve 5.1.1
    "azure": (Side(1155, 0.9, 8192), Side(211, 0.8, 1024)),  # Azure's conversations of 2023
    "burstgpt": (Side(2747, 0.1, 8192), Side(267, 0.27, 1024)),  # conserve, Table 1: means and P99, as the next three
    "dureader": (Side(21776, 0.13, 65536), Side(166, 0.79, 2048)),
    "multinews": (Side(6916, 0.25, 16384), Side(394, 0.32, 1024)),
    "vcsum": (Side(18803, 0.25, 65536), Side(337, 0.19, 1024)),
    "bros-rt": (Side(222.8, 0.92, 1024), Side(234.5, 0.92, 1000)),  # bros, Table 2, ShareGPT
    "bros-lmsys": (Side(90.5, 1.14, 1024), Side(237.0, 0.81, 1000)),  # bros, Table 2: means and standard deviations
    "bros-be": (UniformSide(512, 1024), UniformSide(32, 128)),  # bros 7.1
}
"""Name -> (prompts, outputs)."""

MIXTURES = {"mixed": ("dureader", "multinews", "vcsum")}
"""Name -> names of which each request has one at random (conserve 6.3)."""

LENGTH_FILES = {"sharegpt": "lengths/sharegpt_v3_first_turn.csv", "azure": "azure2023_conv.csv"}
"""Name -> file of a trace folder that is drawn from instead."""
TIMES_FILE = "azure2023_conv.csv"
"""File of a trace folder whose arrival pattern best-effort arrivals follow (omniserve 5.1.1), if there is a folder."""


def lengths_named(name: str, trace_dir: Path | None = None) -> Lengths:
    """Return the lengths of a data set, or of ``IN:OUT``, fixed."""
    first, _, second = name.partition(":")
    if first.isdigit() and second.isdigit():
        return lambda rng: (int(first), int(second))
    if name in MIXTURES:
        parts = [lengths_named(part, trace_dir) for part in MIXTURES[name]]
        return lambda rng: rng.choice(parts)(rng)
    if name not in GENERATORS:
        raise ValueError(f"unknown lengths {name!r}; known: {', '.join((*GENERATORS, *MIXTURES))}, or IN:OUT")
    if trace_dir is not None and name in LENGTH_FILES:
        return sampled_lengths(read_lengths(trace_dir / LENGTH_FILES[name]))
    inputs, outputs = GENERATORS[name]
    return lambda rng: (inputs.draw(rng), outputs.draw(rng))


def random_rates(low: float, high: float, interval_s: float, duration_s: float, rng: random.Random) -> list[float]:
    """Return Poisson times whose rate is drawn anew from ``[low, high]`` every ``interval_s`` (omniserve, Fig. 14)."""
    times: list[float] = []
    begin_s = 0.0
    while begin_s < duration_s:
        length_s = min(interval_s, duration_s - begin_s)
        times += [begin_s + time_s for time_s in poisson(rng.uniform(low, high), length_s, rng)]
        begin_s += interval_s
    return times


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSpec:
    """The requests of a case: rates, lengths and arrivals of both kinds."""

    ls_rate: float = 0.0
    """Requests a second; 0: none."""
    ls_lengths: str = "sharegpt"
    ls_cv: float = 1.0
    """Coefficient of variation of the gaps between arrivals (gamma); 1 is Poisson."""
    ls_rates: tuple[float, float, float] | None = None
    """(low, high, seconds): rates drawn anew, instead of ``ls_rate``."""
    ls_after: float = 0.0
    """Share of the run after which LS requests come."""
    be_rate: float = 0.0
    """Best-effort arrivals a second; 0: see ``backlog``."""
    backlog: int = 0
    """Best-effort requests that are always unfinished."""
    be_lengths: str = "longbench"

    def times(self, factor: int) -> LoadSpec:
        """Return a load with so many times as many requests."""
        rates = self.ls_rates and (factor * self.ls_rates[0], factor * self.ls_rates[1], self.ls_rates[2])
        return dataclasses.replace(
            self, ls_rate=factor * self.ls_rate, ls_rates=rates, be_rate=factor * self.be_rate,
            backlog=factor * self.backlog,
        )  # fmt: skip

    def make(self, duration_s: float, *, warm_up: float, seed: int, trace_dir: Path | None = None) -> Load:
        """Draw the load, with generators or from a folder of traces; LS and BE requests do not depend on each other."""
        rng = random.Random(f"{seed} LS")
        if self.ls_rates is not None:
            low, high, interval_s = self.ls_rates
            times = random_rates(low, high, interval_s, duration_s, rng)
        else:
            after_s = self.ls_after * duration_s
            times = [after_s + time_s for time_s in gamma(self.ls_rate, self.ls_cv, duration_s - after_s, rng)]
        ls = requests(times, lengths_named(self.ls_lengths, trace_dir), rng) if times else []
        rng = random.Random(f"{seed} BE")
        be: list[TraceRequest] = []
        if self.backlog or self.be_rate:
            be_times = [0.0] * _PILE if self.backlog else self._be_times(duration_s, rng, trace_dir)
            be = requests(be_times, lengths_named(self.be_lengths, trace_dir), rng)
        return Load(
            latency_sensitive=ls, best_effort=be, backlog=self.backlog, duration_s=duration_s,
            warm_up_s=warm_up * duration_s,
        )  # fmt: skip

    def _be_times(self, duration_s: float, rng: random.Random, trace_dir: Path | None) -> list[float]:
        if trace_dir is None:
            return poisson(self.be_rate, duration_s, rng)
        trace = read_trace(trace_dir / TIMES_FILE)
        scale = len(trace) / trace[-1].arrival_s / self.be_rate
        times = (request.arrival_s * scale for request in trace)
        return [time_s for time_s in times if time_s < duration_s]
