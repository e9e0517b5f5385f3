"""Measures what scheduling costs: seconds of `schedule()` and `update()` as a share of the step that they plan.

    python -m benchmarks.scheduling --record benchmarks/results/scheduling.json

The real policies with the latency model of a measured profile (SmolLM-135M's shape; cached, or made now), driven
without a device: the clock moves by 10 ms a step, and shares are of the step as the model predicts it. Up to 200
requests run, half of them LS; the others wait.
"""

from __future__ import annotations

import random
import statistics
import time

from benchmarks.common.models import SMOLLM_135M, random_llama
from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser
from omniserve import SLO, EngineConfig, Request, SamplingParams
from omniserve.core.plan import SampledToken, StepOutput
from omniserve.kv import TieredKVManager
from omniserve.latency import LATENCY_MODELS, Profile, features_of
from omniserve.profiling import find_or_make_profile
from omniserve.sched import SCHEDULERS, Forecast, Scheduler, SchedulerLimits

MAX_RUNNING = 200


def measure(scheduler: str, profile: Profile, num_requests: int, num_steps: int, seed: int) -> dict[str, float]:
    """Return medians over the steps after all requests that can run do."""
    forecast = Forecast(LATENCY_MODELS.get("omniserve").from_profile(profile), profile.shape)
    config = EngineConfig(block_size=64, max_num_batched_tokens=512, max_num_seqs=MAX_RUNNING)
    limits = SchedulerLimits(config=config, num_layers=profile.shape.num_layers, max_model_len=2048, num_host_slots=256)
    kv = TieredKVManager(num_device_blocks=20_000, num_host_blocks=20_000, block_size=64)
    policy = Scheduler(SCHEDULERS.get(scheduler), limits=limits, kv=kv, forecast=forecast)
    rng = random.Random(seed)
    now_s, adds, schedules, updates, steps, running = 0.0, [], [], [], [], []
    waiting = [
        Request(
            prompt_token_ids=[1] * rng.randint(20, 400),
            sampling=SamplingParams(max_tokens=1500, ignore_eos=True),
            service_class="LS" if i % 2 == 0 and i < MAX_RUNNING else "BE",
        )
        for i in range(num_requests)
    ]
    for step in range(num_steps + 400):
        if step < num_requests or step == 300:  # a few at a time at first, all others when these run
            count = 1 if step < min(num_requests, MAX_RUNNING) else num_requests if step == 300 else 0
            for _ in range(min(count, len(waiting))):
                began_s = time.perf_counter()
                policy.add(f"r{len(waiting)}", waiting.pop(0), SLO(ttft_s=600.0, tpot_s=0.5), now_s)
                adds.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        plan = policy.schedule(now_s)
        scheduled_s = time.perf_counter()
        tokens = {chunk.request_id: (SampledToken(token_id=1),) for chunk in plan.chunks if chunk.samples}
        planned_s = time.perf_counter()
        now_s += 0.01
        policy.update(plan, StepOutput(tokens=tokens), now_s)
        updated_s = time.perf_counter()
        if step >= 400:
            schedules.append(scheduled_s - began_s)
            updates.append(updated_s - planned_s)
            steps.append(forecast.predictor.step_s(features_of(plan, profile.shape)))
            running.append(len(plan.chunks))
    schedule_s, update_s, step_s = map(statistics.median, (schedules, updates, steps))
    return {
        "schedule_s": schedule_s, "update_s": update_s, "add_s": statistics.median(adds), "step_s": step_s,
        "share": (schedule_s + update_s) / step_s, "schedule_share": schedule_s / step_s,
        "requests_in_step": statistics.median(running),
    }  # fmt: skip


def main() -> None:
    parser = argument_parser(__doc__, "scheduling", requests=[10, 100, 1000], steps=100, seed=0)
    args = parser.parse_args()
    profile = find_or_make_profile(random_llama(**SMOLLM_135M), EngineConfig(device_kv_bytes=2 << 30))
    results: dict[str, dict[str, float]] = {}
    for count in args.requests:
        for scheduler in ("omniserve", "conserve", "bros", "sarathi", "fcfs"):
            result = results[f"{scheduler}, {count}"] = measure(scheduler, profile, count, args.steps, args.seed)
            print(
                f"{scheduler}, {count}: " + ", ".join(f"{key} {value:.3g}" for key, value in result.items()), flush=True
            )
    write_record(args.record, name="scheduling", config=vars(args), seed=args.seed, results=results)


if __name__ == "__main__":
    main()
