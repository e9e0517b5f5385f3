"""The papers' evaluation, simulated: OmniServe Fig. 10-19, APEX Fig. 5-7, ConServe Fig. 6-9, BROS Fig. 10-13.

    python -m benchmarks.reproduction --record benchmarks/results/reproduction.json
    python -m benchmarks.reproduction --only omniserve-19 apex --minutes 2
    python -m benchmarks.pages    # docs/reproduction.md, from the record

Each point is the engine's own scheduler and KV manager on a virtual clock (``omniserve.simulate``), on machines of data
sheets. Nothing is fitted to the papers' results. Lengths come from seeded generators, or with ``--trace-dir`` from
traces. A run takes the experiments that ``--only`` names and leaves the others of the record as they are; points that
do not depend on each other run side by side.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser
from benchmarks.paper import apex, bros, conserve, whole_on_cpu
from benchmarks.paper import omniserve as omniserve_paper
from benchmarks.paper.cases import Case, DecodesAlone, Experiment, MachineSpec
from benchmarks.paper.report import TokenGaps, figures_of, markdown
from omniserve.core.config import EngineConfig
from omniserve.core.request import SLO, ClassSpec, ServiceClass
from omniserve.sched.policy import known_options
from omniserve.simulate.analytic import HOST_SHARE, analytic_machine, engine_config_for
from omniserve.simulate.hardware import GB, find_devices, find_hosts
from omniserve.simulate.machine import Machine
from omniserve.simulate.models import find_model
from omniserve.simulate.results import Result
from omniserve.simulate.run import SimulationConfig, simulate
from omniserve.simulate.runner import StepRecord

EXPERIMENTS: dict[str, Experiment] = {
    each.name: each for part in (omniserve_paper, whole_on_cpu, apex, conserve, bros) for each in part.EXPERIMENTS
}
"""The experiments, in the order of the page. Rates are not the papers' axes, which their text does not print; they lie
around what the text names."""
DRAIN_S = 300.0
"""Seconds that LS requests may go on after the load; those that are unfinished then count as missed."""


def make_machine(spec: MachineSpec) -> Machine:
    """Return the simulated machine of a spec."""
    model = find_model(spec.model)
    if spec.max_model_len is not None:
        model = dataclasses.replace(model, max_model_len=spec.max_model_len)
    count, device = find_devices(spec.device)
    if spec.memory_gb is not None:
        device = dataclasses.replace(device, memory_bytes=spec.memory_gb * GB)
    if spec.bandwidth_gb_per_s is not None:
        device = dataclasses.replace(device, bytes_per_s=spec.bandwidth_gb_per_s * GB)
    num_hosts, host = find_hosts(spec.hosts) if spec.hosts is not None else (0, None)
    if host is not None and spec.network_gb_per_s is not None:
        host = dataclasses.replace(host, network_bytes_per_s=spec.network_gb_per_s * GB)
    hosts = (host,) * num_hosts if host is not None else ()
    machine = analytic_machine(
        model, device, count, hosts=hosts, host_share=spec.host_share or HOST_SHARE, late_layers=model.spec.num_layers,
        num_prefill_engines=spec.prefill_engines,
    )  # the paper's steps  # fmt: skip
    if spec.prompts_come_computed:
        decodes_alone = DecodesAlone(machine.device)
        machine = dataclasses.replace(machine, device=decodes_alone, forecast=decodes_alone)
    return machine


def run_case(
    case: Case, slo: SLO, *, minutes: float, warm_up: float, seed: int, drain_s: float,
    trace_dir: Path | None, on_step: Callable[[StepRecord], object],
) -> Result:  # fmt: skip
    """Simulate one point; ``warm_up`` is the share of its minutes that figures leave out."""
    machine = make_machine(case.machine)
    classes = (
        ClassSpec(name=ServiceClass.LS, kind=ServiceClass.LS, slo=slo),
        ClassSpec(name=ServiceClass.BE, kind=ServiceClass.BE, speculation=case.drafts_right > 0),
    )
    fields = EngineConfig.__dataclass_fields__
    options: dict[str, Any] = {name: value for name, value in case.settings if name not in fields}
    engine = engine_config_for(
        machine, scheduler=case.system, classes=classes, scheduler_options=known_options(case.system, options),
        **{name: value for name, value in case.settings if name in fields},
    )  # fmt: skip
    load = case.load.times(case.num_shares).make(minutes * 60, warm_up=warm_up, seed=seed, trace_dir=trace_dir)
    config = SimulationConfig(
        machine=machine, engine=engine, load=load, num_engines=case.machine.num_engines, seed=seed, drain_s=drain_s,
        drafts_right=case.drafts_right, noise=case.noise,
    )  # fmt: skip
    return simulate(config, on_step=on_step)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Cases of an experiment that one process runs one after another: those of an x if they share objectives."""

    experiment: Experiment
    cases: tuple[Case, ...]
    minutes: float
    seed: int
    trace_dir: Path | None

    def run(self) -> list[dict[str, Any]]:
        """Simulate them; return their rows of the record."""
        experiment, rows, objectives = self.experiment, [], None
        for case in self.cases:
            slo = case.slo if objectives is None else _scaled(objectives, case.slo_scale)
            gaps = TokenGaps(begin_s=experiment.warm_up * self.minutes * 60)
            result = run_case(
                case, slo, minutes=self.minutes, warm_up=experiment.warm_up, seed=self.seed, trace_dir=self.trace_dir,
                drain_s=math.inf if experiment.to_the_end else DRAIN_S, on_step=gaps.note,
            )  # fmt: skip
            if case.system == experiment.slo_from:
                ls = result.classes[ServiceClass.LS]
                objectives = SLO(ttft_s=ls.ttft_p99_s, tpot_s=gaps.percentile(99))
            tbt = {"tbt_p99_s": gaps.percentile(99), "tbt_attainment": gaps.share_within(slo.tpot_s)}
            figures = figures_of(result, slo, num_shares=case.num_shares) | tbt
            rows.append({"x": case.x, "column": case.column, "case": _settings(case), "slo": slo, "figures": figures})
        plain: list[dict[str, Any]] = json.loads(json.dumps(rows, default=_plain))
        return plain


