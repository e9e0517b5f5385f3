"""The simulator against the engine: the same load, the same profile, their figures side by side.

    python -m benchmarks.simulator_validation --record benchmarks/results/simulator_validation.json

SmolLM-135M's shape with random weights, in one process, without HTTP. For each scheduler, with enough device memory and
with too little (best-effort requests then decode on the host, if the scheduler knows how), the engine serves a load in
real time and the simulator serves it on its clock, three times: with the profile as it is (``simulated``); with its
terms as the online correction of the engine's steps had them at the end of the run (``corrected``), so that what the
machine's speed has drifted since it was profiled is known to both; and with an n-th step that takes as long as the
engine's n-th did (``replayed``): no latency model is in that, and what differs still is the simulator's loop and its
host tier.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.common.models import SMOLLM_135M, random_llama
from benchmarks.common.record import write_record
from omniserve import SLO, ClassSpec, Engine, EngineConfig, Request, RequestRejected, SamplingParams
from omniserve.latency import BatchFeatures, CorrectedModel, ModelShape, Predictor, Profile, features_of
from omniserve.plan import StepPlan
from omniserve.profiling import find_or_make_profile
from omniserve.simulate import Load, SimulationConfig, machine_of_profile, simulate
from omniserve.simulate.load import TraceRequest, lognormal_lengths, poisson, requests
from omniserve.simulate.results import RequestResult, summarise

MIB = 1 << 20
POOLS = {"device only": (512 * MIB, 1024 * MIB), "host tier": (64 * MIB, 1024 * MIB)}
"""Bytes of the device's and the host's KV pool: in the first the device holds all, and nothing moves."""
FIGURES = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")


class EngineRun:
    """An engine that serves a load in real time, as ``simulate`` does on its clock.

    Args:
        engine: Without requests.
        load: What comes.
        seed: Of the prompts' tokens.
        learned: Observes each step, as the engine's own latency model does.
    """

    def __init__(self, engine: Engine, load: Load, seed: int, learned: CorrectedModel) -> None:
        self._engine = engine
        self._learned = learned
        self._shape = ModelShape.of(engine.spec)
        self._load = load
        self._rng = random.Random(seed)
        self._upcoming = list(reversed(load.latency_sensitive))
        self._pile = list(reversed(load.best_effort))
        self._results: dict[str, RequestResult] = {}
        self._unfinished = {"LS": 0, "BE": 0}
        self._began_s = 0.0
        self.seconds: list[float] = []
        """Of each step."""

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
            "classes": classes,
            "host_share": host_tokens / max(1, counted("BE")[0]),
            "num_steps": len(self.seconds),
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
        self.seconds.append(seconds)
        self._learned.observe(features_of(plan, self._shape, host_works=host_works), seconds)


def warm_up(engine: Engine) -> None:
    """Compile, and touch the pools: requests of both classes, more than the device holds."""
    for number in range(12):
        sampling = SamplingParams(max_tokens=12, ignore_eos=True)
        name = "BE" if number % 4 else "LS"
        engine.add(Request(prompt_token_ids=[1] * 300, sampling=sampling, service_class=name, slo=SLO()))
    while engine.has_unfinished:
        engine.step()
        if engine.last_plan_was_empty:
            engine.wait(0.05)


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


def runs(args: argparse.Namespace) -> Iterator[tuple[str, str, EngineConfig]]:
    classes = (
        ClassSpec(name="LS", kind="LS", slo=SLO(ttft_s=args.slo[0], tpot_s=args.slo[1])),
        ClassSpec(name="BE", kind="BE"),
    )
    for pools in args.pools:
        device, host = POOLS[pools]
        for scheduler in args.schedulers:
            yield pools, scheduler, EngineConfig(
                scheduler=scheduler, device_kv_bytes=device, host_kv_bytes=host, classes=classes, admission=False,
                swap_in_delay_s=0.5, min_residence_s=1.0,
            )  # fmt: skip


def compare(model: Any, profile: Profile, config: EngineConfig, load: Load, seed: int) -> dict[str, Any]:
    """Return the figures of the engine and of the simulator's three versions."""
    with Engine(model, config, profile=profile) as engine:
        warm_up(engine)
        machine = machine_of_profile(profile, engine.spec)
        learned = CorrectedModel(machine.device)
        run = EngineRun(engine, load, seed, learned)
        measured = run.run()
        measured["correction"] = learned.factors
    rows: dict[str, Any] = {"engine": measured}
    replay = Replay(run.seconds, learned)
    for name, device, forecast in (
        ("simulated", machine.device, machine.device), ("corrected", learned, learned), ("replayed", replay, learned),
    ):  # fmt: skip
        twin = dataclasses.replace(machine, device=device, forecast=forecast)
        result = simulate(SimulationConfig(machine=twin, engine=config, load=load))
        rows[name] = {
            "classes": result.classes, "host_share": result.host_share, "num_steps": result.num_steps,
            "preemptions": result.preemptions, "swaps_out": result.swaps_out, "wall_s": result.wall_s,
            "requests": result.requests,
        }  # fmt: skip
    return rows


