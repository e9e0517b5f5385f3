"""The papers' evaluation, simulated: OmniServe Fig. 10-19, APEX Fig. 5 and 7, ConServe Fig. 6 and 9, BROS Fig. 10-11.

    python -m benchmarks.reproduction --record benchmarks/results/reproduction.json
    python -m benchmarks.reproduction --only omniserve-19 apex --minutes 2
    python -m benchmarks.reproduction --render docs/reproduction.md

Each point is the engine's own scheduler and KV manager on a virtual clock (``omniserve.simulate``), on machines of data
sheets. Nothing is fitted to the papers' results. Lengths come from seeded generators, or with ``--trace-dir`` from
traces. A run takes the experiments that ``--only`` names and leaves the others of the record as they are.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.common.paper_figures import EXPERIMENTS, Case, Experiment, MachineSpec
from benchmarks.common.paper_report import CELLS, TokenGaps, figures_of, fill_page, markdown
from benchmarks.common.record import environment, write_record
from omniserve.request import SLO, ClassSpec, ServiceClass
from omniserve.simulate.analytic import HostEfficiency, analytic_machine, engine_config_for
from omniserve.simulate.engine import StepRecord
from omniserve.simulate.hardware import GB, find_devices, find_hosts
from omniserve.simulate.machine import Machine
from omniserve.simulate.models import find_model
from omniserve.simulate.results import Result
from omniserve.simulate.run import SimulationConfig, simulate

RECORD = Path("benchmarks/results/reproduction.json")
DRAIN_S = 300.0
"""How long LS requests may go on after the load; those that are unfinished then count as missed."""


def make_machine(spec: MachineSpec) -> Machine:
    """Return the simulated machine of a spec.

    Raises:
        ValueError: A name is unknown, or the model does not fit.
    """
    model = find_model(spec.model)
    if spec.max_model_len is not None:
        model = dataclasses.replace(model, max_model_len=spec.max_model_len)
    count, device = find_devices(spec.device)
    if spec.memory_gb is not None:
        device = dataclasses.replace(device, memory_bytes=spec.memory_gb * GB)
    if spec.bandwidth_gb_per_s is not None:
        device = dataclasses.replace(device, bytes_per_s=spec.bandwidth_gb_per_s * GB)
    num_hosts, host = find_hosts(spec.hosts) if spec.hosts is not None else (0, None)
    hosts = (host,) * num_hosts if host is not None else ()
    efficiency = HostEfficiency() if spec.host_share is None else HostEfficiency(bytes_share=spec.host_share)
    return analytic_machine(model, device, count, hosts=hosts, host_efficiency=efficiency)


def run_case(
    case: Case, slo: SLO, *, minutes: float, warm_up: float, seed: int, trace_dir: Path | None = None,
    on_step: Callable[[StepRecord], object] | None = None,
) -> Result:  # fmt: skip
    """Simulate one point.

    Args:
        case: Machine, load and settings.
        slo: Of its LS requests.
        minutes: Simulated.
        warm_up: Share of them that figures leave out.
        seed: Of the load.
        trace_dir: See ``LoadSpec.make``.
        on_step: See ``simulate``.
    """
    machine = make_machine(case.machine)
    classes = (
        ClassSpec(name=ServiceClass.LS, kind=ServiceClass.LS, slo=slo),
        ClassSpec(name=ServiceClass.BE, kind=ServiceClass.BE),
    )
    engine = engine_config_for(
        machine, scheduler=case.system, classes=classes, **{"be_order": "prefill"} | dict(case.settings)
    )
    load = case.load.make(minutes * 60, warm_up=warm_up, seed=seed, trace_dir=trace_dir)
    config = SimulationConfig(machine=machine, engine=engine, load=load, seed=seed, drain_s=DRAIN_S)
    return simulate(config, on_step=on_step)


def run_experiment(
    experiment: Experiment, *, minutes: float, seed: int, trace_dir: Path | None, bar: tqdm[Any]
) -> dict[str, Any]:
    """Simulate an experiment's points; return its entry of the record."""
    rows: list[dict[str, Any]] = []
    objectives: dict[str, SLO] = {}
    minutes *= experiment.times
    for case in experiment.cases:
        bar.set_description_str(f"{experiment.name} {case.x} {case.column}")
        slo = objectives.get(case.x, case.slo)
        gaps = TokenGaps(begin_s=experiment.warm_up * minutes * 60)
        result = run_case(
            case, slo, minutes=minutes, warm_up=experiment.warm_up, seed=seed, trace_dir=trace_dir, on_step=gaps.note
        )  # fmt: skip
        if case.system == experiment.slo_from:
            ls = result.classes[ServiceClass.LS]
            objectives[case.x] = SLO(ttft_s=ls.ttft_p99_s, tpot_s=gaps.percentile(99))
        figures = figures_of(result, slo) | {"tbt_p99_s": gaps.percentile(99)}
        rows.append({"x": case.x, "column": case.column, "case": case, "slo": slo, "figures": figures})
        bar.update(experiment.times)
    plain = json.loads(json.dumps(rows, default=_plain))
    return {
        "figure": experiment.figure, "paper_says": experiment.says, "x_name": experiment.x_name,
        "cell": experiment.cell, "minutes": minutes, "seed": seed, "warm_up": experiment.warm_up,
        "traces": trace_dir is not None, "git": environment()["git"], "rows": plain,
    }  # fmt: skip


