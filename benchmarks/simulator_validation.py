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
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.common.models import SMOLLM_135M, random_llama
from benchmarks.common.record import write_record
from omniserve import SLO, ClassSpec, Engine, EngineConfig, Request, RequestRejected, SamplingParams
from omniserve.latency import BatchFeatures, CorrectedModel, ModelShape, Predictor, ScaledModel, StepSample, features_of
from omniserve.plan import StepPlan
from omniserve.profiling import find_or_make_profile
from omniserve.simulate import Calibration, Load, Machine, SimulationConfig, machine_of_profile, simulate
from omniserve.simulate.load import Lengths, TraceRequest, gamma, lognormal_lengths, requests
from omniserve.simulate.results import ClassResult, RequestResult, summarise

MIB = 1 << 20
HOST_KV_BYTES = 256 * MIB
FIGURES = {"TTFT p50": "ttft_p50_s", "p99": "ttft_p99_s", "TPOT p50": "tpot_p50_s", "p99 ": "tpot_p99_s"}
"""Heading -> figure of the latency-sensitive class; then comes the best-effort class's throughput."""
GOAL = 0.05
_COMPILE_S = 2.0
_WIDTH = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """A load that can be drawn."""

    device_kv_bytes: int
    rate: float
    """Latency-sensitive requests a second."""
    cv: float = 1.0
    """Of the gaps between them: 1 is a Poisson process."""
    ls_lengths: Lengths
    backlog: int
    """Best-effort requests that are kept unfinished."""
    be_lengths: Lengths

    def load(self, seconds: float, seed: int) -> Load:
        rng = random.Random(seed)
        return Load(
            latency_sensitive=requests(gamma(self.rate, self.cv, seconds, rng), self.ls_lengths, rng),
            best_effort=requests([0.0] * int(100 * seconds), self.be_lengths, rng),
            backlog=self.backlog,
            duration_s=seconds,
        )


_CHAT = lognormal_lengths(128, 24, sigma=0.5, max_input=512, max_output=96)
_PILE = lognormal_lengths(256, 64, sigma=0.5, max_input=768, max_output=192)
LOADS = {
    "steady": Mix(device_kv_bytes=512 * MIB, rate=2.0, ls_lengths=_CHAT, backlog=8, be_lengths=_PILE),
    "bursts": Mix(device_kv_bytes=512 * MIB, rate=2.5, cv=3.0, ls_lengths=_CHAT, backlog=4, be_lengths=_PILE),
    "short memory": Mix(device_kv_bytes=64 * MIB, rate=2.0, ls_lengths=_CHAT, backlog=12, be_lengths=_PILE),
}
"""In the last the device does not hold all, and best-effort requests decode on the host if the scheduler knows how."""
_OTHER_CHAT = lognormal_lengths(96, 32, sigma=0.7, max_input=400, max_output=96)
_OTHER_PILE = lognormal_lengths(180, 80, sigma=0.7, max_input=600, max_output=160)
CALIBRATION = (
    Mix(device_kv_bytes=512 * MIB, rate=1.5, ls_lengths=_OTHER_CHAT, backlog=6, be_lengths=_OTHER_PILE),
    Mix(device_kv_bytes=48 * MIB, rate=1.5, ls_lengths=_OTHER_CHAT, backlog=10, be_lengths=_OTHER_PILE),
)
"""Other rates, lengths and seeds, and only the scheduler ``omniserve``: its host tier works if memory is short."""


