"""A load of LS requests and BE work for every policy, and runs of policies on it, each on a server of its own."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.client import BE_TIER, LS_TIER, LoadRequest, Wire, drive, few_of_each, random_tokens, warm_server
from benchmarks.common.prefixes import PrefixStructure
from benchmarks.common.record import read_row
from benchmarks.common.server import BE_TOKENS, HOST_TOKENS, Server
from benchmarks.common.summary import medians, summarize_co_serving
from benchmarks.common.timing import OtherLoad
from omniserve.simulate.load import TraceRequest, fixed_lengths, gamma, poisson, read_trace, requests, square_wave

PROCESSES = ("poisson", "gamma", "square")


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """An arrival process whose mean rate is chosen later."""

    process: str
    """The name of the process, one of PROCESSES."""
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
    """The part of a trace that is sent, its speed, and the scale of its lengths."""

    start_s: float = 0.0
    """Begin of the slice, in the trace's time."""
    seconds: float
    """Length of the load, in its own time: the slice is ``seconds * scale`` of the trace."""
    scale: float = 1.0
    """Speed, in multiples of the recorded one."""
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
    """The requests to send, but for rate and seed."""

    arrivals: Arrivals | None
    """The arrival process; None: LS requests are a trace's."""
    seconds: float
    ls_input: int
    ls_output: int
    ls_trace: str | None
    ls_slice: TraceSlice
    """The slice of the LS trace; each rate sets its scale."""
    be_requests: int
    be_input: int
    be_output: int
    be_trace: str | None
    be_slice: TraceSlice
    ls_prefixes: PrefixStructure
    """The prefixes in front of LS prompts, beyond ``ls_input``."""
    be_prefixes: PrefixStructure
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
        ls_rng, be_rng, size = random.Random(seed), random.Random(seed + 10_000), self.vocab_size
        ls = random_tokens(self.ls_rows(point, ls_rng), ls_rng, tier=LS_TIER, vocab_size=size, slo=slo)
        be = random_tokens(self.be_rows(be_rng), be_rng, tier=BE_TIER, vocab_size=size)
        return [
            *self.ls_prefixes.put_before(ls, ls_rng, vocab_size=size),
            *self.be_prefixes.put_before(be, be_rng, vocab_size=size),
        ]


PREEMPTED, RESUMED = "omniserve_preempted_tokens_total", "omniserve_resumed_tokens_total"
COUNTERS = {
    "host_tokens": HOST_TOKENS,
    "preemptions": "omniserve_preemptions_total",
    "swaps_out": 'omniserve_swaps_total{direction="out"}',
    "swaps_in": 'omniserve_swaps_total{direction="in"}',
}
CACHED = 'omniserve_cached_tokens_total{{service_class="{}"}}'
PROMPTS = 'omniserve_prompt_tokens_total{{service_class="{}"}}'


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of one policy on one load."""

    policy: str
    point: float
    """A rate, or a scale of the trace."""
    repeat: int
    told_scale: float
    """Factor of the objectives that the server is told."""
    scales: tuple[float, ...]
    """Factors of the objectives that the outcome is compared with."""


def scheduler_of(policy: str) -> str:
    """Return the scheduler of ``SCHEDULER[,FLAG[=VALUE]...]``."""
    return policy.split(",")[0]


def flags_of(policy: str) -> list[str]:
    """Return the server's flags of ``SCHEDULER[,FLAG[=VALUE]...]``, such as ``conserve,kv=incremental``."""
    flags = ["--scheduler", scheduler_of(policy)]
    for setting in policy.split(",")[1:]:
        name, has_value, value = setting.partition("=")
        flags += [f"--{name}", value] if has_value else [f"--{name}"]
    return flags


def plan_runs(
    policies: Sequence[str], points: Sequence[float], scales: Sequence[float], repeats: int, *, blind: AbstractSet[str]
) -> list[Run]:
    """Return the runs in their order: policies alternate, and each repeat begins with another one."""
    runs = []
    for repeat in range(repeats):
        first = repeat % len(policies)
        for point in points:
            for number, scale in enumerate(scales):
                for policy in (*policies[first:], *policies[:first]):
                    if policy in blind and number > 0:
                        continue
                    compared = tuple(scales) if policy in blind else (scale,)
                    runs.append(Run(policy=policy, point=point, repeat=repeat, told_scale=scale, scales=compared))
    return runs