def chosen(only: Sequence[str]) -> list[Experiment]:
    """Return the experiments whose names begin with one of ``only``; all if it is empty.

    Raises:
        ValueError: One of them begins no name.
    """
    for start in only:
        if not any(name.startswith(start) for name in EXPERIMENTS):
            raise ValueError(f"no experiment is named {start}...; there are: {', '.join(EXPERIMENTS)}")
    return [e for e in EXPERIMENTS.values() if not only or any(e.name.startswith(start) for start in only)]


def read_results(path: Path) -> dict[str, Any]:
    """Return the experiments of a record, in the order of EXPERIMENTS; none if there is no such file."""
    if not path.exists():
        return {}
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    return {name: results[name] for name in EXPERIMENTS if name in results}


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} has no place in a record")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="experiments whose names begin so")
    parser.add_argument("--minutes", type=float, default=3.0, help="simulated, a point (default: 3; some take more)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace-dir", type=Path, metavar="FOLDER", help="traces to draw lengths and arrivals from")
    parser.add_argument("--record", type=Path, metavar="FILE", help=f"add to this record (to render: {RECORD})")
    parser.add_argument("--render", type=Path, metavar="PAGE", help="simulate nothing; put the record's tables there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    if args.render is not None:
        missing = fill_page(args.render, read_results(args.record or RECORD))
        if missing:
            print(f"only in the page or only in the record: {', '.join(missing)}")
        return
    experiments = chosen(args.only)
    results = read_results(args.record) if args.record is not None else {}
    total = sum(e.times * len(e.cases) for e in experiments)
    with tqdm(total=total, disable=None, bar_format="{percentage:3.0f}% |{bar:30}| {elapsed} {desc}") as bar:
        for experiment in experiments:
            entry = run_experiment(
                experiment, minutes=args.minutes, seed=args.seed, trace_dir=args.trace_dir, bar=bar
            )  # fmt: skip
            results[experiment.name] = entry
            bar.clear()
            print(f"\n{experiment.figure} (simulated)\npaper: {experiment.says}\n{markdown(entry)}", flush=True)
            if args.record is not None:
                cells = {name: text for name, (text, _) in CELLS.items()}
                write_record(
                    args.record, name="reproduction", config={"simulated": True, "cells": cells}, seed=args.seed,
                    results=results,
                )  # fmt: skip


if __name__ == "__main__":
    main()
