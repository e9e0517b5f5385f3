"""The simulator against the engine: the same load, the same profile, their figures side by side.

    python -m benchmarks.simulator_validation --record benchmarks/results/simulator_validation.json

SmolLM-135M's shape with random weights, in one process, without HTTP. Each repeat first traces the engine's steps under
calibration loads, which nothing is compared on, then serves every load under every scheduler in real time. The
simulator serves them on its clock, three times:

* ``simulated``: steps take what the profile says;
* ``calibrated``: they take, and vary, as the steps of the same repeat's calibration loads did (``Calibration``);
* ``replayed``: the n-th step takes as long as the engine's n-th did: no latency model is in that, and what then differs
  is the simulator's loop and its host tier.

``--place ranks`` serves with two ranks of tensor parallel, ``--place host`` with a CPU host in a process of its own,
which has most of the host tier's memory, ``--place prefill`` with a prefill engine in a process of its own, a
core each; all on this machine. With a prefill engine nothing is replayed: which of its steps came when is not known.

Figures are medians over the repeats (and for ``calibrated`` over seeds). ``again`` is what one run of the engine is to
another on the same load, the pair that differs most: no simulator can be asked to be nearer than that.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from benchmarks.common.engine_run import EngineRun, request
from benchmarks.common.models import SMOLLM_135M
from benchmarks.common.places import PLACES
from benchmarks.common.record import write_record
from benchmarks.common.summary import without_samples
from benchmarks.common.terminal import argument_parser, table
from omniserve import SLO, ClassSpec, Engine, EngineConfig
from omniserve.core.plan import StepPlan
from omniserve.latency import BatchFeatures, CorrectedModel, ModelShape, Predictor, ScaledModel, StepSample, features_of
from omniserve.profiling import find_or_make_profile
from omniserve.sched.policy import known_options
from omniserve.simulate import Calibration, Load, Machine, SimulationConfig, machine_of_profile, simulate
from omniserve.simulate.load import Lengths, gamma, lognormal_lengths, requests
from omniserve.simulate.results import ClassResult

MIB = 1 << 20
HOST_KV_BYTES = 256 * MIB
OBJECTIVES = SLO(ttft_s=1.0, tpot_s=0.15)
FIGURES = {"TTFT p50": "ttft_p50_s", "TTFT p99": "ttft_p99_s", "TPOT p50": "tpot_p50_s", "TPOT p99": "tpot_p99_s"}
"""Heading -> figure of the latency-sensitive class; then comes the best-effort class's throughput."""
GOAL = 0.05
_COMPILE_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """A load that can be drawn."""

    device_kv_bytes: int
    rate: float
    """Latency-sensitive requests a second."""
    cv: float = 1.0
    """Coefficient of variation of the gaps between them: 1 is a Poisson process."""
    ls_lengths: Lengths
    backlog: int
    """Best-effort requests that are kept unfinished."""
    be_lengths: Lengths

    def load(self, seconds: float, seed: int) -> Load:
        rng = random.Random(seed)
        return Load(
            latency_sensitive=requests(gamma(self.rate, self.cv, seconds, rng), self.ls_lengths, rng),
            best_effort=requests([0.0] * int(100 * seconds), self.be_lengths, rng),
            backlog=self.backlog, duration_s=seconds,
        )  # fmt: skip