@dataclass(frozen=True, kw_only=True)
class Servers:
    """The servers of the runs: one for each, started with these arguments, or a single one that is there."""

    url: str | None
    wire: Wire
    arguments: tuple[str, ...]

    @contextmanager
    def server(self, policy: str, load: CoServingLoad) -> Iterator[Server]:
        """Give a server with this policy that has served the load's first requests."""
        sizes = (load.ls_input, load.ls_output), (load.be_input, load.be_output)
        warm_up = few_of_each(*sizes, vocab_size=load.vocab_size, slo=(60.0, 60.0))
        if self.url is not None:
            server = Server(self.url)
            drive(server, warm_up, cutoff_s=120.0, wire=self.wire)
            yield server
        else:
            with warm_server("coserve", [*flags_of(policy), *self.arguments], warm_up) as server:
                yield server


def measure(run: Run, load: CoServingLoad, servers: Servers, seed: int) -> dict[str, Any]:
    """Do one run and return its summaries, by scale, and the requests' times."""
    is_ours = servers.url is None
    slo, others = load.slo(run.told_scale), OtherLoad()
    with servers.server(run.policy, load) as server:
        before = server.metrics() if is_ours else {}
        records, end_s = drive(
            server, load.requests(run.point, seed + run.repeat, slo), cutoff_s=load.seconds + load.drain_s,
            may_be_cut_off=True, wire=servers.wire,
        )  # fmt: skip
        counts: dict[str, Any] = {}
        if is_ours:
            counts = counters(before, server.metrics()) | {"others_busy_cores": others.cores()}
    return dataclasses.asdict(run) | {
        "rate": load.mean_rate(run.point),
        "summaries": [
            {"scale": scale}
            | summarize_co_serving(records, load.slo(scale), end_s=end_s, stream_s=load.seconds)
            | counts
            for scale in run.scales
        ],
        "end_s": end_s,
        "requests": [
            {key: value for key, value in vars(record).items() if key != "token_times_s"} for record in records
        ],
    }


def counters(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """Return what our server's counters say of the time between two readings."""

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    result: dict[str, Any] = {key: grown(name) for key, name in COUNTERS.items()}
    result["recomputed_tokens"] = grown(PREEMPTED) - grown(RESUMED)
    if be_tokens := grown(BE_TOKENS):
        result["host_share"] = grown(HOST_TOKENS) / be_tokens
    for name in ("LS", "BE"):
        if (cached := grown(CACHED.format(name))) and (prompt_tokens := grown(PROMPTS.format(name))):
            result[f"{name.lower()}_found"] = cached / prompt_tokens
    return result


def rows_of(runs: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the medians over repeats, in the order in which policies first ran, and the single runs, as table rows."""
    groups: dict[tuple[str, float, float], list[dict[str, Any]]] = {}
    for run in runs:
        for summary in run["summaries"]:
            groups.setdefault((run["policy"], run["rate"], summary["scale"]), []).append(summary)
    keys = [dict(zip(("policy", "rate", "scale"), key, strict=True)) for key in groups]
    middle = [medians(group) | key for key, group in zip(keys, groups.values(), strict=True)]
    single = [summary | key for key, group in zip(keys, groups.values(), strict=True) for summary in group]
    return middle, single


def joined_records(paths: Sequence[Path], case: str) -> list[dict[str, Any]]:
    """Return the runs of a case in several records of one load; a policy in two gets its record's name added.

    Raises:
        OSError, ValueError: A record has no such case, or is of another load.
    """
    records = [read_row(path, case) for path in paths]
    for path, record in zip(paths, records, strict=True):
        load, first = ({"seed": r["seed"]} | r["config"]["load"] for r in (record, records[0]))
        if differing := sorted(key for key in load.keys() | first.keys() if load.get(key) != first.get(key)):
            raise ValueError(f"{path} and {paths[0]} are of different loads; what differs: {', '.join(differing)}")
    names = [{run["policy"] for run in record["results"]["runs"]} for record in records]
    joined = []
    for number, (path, record) in enumerate(zip(paths, records, strict=True)):
        elsewhere = set().union(*names[:number], *names[number + 1 :])
        for run in record["results"]["runs"]:
            name = run["policy"]
            joined.append(run | {"policy": f"{name} ({path.stem})" if name in elsewhere else name})
    return joined
