"""What layer-wise preemption brings and costs: how soon an LS request runs, what is lost, and the price of asking.

    python -m benchmarks.safepoints --record benchmarks/results/safepoints.json

`conserve` with a pile of BE prompts and a Poisson stream of LS requests that come in the middle of steps, in one
process; a random-weight bf16 model in SmolLM-135M's shape. Modes, alternating: safepoints that keep what rows had
computed; safepoints that drop it (the paper's); none. `delay`: from an arrival in a step with BE rows to the end of
that step, when the LS request can be scheduled. `overhead`: a step of BE decodes with and without a safepoint in each
layer that nobody uses, turn and turn about. Paper: conserve 4.3 and 6.5.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.common.models import SMOLLM_135M, random_llama
from benchmarks.common.record import write_record
from omniserve import SLO, Engine, EngineConfig, Request, SamplingParams
from omniserve.plan import StepPlan
from omniserve.profiling import find_or_make_profile
from omniserve.simulate.results import percentile

MODES = {"kept": True, "dropped": True, "no safepoints": False}


class Stream:
    """LS requests that come at their own times, whatever the engine does, and what became of them."""

    def __init__(self, engine: Engine, args: argparse.Namespace, rng: random.Random, *, has_safepoints: bool) -> None:
        self._engine = engine
        self._args = args
        self._rng = rng
        self._began_s = time.monotonic()
        self._next_s = self._began_s + rng.expovariate(args.rate)
        self._arrived: list[tuple[float, Request]] = []
        self.arrived_s: dict[str, float] = {}
        self.delays_s: list[float] = []
        if has_safepoints:
            engine.on_safepoint = self.announce

    def announce(self) -> None:
        """Tell the engine, in the middle of a step, who has come, as a server does."""
        known = len(self._arrived)
        self._look()
        for arrival_s, request in self._arrived[known:]:
            self._engine.arriving(request, arrival_s=arrival_s)

    def _look(self) -> None:
        while (now_s := time.monotonic()) >= self._next_s and now_s - self._began_s < self._args.seconds:
            prompt = [self._rng.randrange(1, SMOLLM_135M["vocab_size"]) for _ in range(self._args.ls_prompt)]
            request = Request(
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=8, ignore_eos=True),
                service_class="LS",
                slo=SLO(ttft_s=self._args.ttft, tpot_s=self._args.tpot),
            )
            self._arrived.append((self._next_s, request))
            self._next_s += self._rng.expovariate(self._args.rate)

    def add(self, *, during_step: bool) -> None:
        """Give the engine those that have come, between two steps."""
        self._look()
        for arrival_s, request in self._arrived:
            if during_step:
                self.delays_s.append(time.monotonic() - arrival_s)
            self.arrived_s[self._engine.add(request, arrival_s=arrival_s)] = arrival_s
        self._arrived = []


def be_request(rng: random.Random, args: argparse.Namespace) -> Request:
    """Return a BE request."""
    return Request(
        prompt_token_ids=[rng.randrange(1, SMOLLM_135M["vocab_size"]) for _ in range(args.be_prompt)],
        sampling=SamplingParams(max_tokens=args.be_output, ignore_eos=True),
        service_class="BE",
    )


def measure_stream(model: Any, config: EngineConfig, args: argparse.Namespace, mode: str, seed: int) -> dict[str, Any]:
    """Serve the stream beside the pile and return delays, TTFTs and BE throughput."""
    rng = random.Random(seed)
    ttfts: list[float] = []
    be_tokens = 0
    with Engine(model, config, profile=find_or_make_profile(model, config)) as engine:
        for _ in range(args.be):
            engine.add(be_request(rng, args))
        stream = Stream(engine, args, rng, has_safepoints=MODES[mode])
        had_be = False

        def watch(plan: StepPlan, host_works: bool, seconds: float) -> None:
            nonlocal had_be
            had_be = bool(plan.preemptible)

        engine.on_step = watch
        began_s = time.monotonic()
        while time.monotonic() - began_s < args.seconds:
            outputs = engine.step()
            stream.add(during_step=had_be)
            for output in outputs:
                if output.service_class == "BE":
                    be_tokens += len(output.new_token_ids)
                    if output.finished:  # the pile never ends
                        be_tokens += output.num_prompt_tokens
                        engine.add(be_request(rng, args))
                elif output.finished and output.times is not None and output.times.first_token_s is not None:
                    ttfts.append(output.times.first_token_s - stream.arrived_s[output.request_id])
        seconds = time.monotonic() - began_s
        halted = engine.stats().layer_preemptions
    return {
        "ls_requests": len(ttfts),
        "delay_p50_s": percentile(stream.delays_s, 50),
        "delay_p99_s": percentile(stream.delays_s, 99),
        "ttft_p50_s": percentile(ttfts, 50),
        "ttft_p99_s": percentile(ttfts, 99),
        "ttft_attained": sum(ttft <= args.ttft for ttft in ttfts) / len(ttfts),
        "be_tokens_per_s": be_tokens / seconds,
        "chunks_halted": halted,
    }


def measure_overhead(model: Any, config: EngineConfig, args: argparse.Namespace) -> dict[str, float]:
    """Return the median step of BE decodes with unused safepoints over that without, and both."""
    rng = random.Random(0)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with Engine(model, config, profile=find_or_make_profile(model, config)) as engine:
        ask, asked = engine.runner.safepoint, True
        for _ in range(args.be):
            engine.add(
                Request(
                    prompt_token_ids=[rng.randrange(1, 1000) for _ in range(32)],
                    sampling=SamplingParams(max_tokens=2 * args.steps + 50, ignore_eos=True),
                    service_class="BE",
                )
            )
        engine.on_step = lambda plan, host_works, taken_s: seconds[asked].append(taken_s)
        for step in range(2 * args.steps + 20):
            asked = step % 2 == 0
            engine.runner.safepoint = ask if asked else None
            engine.step()
    with_s, without_s = (statistics.median(seconds[key][10:]) for key in (True, False))
    return {"ratio": with_s / without_s, "with_s": with_s, "without_s": without_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=0.7, help="LS requests a second")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--be", type=int, default=16)
    parser.add_argument("--be-prompt", type=int, default=512)
    parser.add_argument("--be-output", type=int, default=16)
    parser.add_argument("--ls-prompt", type=int, default=64)
    parser.add_argument("--ttft", type=float, default=0.25)
    parser.add_argument("--tpot", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, default=Path(".cache/safepoints.json"))
    args = parser.parse_args()
    model = random_llama(**SMOLLM_135M)
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for repeat in range(args.repeats):
        for mode in MODES:
            config = EngineConfig(
                scheduler="conserve", device_kv_bytes=2 << 30, host_kv_bytes=0, max_model_len=1024,
                keep_halted=mode == "kept",
            )  # fmt: skip
            runs[mode].append(measure_stream(model, config, args, mode, args.seed + repeat))
            print(mode, runs[mode][-1], flush=True)
    overhead = measure_overhead(model, config, args)
    print("overhead", overhead)
    medians = {
        mode: {key: statistics.median([run[key] for run in samples]) for key in samples[0]}
        for mode, samples in runs.items()
    }
    results = {"medians": medians, "runs": runs, "overhead": overhead}
    write_record(args.record, name="safepoints", config=vars(args), seed=args.seed, results=results)


if __name__ == "__main__":
    main()
