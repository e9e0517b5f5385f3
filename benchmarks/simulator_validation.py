"""The simulator against the engine, request by request: the same loads, the same profile.

    python -m benchmarks.simulator_validation --record benchmarks/results/simulator_validation.json
    python -m benchmarks.simulator_validation --model built-in --speed 15 --seconds 6 --trace-dir DIR

Without HTTP, in one process. First a profile is measured. Each repeat then traces the engine's steps under calibration
loads, which nothing is compared on, and serves every load under every scheduler in real time. The simulator serves
them on its clock, three times:

* ``simulated``: steps take what the profile says;
* ``calibrated``: they take, and vary, as the steps of the same repeat's calibration loads did (``Calibration``);
* ``replayed``: the n-th step takes as long as the engine's n-th did: no latency model is in that, and what then differs
  is the simulator's loop and its host tier.

The error of a request is (simulated - real) / real of its time from arrival to the last token (E2E), to the first one
(TTFT), and per token after that (TPOT). What is reported is the mean of the absolute errors of all requests (MAPE),
their median, and the mean with signs (bias). ``again`` is the same between two runs of the engine: no simulator can be
asked to be nearer than that. What the profile, or the calibration, says of the engine's own steps is compared with what
these took, too: it tells an error of steps' times from one of their composition.

``--trace-dir`` has ``azure2023_conv.csv`` (columns ``arrival_s,input_tokens,output_tokens``); without it, the load
``azure`` is drawn. ``--place ranks`` serves with two ranks of tensor parallel, ``--place host`` with a CPU host in a
process of its own, which has most of the host tier's memory, ``--place prefill`` with a prefill engine in a process of
its own, a core each; all on this machine. With a prefill engine nothing is replayed: which of its steps came when is
not known.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.common.engine_run import EngineRun, request
from benchmarks.common.models import MODELS
from benchmarks.common.record import write_record
from benchmarks.common.summary import without_samples
from benchmarks.common.terminal import argument_parser, table
from benchmarks.validation.errors import FIGURES, pairs_of, request_errors, step_errors, summed_up
from benchmarks.validation.loads import CALIBRATION, LOADS, USUAL, Mix
from benchmarks.validation.places import PLACES
from omniserve import SLO, ClassSpec, Engine, EngineConfig
from omniserve.core.plan import StepPlan
from omniserve.latency import CorrectedModel, ModelShape, Predictor, ScaledModel, StepSample, features_of
from omniserve.profiling import profile_model
from omniserve.sched.policy import known_options
from omniserve.simulate import Calibration, Load, Machine, SimulationConfig, machine_of_profile, simulate
from omniserve.simulate.results import RequestResult, Result

HOST_KV_BYTES = 256 << 20
OBJECTIVES = SLO(ttft_s=1.0, tpot_s=0.15)
"""Objectives of LS requests of SmolLM-135M's shape; with ``--speed`` they are that much shorter."""
SOURCES = {
    "replayed": "steps as long as the engine's were",
    "simulated": "steps from the profile",
    "calibrated": "steps calibrated on other loads",
    "again": "the engine itself, one run beside another",
}
KV_OF_TOKEN = {"SmolLM-135M": 1.0, "built-in": 2 / 15}
"""Model -> bytes of a token's KV, in multiples of those of SmolLM-135M's shape, for which loads give device pools."""
_TITLES = dict(zip(FIGURES, ("E2E", "TTFT", "TPOT"), strict=True))
_COMPILE_S = 1.0


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a load, on the engine or on the simulator."""

    requests: Sequence[RequestResult]
    num_steps: int
    host_share: float
    """Share of the best-effort output tokens with attention on the host tier."""
    prefilled_share: float
    """Share of the LS prompts' tokens whose KV came from prefill engines."""


