"""Layers of a token that are spread over steps, for shorter steps of a higher class: planned deferral by class."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import random

from benchmarks.common.cases import Trials
from benchmarks.features import FEATURES
from omniserve import SLO, ClassSpec
from omniserve.simulate import Load, SimulationConfig, simulate
from omniserve.simulate.analytic import analytic_machine, engine_config_for
from omniserve.simulate.hardware import find_devices
from omniserve.simulate.load import fixed_lengths, lognormal_lengths, poisson, requests
from omniserve.simulate.models import find_model

CLASSES = (
    ClassSpec(name="GOLD", kind="LS", slo=SLO(ttft_s=1.0, tpot_s=0.03)),
    ClassSpec(name="SILVER", kind="LS", slo=SLO(ttft_s=10.0, tpot_s=0.2)),
    ClassSpec(name="BE", kind="BE"),
)
LOADS = {"few prompts": (1000.0, 400.0), "long contexts": (3000.0, 300.0)}
"""Median prompt and output of SILVER, by load."""
RATES = {"few prompts": (4.0, 8.0), "long contexts": (2.0, 3.0)}
"""SILVER requests a second, by load."""


@FEATURES.case(
    seconds=45.0, gold_rate=0.5, be=16, seeds=1, seed=0, uncounted=0, tiny={"seconds": 5.0, "be": 2},
)  # fmt: skip
def token_deferral(args: argparse.Namespace) -> Trials:
    """Simulates planned deferral by class (`defer_tokens`): TPOT of two LS classes, and best-effort output.

    Requests of the class GOLD (256 tokens in, 128 out) have a TPOT of 30 ms, those of SILVER, at several rates, one of
    200 ms; both Poisson. The decodes of SILVER alone make steps longer than GOLD's TPOT at times. `with BE` adds a
    backlog of best-effort work (1,000 in, 200 out). The machine is simulated: Llama-3-8B on an A100, whose steps take
    what is forecast. What the engine gives up on a GPU for steps that rows leave is not: CUDA graphs of a whole step,
    and launching a step while the one before it runs. Paper: omniserve 6 (multiple priority levels).
    """
    for name, has_be in itertools.product(LOADS, (False, True)):
        for rate in RATES[name]:
            arms = {
                mode: functools.partial(_mean, name, rate, mode, args, has_be=has_be)
                for mode in ("off", "late", "always")
            }
            yield f"{name}{', with BE' if has_be else ''}, {rate:g}/s", arms


def _mean(name: str, rate: float, mode: str, args: argparse.Namespace, *, has_be: bool) -> dict[str, float]:
    seeds = range(args.seed, args.seed + args.seeds)
    runs = [simulated(load_of(name, rate, args, seed, has_be=has_be), mode, seed) for seed in seeds]
    return {figure: sum(run[figure] for run in runs) / len(runs) for figure in runs[0]}


def load_of(name: str, rate: float, args: argparse.Namespace, seed: int, *, has_be: bool) -> Load:
    """Draw a load: GOLD at ``args.gold_rate``, SILVER at ``rate``."""
    rng = random.Random(f"{seed} {name}")
    gold = requests(poisson(args.gold_rate, args.seconds, rng), fixed_lengths(256, 128), rng)
    silver = requests(poisson(rate, args.seconds, rng), lognormal_lengths(*LOADS[name], sigma=0.3), rng)
    named = [dataclasses.replace(row, service_class="SILVER") for row in silver]
    return Load(
        latency_sensitive=sorted([*gold, *named], key=lambda row: row.arrival_s),
        best_effort=requests([0.0] * 200, fixed_lengths(1000, 200), rng) if has_be else [],
        backlog=args.be if has_be else 0, duration_s=args.seconds, warm_up_s=args.seconds / 3,
    )  # fmt: skip


def simulated(load: Load, mode: str, seed: int) -> dict[str, float]:
    """Simulate a load and return each class's figures."""
    machine = analytic_machine(find_model("llama-3-8b"), find_devices("A100-80GB")[1])
    options = {"defer_tokens": mode, "admission": False}
    engine = engine_config_for(machine, classes=CLASSES, max_num_batched_tokens=2048, scheduler_options=options)
    classes = simulate(SimulationConfig(machine=machine, engine=engine, load=load, seed=seed)).classes
    figures: dict[str, float] = {}
    for name in ("GOLD", "SILVER"):
        figures |= {
            f"{name} TPOT p50, ms": 1e3 * classes[name].tpot_p50_s,
            f"{name} TPOT p99, ms": 1e3 * classes[name].tpot_p99_s,
            f"{name} attainment": classes[name].attainment,
        }
    return figures | {"BE tokens/s": classes["BE"].output_tokens_per_s}
