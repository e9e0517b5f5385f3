"""Rows that leave a step between two layers for more urgent ones: safepoints, and deferral by class."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.common.cases import Trials
from benchmarks.common.engine_run import EngineRun, request
from benchmarks.common.models import SMOLLM_135M, random_llama
from benchmarks.features import FEATURES
from omniserve import SLO, ClassSpec, Engine, EngineConfig, Request
from omniserve.core.plan import StepPlan
from omniserve.core.request import Arrival
from omniserve.profiling import find_or_make_profile
from omniserve.runner.safepoint import LayerPreemption
from omniserve.simulate import Load, SimulationConfig, simulate
from omniserve.simulate.analytic import analytic_machine, engine_config_for
from omniserve.simulate.hardware import find_devices
from omniserve.simulate.load import TraceRequest, fixed_lengths, lognormal_lengths, poisson, requests
from omniserve.simulate.models import find_model
from omniserve.simulate.results import percentile


@FEATURES.case(
    rate=(0.8, "LS requests a second"), seconds=(20.0, "of each mode and repeat"), repeats=2,
    steps=(150, "of each kind, for the overhead"),
    step_tokens=(1024, "max_num_batched_tokens: the largest BE step"), be=16, be_prompt=768, be_output=2, ls_prompt=64,
    ls_output=4, ttft=0.2, tpot=0.1, profile_s=(60.0, "longest time for a profile"), seed=0, uncounted=0,
    tiny={"rate": 5.0, "seconds": 1.5, "repeats": 1, "steps": 3, "step_tokens": 128, "be": 3, "be_prompt": 64,
          "ls_prompt": 8, "profile_s": 1.0},
)  # fmt: skip
def safepoints(args: argparse.Namespace) -> Trials:
    """Layer-wise preemption: how soon an LS request runs, what is lost, and the price of asking.

    `conserve` with a pile of BE prompts and a thin Poisson stream of short LS requests, in one process; a random-weight
    bf16 model in SmolLM-135M's shape. While no LS request is there, BE steps are as large as throughput likes
    (--step-tokens at most), most of a second long on two cores; most LS requests come in the middle of one. Beside LS
    requests the TPOT keeps steps short, and there is little to preempt. Modes, each with the same arrivals: no
    safepoints; safepoints that drop what rows had computed (the paper's); safepoints that keep it.

    Of the LS requests that came in a step of BE work alone: `delay`, from the arrival to the end of that step, when
    they can be scheduled; `ttft`, from the arrival to the end of their first step. `alone_step_s`: steps of BE work
    that no row left. `overhead`: a BE decode step with and without a look for new requests between all layers, while
    none comes, turn and turn about. The first steps of each engine, halted and resumed ones among them, are not
    counted. Paper: conserve 4.3 and 6.5.
    """
    model, arms, configs = random_llama(**SMOLLM_135M), {}, {}
    for mode in ("no safepoints", "dropped", "kept"):
        configs[mode] = EngineConfig(
            scheduler="conserve", device_kv_bytes=1 << 30, host_kv_bytes=0, max_model_len=1024,
            max_num_batched_tokens=args.step_tokens, scheduler_options={"keep_halted": mode == "kept"},
        )  # fmt: skip
        seeds = itertools.count(args.seed)
        arms[mode] = functools.partial(measure_stream, model, configs[mode], args, mode != "no safepoints", seeds)
    yield "stream", arms
    yield "overhead", {"safepoints": functools.partial(measure_overhead, model, configs["kept"], args)}


class Stream(EngineRun):
    """Notes what the LS requests that come in a step of BE work alone wait."""

    def __init__(self, engine: Engine, load: Load, seed: int, slo: SLO) -> None:
        super().__init__(engine, load, seed, slo)
        self.alone_steps_s: list[float] = []
        self.delays_s: dict[str, float] = {}
        self._was_alone, self._num_announced = False, 0
        self._halted = engine.stats().scheduler.layer_preemptions
        engine.on_step = self._watch

    def arrivals(self) -> Iterator[Arrival]:
        """Yield what has come, in the middle of a step, as a server's link does."""
        for arrival_s, coming in itertools.islice(self.upcoming, self._num_announced, None):
            if arrival_s > self.now_s:
                return
            self._num_announced += 1
            yield Arrival(coming, self.began_s + arrival_s)

    def add(self, request: Request, arrival_s: float) -> None:
        super().add(request, arrival_s)
        self._num_announced = 0  # what came after the last layer is in the next step anyway
        if request.service_class == "LS" and self._was_alone:
            assert request.request_id is not None
            self.delays_s[request.request_id] = self.now_s - arrival_s

    def _watch(self, plan: StepPlan, host_works: bool, seconds: float) -> None:
        self._was_alone = len(plan.preemptible) == len(plan.chunks)
        halted = self.engine.stats().scheduler.layer_preemptions
        if self._was_alone and halted == self._halted:
            self.alone_steps_s.append(seconds)
        self._halted = halted


def open_engine(model: Any, config: EngineConfig, args: argparse.Namespace) -> Engine:
    """Return an engine that has served requests of both kinds, whose steps were left between two layers."""
    engine = Engine(model, config, profile=find_or_make_profile(model, config, time_limit_s=args.profile_s))
    strategy, left = strategy_of(engine), iter([True, False, False] * 4)
    ask = strategy.must_leave
    strategy.must_leave = lambda: engine.scheduler.requests.states.keys() if next(left, False) else set()
    engine.generate([*(request(f"be{i}", args.be_prompt, 4) for i in range(3)), request("ls", args.ls_prompt, 4)])
    strategy.must_leave = ask
    return engine


def strategy_of(engine: Engine) -> LayerPreemption:
    """Return what lets rows leave an engine's steps."""
    (strategy,) = (each for each in engine.runner.strategies if isinstance(each, LayerPreemption))
    return strategy


def measure_stream(
    model: Any, config: EngineConfig, args: argparse.Namespace, has_safepoints: bool, seeds: Iterator[int]
) -> dict[str, Any]:
    """Serve the stream with the next seed beside the pile and return delays, TTFTs and BE throughput."""
    seed = next(seeds)
    rng, slo = random.Random(seed), SLO(ttft_s=args.ttft, tpot_s=args.tpot)
    load = Load(
        latency_sensitive=requests(
            poisson(args.rate, args.seconds, rng), fixed_lengths(args.ls_prompt, args.ls_output), rng
        ),
        best_effort=[TraceRequest(0.0, args.be_prompt, args.be_output)] * 100_000, backlog=args.be,  # it never ends
        duration_s=args.seconds,
    )  # fmt: skip
    with open_engine(model, config, args) as engine:
        run = Stream(engine, load, seed, slo)
        assert engine.preemption is not None
        if has_safepoints:
            engine.preemption.arrivals = run.arrivals
        run.run(drain_s=0.0)
    served = {name: r for name, r in run.results.items() if r.service_class == "LS" and r.finished_s is not None}
    ttfts_s = [r.ttft_s for name, r in served.items() if name in run.delays_s and r.ttft_s is not None]
    delays_s = list(run.delays_s.values())
    return {
        "ls_in_be_steps": len(delays_s), "alone_step_p50_s": percentile(run.alone_steps_s, 50),
        "delay_p50_s": percentile(delays_s, 50), "ttft_p50_s": percentile(ttfts_s, 50),
        "ttft_attained_of_all": statistics.fmean(r.meets_ttft(slo) for r in served.values()) if served else None,
        "be_tokens_per_s": (run.grown("prompt_tokens", "BE") + run.grown("output_tokens", "BE")) / run.seconds,
        "delays_s": delays_s,
    }  # fmt: skip


def measure_overhead(model: Any, config: EngineConfig, args: argparse.Namespace) -> dict[str, float]:
    """Return the median step of BE decodes with safepoints over that without, both, and what one look takes."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    far = Load(latency_sensitive=[TraceRequest(1e9, args.ls_prompt, args.ls_output)])
    with open_engine(model, config, args) as engine:
        run = Stream(engine, far, 0, SLO(ttft_s=args.ttft, tpot_s=args.tpot))
        assert engine.preemption is not None
        run.began_s, engine.preemption.arrivals = time.monotonic(), run.arrivals
        strategies, asked = engine.runner.strategies, True
        for i in range(args.be):
            engine.add(request(f"be{i}", 32, 2 * args.steps + 50))
        while not engine.step():  # prompts
            pass
        engine.on_step = lambda plan, host_works, taken_s: seconds[asked].append(taken_s)
        for step in range(2 * args.steps):
            asked = step % 2 == 0
            engine.runner.strategies = strategies if asked else ()
            engine.step()
        engine.runner.strategies = strategies
        ask = strategy_of(engine).must_leave
        began_s = time.perf_counter()
        for _ in range(1000):
            ask()
        look_s = (time.perf_counter() - began_s) / 1000
    with_s, without_s = (statistics.median(seconds[key]) for key in (True, False))
    return {"ratio": with_s / without_s, "with_s": with_s, "without_s": without_s, "look_s": look_s}


CLASSES = (
    ClassSpec(name="GOLD", kind="LS", slo=SLO(ttft_s=0.15, tpot_s=0.25)),
    ClassSpec(name="SILVER", kind="LS", slo=SLO(ttft_s=5.0, tpot_s=0.25)),
    ClassSpec(name="BE", kind="BE"),
)
SILVER = {"prompts": (4000.0, 8.0), "decodes": (1500.0, 200.0)}
"""Median prompt and output of SILVER, by load."""


@FEATURES.case(
    seconds=90.0, gold_rate=1.0, silver_rates=[1.5, 2.5, 4.0], seeds=2, seed=0,
    noise=(0.1, "standard deviation of the logarithm of what a step takes over its forecast"), uncounted=0,
    tiny={"seconds": 5.0, "silver_rates": [2.5], "seeds": 1},
)  # fmt: skip
def deferral(args: argparse.Namespace) -> Trials:
    """Simulates deferral by class: the SLO attainment of two LS classes with and without it.

    Few short requests of the class GOLD (a TTFT that is shorter than a step with a long prompt), and long prompts of
    the class SILVER, at several rates; both Poisson. Two loads: `prompts` (SILVER has little output, its prompts fill
    the steps) and `decodes` (long outputs). `with BE` adds a backlog of best-effort work. The machine is simulated:
    Llama-3-8B on an A100; what its steps take differs from the forecast by ``--noise``. What is not simulated is what
    the engine gives up on a GPU for steps that rows may leave: CUDA graphs, and launching a step while the one before
    it runs. A rejected request met nothing. Paper: omniserve 6 (multiple priority levels).
    """

    def mean(name: str, rate: float, has_be: bool, defers: bool) -> dict[str, float]:
        runs = [
            simulated(load_of(name, rate, args, seed, has_be=has_be), defers=defers, noise=args.noise, seed=seed)
            for seed in range(args.seed, args.seed + args.seeds)
        ]
        return {figure: statistics.fmean(run[figure] for run in runs) for figure in runs[0]}

    for name, has_be, rate in itertools.product(SILVER, (False, True), args.silver_rates):
        arms = {
            arm: functools.partial(mean, name, rate, has_be, defers) for arm, defers in (("off", False), ("on", True))
        }
        yield f"{name}{', with BE' if has_be else ''}, {rate}/s", arms


def load_of(name: str, rate: float, args: argparse.Namespace, seed: int, *, has_be: bool) -> Load:
    """Draw a load: GOLD at ``args.gold_rate``, SILVER at ``rate``."""
    rng = random.Random(f"{seed} {name}")
    gold = requests(poisson(args.gold_rate, args.seconds, rng), fixed_lengths(256, 8), rng)
    silver = requests(poisson(rate, args.seconds, rng), lognormal_lengths(*SILVER[name], sigma=0.5), rng)
    named = [dataclasses.replace(row, service_class="SILVER") for row in silver]
    pile = requests([0.0] * 200, fixed_lengths(1000, 200), rng) if has_be else []
    return Load(
        latency_sensitive=sorted([*gold, *named], key=lambda row: row.arrival_s), best_effort=pile,
        backlog=32 if has_be else 0, duration_s=args.seconds,
    )  # fmt: skip


def simulated(load: Load, *, defers: bool, noise: float, seed: int) -> dict[str, float]:
    """Simulate a load and return each class's figures."""
    machine = analytic_machine(find_model("llama-3-8b"), find_devices("A100-80GB")[1])
    engine = engine_config_for(
        machine, classes=CLASSES, max_num_batched_tokens=4096, scheduler_options={"defer_classes": defers}
    )
    result = simulate(SimulationConfig(machine=machine, engine=engine, load=load, seed=seed, noise=noise))
    attained = {f"{name} attainment": result.classes[name].attainment for name in ("GOLD", "SILVER")}
    return attained | {"BE tokens/s": result.classes["BE"].output_tokens_per_s}
