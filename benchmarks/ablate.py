"""What each mechanism of a policy brings: a row for each, with that one switched off and all else equal.

    python -m benchmarks.ablate                                # every policy of a paper, simulated
    python -m benchmarks.ablate conserve bros --seeds 5 --jobs 2
    python -m benchmarks.ablate omniserve --on engine          # this machine, on the load of `make coserve`

The simulator runs a point of the policy's own paper (``BASES``), a run for each seed; the engine serves the load of
``benchmarks.coserve`` on a new server for each row and repeat, in turns. A mechanism is an option of the policy
(docs/policies.md), or a setting of the engine. The table has medians over the seeds, and in brackets the median of the
ratios to the whole policy with the same seed, and their smallest and largest.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import coserve
from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser, table
from benchmarks.paper.cases import Case, Experiment, with_settings
from benchmarks.reproduction import EXPERIMENTS, Unit
from omniserve.core.config import EngineConfig

WHOLE = "all of it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mechanism:
    """A mechanism of a policy, by the settings without it."""

    name: str
    off: Mapping[str, object]
    """Options of the policy and settings of the engine, as a case of an experiment has them."""
    noise: float = 0.0
    """Noise of the steps with which the mechanism is tried; the whole policy is tried with it, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """The point of an experiment at which a policy's mechanisms are tried, and these."""

    experiment: str
    x: str
    system: str = ""
    """The system of the point; "": the policy itself."""
    more: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Settings of every run, beside those of the point."""
    mechanisms: tuple[Mechanism, ...]


NOISE = 0.2
_CO_SERVING = (
    Mechanism(name="headrooms", off={"headrooms": False}),
    Mechanism(name="time for a newcomer", off={"newcomer_bound": False}),
    Mechanism(name="decodes lend their lead", off={"slack": "step"}),
    Mechanism(name="late joins", off={"late_joins": False}),
    Mechanism(name="prompts that begin alike together", off={"be_prefix_order": False}),
    Mechanism(name="correction of the model", off={"correct_model": False}, noise=NOISE),
)
BASES: dict[str, Base] = {
    "omniserve": Base(
        experiment="omniserve-10-15-yi", x="6", mechanisms=(
            *_CO_SERVING,
            Mechanism(name="decodes before prompts", off={"be_order": "prefill"}),
            Mechanism(name="seats by rate", off={"seat_objective": False}),
            Mechanism(name="admission", off={"admission": False}),
            Mechanism(name="host tier", off={"kv": "paged"}),
        ), more={"admission": True},
    ),
    "neo": Base(
        experiment="omniserve-10-15-yi", x="6", mechanisms=(
            *_CO_SERVING, Mechanism(name="partial progress first", off={"partial_progress_first": False}),
        ),
    ),
    "apex": Base(
        experiment="apex-5-t4", x="200 out", mechanisms=(
            Mechanism(name="choice of a strategy: pipelined alone", off={"strategy": "pipelined"}),
            Mechanism(name="choice of a strategy: overlapped alone", off={"strategy": "overlapped"}),
            Mechanism(name="cohorts of eight times the device's", off={"min_host_per_device": 0}),
            Mechanism(name="partial progress first", off={"partial_progress_first": False}),
            Mechanism(name="watch on the host's speed", off={"watch_host": False}, noise=NOISE),
            Mechanism(name="late joins", off={"late_joins": False}),
        ),
    ),
    "conserve": Base(
        experiment="conserve-6-8b", x="2/s", mechanisms=(
            Mechanism(name="layer preemption", off={"layer_preemption": False}),
            Mechanism(name="halted rows go on", off={"keep_halted": False}),
            Mechanism(name="a safepoint at each layer (every 4th)", off={"safepoint_every": 4}),
            Mechanism(name="best step size", off={"best_step_size": False}),
            Mechanism(name="incremental KV", off={"kv": "tiered", "checkpoint_kv": False}),
            Mechanism(name="correction of the model", off={"correct_model": False}, noise=NOISE),
        ),
    ),
    "bros": Base(
        experiment="bros-10-13b", x="6", mechanisms=(
            Mechanism(name="replacement", off={"replace_ls": False}),
            Mechanism(name="adaptive batch size", off={"adapt_batch": False}),
            Mechanism(name="the batch size spares LS", off={"batch_limits_ls": True}),
            Mechanism(name="bidirectional blocks", off={"kv": "tiered"}),
            Mechanism(name="correction of the model", off={"correct_model": False}, noise=NOISE),
        ),
    ),
    "omniserve-paper": Base(
        experiment="omniserve-10-15-yi", x="6", mechanisms=(
            Mechanism(name="late joins", off={"late_joins": False}),
            Mechanism(name="host tier", off={"kv": "paged"}),
            Mechanism(name="correction of the model", off={"correct_model": False}, noise=NOISE),
        ),
    ),
}  # fmt: skip
"""Where the mechanisms of each policy are tried. Admission is off at the papers' points, and on for ``omniserve``."""
FIGURES = {
    "LS attained": ("attainment", 100), "TTFT p99, ms": ("ttft_p99_s", 1000), "TPOT p99, ms": ("tpot_p99_s", 1000),
    "BE tokens/s": ("be_tokens_per_s", 1), "BE output/s": ("be_output_per_s", 1),
}  # fmt: skip
"""Columns of the simulator's table: a figure of ``figures_of``, and its factor."""
_HEADS = ("BE tokens/s", "BE output/s")