class EngineRun:
    """An engine that serves a load in real time, as ``simulate`` does on its clock.

    Args:
        engine: Without requests.
        load: What comes.
        seed: Of the prompts' tokens.
    """

    def __init__(self, engine: Engine, load: Load, seed: int) -> None:
        self._engine = engine
        self._shape = ModelShape.of(engine.spec)
        self._load = load
        self._rng = random.Random(seed)
        self._upcoming = list(reversed(load.latency_sensitive))
        self._pile = list(reversed(load.best_effort))
        self._results: dict[str, RequestResult] = {}
        self._unfinished = {"LS": 0, "BE": 0}
        self._began_s = 0.0
        self.steps: list[StepSample] = []
        """That computed something, in order."""

    def run(self) -> dict[str, Any]:
        """Serve the load; return its figures."""
        engine, duration_s = self._engine, self._load.duration_s
        assert duration_s is not None
        engine.on_step = self._watch
        before = engine.stats()
        self._began_s = time.monotonic()
        while (now_s := time.monotonic() - self._began_s) < duration_s:
            while self._pile and self._unfinished["BE"] < self._load.backlog:
                self._add(self._pile.pop(), "BE", now_s)
            while self._upcoming and self._upcoming[-1].arrival_s <= now_s:
                request = self._upcoming.pop()
                self._add(request, "LS", request.arrival_s)
            if not engine.has_unfinished:
                time.sleep(min(0.001, duration_s - now_s))
                continue
            self._step()
        at_end = engine.stats()
        while self._unfinished["LS"] and time.monotonic() - self._began_s < duration_s + 60:
            self._step()
        engine.on_step = None

        def counted(name: str) -> tuple[int, int]:
            return (
                at_end.output_tokens[name] - before.output_tokens.get(name, 0),
                at_end.prompt_tokens[name] - before.prompt_tokens.get(name, 0),
            )

        classes = {}
        for name, slo in ((spec.name, spec.slo) for spec in engine.config.classes):
            group = [result for result in self._results.values() if result.service_class == name]
            output, prompt = counted(name)
            classes[name] = summarise(group, slo, duration_s=duration_s, output_tokens=output, prompt_tokens=prompt)
        host_tokens = at_end.host_output_tokens - before.host_output_tokens
        return {
            "figures": figures_of(classes["LS"], classes["BE"]),
            "host_share": host_tokens / max(1, counted("BE")[0]),
            "num_steps": len(self.steps),
            "preemptions": at_end.preemptions - before.preemptions,
            "swaps_out": at_end.swaps_out - before.swaps_out,
            "step_error": at_end.latency_error,
            "drift": at_end.latency_drift,
            "requests": list(self._results.values()),
        }

    def _add(self, request: TraceRequest, name: str, arrival_s: float) -> None:
        result = RequestResult(name, arrival_s, request.input_tokens, request.output_tokens)
        request_id = f"{name}-{len(self._results)}"
        self._results[request_id] = result
        tokens = self._rng.choices(range(1, SMOLLM_135M["vocab_size"]), k=request.input_tokens)
        sampling = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
        try:
            self._engine.add(
                Request(prompt_token_ids=tokens, sampling=sampling, service_class=name, request_id=request_id),
                arrival_s=self._began_s + arrival_s,
            )
        except RequestRejected:
            result.rejected = True
        else:
            self._unfinished[name] += 1

    def _step(self) -> None:
        for output in self._engine.step():
            result, times = self._results[output.request_id], output.times
            assert times is not None
            if times.first_token_s is not None:
                result.first_token_s = times.first_token_s - self._began_s
            result.num_output_tokens, result.num_host_tokens = output.num_output_tokens, output.num_host_tokens
            if output.finished:
                assert times.finished_s is not None
                result.finished_s = times.finished_s - self._began_s
                self._unfinished[output.service_class] -= 1
        if self._engine.last_plan_was_empty:
            self._engine.wait(0.05)

    def _watch(self, plan: StepPlan, host_works: bool, seconds: float) -> None:
        features = features_of(plan, self._shape, host_works=host_works)
        self.steps.append(StepSample(features=features, seconds=seconds))


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


@dataclass(slots=True)
class Case:
    """A load under a scheduler, and what came of it."""

    name: str
    config: EngineConfig
    load: Load
    runs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """The engine's, one a repeat."""
    twins: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    """The simulator's."""


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
            return run.run(), run.steps, machine, ScaledModel(machine.device, learned.factors)

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


def warm_up(engine: Engine, learned: CorrectedModel) -> None:
    """Serve some requests of both classes; ``learned`` sees their steps."""
    shape = ModelShape.of(engine.spec)

    def watch(plan: StepPlan, host_works: bool, seconds: float) -> None:
        learned.observe(features_of(plan, shape, host_works=host_works), seconds)

    engine.on_step = watch
    for number in range(4):
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        name = "BE" if number % 2 else "LS"
        engine.add(Request(prompt_token_ids=[1] * 64, sampling=sampling, service_class=name, slo=SLO()))
    while engine.has_unfinished:
        engine.step()
        if engine.last_plan_was_empty:
            engine.wait(0.05)
    engine.on_step = None


def engine_config(scheduler: str, mix: Mix, args: argparse.Namespace) -> EngineConfig:
    classes = (
        ClassSpec(name="LS", kind="LS", slo=SLO(ttft_s=args.slo[0], tpot_s=args.slo[1])),
        ClassSpec(name="BE", kind="BE"),
    )
    return EngineConfig(
        scheduler=scheduler, device_kv_bytes=mix.device_kv_bytes, host_kv_bytes=HOST_KV_BYTES, classes=classes,
        admission=False, swap_in_delay_s=0.5, min_residence_s=1.0,
    )  # fmt: skip


