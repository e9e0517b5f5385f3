"""The prefix cache, on and off: prompts that begin alike, and prompts that do not, in one interleaved run.

    python -m benchmarks.prefix_cache --record benchmarks/results/prefix_cache.json

The loads, each a batch of best-effort requests that come at once: ``shared``, prompts with ``--shared`` tokens in front
that are the same in all, and ``--own`` random ones; ``own``, as many random tokens; ``templates``, prompts like those
of ``shared``, but each begins with one of ``--templates`` fronts, drawn at random, and the device has memory for a few
of these only. ``arrival`` is with the cache, without admission by prefix (``be_prefix_order=false``). ``host`` is the
last load with ``sarathi``, which takes prompts by arrival, and a host tier, which keeps what the device forgets or,
with ``off``, does not (``host_prefixes``); it decodes nothing there, and there is no prediction. A run has an engine of
its own, so nothing is there from the run before. ``predicted_s`` is the sum of what the latency profile says of the
steps: its gain is what the work that is left should bring. ``cpu_per_token_us`` is the CPU time of all threads, over
the tokens of prompts and outputs.
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable

from transformers import PreTrainedModel

from benchmarks.common.models import MODELS, token_bytes
from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser, table_of
from benchmarks.common.timing import in_turn, median_ratio
from omniserve import Engine, EngineConfig, ExecutionConfig, Request, SamplingParams
from omniserve.core.plan import StepPlan
from omniserve.latency import Profile
from omniserve.profiling import find_or_make_profile

Run = Callable[[], dict[str, float]]


def batch(count: int, *, shared: int, own: int, output: int, seed: int, templates: int = 1) -> list[Request]:
    """Draw requests whose prompts begin with one of so many fronts, at random."""
    rng = random.Random(seed)
    fronts = [[rng.randrange(1, 400) for _ in range(shared)] for _ in range(templates)]
    sampling = SamplingParams(max_tokens=output, ignore_eos=True)
    return [
        Request(
            prompt_token_ids=[*rng.choice(fronts), *(rng.randrange(1, 400) for _ in range(own))], sampling=sampling,
            service_class="BE",
        )
        for _ in range(count)
    ]  # fmt: skip


def run(
    model: PreTrainedModel, profile: Profile | None, requests: list[Request], config: EngineConfig
) -> dict[str, float]:
    """Serve a batch with a new engine; return what it took."""
    predicted_s = 0.0

    def on_step(plan: StepPlan, host_works: bool, seconds: float) -> None:
        nonlocal predicted_s
        if plan.decision is not None:
            predicted_s += plan.decision.predicted_s or 0.0

    with Engine(model, config, profile=profile) as engine:
        engine.generate(batch(1, shared=0, own=8, output=2, seed=-1))  # what is compiled at the first step
        engine.on_step = on_step
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        done = engine.generate(requests)
        seconds, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    num_tokens = sum(each.num_prompt_tokens + len(each.token_ids) for each in done)
    return {
        "seconds": seconds,
        "tokens_per_s": num_tokens / seconds,
        "cpu_per_token_us": 1e6 * cpu_s / num_tokens,
        "predicted_s": predicted_s,
        "cached": sum(each.num_cached_tokens for each in done) / sum(each.num_prompt_tokens for each in done),
    }


def main() -> None:
    parser = argument_parser(
        __doc__, "prefix_cache", model=("SmolLM-135M", "of benchmarks.common.models"), requests=16, shared=512, own=64,
        output=32, templates=(16, "fronts of the third load"), each=(8, "its requests per front"),
        templates_kv=(4.0, "fronts that the device has memory for in the third load"), block_size=16,
        device_kv_gib=1.0, repeats=3, profile_s=20.0,
    )  # fmt: skip
    args = parser.parse_args()
    model = MODELS[args.model]()

    def config(key: str, device_kv_bytes: int) -> EngineConfig:
        return EngineConfig(
            device_kv_bytes=device_kv_bytes, host_kv_bytes=0, block_size=args.block_size,
            execution=ExecutionConfig(prefix_cache=key != "off"),
            scheduler_options={"be_prefix_order": key != "arrival"},
        )  # fmt: skip

    def with_host(key: str, device_kv_bytes: int) -> EngineConfig:
        return EngineConfig(
            device_kv_bytes=device_kv_bytes, host_kv_bytes=much, block_size=args.block_size, scheduler="sarathi",
            execution=ExecutionConfig(prefix_cache=True, host_prefixes=key == "on"),
        )  # fmt: skip

    much = int(args.device_kv_gib * 2**30)
    little = int(args.templates_kv * args.shared * token_bytes(model))
    draw = functools.partial(batch, output=args.output, seed=1)
    loads = {
        "shared": (draw(args.requests, shared=args.shared, own=args.own), much, ("off", "on")),
        "own": (draw(args.requests, shared=0, own=args.own + args.shared), much, ("off", "on")),
        "templates": (
            draw(args.templates * args.each, shared=args.shared, own=args.own, templates=args.templates), little,
            ("off", "arrival", "on"),
        ),
    }  # fmt: skip
    loads["host"] = (loads["templates"][0], little, ("off", "on"))
    profile = find_or_make_profile(model, config("off", much), time_limit_s=args.profile_s)
    results: dict[str, object] = {}
    for load, (requests, device_kv_bytes, keys) in loads.items():
        is_host = load == "host"
        runs: dict[str, Run] = {
            key: functools.partial(
                run,
                model,
                None if is_host else profile,
                requests,
                (with_host if is_host else config)(key, device_kv_bytes),
            )
            for key in keys
        }
        found = in_turn(runs, args.repeats)
        medians = {
            key: {name: statistics.median(each[name] for each in some) for name in some[0]}
            for key, some in found.items()
        }
        gains = {
            key: {
                name: median_ratio([each[name] for each in found["off"]], [each[name] for each in found[key]])
                for name in ("seconds", "cpu_per_token_us", *(() if is_host else ("predicted_s",)))
            }
            for key in keys[1:]
        }
        for key, gain in gains.items():
            predicted = "" if is_host else f", {gain['predicted_s']:.2f} predicted"
            print(f"{load}, {key}: {gain['seconds']:.2f} times as fast{predicted}")
        print(
            table_of([{"": name, **{k: f"{m[name]:.4g}" for k, m in medians.items()}} for name in medians["on"]])
        )  # fmt: skip
        results[load] = {"medians": medians, "gains": gains, "raw": found}
    write_record(args.record, name="prefix_cache", config=vars(args), seed=1, results=results)


if __name__ == "__main__":
    main()
