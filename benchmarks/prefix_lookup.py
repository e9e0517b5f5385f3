"""Measures what the prefix cache's bookkeeping costs the scheduler: many requests, long prompts, with and without it.

    python -m benchmarks.prefix_lookup --record benchmarks/results/prefix_lookup.json

The real scheduler with the latency model of a measured profile (SmolLM-135M's shape; cached, or made now), driven
without a device. ``--requests`` requests of ``--prompt`` tokens, of which the first ``--shared`` are the same in all,
are there from the start, half of them LS, and there is memory for all. ``prefill_ms`` and ``decode_ms`` are medians of
``schedule()`` and ``update()`` of a step with prompts and without, ``prefill_step_s`` and ``decode_step_s`` what the
model says of these steps; ``add_ms`` is of a request's arrival, at which its keys are made.
"""

from __future__ import annotations

import random
import statistics
import time
from functools import partial

from benchmarks.common.models import SMOLLM_135M, random_llama
from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser, table_of
from benchmarks.common.timing import in_turn
from omniserve import SLO, EngineConfig, Request, SamplingParams
from omniserve.core.plan import SampledToken, StepOutput
from omniserve.kv import TieredKVManager
from omniserve.latency import LATENCY_MODELS, Profile, features_of
from omniserve.profiling import find_or_make_profile
from omniserve.sched import SCHEDULERS, Forecast, Scheduler, SchedulerLimits

_BLOCK, _VOCABULARY = 16, 50_000


def run(profile: Profile, cache: bool, *, requests: int, prompt: int, shared: int, decodes: int) -> dict[str, float]:
    """Serve until there were so many steps without prompts; return what they took."""
    forecast = Forecast(LATENCY_MODELS.get("omniserve").from_profile(profile), profile.shape)
    config = EngineConfig(block_size=_BLOCK, max_num_batched_tokens=8192, max_num_seqs=requests)
    limits = SchedulerLimits(
        config=config, num_layers=profile.shape.num_layers, max_model_len=2 * prompt, num_host_slots=256
    )  # fmt: skip
    num_blocks = requests * (prompt + 2 * decodes) // _BLOCK + requests
    kv = TieredKVManager(
        num_device_blocks=num_blocks, num_host_blocks=100, block_size=_BLOCK, prefix_cache=cache
    )  # fmt: skip
    scheduler = Scheduler(SCHEDULERS.get("omniserve"), limits=limits, kv=kv, forecast=forecast)
    rng = random.Random(0)
    front = [rng.randrange(1, _VOCABULARY) for _ in range(shared)]
    adds_s: list[float] = []
    for number in range(requests):
        request = Request(
            prompt_token_ids=[*front, *(rng.randrange(1, _VOCABULARY) for _ in range(prompt - shared))],
            sampling=SamplingParams(max_tokens=prompt, ignore_eos=True), service_class=("BE", "LS")[number % 2],
        )  # fmt: skip
        began_s = time.perf_counter()
        scheduler.add(f"r{number}", request, SLO(ttft_s=1e9, tpot_s=1e3), 0.0)
        adds_s.append(time.perf_counter() - began_s)
    times_s: dict[bool, list[float]] = {True: [], False: []}
    steps_s: dict[bool, list[float]] = {True: [], False: []}
    now_s = 0.0
    while len(times_s[False]) < decodes:
        began_s = time.perf_counter()
        plan = scheduler.schedule(now_s)
        took_s = time.perf_counter() - began_s
        tokens = {chunk.request_id: (SampledToken(token_id=rng.randrange(1, _VOCABULARY)),) for chunk in plan.chunks
                  if chunk.samples}  # fmt: skip
        now_s += 0.01
        began_s = time.perf_counter()
        scheduler.update(plan, StepOutput(tokens=tokens), now_s)
        took_s += time.perf_counter() - began_s
        has_prompts = any(len(chunk.token_ids) > 1 for chunk in plan.chunks)
        times_s[has_prompts].append(took_s)
        steps_s[has_prompts].append(forecast.predictor.step_s(features_of(plan, profile.shape)))
    median = statistics.median
    return {
        "add_ms": 1e3 * median(adds_s), "prefill_steps": len(times_s[True]),
        "prefill_ms": 1e3 * median(times_s[True]), "prefill_step_s": median(steps_s[True]),
        "decode_ms": 1e3 * median(times_s[False]), "decode_step_s": median(steps_s[False]),
    }  # fmt: skip


def main() -> None:
    parser = argument_parser(
        __doc__, "prefix_lookup", requests=1000, prompt=(8000, "tokens"), shared=(2000, "of them"),
        decodes=(100, "steps without prompts"), repeats=3,
    )  # fmt: skip
    args = parser.parse_args()
    profile = find_or_make_profile(random_llama(**SMOLLM_135M), EngineConfig(device_kv_bytes=2 << 30))
    sizes = {"requests": args.requests, "prompt": args.prompt, "shared": args.shared, "decodes": args.decodes}
    runs = {name: partial(run, profile, name == "on", **sizes) for name in ("off", "on")}
    found = in_turn(runs, args.repeats)
    medians = {
        key: {name: statistics.median(each[name] for each in some) for name in some[0]} for key, some in found.items()
    }
    print(table_of([{"": name, **{k: f"{m[name]:.4g}" for k, m in medians.items()}} for name in medians["on"]]))
    write_record(
        args.record, name="prefix_lookup", config=vars(args), seed=0, results={"medians": medians, "raw": found}
    )


if __name__ == "__main__":
    main()
