"""Measures layer-wise preemption: how soon an LS request runs, what is lost, and the price of asking.

    python -m benchmarks.safepoints --record benchmarks/results/safepoints.json

`conserve` with a pile of BE prompts and a thin Poisson stream of short LS requests, in one process; a random-weight
bf16 model in SmolLM-135M's shape. While no LS request is there, BE steps are as large as throughput likes
(--step-tokens at most), most of a second long on two cores; most LS requests come in the middle of one. Beside LS
requests the TPOT keeps steps short, and there is little to preempt. Modes, alternating, each with the same arrivals:
safepoints that keep what rows had computed; safepoints that drop it (the paper's); none.

Of the LS requests that came in a step of BE work alone: `delay`, from the arrival to the end of that step, when they
can be scheduled; `ttft`, from the arrival to the end of their first step. `alone_step_s`: steps of BE work that
no row left. `overhead`: a BE decode step with and without a look for new requests between all layers, while none
comes, turn and turn about. The first steps of each engine, halted and resumed ones among them, are not counted.
Paper: conserve 4.3 and 6.5.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.common.engine_run import EngineRun, request
from benchmarks.common.models import SMOLLM_135M, random_llama
from benchmarks.common.record import write_record
from benchmarks.common.summary import medians
from benchmarks.common.terminal import argument_parser
from omniserve import SLO, Engine, EngineConfig, Request
from omniserve.core.plan import StepPlan
from omniserve.core.request import Arrival
from omniserve.profiling import find_or_make_profile
from omniserve.runner.safepoint import LayerPreemption
from omniserve.simulate import Load
from omniserve.simulate.load import TraceRequest, fixed_lengths, poisson, requests
from omniserve.simulate.results import percentile

MODES = {"kept": True, "dropped": True, "no safepoints": False}


class Run(EngineRun):
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


def warm_up(engine: Engine, args: argparse.Namespace) -> None:
    """Serve requests of both kinds; their steps are left between two layers, and go on."""
    strategy, left = strategy_of(engine), iter([True, False, False] * 4)
    ask = strategy.must_leave
    strategy.must_leave = lambda: engine.scheduler.requests.states.keys() if next(left, False) else set()
    engine.generate([*(request(f"be{i}", args.be_prompt, 4) for i in range(3)), request("ls", args.ls_prompt, 4)])
    strategy.must_leave = ask


def strategy_of(engine: Engine) -> LayerPreemption:
    """Return what lets rows leave an engine's steps."""
    (strategy,) = (each for each in engine.runner.strategies if isinstance(each, LayerPreemption))
    return strategy


def measure_stream(model: Any, config: EngineConfig, args: argparse.Namespace, mode: str, seed: int) -> dict[str, Any]:
    """Serve the stream beside the pile and return delays, TTFTs and BE throughput."""
    rng, slo = random.Random(seed), SLO(ttft_s=args.ttft, tpot_s=args.tpot)
    load = Load(
        latency_sensitive=requests(
            poisson(args.rate, args.seconds, rng), fixed_lengths(args.ls_prompt, args.ls_output), rng
        ),
        best_effort=[TraceRequest(0.0, args.be_prompt, args.be_output)] * 100_000, backlog=args.be,  # it never ends
        duration_s=args.seconds,
    )  # fmt: skip
    with Engine(model, config, profile=find_or_make_profile(model, config, time_limit_s=args.profile_s)) as engine:
        warm_up(engine, args)
        run = Run(engine, load, seed, slo)
        assert engine.preemption is not None
        if MODES[mode]:
            engine.preemption.arrivals = run.arrivals
        run.run(drain_s=0.0)
    served = {name: r for name, r in run.results.items() if r.service_class == "LS" and r.finished_s is not None}
    ttfts_s = [r.ttft_s for name, r in served.items() if name in run.delays_s and r.ttft_s is not None]
    delays_s = list(run.delays_s.values())
    return {
        "ls_requests": len(served), "ls_in_be_steps": len(delays_s),
        "alone_step_p50_s": percentile(run.alone_steps_s, 50),
        "delay_p50_s": percentile(delays_s, 50), "delay_max_s": max(delays_s, default=None),
        "ttft_p50_s": percentile(ttfts_s, 50), "ttft_max_s": max(ttfts_s, default=None),
        "ttft_attained_of_all": statistics.fmean(r.meets_ttft(slo) for r in served.values()) if served else None,
        "be_tokens_per_s": (run.grown("prompt_tokens", "BE") + run.grown("output_tokens", "BE")) / run.seconds,
        "chunks_halted": run.grown("layer_preemptions"), "delays_s": delays_s, "ttfts_s": ttfts_s,
    }  # fmt: skip


def measure_overhead(model: Any, config: EngineConfig, args: argparse.Namespace) -> dict[str, float]:
    """Return the median step of BE decodes with safepoints over that without, both, and what one look takes."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    far = Load(latency_sensitive=[TraceRequest(1e9, args.ls_prompt, args.ls_output)])
    with Engine(model, config, profile=find_or_make_profile(model, config, time_limit_s=args.profile_s)) as engine:
        warm_up(engine, args)
        run = Run(engine, far, 0, SLO(ttft_s=args.ttft, tpot_s=args.tpot))
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
        ask = strategy_of(engine).must_leave
        began_s = time.perf_counter()
        for _ in range(1000):
            ask()
        look_s = (time.perf_counter() - began_s) / 1000
    with_s, without_s = (statistics.median(seconds[key]) for key in (True, False))
    return {"ratio": with_s / without_s, "with_s": with_s, "without_s": without_s, "look_s": look_s}


def main() -> None:
    parser = argument_parser(
        __doc__, "safepoints", rate=(0.8, "LS requests a second"), seconds=(20.0, "of each mode and repeat"),
        repeats=2, steps=(150, "of each kind, for the overhead"),
        step_tokens=(1024, "max_num_batched_tokens: the largest BE step"), be=16, be_prompt=768, be_output=2,
        ls_prompt=64, ls_output=4, ttft=0.2, tpot=0.1, profile_s=(60.0, "longest time for a profile"), seed=0,
    )  # fmt: skip
    args = parser.parse_args()
    model = random_llama(**SMOLLM_135M)
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for repeat in range(args.repeats):
        for mode in MODES:
            config = EngineConfig(
                scheduler="conserve", device_kv_bytes=1 << 30, host_kv_bytes=0, max_model_len=1024,
                max_num_batched_tokens=args.step_tokens, scheduler_options={"keep_halted": mode == "kept"},
            )  # fmt: skip
            runs[mode].append(measure_stream(model, config, args, mode, args.seed + repeat))
            print(mode, {k: v for k, v in runs[mode][-1].items() if not isinstance(v, list)}, flush=True)
    overhead = measure_overhead(model, config, args)
    print("overhead", overhead)
    results = {
        "medians": {mode: medians(samples) for mode, samples in runs.items()},
        "runs": runs,
        "overhead": overhead,
    }
    write_record(args.record, name="safepoints", config=vars(args), seed=args.seed, results=results)


if __name__ == "__main__":
    main()
