"""Runs of policies on one load: their order, each on a server of its own, and what comes of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.client import Wire, drive, warm_server
from benchmarks.common.server import BE_TOKENS, HOST_TOKENS, Server
from benchmarks.common.summary import medians, summarize_co_serving
from benchmarks.common.timing import OtherLoad
from benchmarks.coserving.load import CoServingLoad

PREEMPTED, RESUMED = "omniserve_preempted_tokens_total", "omniserve_resumed_tokens_total"
COUNTERS = {
    "host_tokens": HOST_TOKENS,
    "preemptions": "omniserve_preemptions_total",
    "swaps_out": 'omniserve_swaps_total{direction="out"}',
    "swaps_in": 'omniserve_swaps_total{direction="in"}',
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One policy on one load."""

    policy: str
    point: float
    """A rate, or a scale of the trace."""
    repeat: int
    told_scale: float
    """Of the objectives that the server is told."""
    scales: tuple[float, ...]
    """Of the objectives that the outcome is compared with."""


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
    """Where the runs go: to a server of one's own each, with these arguments, or all to one that is there."""

    url: str | None
    wire: Wire
    arguments: tuple[str, ...]

    @contextmanager
    def server(self, policy: str, load: CoServingLoad) -> Iterator[Server]:
        """Give a server with this policy that has served the load's first requests."""
        warm_up = load.warm_up((60.0, 60.0))
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
        after = server.metrics() if is_ours else {}
    counts = counters(before, after) if is_ours else {}
    if is_ours:  # it has ended, and its CPU time is this process's
        counts["others_busy_cores"] = others.cores()
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


def joined_records(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the runs of several records of one load; a policy in more than one gets its record's name added."""
    records = [json.loads(path.read_text()) for path in paths]
    for path, record in zip(paths, records, strict=True):
        if record.get("benchmark") != "coserve":
            raise ValueError(f"{path} is a record of {record.get('benchmark')!r}, not of coserve")
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