def figures(row: dict[str, Any]) -> list[float]:
    ls, be = row["classes"]["LS"], row["classes"]["BE"]
    return [*(getattr(ls, name) for name in FIGURES), be.output_tokens_per_s + be.prompt_tokens_per_s]


def table(name: str, rows: dict[str, Any]) -> str:
    lines = []
    truth = figures(rows["engine"])
    for who, row in rows.items():
        values = figures(row)
        text = [f"{1e3 * value:9.1f}" for value in values[:-1]] + [f"{values[-1]:9.0f}"]
        ratios = (
            "" if who == "engine" else "  x" + " ".join(f"{a / b:5.2f}" for a, b in zip(values, truth, strict=True))
        )
        label = name if who == "engine" else ""
        lines.append(f"{label:24s}{who:10s}{''.join(text)} {row['host_share']:6.0%} {row['num_steps']:6d}{ratios}")
    return "\n".join(lines)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedulers", nargs="+", default=["sarathi", "fcfs", "omniserve"])
    parser.add_argument("--pools", nargs="+", choices=POOLS, default=list(POOLS))
    parser.add_argument("--rate", type=float, default=1.0, help="LS requests a second (default: 1)")
    parser.add_argument("--backlog", type=int, default=12, help="best-effort requests kept unfinished (default: 12)")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--slo", type=float, nargs=2, default=[1.0, 0.15], metavar=("TTFT_S", "TPOT_S"))
    parser.add_argument("--profiles", type=Path, metavar="FOLDER", help="where profiles are kept (default: the cache)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, default=Path(".cache/simulator_validation.json"))
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_arguments()
    rng = random.Random(args.seed)
    lengths = lognormal_lengths(128, 32, sigma=0.5, max_input=512, max_output=128)
    pile = lognormal_lengths(256, 64, sigma=0.5, max_input=768, max_output=192)
    load = Load(
        latency_sensitive=requests(poisson(args.rate, args.seconds, rng), lengths, rng),
        best_effort=requests([0.0] * int(100 * args.seconds), pile, rng),
        backlog=args.backlog,
        duration_s=args.seconds,
    )
    model = random_llama(**SMOLLM_135M)
    results: dict[str, Any] = {}
    profile: Profile | None = None
    heads = "".join(f"{head:>9s}" for head in ("TTFT p50", "p99 ms", "TPOT p50", "p99 ms", "BE tok/s"))
    print(f"{'':34s}{heads} {'host':>6s} {'steps':>6s}  ratios to the engine")
    for pools, scheduler, config in tqdm(list(runs(args)), disable=None):
        if profile is None:  # what it depends on is the same in all runs
            profile = find_or_make_profile(model, config, folder=args.profiles)
        name = f"{scheduler}, {pools}"
        results[name] = compare(model, profile, config, load, args.seed)
        print(table(name, results[name]), flush=True)
    settings = vars(args) | {"model": SMOLLM_135M, "pools_bytes": POOLS}
    write_record(args.record, name="simulator_validation", config=settings, seed=args.seed, results=results)


if __name__ == "__main__":
    main()