_CHAT = lognormal_lengths(128, 24, sigma=0.5, max_input=512, max_output=96)
_PILE = lognormal_lengths(256, 64, sigma=0.5, max_input=768, max_output=192)
LOADS = {
    "steady": Mix(device_kv_bytes=512 * MIB, rate=2.0, ls_lengths=_CHAT, backlog=8, be_lengths=_PILE),
    "bursts": Mix(device_kv_bytes=512 * MIB, rate=2.5, cv=3.0, ls_lengths=_CHAT, backlog=4, be_lengths=_PILE),
    "short memory": Mix(device_kv_bytes=64 * MIB, rate=2.0, ls_lengths=_CHAT, backlog=12, be_lengths=_PILE),
    "half": Mix(device_kv_bytes=512 * MIB, rate=0.8, ls_lengths=_CHAT, backlog=4, be_lengths=_PILE),
    "residents": Mix(
        device_kv_bytes=16 * MIB, rate=0.8, backlog=24,
        ls_lengths=lognormal_lengths(96, 24, sigma=0.4, max_input=256, max_output=96),
        be_lengths=lognormal_lengths(48, 160, sigma=0.4, max_input=128, max_output=256),
    ),
}  # fmt: skip
"""Loads by name. With short memory the device does not hold all, and best-effort requests decode on the host if the
scheduler knows how. ``half`` is for engines that have one core each. In ``residents`` best-effort prompts are short:
soon many decode on the host."""
_OTHER_CHAT = lognormal_lengths(96, 32, sigma=0.7, max_input=400, max_output=96)
_OTHER_PILE = lognormal_lengths(180, 80, sigma=0.7, max_input=600, max_output=160)
CALIBRATION = (
    Mix(device_kv_bytes=512 * MIB, rate=1.5, ls_lengths=_OTHER_CHAT, backlog=6, be_lengths=_OTHER_PILE),
    Mix(device_kv_bytes=48 * MIB, rate=1.5, ls_lengths=_OTHER_CHAT, backlog=10, be_lengths=_OTHER_PILE),
)
"""Loads of the calibration, with other rates, lengths and seeds, and the scheduler ``omniserve`` alone: its host tier
works if memory is short."""


@dataclass(slots=True)
class Case:
    """A load under a scheduler, and what came of it."""

    name: str
    config: EngineConfig
    load: Load
    runs: list[dict[str, Any]] = field(default_factory=list)
    """The engine's, one a repeat."""
    twins: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """The simulator's."""


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
    """The comparison of all cases on one model."""

    def __init__(self, args: argparse.Namespace, stack: ExitStack) -> None:
        self._args = args
        self._place = PLACES[args.place](stack, HOST_KV_BYTES)
        self.cases = list(cases(args))
        first = self._placed(self.cases[0].config)
        self._model, self._group = self._place.load(first)
        self._profile = find_or_make_profile(self._model, first, group=self._group)
        self.calibrations: list[Calibration] = []
        self._place.start()

    def _placed(self, config: EngineConfig) -> EngineConfig:
        return dataclasses.replace(config, **self._place.settings)

    def run(self) -> None:
        """Serve all loads in real time, repeat after repeat, and simulate each as soon as it was served."""
        args = self._args
        for mix in CALIBRATION:  # compiles
            self._serve(engine_config("omniserve", mix), mix.load(_COMPILE_S, args.seed), 0)
        total = args.repeats * (len(self.cases) + len(CALIBRATION))
        with tqdm(total=total, unit="run", disable=None, leave=False) as bar:
            for repeat in range(args.repeats):
                seed = args.seed + 1 + repeat
                samples: list[StepSample] = []
                for mix in CALIBRATION:
                    config = engine_config("omniserve", mix)
                    samples += self._serve(config, mix.load(args.seconds, 1000 + seed), seed)[1]
                    bar.update()
                for number, case in enumerate(self.cases):
                    # Other tokens in each case: a prefill engine outlives them, and has a prefix cache.
                    texts = seed + 1000 * number
                    figures, steps, machine, believed = self._serve(case.config, case.load, texts)
                    if len(self.calibrations) == repeat:
                        self.calibrations.append(Calibration.fitted(machine.device, samples))
                        self._place.calibrate(machine)
                    case.runs.append(figures)
                    self._simulate(case, machine, believed, [step.seconds for step in steps])
                    bar.update()

    def _serve(
        self, config: EngineConfig, load: Load, seed: int
    ) -> tuple[dict[str, Any], list[StepSample], Machine, Predictor]:
        """Return figures, steps, the profile's machine, and what the engine believed of steps as the load began."""
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
            run.run()
            figures = {
                "figures": figures_of(run.of_class("LS", OBJECTIVES), run.of_class("BE", SLO())),
                "host_share": run.grown("host_output_tokens") / max(1, run.grown("output_tokens", "BE")),
                "prefilled_share": _prefilled_share(run),
                "requests": list(run.results.values()),
            }  # fmt: skip
        return figures, steps, machine, ScaledModel(machine.device, believed)

    def _simulate(self, case: Case, machine: Machine, believed: Predictor, seconds: list[float]) -> None:
        if not case.twins:  # the profile never changes
            case.twins["simulated"] = [self._twin(case, self._place.machine(machine), 0)]
        calibrated = self._place.machine(self.calibrations[-1].apply(machine), calibrated=True)
        first_seed = len(case.runs) * self._args.seeds
        seeds = range(first_seed, first_seed + self._args.seeds)
        case.twins.setdefault("calibrated", []).extend(self._twin(case, calibrated, seed) for seed in seeds)
        if self._place.replays:
            placed = self._place.machine(machine)
            replay = dataclasses.replace(placed, device=Replay(seconds, placed.device), forecast=believed)
            case.twins.setdefault("replayed", []).append(self._twin(case, replay, 0))

    def _twin(self, case: Case, machine: Machine, seed: int) -> dict[str, Any]:
        config = dataclasses.replace(case.config, **self._place.simulated_settings)
        result = simulate(SimulationConfig(machine=machine, engine=config, load=case.load, seed=seed))
        return {
            "figures": figures_of(result.classes["LS"], result.classes["BE"]), "host_share": result.host_share,
            "prefilled_share": result.classes["LS"].prefilled_share,
        }  # fmt: skip


