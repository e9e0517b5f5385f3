"""The simulator against the engine: the same load, the same profile, their figures side by side.

    python -m benchmarks.simulator_validation --record benchmarks/results/simulator_validation.json

SmolLM-135M's shape with random weights, in one process, without HTTP. Each repeat first traces the engine's steps under
calibration loads, which nothing is compared on, then serves every load under every scheduler in real time. The
simulator serves them on its clock, three times:

* ``simulated``: steps take what the profile says;
* ``calibrated``: they take, and vary, as the steps of the same repeat's calibration loads did (``Calibration``);
* ``replayed``: the n-th step takes as long as the engine's n-th did: no latency model is in that, and what then differs
  is the simulator's loop and its host tier.

Figures are medians over the repeats (and for ``calibrated`` over seeds). ``again`` is what one run of the engine is to
another on the same load, the pair that differs most: no simulator can be asked to be nearer than that.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.common.arguments import argument_parser
from benchmarks.common.models import SMOLLM_135M, random_llama
from benchmarks.common.record import write_record
from benchmarks.validation.loads import CALIBRATION, LOADS, MIB, Mix
from benchmarks.validation.report import FIGURES, Case, figures_of, line, ratios, summary, summary_table, table
from benchmarks.validation.serving import EngineRun, warm_up
from omniserve import SLO, ClassSpec, Engine, EngineConfig
from omniserve.latency import BatchFeatures, CorrectedModel, Predictor, ScaledModel, StepSample
from omniserve.profiling import find_or_make_profile
from omniserve.sched.policy import known_options
from omniserve.simulate import Calibration, Load, Machine, SimulationConfig, machine_of_profile, simulate

HOST_KV_BYTES = 256 * MIB
_COMPILE_S = 2.0


class Replay(Predictor):
    """Steps take what the engine's took, in order; after the last of them, what a model says."""

    def __init__(self, seconds: Sequence[float], model: Predictor) -> None:
        self.term_names, self.layer_terms, self.num_layers = model.term_names, model.layer_terms, model.num_layers
        self.attention_terms = model.attention_terms
        self._seconds = iter(seconds)
        self._model = model

    def terms(self, features: BatchFeatures) -> tuple[float, ...]:
        return self._model.terms(features)

    def step_s(self, features: BatchFeatures) -> float:
        return next(self._seconds, None) or self._model.step_s(features)


class Validation:
    """All cases, on one model."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._model = random_llama(**SMOLLM_135M)
        self.cases = list(cases(args))
        self._profile = find_or_make_profile(self._model, self.cases[0].config, folder=args.profiles)
        self.calibrations: list[Calibration] = []

    def run(self) -> None:
        """Serve all loads in real time, repeat after repeat, and simulate each as soon as it was served."""
        args = self._args
        for mix in CALIBRATION:  # compiles
            self._serve(engine_config("omniserve", mix, args), mix.load(_COMPILE_S, args.seed), 0)
        total = args.repeats * (len(self.cases) + len(CALIBRATION))
        with tqdm(total=total, unit="run", disable=None, leave=False) as bar:
            for repeat in range(args.repeats):
                seed = args.seed + 1 + repeat
                samples: list[StepSample] = []
                for mix in CALIBRATION:
                    config = engine_config("omniserve", mix, args)
                    samples += self._serve(config, mix.load(args.seconds, 1000 + seed), seed)[1]
                    bar.update()
                machine: Machine | None = None
                for case in self.cases:
                    figures, steps, machine, believed = self._serve(case.config, case.load, seed)
                    if len(self.calibrations) == repeat:
                        self.calibrations.append(Calibration.fitted(machine.device, samples))
                    case.runs.append(figures)
                    self._simulate(case, machine, believed, [step.seconds for step in steps])
                    bar.update()

    def _serve(
        self, config: EngineConfig, load: Load, seed: int
    ) -> tuple[dict[str, Any], list[StepSample], Machine, Predictor]:
        """Return figures, steps, the profile's machine, and what the engine believed of steps as the load began."""
        with Engine(self._model, config, profile=self._profile) as engine:
            machine = machine_of_profile(self._profile, engine.spec)
            learned = CorrectedModel(machine.device)
            warm_up(engine, learned)
            run = EngineRun(engine, load, seed)
            believed = [learned.pace * factor for factor in learned.factors]
            return run.run(), run.steps, machine, ScaledModel(machine.device, believed)

    def _simulate(self, case: Case, machine: Machine, believed: Predictor, seconds: list[float]) -> None:
        if not case.twins:  # the profile never changes
            case.twins["simulated"] = [self._twin(case, machine, 0)]
        calibrated = self.calibrations[-1].apply(machine)
        replay = dataclasses.replace(machine, device=Replay(seconds, machine.device), forecast=believed)
        first_seed = len(case.runs) * self._args.seeds
        seeds = range(first_seed, first_seed + self._args.seeds)
        case.twins.setdefault("calibrated", []).extend(self._twin(case, calibrated, seed) for seed in seeds)
        case.twins.setdefault("replayed", []).append(self._twin(case, replay, 0))

    def _twin(self, case: Case, machine: Machine, seed: int) -> dict[str, Any]:
        result = simulate(SimulationConfig(machine=machine, engine=case.config, load=case.load, seed=seed))
        return {
            "figures": figures_of(result.classes["LS"], result.classes["BE"]), "host_share": result.host_share,
            "num_steps": result.num_steps, "preemptions": result.preemptions, "swaps_out": result.swaps_out,
            "wall_s": result.wall_s,
        }  # fmt: skip


