"""What layer-wise preemption brings and costs: how soon an LS request runs, what is lost, and the price of asking.

    python -m benchmarks.safepoints --record benchmarks/results/safepoints.json

`conserve` with a pile of BE prompts and a thin Poisson stream of short LS requests, in one process; a random-weight
bf16 model in SmolLM-135M's shape. While no LS request is there, BE steps are as large as throughput likes
(--step-tokens at most), most of a second long on two cores; most LS requests come in the middle of one. Beside LS
requests the TPOT keeps steps short, and there is little to preempt. Modes, alternating, each with the same arrivals:
safepoints that keep what rows had computed; safepoints that drop it (the paper's); none.

Of the LS requests that came in a step of BE work alone: `delay`, from the arrival to the end of that step, when they
can be scheduled; `ttft`, from the arrival to the end of their first step. `alone_step_s`: steps of BE work that
nobody left. `overhead`: a BE decode step with and without a look for new requests between all layers, while none
comes, turn and turn about. The first steps of each engine, halted and resumed ones among them, are not counted.
Paper: conserve 4.3 and 6.5.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common.arguments import argument_parser
from benchmarks.common.models import SMOLLM_135M, random_llama
from benchmarks.common.record import write_record
from omniserve import SLO, Engine, EngineConfig, Request, SamplingParams
from omniserve.core.plan import StepPlan
from omniserve.profiling import find_or_make_profile
from omniserve.simulate.results import percentile

MODES = {"kept": True, "dropped": True, "no safepoints": False}


def be_request(rng: random.Random, prompt: int, output: int) -> Request:
    """Return a BE request."""
    return Request(
        prompt_token_ids=[rng.randrange(1, SMOLLM_135M["vocab_size"]) for _ in range(prompt)],
        sampling=SamplingParams(max_tokens=output, ignore_eos=True),
        service_class="BE",
    )


def ls_request(rng: random.Random, args: argparse.Namespace) -> Request:
    """Return an LS request."""
    return Request(
        prompt_token_ids=[rng.randrange(1, SMOLLM_135M["vocab_size"]) for _ in range(args.ls_prompt)],
        sampling=SamplingParams(max_tokens=args.ls_output, ignore_eos=True),
        service_class="LS",
        slo=SLO(ttft_s=args.ttft, tpot_s=args.tpot),
    )


class Stream:
    """LS requests that come at their own times, whatever the engine does.

    Args:
        engine: Is told of them.
        requests: Seconds from now, ascending, and what comes then.
    """

    def __init__(self, engine: Engine, requests: Sequence[tuple[float, Request]]) -> None:
        self._engine = engine
        began_s = time.monotonic()
        self._due = [(began_s + after_s, request) for after_s, request in requests]
        self._num_announced = 0

    def announce(self) -> None:
        """Tell the engine, in the middle of a step, who has come, as a server does."""
        now_s = time.monotonic()
        for arrival_s, request in self._due[self._num_announced :]:
            if arrival_s > now_s:
                return
            self._num_announced += 1
            self._engine.arriving(request, arrival_s=arrival_s)

    def add(self) -> list[tuple[str, float]]:
        """Give the engine those that have come, between two steps; return their ids and times of arrival."""
        now_s = time.monotonic()
        come = [(arrival_s, request) for arrival_s, request in self._due if arrival_s <= now_s]
        del self._due[: len(come)]
        self._num_announced = 0  # whoever came after the last layer is in the next step anyway
        return [(self._engine.add(request, arrival_s=arrival_s), arrival_s) for arrival_s, request in come]


@dataclass(slots=True)
class Times:
    """What a stream is about."""

    alone_steps_s: list[float] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)
    all_ttfts_s: list[float] = field(default_factory=list)
    """Also of those that came beside other LS requests."""


def warm_up(engine: Engine, args: argparse.Namespace) -> None:
    """Serve requests of both kinds; their steps are left between two layers, and go on."""
    rng = random.Random(77)
    ask, left = engine.runner.loop.safepoint, iter([True, False, False] * 4)
    engine.runner.loop.safepoint = lambda: next(left, False)
    engine.generate([*(be_request(rng, args.be_prompt, 4) for _ in range(3)), ls_request(rng, args)])
    engine.runner.loop.safepoint = ask


def measure_stream(model: Any, config: EngineConfig, args: argparse.Namespace, mode: str, seed: int) -> dict[str, Any]:
    """Serve the stream beside the pile and return delays, TTFTs and BE throughput."""
    rng = random.Random(seed)
    coming = []
    after_s = rng.expovariate(args.rate)
    while after_s < args.seconds:
        coming.append((after_s, ls_request(rng, args)))
        after_s += rng.expovariate(args.rate)
    times, arrived_s, in_alone = Times(), dict[str, float](), set[str]()
    with Engine(model, config, profile=find_or_make_profile(model, config)) as engine:
        warm_up(engine, args)
        before = engine.stats()
        for _ in range(args.be):
            engine.add(be_request(rng, args.be_prompt, args.be_output))
        was_alone, halted = False, before.layer_preemptions

        def watch(plan: StepPlan, host_works: bool, seconds: float) -> None:
            nonlocal was_alone, halted
            was_alone = len(plan.preemptible) == len(plan.chunks)
            if was_alone and halted == engine.stats().layer_preemptions:
                times.alone_steps_s.append(seconds)
            halted = engine.stats().layer_preemptions

        engine.on_step = watch
        stream = Stream(engine, coming)
        if MODES[mode]:
            engine.on_safepoint = stream.announce
        began_s = time.monotonic()
        while time.monotonic() - began_s < args.seconds:
            for output in engine.step():
                if output.service_class == "BE" and output.finished:  # the pile never ends
                    engine.add(be_request(rng, args.be_prompt, args.be_output))
                elif output.finished and output.times is not None and output.times.first_token_s is not None:
                    ttft_s = output.times.first_token_s - arrived_s[output.request_id]
                    times.all_ttfts_s.append(ttft_s)
                    if output.request_id in in_alone:
                        times.ttfts_s.append(ttft_s)
            ended_s = time.monotonic()
            for request_id, arrival_s in stream.add():
                arrived_s[request_id] = arrival_s
                if was_alone:
                    in_alone.add(request_id)
                    times.delays_s.append(ended_s - arrival_s)
        seconds = time.monotonic() - began_s
        after = engine.stats()
    be_tokens = sum(
        counts(after)["BE"] - counts(before)["BE"]
        for counts in (lambda stats: stats.prompt_tokens, lambda stats: stats.output_tokens)
    )
    kept = [ttft_s <= args.ttft for ttft_s in times.all_ttfts_s]
    return {
        "ls_requests": len(times.all_ttfts_s),
        "ls_in_be_steps": len(times.delays_s),
        "alone_step_p50_s": percentile(times.alone_steps_s, 50),
        "delay_p50_s": percentile(times.delays_s, 50),
        "delay_max_s": max(times.delays_s, default=None),
        "ttft_p50_s": percentile(times.ttfts_s, 50),
        "ttft_max_s": max(times.ttfts_s, default=None),
        "ttft_attained_of_all": statistics.fmean(kept) if kept else None,
        "be_tokens_per_s": be_tokens / seconds,
        "chunks_halted": after.layer_preemptions - before.layer_preemptions,
        "delays_s": times.delays_s,
        "ttfts_s": times.ttfts_s,
    }


def measure_overhead(model: Any, config: EngineConfig, args: argparse.Namespace) -> dict[str, float]:
    """Return the median step of BE decodes with safepoints over that without, both, and what one look takes."""
    rng = random.Random(0)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with Engine(model, config, profile=find_or_make_profile(model, config)) as engine:
        warm_up(engine, args)
        engine.on_safepoint = Stream(engine, [(1e9, ls_request(rng, args))]).announce
        ask, asked = engine.runner.loop.safepoint, True
        for _ in range(args.be):
            engine.add(be_request(rng, 32, 2 * args.steps + 50))
        while not engine.step():  # prompts
            pass
        engine.on_step = lambda plan, host_works, taken_s: seconds[asked].append(taken_s)
        for step in range(2 * args.steps):
            asked = step % 2 == 0
            engine.runner.loop.safepoint = ask if asked else None
            engine.step()
        assert ask is not None
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
        ls_prompt=64, ls_output=4, ttft=0.2, tpot=0.1, seed=0,
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
    medians = {
        mode: {
            key: statistics.median(run[key] for run in samples)
            for key, value in samples[0].items()
            if not isinstance(value, list)
        }
        for mode, samples in runs.items()
    }
    results = {"medians": medians, "runs": runs, "overhead": overhead}
    write_record(args.record, name="safepoints", config=vars(args), seed=args.seed, results=results)


if __name__ == "__main__":
    main()