def _settings(value: Any) -> dict[str, Any]:
    """Return the fields of a case, or of a part of it, that do not have their defaults; its settings by name."""
    return {
        field.name: _settings(given)
        if dataclasses.is_dataclass(given := getattr(value, field.name))
        else dict(given)
        if field.name == "settings"
        else given
        for field in dataclasses.fields(value)
        if field.default is dataclasses.MISSING or getattr(value, field.name) != field.default
    }


def _scaled(slo: SLO, scale: float) -> SLO:
    assert slo.ttft_s is not None and slo.tpot_s is not None
    return SLO(ttft_s=scale * slo.ttft_s, tpot_s=scale * slo.tpot_s)


def units_of(experiment: Experiment, *, minutes: float, seed: int, trace_dir: Path | None) -> list[Unit]:
    """Return an experiment's cases in their order, cut into what can run side by side."""
    by_x = [list(group) for _, group in itertools.groupby(experiment.cases, key=lambda case: case.x)]
    groups = by_x if experiment.slo_from is not None else [[case] for case in experiment.cases]
    return [
        Unit(experiment=experiment, cases=tuple(group), minutes=minutes * experiment.times, seed=seed,
             trace_dir=trace_dir)
        for group in groups
    ]  # fmt: skip


def run_experiments(
    experiments: Sequence[Experiment], *, minutes: float, seed: int, trace_dir: Path | None, jobs: int,
    bar: tqdm[Any],
) -> Iterator[tuple[Experiment, dict[str, Any]]]:  # fmt: skip
    """Simulate experiments; yield each with its entry of the record, in their order. The bar counts their lengths."""
    units = [units_of(e, minutes=minutes, seed=seed, trace_dir=trace_dir) for e in experiments]
    with contextlib.ExitStack() as stack:
        if jobs > 1:
            pool = stack.enter_context(ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")))
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)  # if one of them fails, the others end too
            found = pool.map(Unit.run, itertools.chain.from_iterable(units))
        else:
            found = map(Unit.run, itertools.chain.from_iterable(units))
        for experiment, parts in zip(experiments, units, strict=True):
            rows: list[dict[str, Any]] = []
            for unit in parts:
                bar.set_description_str(f"{experiment.name} {unit.cases[0].x} {unit.cases[0].column}")
                rows += next(found)
                bar.update(experiment.times * len(unit.cases))
            yield experiment, {
                "figure": experiment.figure, "paper_says": experiment.says, "x_name": experiment.x_name,
                "cell": experiment.cell, "minutes": minutes * experiment.times, "seed": seed,
                "warm_up": experiment.warm_up, "traces": trace_dir is not None,
                "rows": rows,
            }  # fmt: skip


def chosen(only: Sequence[str]) -> list[Experiment]:
    """Return the experiments whose names begin with one of ``only``; all if it is empty."""
    for start in only:
        if not any(name.startswith(start) for name in EXPERIMENTS):
            raise ValueError(f"no experiment is named {start}...; there are: {', '.join(EXPERIMENTS)}")
    return [e for e in EXPERIMENTS.values() if not only or any(e.name.startswith(start) for start in only)]


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} has no place in a record")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argument_parser(__doc__, minutes=(3.0, "simulated, a point"), seed=0)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="experiments whose names begin so")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: all cores)")
    parser.add_argument("--trace-dir", type=Path, metavar="FOLDER", help="traces to draw lengths and arrivals from")
    parser.add_argument("--record", type=Path, metavar="FILE", help="add to this record, a row for each experiment")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    experiments = chosen(args.only)
    total = sum(e.times * len(e.cases) for e in experiments)
    with tqdm(total=total, disable=None, bar_format="{percentage:3.0f}% |{bar:30}| {elapsed} {desc}") as bar:
        done = run_experiments(
            experiments, minutes=args.minutes, seed=args.seed, trace_dir=args.trace_dir, jobs=args.jobs, bar=bar
        )  # fmt: skip
        for experiment, entry in done:
            bar.clear()
            print(f"\n{experiment.figure} (simulated)\npaper: {experiment.says}\n{markdown(entry)}", flush=True)
            if args.record is not None:
                config = {"simulated": True, "minutes": entry["minutes"], "traces": entry["traces"]}
                write_record(
                    args.record, name="reproduction", case=experiment.name, config=config, seed=args.seed, results=entry
                )


if __name__ == "__main__":
    main()