def engine_config(scheduler: str, mix: Mix, args: argparse.Namespace) -> EngineConfig:
    classes = (
        ClassSpec(name="LS", kind="LS", slo=SLO(ttft_s=args.slo[0], tpot_s=args.slo[1])),
        ClassSpec(name="BE", kind="BE"),
    )
    return EngineConfig(
        scheduler=scheduler, device_kv_bytes=mix.device_kv_bytes, host_kv_bytes=HOST_KV_BYTES, classes=classes,
        scheduler_options=known_options(
            scheduler, {"admission": False, "swap_in_delay_s": 0.5, "min_residence_s": 1.0}
        ),
    )  # fmt: skip


def cases(args: argparse.Namespace) -> Iterator[Case]:
    for name in args.loads:
        load = LOADS[name].load(args.seconds, args.seed)
        for scheduler in args.schedulers:
            yield Case(f"{scheduler}, {name}", engine_config(scheduler, LOADS[name], args), load)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argument_parser(
        __doc__, "simulator_validation", schedulers=["sarathi", "fcfs", "omniserve"], seconds=(6.5, "of each load"),
        repeats=(3, "runs of the engine"), seeds=(10, "calibrated simulations of a run"), seed=0,
    )  # fmt: skip
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--slo", type=float, nargs=2, default=[1.0, 0.15], metavar=("TTFT_S", "TPOT_S"))
    parser.add_argument("--profiles", type=Path, metavar="FOLDER", help="where profiles are kept (default: the cache)")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_arguments()
    began_s = time.monotonic()
    validation = Validation(args)
    validation.run()
    for repeat, calibration in enumerate(validation.calibrations):
        print(f"calibration {repeat + 1}: {calibration}")
    print(line("", "", [*FIGURES, "BE tok/s"]) + "   medians; ms, tokens/s; x: ratio to the engine")
    for case in validation.cases:
        print(table(case))
    print(summary_table(validation.cases))
    results = {
        "cases": {case.name: {"engine": case.runs, **case.twins, "ratios": ratios(case)} for case in validation.cases},
        "summary": summary(validation.cases),
        "calibrations": [str(calibration) for calibration in validation.calibrations],
        "wall_s": time.monotonic() - began_s,
    }
    settings = vars(args) | {"model": SMOLLM_135M, "figures": [*FIGURES.values(), "be_tokens_per_s"]}
    write_record(args.record, name="simulator_validation", config=settings, seed=args.seed, results=results)


if __name__ == "__main__":
    main()