def _prefilled_share(run: EngineRun) -> float:
    """Return the share of the LS prompts' tokens whose KV came from prefill engines."""
    before, after = (stats.scheduler.loaded_from("prefilled")["LS"] for stats in (run.before, run.after))
    return (after - before) / max(1, run.grown("prompt_tokens", "LS"))


def engine_config(scheduler: str, mix: Mix) -> EngineConfig:
    options = {"admission": False, "swap_in_delay_s": 0.5, "min_residence_s": 1.0}
    return EngineConfig(
        scheduler=scheduler, device_kv_bytes=mix.device_kv_bytes, host_kv_bytes=HOST_KV_BYTES,
        classes=(ClassSpec(name="LS", kind="LS", slo=OBJECTIVES), ClassSpec(name="BE", kind="BE")),
        scheduler_options=known_options(scheduler, options),
    )  # fmt: skip


def cases(args: argparse.Namespace) -> Iterator[Case]:
    for name in args.loads:
        load = LOADS[name].load(args.seconds, args.seed)
        for scheduler in args.schedulers:
            yield Case(f"{scheduler}, {name}", engine_config(scheduler, LOADS[name]), load)


def figures_of(ls: ClassResult, be: ClassResult) -> list[float]:
    """Return the figures that are compared: seconds, and best-effort tokens a second (prompts and outputs).

    Raises:
        ValueError: One of them is 0 or missing, so that nothing can be compared with it.
    """
    found = {name: getattr(ls, name) for name in FIGURES.values()}
    found["be_tokens_per_s"] = be.output_tokens_per_s + be.prompt_tokens_per_s
    if lacking := [name for name, value in found.items() if not value]:
        raise ValueError(f"a run has no {', '.join(lacking)}: its load is too short or too light to compare with")
    return [*found.values()]


def medians(runs: Sequence[dict[str, Any]]) -> list[float]:
    """Return the median of each figure over runs."""
    return [statistics.median(values) for values in zip(*(run["figures"] for run in runs), strict=True)]