@dataclass(slots=True)
class Case:
    """A load under a scheduler, and what came of it."""

    scheduler: str
    load_name: str
    config: EngineConfig
    load: Load
    runs: list[Run] = field(default_factory=list)
    """The engine's, one a repeat."""
    twins: dict[str, list[Run]] = field(default_factory=dict)
    """The simulator's by source: of each repeat in turn, equally many."""
    step_errors: dict[str, list[float]] = field(default_factory=dict)
    """Errors of models of the simulator on the engine's steps."""
    predicted_s: dict[str, float] = field(default_factory=dict)
    """Seconds of all these steps by the same models, and by the clock (``engine``)."""

    @property
    def name(self) -> str:
        return f"{self.scheduler}, {self.load_name}"

    def errors(self) -> dict[str, dict[str, list[float]]]:
        """Return the errors of all requests, by source and figure; ``again`` if there are two runs or more."""
        pairs: dict[str, list[tuple[Run, Run]]] = {}
        for source, twins in self.twins.items():
            each = len(twins) // len(self.runs)
            pairs[source] = [(self.runs[number // each], twin) for number, twin in enumerate(twins)]
        if len(self.runs) > 1:
            pairs["again"] = list(itertools.permutations(self.runs, 2))
        return {source: _joined(_errors_of(pair) for pair in found) for source, found in pairs.items()}


def _errors_of(pair: tuple[Run, Run]) -> dict[str, list[float]]:
    real, other = pair
    return request_errors(pairs_of(real.requests, other.requests))


def _joined(parts: Iterable[dict[str, list[float]]]) -> dict[str, list[float]]:
    joined: dict[str, list[float]] = {}
    for part in parts:
        for name, errors in part.items():
            joined.setdefault(name, []).extend(errors)
    return joined


class Replay:
    """The engine's steps in order: the n-th takes what the engine's took; after the last one, what a model says."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self._seconds = seconds

    def draws(self, rng: random.Random) -> Callable[[float], float]:
        left = iter(self._seconds)
        return lambda predicted_s: (next(left, None) or predicted_s) / predicted_s


class Validation:
    """The comparison of all cases on one model."""

    def __init__(self, args: argparse.Namespace, stack: ExitStack) -> None:
        self._args = args
        self._place = PLACES[args.place](stack, HOST_KV_BYTES, args.model)
        self.cases = list(cases(args))
        first = self._placed(self.cases[0].config)
        self._model, self._group = self._place.load(first)
        self._profile = profile_model(self._model, first, time_limit_s=args.profile_s, group=self._group)
        self.disturbances = self._profile.disturbances
        self.calibrations: list[Calibration] = []
        self._place.start()

    def _placed(self, config: EngineConfig) -> EngineConfig:
        return dataclasses.replace(config, **self._place.settings)

    def run(self) -> None:
        """Serve all loads in real time, repeat after repeat, and simulate each as soon as it was served."""
        args = self._args
        for scheduler, mix in itertools.product(dict.fromkeys(("omniserve", *args.schedulers)), CALIBRATION):
            config = engine_config(scheduler, mix, args.model, args.speed)  # compiles
            self._serve(config, mix.load(_COMPILE_S, args.seed, speed=args.speed), 0)
        total = args.repeats * (len(self.cases) + len(CALIBRATION))
        with tqdm(total=total, unit="run", disable=None, leave=False) as bar:
            for repeat in range(args.repeats):
                seed = args.seed + 1 + repeat
                samples: list[StepSample] = []
                for mix in CALIBRATION:
                    load = mix.load(args.seconds, 1000 + seed, speed=args.speed)
                    samples += self._serve(self._config(mix), load, seed)[1]
                    bar.update()
                for number, case in enumerate(self.cases):
                    # Other tokens in each case: a prefill engine outlives them, and has a prefix cache.
                    texts = seed + 1000 * number
                    run, steps, machine, believed = self._serve(case.config, case.load, texts)
                    if len(self.calibrations) == repeat:
                        self.calibrations.append(Calibration.fitted(machine.device, samples))
                        self._place.calibrate(machine)
                    case.runs.append(run)
                    self._simulate(case, machine, believed, steps)
                    bar.update()

    def _config(self, mix: Mix) -> EngineConfig:
        return engine_config("omniserve", mix, self._args.model, self._args.speed)

    def _serve(self, config: EngineConfig, load: Load, seed: int) -> tuple[Run, list[StepSample], Machine, Predictor]:
        """Return a run, its steps, the profile's machine, and what the engine believed of steps as the load began."""
        with Engine(self._model, self._placed(config), profile=self._profile, group=self._group) as engine:
            machine, shape = machine_of_profile(self._profile, engine.spec), ModelShape.of(engine.spec)
            learned, steps = CorrectedModel(machine.device), list[StepSample]()

            def note(plan: StepPlan, host_works: bool, seconds: float) -> None:
                features = features_of(plan, shape, host_works=host_works)
                steps.append(StepSample(features=features, seconds=seconds))

            engine.on_step = note
            engine.generate([request(name, 64, 4, slo=SLO()) for name in ("ls1", "be1", "ls2", "be2")])
            now_s = 0.0
            for step in steps:
                now_s += step.seconds
                learned.observe(step.features, step.seconds, now_s)
            steps.clear()
            believed = [learned.pace * factor for factor in learned.factors]
            run = EngineRun(engine, load, seed)
            run.run(drain_s=_drain_s(load))
            host_tokens, tokens = run.grown("host_output_tokens"), run.grown("output_tokens", "BE")
            found = Run(
                [*run.results.values()], len(steps), host_share=host_tokens / max(1, tokens),
                prefilled_share=_prefilled_share(run),
            )  # fmt: skip
        return found, steps, machine, ScaledModel(machine.device, believed)

    def _simulate(self, case: Case, machine: Machine, believed: Predictor, steps: Sequence[StepSample]) -> None:
        calibrated = self._place.machine(self.calibrations[-1].apply(machine), calibrated=True)
        first_seed = len(case.runs) * self._args.seeds
        twins = {
            "simulated": [self._twin(case, self._place.machine(machine), 0)],  # the profile never changes
            "calibrated": [self._twin(case, calibrated, first_seed + seed) for seed in range(self._args.seeds)],
        }
        if self._place.replays:
            replay = Replay([step.seconds for step in steps])
            replayed = dataclasses.replace(self._place.machine(machine), spread=replay, forecast=believed)
            twins["replayed"] = [self._twin(case, replayed, 0)]
        for source, found in twins.items():
            case.twins.setdefault(source, []).extend(found)
        case.predicted_s["engine"] = case.predicted_s.get("engine", 0.0) + sum(step.seconds for step in steps)
        for source, model in (("simulated", machine.device), ("calibrated", calibrated.device)):
            case.step_errors.setdefault(source, []).extend(step_errors(model, steps))
            predicted_s = sum(model.step_s(step.features) for step in steps)
            case.predicted_s[source] = case.predicted_s.get(source, 0.0) + predicted_s

    def _twin(self, case: Case, machine: Machine, seed: int) -> Run:
        config = dataclasses.replace(case.config, **self._place.simulated_settings)
        return run_of(
            simulate(
                SimulationConfig(machine=machine, engine=config, load=case.load, seed=seed, drain_s=_drain_s(case.load))
            )
        )


def run_of(result: Result) -> Run:
    """Return a simulated run."""
    return Run(result.requests, result.num_steps, result.host_share, result.classes["LS"].prefilled_share)


def _drain_s(load: Load) -> float:
    """Return how long a run goes on behind its load: to the end of all requests, or with a backlog, of LS ones."""
    return 60.0 if load.backlog else math.inf


def _prefilled_share(run: EngineRun) -> float:
    """Return the share of the LS prompts' tokens whose KV came from prefill engines."""
    before, after = (stats.scheduler.loaded_from("prefilled")["LS"] for stats in (run.before, run.after))
    return (after - before) / max(1, run.grown("prompt_tokens", "LS"))


def engine_config(scheduler: str, mix: Mix, model: str = "SmolLM-135M", speed: float = 1.0) -> EngineConfig:
    assert OBJECTIVES.ttft_s is not None and OBJECTIVES.tpot_s is not None
    slo = SLO(ttft_s=OBJECTIVES.ttft_s / speed, tpot_s=OBJECTIVES.tpot_s / speed)
    options = {"admission": False, "swap_in_delay_s": 0.5, "min_residence_s": 1.0}
    return EngineConfig(
        scheduler=scheduler, device_kv_bytes=int(KV_OF_TOKEN[model] * mix.device_kv_bytes), host_kv_bytes=HOST_KV_BYTES,
        classes=(ClassSpec(name="LS", kind="LS", slo=slo), ClassSpec(name="BE", kind="BE")),
        scheduler_options=known_options(scheduler, options),
    )  # fmt: skip


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Yield every load under every scheduler."""
    for name in args.loads:
        load = LOADS[name].load(args.seconds, args.seed, speed=args.speed, trace_dir=args.trace_dir)
        for scheduler in args.schedulers:
            yield Case(scheduler, name, engine_config(scheduler, LOADS[name], args.model, args.speed), load)


def results_of(found: Sequence[Case]) -> dict[str, Any]:
    """Return what a record has of the cases: errors of each, and together: all, by scheduler and by load."""
    groups: dict[str, dict[str, Sequence[Case]]] = {
        "all": {"all": found},
        "schedulers": _grouped(found, lambda case: case.scheduler),
        "loads": _grouped(found, lambda case: case.load_name),
        "cases": _grouped(found, lambda case: case.name),
    }
    return {kind: {name: _summary(group) for name, group in named.items()} for kind, named in groups.items()}


def _grouped(found: Sequence[Case], name_of: Callable[[Case], str]) -> dict[str, Sequence[Case]]:
    groups: dict[str, list[Case]] = {}
    for case in found:
        groups.setdefault(name_of(case), []).append(case)
    return dict(groups)


def _summary(group: Sequence[Case]) -> dict[str, Any]:
    """Return the errors of requests by source and figure, the errors of steps by model, and counts."""
    errors = [case.errors() for case in group]
    sources = [source for source in SOURCES if source in errors[0]]
    requests = {source: _joined(each[source] for each in errors) for source in sources}
    models = list(group[0].step_errors)
    steps = {
        model: summed_up([error for case in group for error in case.step_errors[model]])
        | {"time_ratio": sum(c.predicted_s[model] for c in group) / sum(c.predicted_s["engine"] for c in group)}
        for model in models
    }
    runs = {"engine": [run for case in group for run in case.runs]} | {
        source: [twin for case in group for twin in case.twins[source]] for source in sources if source != "again"
    }
    return {
        "requests": {source: {f: summed_up(each[f]) for f in FIGURES} for source, each in requests.items()},
        "steps": steps,
        "runs": {
            source: {
                "num_steps": statistics.fmean(run.num_steps for run in each),
                "host_share": statistics.fmean(run.host_share for run in each),
                "prefilled_share": statistics.fmean(run.prefilled_share for run in each),
            }
            for source, each in runs.items()
        },
    }  # fmt: skip


def report(results: dict[str, Any]) -> str:
    """Return a table: mean absolute error / median / bias of each group and source, and the errors of steps."""
    lines = [["MAPE / median / bias", "of", *_TITLES.values(), "steps", "step time", "number", "on host", "elsewhere"]]
    for group in ("cases", "loads", "schedulers", "all"):
        for name, found in results[group].items():
            engine = found["runs"]["engine"]
            for source, errors in found["requests"].items():
                steps, run = found["steps"].get(source), found["runs"].get(source, engine)
                lines.append(
                    [
                        name, source, *(_three(errors[figure]) for figure in FIGURES), _three(steps) if steps else "",
                        f"x{steps['time_ratio']:.2f}" if steps else "",
                        f"x{run['num_steps'] / engine['num_steps']:.2f}",
                        f"{engine['host_share']:.0%} > {run['host_share']:.0%}",
                        f"{engine['prefilled_share']:.0%} > {run['prefilled_share']:.0%}",
                    ]
                )  # fmt: skip
    return table(lines, numbers=True)


def _three(errors: dict[str, float]) -> str:
    return f"{errors['mape']:.1%} / {errors['median']:.1%} / {errors['bias']:+.1%}"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argument_parser(
        __doc__, "simulator_validation", schedulers=["omniserve", "sarathi", "conserve"],
        seconds=(10.0, "of each load"), repeats=(2, "runs of the engine"),
        seeds=(2, "calibrated simulations of a run"), seed=0, speed=(1.0, "factor of all rates"),
        profile_s=(60.0, "for measuring the profile"),
    )  # fmt: skip
    parser.add_argument("--place", choices=PLACES, default="process")
    parser.add_argument("--model", choices=MODELS, default="SmolLM-135M", help="of an engine in one process")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(USUAL))
    parser.add_argument("--trace-dir", type=Path, help="folder with azure2023_conv.csv")
    args = parser.parse_args(arguments)
    if args.model != "SmolLM-135M" and args.place != "process":
        parser.error(f"--place {args.place} has a model of its own")
    return args


def main() -> None:
    args = parse_arguments()
    with ExitStack() as stack:
        validation = Validation(args, stack)
        validation.run()
    for what in validation.disturbances:
        print(f"the profile is of a busy machine: {what}")
    for repeat, calibration in enumerate(validation.calibrations):
        print(f"calibration {repeat + 1}: {calibration}")
    results = results_of(validation.cases)
    print(report(results))
    results |= {
        "calibrations": [str(calibration) for calibration in validation.calibrations],
        "disturbances": validation.disturbances,
        "samples": {case.name: {"engine": case.runs, **case.twins} for case in validation.cases},
    }
    settings = vars(args) | {"slo": OBJECTIVES, "num_requests": {c.name: _count(c.load) for c in validation.cases}}
    kept, raw = without_samples(results, "samples")
    case_name = args.place if args.place != "process" or args.model == "SmolLM-135M" else args.model
    write_record(
        args.record, name="simulator_validation", case=case_name, config=settings, seed=args.seed, results=kept, raw=raw
    )


def _count(load: Load) -> dict[str, int]:
    return {"LS": len(load.latency_sensitive), "BE": load.backlog or len(load.best_effort)}


if __name__ == "__main__":
    main()
