"""Simulates deferral by class: the SLO attainment of two LS classes with and without it.

    python -m benchmarks.deferral --record benchmarks/results/deferral.json

Few short requests of the class GOLD (a TTFT that is shorter than a step with a long prompt), and long prompts of the
class SILVER, at several rates; both Poisson. Two loads: `prompts` (SILVER has little output, its prompts fill the
steps) and `decodes` (long outputs). `with BE` adds a backlog of best-effort work. The machine is simulated: Llama-3-8B
on an A100; what its steps take differs from the forecast by ``--noise``. What is not simulated is what the engine gives
up on a GPU for steps that rows may leave: CUDA graphs, and launching a step while the one before it runs. A rejected
request met nothing. Paper: omniserve 6 (multiple priority levels).
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser, table
from omniserve import SLO, ClassSpec
from omniserve.simulate import Load, SimulationConfig, simulate
from omniserve.simulate.analytic import analytic_machine, engine_config_for
from omniserve.simulate.hardware import find_devices
from omniserve.simulate.load import fixed_lengths, lognormal_lengths, poisson, requests
from omniserve.simulate.models import find_model
from omniserve.simulate.runner import StepRecord

CLASSES = (
    ClassSpec(name="GOLD", kind="LS", slo=SLO(ttft_s=0.15, tpot_s=0.25)),
    ClassSpec(name="SILVER", kind="LS", slo=SLO(ttft_s=5.0, tpot_s=0.25)),
    ClassSpec(name="BE", kind="BE"),
)
LOADS = {"prompts": (4000.0, 8.0), "decodes": (1500.0, 200.0)}
"""Median prompt and output of SILVER."""


def load_of(name: str, rate: float, args: Any, seed: int, *, has_be: bool) -> Load:
    """Draw a load: GOLD at ``args.gold_rate``, SILVER at ``rate``."""
    rng = random.Random(f"{seed} {name}")
    gold = requests(poisson(args.gold_rate, args.seconds, rng), fixed_lengths(256, 8), rng)
    silver = requests(poisson(rate, args.seconds, rng), lognormal_lengths(*LOADS[name], sigma=0.5), rng)
    named = [dataclasses.replace(row, service_class="SILVER") for row in silver]
    pile = requests([0.0] * 200, fixed_lengths(1000, 200), rng) if has_be else []
    return Load(
        latency_sensitive=sorted([*gold, *named], key=lambda row: row.arrival_s), best_effort=pile,
        backlog=32 if has_be else 0, duration_s=args.seconds,
    )  # fmt: skip


def run(load: Load, *, defers: bool, noise: float, seed: int) -> dict[str, float]:
    """Simulate a load and return each class's figures."""
    machine = analytic_machine(find_model("llama-3-8b"), find_devices("A100-80GB")[1])
    engine = engine_config_for(
        machine, classes=CLASSES, max_num_batched_tokens=4096, scheduler_options={"defer_classes": defers}
    )
    num_left = 0

    def count(step: StepRecord) -> None:
        nonlocal num_left
        num_left += sum(chunk.from_layer > 0 for chunk in step.plan.chunks)

    result = simulate(
        SimulationConfig(machine=machine, engine=engine, load=load, seed=seed, noise=noise), on_step=count
    )
    figures: dict[str, float] = {"chunks_that_went_on": num_left}
    for name in ("GOLD", "SILVER"):
        group = result.classes[name]
        figures |= {
            f"{name} attainment": group.attainment, f"{name} TTFT attainment": group.ttft_attainment,
            f"{name} rejected": group.num_rejected / group.num_requests, f"{name} TTFT p50": group.ttft_p50_s,
            f"{name} TTFT p99": group.ttft_p99_s, f"{name} TPOT p99": group.tpot_p99_s,
            f"{name} goodput": group.goodput,
        }  # fmt: skip
    return figures | {"BE tokens/s": result.classes["BE"].output_tokens_per_s}


def mean(runs: list[dict[str, float]]) -> Mapping[str, float]:
    """Return the means of some runs."""
    return {name: statistics.fmean(figures[name] for figures in runs) for name in runs[0]}


def main() -> None:
    parser = argument_parser(
        __doc__, "deferral", seconds=90.0, gold_rate=1.0, silver_rates=[1.5, 2.5, 4.0], seeds=2, seed=0,
        noise=(0.1, "standard deviation of the logarithm of what a step takes over its forecast"),
    )  # fmt: skip
    args = parser.parse_args()
    results: dict[str, Any] = {}
    lines = [["load", "silver/s", "deferral", "GOLD", "GOLD TTFT p99", "SILVER", "SILVER TTFT p99", "BE tokens/s"]]
    for name in LOADS:
        for has_be in (False, True):
            for rate in args.silver_rates:
                for defers in (False, True):
                    runs = [
                        run(load_of(name, rate, args, seed, has_be=has_be), defers=defers, noise=args.noise, seed=seed)
                        for seed in range(args.seed, args.seed + args.seeds)
                    ]
                    label = f"{name}{', with BE' if has_be else ''}"
                    figures = results[f"{label}, {rate}/s, {'on' if defers else 'off'}"] = mean(runs)
                    lines.append([
                        label, f"{rate:g}", "on" if defers else "off", f"{figures['GOLD attainment']:.1%}",
                        f"{figures['GOLD TTFT p99']:.3f}", f"{figures['SILVER attainment']:.1%}",
                        f"{figures['SILVER TTFT p99']:.2f}", f"{figures['BE tokens/s']:.0f}",
                    ])  # fmt: skip
    print(table(lines, numbers=True))
    config = {key: value for key, value in vars(args).items() if key != "record"}
    write_record(args.record, name="deferral", config=config | {"classes": CLASSES}, seed=args.seed, results=results)


if __name__ == "__main__":
    main()
