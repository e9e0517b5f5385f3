"""The simulator against what a server was recorded to do: the loads of a record of benchmarks.frontier, simulated.

    python -m benchmarks.simulator_served benchmarks/results/frontier.json

Steps take what the profile of this machine says: the cached one, or one that is measured now. The record's figures
come from clients over HTTP, whose processes shared the machine's cores with the engine; the simulator knows neither.
Each run of the record is simulated with its own arrivals; medians are compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.client import LoadRequest
from benchmarks.common.models import SMOLLM_135M, random_llama
from benchmarks.common.record import read_row, write_record
from benchmarks.common.terminal import argument_parser, table_of
from benchmarks.frontier import FrontierLoad, Row, be_pile, frontier_rows, ls_stream
from omniserve import SLO, ClassSpec, EngineConfig
from omniserve.launch.flags import add_engine_flags, config_from
from omniserve.profiling import find_or_make_profile
from omniserve.simulate import Load, Machine, SimulationConfig, machine_of_profile, simulate
from omniserve.simulate.load import TraceRequest
from omniserve.simulate.models import find_model
from omniserve.simulate.results import summarise

COLUMNS = {
    "BE tokens/s": ("be_tokens_per_s", 1.0), "TTFT p50 ms": ("ttft_p50_s", 1e3), "TTFT p99 ms": ("ttft_p99_s", 1e3),
    "TPOT p50 ms": ("tpot_p50_s", 1e3), "TPOT p99 ms": ("tpot_p99_s", 1e3), "attained %": ("attained", 100.0),
}  # fmt: skip
"""Heading -> figure, and the factor that it is printed with."""


def load_of(record: Mapping[str, Any]) -> FrontierLoad:
    """Return the load that was recorded."""
    return FrontierLoad(**{"budgets": {}, **record["config"]["load"]})


def engine_config(flags: list[str], row: Row, slo: tuple[float, float] | None) -> EngineConfig:
    """Return the settings that a row's server had."""
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    config = config_from(parser.parse_args([*flags, "--scheduler", row.scheduler, *row.flags]))
    if slo is None:
        return config
    ls = ClassSpec(name="LS", kind="LS", slo=SLO(ttft_s=slo[0], tpot_s=slo[1]))
    return dataclasses.replace(config, classes=(ls, ClassSpec(name="BE", kind="BE")))


def simulate_row(machine: Machine, row: Row, load: FrontierLoad, flags: list[str], seed: int) -> dict[str, float]:
    """Return the figures of a row, reckoned as the record's are (see ``summarize_co_serving``)."""
    slo = load.objectives[row.objective] if row.objective is not None else None
    stream = ls_stream(load, seed, slo, load.ls_rate) if row.has_ls and slo is not None else []
    config = SimulationConfig(
        machine=machine,
        engine=engine_config(flags, row, slo),
        load=Load(latency_sensitive=_trace(stream), best_effort=_trace(be_pile(load, seed) if row.has_be else [])),
        drain_s=math.inf,
        seed=seed,
    )
    requests = simulate(config).requests
    be = [request for request in requests if request.service_class == "BE"]
    be_end_s = max((request.finished_s or 0.0 for request in be), default=math.inf)
    figures: dict[str, float] = {}
    if be:
        figures["be_tokens_per_s"] = sum(r.input_tokens + r.num_output_tokens for r in be) / be_end_s
    beside = [r for r in requests if r.service_class == "LS" and r.arrival_s < be_end_s]
    admitted = [r for r in beside if not r.rejected]
    if admitted:
        slo_of_ls = config.engine.class_named("LS").slo
        ls = summarise(admitted, slo_of_ls, duration_s=load.seconds, output_tokens=0, prompt_tokens=0)
        figures |= {
            "ttft_p50_s": ls.ttft_p50_s, "ttft_p99_s": ls.ttft_p99_s, "tpot_p50_s": ls.tpot_p50_s,
            "tpot_p99_s": ls.tpot_p99_s, "attained": ls.attainment, "rejected": len(beside) - len(admitted),
            "ls_requests": len(beside),
        }  # fmt: skip
    return figures


def _trace(requests: list[LoadRequest]) -> list[TraceRequest]:
    return [TraceRequest(r.send_at_s, len(r.prompt), r.max_tokens) for r in requests]


def cells(recorded: Mapping[str, float], simulated: Mapping[str, float]) -> dict[str, str]:
    """Return recorded > simulated (ratio) of each figure."""
    found = {}
    for name, (key, factor) in COLUMNS.items():
        before, after = recorded.get(key), simulated.get(key)
        if before is not None and after is not None:
            ratio = f"x{after / before:.2f}" if before else "-"
            found[name] = f"{factor * before:.0f} > {factor * after:.0f} {ratio}"
    return found


def main() -> None:
    parser = argument_parser(__doc__, "simulator_served")
    parser.add_argument("served", type=Path, help="record of benchmarks.frontier, of SmolLM-135M's shape")
    args = parser.parse_args()
    record = read_row(args.served)
    if record["config"]["model"] != "smollm":
        parser.error(f"{args.served} is of the model {record['config']['model']!r}; only smollm is known here")
    load, flags, seed = load_of(record), record["config"]["flags"], record["seed"]
    profile = find_or_make_profile(
        random_llama(**SMOLLM_135M), engine_config(flags, frontier_rows(load.objectives, load.budgets)[0], None)
    )
    machine = machine_of_profile(profile, find_model("smollm-135m").spec)
    results: dict[str, Any] = {}
    for row in frontier_rows(load.objectives, load.budgets):
        runs = record["results"]["frontier"]["runs"].get(row.name, [])
        if not runs:
            continue
        simulated = [simulate_row(machine, row, load, flags, seed + repeat) for repeat in range(len(runs))]
        middle = {key: statistics.median(run[key] for run in simulated) for key in simulated[0]}
        recorded = record["results"]["frontier"]["medians"][row.name]
        results[row.name] = {"recorded": recorded, "simulated": middle}
    print(table_of([{"recorded > simulated": name} | cells(**found) for name, found in results.items()]))
    settings = {"served": record["environment"] | record["config"], "profile": profile.fingerprint}
    write_record(args.record, name="simulator_served", config=settings, seed=seed, results=results)


if __name__ == "__main__":
    main()