def cases(args: argparse.Namespace) -> Iterator[Case]:
    for name in args.loads:
        load = LOADS[name].load(args.seconds, args.seed)
        for scheduler in args.schedulers:
            yield Case(f"{scheduler}, {name}", engine_config(scheduler, LOADS[name], args), load)


def figures_of(ls: ClassResult, be: ClassResult) -> list[float]:
    """Return the figures that are compared: seconds, and best-effort tokens a second (prompts and outputs)."""
    return [*(getattr(ls, name) for name in FIGURES.values()), be.output_tokens_per_s + be.prompt_tokens_per_s]


def medians(runs: Sequence[dict[str, Any]]) -> list[float]:
    """Return the median of each figure over runs."""
    return [statistics.median(values) for values in zip(*(run["figures"] for run in runs), strict=True)]


def ratios(case: Case) -> dict[str, list[float]]:
    """Return each twin's figures over the engine's, medians both; and ``again``: the largest between two runs."""
    truth = medians(case.runs)
    found = {name: [a / b for a, b in zip(medians(runs), truth, strict=True)] for name, runs in case.twins.items()}
    if len(case.runs) > 1:
        columns = zip(*(run["figures"] for run in case.runs), strict=True)
        found["again"] = [max(values) / min(values) for values in columns]
    return found


def table(case: Case) -> str:
    """Return the lines of a case: the engine's figures (milliseconds; tokens/s), then ratios to them."""
    *times_s, throughput = medians(case.runs)
    cells = [f"{1e3 * value:.1f}" for value in times_s] + [f"{throughput:.0f}"]
    share = statistics.median(run["host_share"] for run in case.runs)
    lines = [_line(case.name, "engine", cells) + f"   host {share:.0%}"]
    lines += [_line("", who, [f"x{value:.2f}" for value in values]) for who, values in ratios(case).items()]
    return "\n".join(lines)


def summary(found: Sequence[Case]) -> dict[str, list[dict[str, float]]]:
    """Return for each twin and figure how far the cases are off: median, largest, and the share within the goal.

    Being off is the ratio to the engine, or its inverse if that is larger, less 1. ``again`` sums up each pair of runs.
    """
    off: dict[str, list[list[float]]] = {}
    for case in found:
        for who, values in ratios(case).items():
            if who != "again":
                off.setdefault(who, []).append([_off(value) for value in values])
        for one, other in itertools.combinations(case.runs, 2):
            pair = zip(one["figures"], other["figures"], strict=True)
            off.setdefault("again", []).append([_off(a / b) for a, b in pair])
    return {
        who: [
            {
                "median": statistics.median(column),
                "largest": max(column),
                "within_goal": sum(value <= GOAL for value in column) / len(column),
            }
            for column in zip(*rows, strict=True)
        ]
        for who, rows in off.items()
    }


def summary_table(found: Sequence[Case]) -> str:
    lines = []
    for who, columns in summary(found).items():
        for what, form in (("median", ".1%"), ("largest", ".0%"), ("within_goal", ".0%")):
            label = f"within {GOAL:.0%}" if what == "within_goal" else f"off by, {what}"
            lines.append(_line(label, who, [format(column[what], form) for column in columns]))
    return "\n".join(lines)


def _off(ratio: float) -> float:
    return math.expm1(abs(math.log(ratio)))


def _line(label: str, who: str, cells: Sequence[str]) -> str:
    return f"{label:26s}{who:11s}" + "".join(cell.rjust(_WIDTH) for cell in cells)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedulers", nargs="+", default=["sarathi", "fcfs", "omniserve"])
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--seconds", type=float, default=6.5, help="of each load (default: 6.5)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of the engine (default: 3)")
    parser.add_argument("--seeds", type=int, default=10, help="calibrated simulations of a run (default: 10)")
    parser.add_argument("--slo", type=float, nargs=2, default=[1.0, 0.15], metavar=("TTFT_S", "TPOT_S"))
    parser.add_argument("--profiles", type=Path, metavar="FOLDER", help="where profiles are kept (default: the cache)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, default=Path(".cache/simulator_validation.json"))
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_arguments()
    began_s = time.monotonic()
    validation = Validation(args)
    validation.run()
    for repeat, calibration in enumerate(validation.calibrations):
        print(f"calibration {repeat + 1}: {calibration}")
    print(_line("", "", [*FIGURES, "BE tok/s"]) + "   medians; ms, tokens/s; x: ratio to the engine")
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