def cases_of(policy: str) -> tuple[Experiment, list[tuple[str, Case]]]:
    """Return the experiment of a policy's point, and its cases: the whole policy, and without each mechanism."""
    base = BASES[policy]
    experiment = EXPERIMENTS[base.experiment]
    system = base.system or policy
    whole = next(case for case in experiment.cases if (case.x, case.system, case.variant) == (base.x, system, ""))
    whole = with_settings(whole, "", **base.more)
    found = [(WHOLE, whole)]
    for noise in sorted({one.noise for one in base.mechanisms} - {0.0}):
        found.append((f"{WHOLE}, steps with a noise of {noise:g}", dataclasses.replace(whole, noise=noise)))
    found += [
        (one.name, dataclasses.replace(with_settings(whole, "", **one.off), noise=one.noise))
        for one in base.mechanisms
    ]  # fmt: skip
    return experiment, found


def compared_with(policy: str) -> dict[str, str]:
    """Return the row that each row is compared with: the whole policy with the same noise of the steps."""
    _, cases = cases_of(policy)
    by_noise = {case.noise: name for name, case in reversed(cases) if name.startswith(WHOLE)}
    return {name: by_noise[case.noise] for name, case in cases}


def simulate(policy: str, *, minutes: float, seeds: int, jobs: int, bar: tqdm[Any]) -> dict[str, list[dict[str, Any]]]:
    """Simulate a policy whole and without each mechanism; return the figures of each row, in the order of the seeds."""
    experiment, named = cases_of(policy)
    names, cases = [name for name, _ in named], tuple(case for _, case in named)
    alone = next((c for c in experiment.cases if c.system == experiment.slo_from and c.x == cases[0].x), None)
    units = [
        Unit(experiment=experiment, cases=group, minutes=minutes, seed=seed, trace_dir=None)
        for seed in range(seeds)
        for group in ([(alone, *cases)] if alone is not None else [(case,) for case in cases])
    ]  # fmt: skip
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        rows = [row for unit_rows in _counted(pool.map(Unit.run, units), bar) for row in unit_rows]
    ours = [row["figures"] for row in rows if alone is None or row["case"].get("system") != alone.system]
    for number, figures in enumerate(ours):
        found[names[number % len(names)]].append(figures)
    return found


def _counted(parts: Iterator[list[dict[str, Any]]], bar: tqdm[Any]) -> Iterator[list[dict[str, Any]]]:
    for part in parts:
        bar.update(len(part))
        yield part


def rows_of(policy: str, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[list[str]]:
    """Return the lines of a policy's table, its head first."""
    with_it = compared_with(policy)
    lines = [["without", *FIGURES]]
    for name, seeds in found.items():
        cells = []
        for head, (figure, factor) in FIGURES.items():
            values = [one[figure] for one in seeds if one[figure] is not None]
            if not values:
                cells.append("-")
                continue
            text = f"{factor * statistics.median(values):,.{0 if factor != 100 else 1}f}"
            if head in _HEADS and (beside := with_it[name]) != name:
                ratios = [
                    one[figure] / other[figure]
                    for one, other in zip(seeds, found[beside], strict=True)
                    if other[figure]
                ]
                if ratios:
                    text += f" ({statistics.median(ratios):.2f}; {min(ratios):.2f} to {max(ratios):.2f})"
            cells.append(text)
        lines.append([name, *cells])
    return lines


def flags_of(policy: str, mechanism: Mechanism) -> str:
    """Return a policy without a mechanism as ``benchmarks.coserve`` names it."""
    fields = EngineConfig.__dataclass_fields__
    flags = [
        f"{name}={_text(value)}" if name in fields else f"scheduler-option={name}={_text(value)}"
        for name, value in mechanism.off.items()
    ]
    return ",".join([policy, *flags])


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argument_parser(
        __doc__, minutes=(3.0, "simulated, a run"), seeds=(3, "runs of each row"),
        jobs=(len(os.sched_getaffinity(0)), "processes"),
    )  # fmt: skip
    parser.add_argument("policies", nargs="*", metavar="POLICY", help=f"of {', '.join(BASES)}; none: all")
    parser.add_argument("--on", choices=("simulator", "engine"), default="simulator")
    parser.add_argument("--record", type=Path, metavar="FILE", help="add to this record, a row for each policy")
    args = parser.parse_args(arguments)
    if unknown := [policy for policy in args.policies if policy not in BASES]:
        parser.error(f"nothing is known of the mechanisms of {', '.join(unknown)}; there are {', '.join(BASES)}")
    if args.seeds < 1 or args.jobs < 1 or args.minutes <= 0:
        parser.error("--seeds and --jobs must be 1 or more, --minutes more than 0")
    args.policies = args.policies or list(BASES)
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if args.on == "engine":
        load = ["--load", "memory"]  # where memory is short all mechanisms have work
        for policy in args.policies:
            rows = [policy, *(flags_of(policy, one) for one in BASES[policy].mechanisms)]
            status = coserve.main([*load, "--repeats", str(args.seeds), "--policies", *rows])
            if status:
                return status
        return 0
    total = args.seeds * sum(len(cases_of(policy)[1]) for policy in args.policies)
    with tqdm(total=total, disable=None, bar_format="{percentage:3.0f}% |{bar:30}| {elapsed} {desc}") as bar:
        for policy in args.policies:
            bar.set_description_str(policy)
            found = simulate(policy, minutes=args.minutes, seeds=args.seeds, jobs=args.jobs, bar=bar)
            bar.clear()
            base = BASES[policy]
            print(f"\n{policy}: {EXPERIMENTS[base.experiment].figure}, {base.x}\n{table(rows_of(policy, found))}")
            if args.record is not None:
                config = {
                    "simulated": True,
                    "minutes": args.minutes,
                    "seeds": args.seeds,
                    "experiment": base.experiment,
                }
                write_record(
                    args.record, name="ablate", case=policy, config=config | {"x": base.x}, seed=0, results=dict(found)
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