def shares(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the median shares of tokens that hosts and prefill engines computed; nothing without runs."""
    names = ("host_share", "prefilled_share")
    return [f"{statistics.median(run[name] for run in runs):.0%}" if runs else "" for name in names]


def ratios(case: Case) -> dict[str, list[float]]:
    """Return each twin's figures over the engine's, medians both; and ``again``: the largest between two runs."""
    truth = medians(case.runs)
    found = {name: [a / b for a, b in zip(medians(runs), truth, strict=True)] for name, runs in case.twins.items()}
    if len(case.runs) > 1:
        columns = zip(*(run["figures"] for run in case.runs), strict=True)
        found["again"] = [max(values) / min(values) for values in columns]
    return found


def summary(found: Sequence[Case]) -> dict[str, list[dict[str, float]]]:
    """Return for each twin and figure how far the cases are off: median, largest, and the share within the goal.

    Being off is the ratio to the engine, or its inverse if that is larger, less 1. ``again`` sums up each pair of runs.
    """
    off: dict[str, list[list[float]]] = {}
    for case in found:
        for source, values in ratios(case).items():
            if source != "again":
                off.setdefault(source, []).append([_off(value) for value in values])
        for one, other in itertools.combinations(case.runs, 2):
            pair = zip(one["figures"], other["figures"], strict=True)
            off.setdefault("again", []).append([_off(a / b) for a, b in pair])
    return {
        source: [
            {"median": statistics.median(column), "largest": max(column),
             "within_goal": sum(value <= GOAL for value in column) / len(column)}
            for column in zip(*rows, strict=True)
        ]
        for source, rows in off.items()
    }  # fmt: skip


def _off(ratio: float) -> float:
    return math.expm1(abs(math.log(ratio)))


def report(found: Sequence[Case]) -> str:
    """Return a table: each case's figures on the engine (milliseconds; tokens/s), ratios to them, and the summary."""
    lines = [["medians", "of", *FIGURES, "BE tok/s", "on host", "LS elsewhere"]]
    for case in found:
        *times_s, throughput = medians(case.runs)
        lines.append([case.name, "engine", *(f"{1e3 * value:.1f}" for value in times_s), f"{throughput:.0f}",
                      *shares(case.runs)])  # fmt: skip
        for source, values in ratios(case).items():
            lines.append(["", source, *(f"x{value:.2f}" for value in values), *shares(case.twins.get(source, ()))])
    for source, columns in summary(found).items():
        for what in ("median", "largest", "within_goal"):
            lines.append([f"off by, {what}", source, *(f"{column[what]:.1%}" for column in columns), "", ""])
    return table(lines, numbers=True)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argument_parser(
        __doc__, "simulator_validation", schedulers=["sarathi", "fcfs", "omniserve"], seconds=(6.5, "of each load"),
        repeats=(3, "runs of the engine"), seeds=(10, "calibrated simulations of a run"), seed=0,
    )  # fmt: skip
    parser.add_argument("--place", choices=PLACES, default="process")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS)[:3])
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_arguments()
    with ExitStack() as stack:
        validation = Validation(args, stack)
        validation.run()
    for repeat, calibration in enumerate(validation.calibrations):
        print(f"calibration {repeat + 1}: {calibration}")
    print(report(validation.cases))
    results = {
        "cases": {case.name: {"engine": case.runs, **case.twins, "ratios": ratios(case)} for case in validation.cases},
        "summary": summary(validation.cases),
        "calibrations": [str(calibration) for calibration in validation.calibrations],
    }
    settings = vars(args) | {"model": SMOLLM_135M, "slo": OBJECTIVES, "figures": [*FIGURES.values(), "be_tokens_per_s"]}
    kept, raw = without_samples(results, "requests")
    write_record(
        args.record,
        name="simulator_validation",
        case=args.place,
        config=settings,
        seed=args.seed,
        results=kept,
        raw=raw,
    )


if __name__ == "__main__":
    main()
