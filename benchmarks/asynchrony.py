"""LS tokens a second while host attention runs at its speed and 100 times slower: the device never waits for the host.

    python -m benchmarks.asynchrony --record benchmarks/results/asynchrony.json

One LS request decodes beside BE requests whose attention is on the host tier. The two speeds alternate in one run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from benchmarks.common.models import SMOLLM_135M, random_llama
from benchmarks.common.record import write_record
from omniserve import Engine, EngineConfig, Request, SamplingParams


def request(first_token: int, prompt: int, output: int, service_class: str) -> Request:
    return Request(
        prompt_token_ids=[1 + (first_token + i) % 1000 for i in range(prompt)],
        sampling=SamplingParams(max_tokens=output, ignore_eos=True),
        service_class=service_class,
    )


def ls_rate(engine: Engine, num_tokens: int) -> float:
    """Return tokens a second of one LS request, its prefill left out."""
    request_id = engine.add(request(7, 16, num_tokens + 1, "LS"))
    first_s = None
    while True:
        for output in engine.step():
            if output.request_id == request_id:
                first_s = first_s if first_s is not None else time.perf_counter()
                if output.finished:
                    return num_tokens / (time.perf_counter() - first_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--be", type=int, default=24, help="BE requests")
    parser.add_argument("--be-prompt", type=int, default=256)
    parser.add_argument("--ls-tokens", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--slowdown", type=float, default=100.0)
    parser.add_argument("--record", type=Path, default=Path(".cache/asynchrony.json"))
    args = parser.parse_args()
    model = random_llama(**SMOLLM_135M)
    config = EngineConfig(device_kv_bytes=64 << 20, host_kv_bytes=1 << 30, swap_in_delay_s=1 << 30)
    rates: dict[str, list[float]] = {"full speed": [], "slowed": []}
    progress: dict[str, list[int]] = {"full speed": [], "slowed": []}
    with Engine(model, config) as engine:
        tier = engine.host_tier
        assert tier is not None
        for i in range(args.be):
            engine.add(request(i, args.be_prompt, 1500, "BE"))
        while engine.stats().host_requests < args.be // 2 or engine.stats().host_output_tokens < args.be:
            engine.step()
        stats = tier.stats()
        task_s = stats.busy_seconds / max(1, stats.tasks_done)
        for repeat in range(args.repeats + 1):
            for name, delay_s in (("full speed", 0.0), ("slowed", (args.slowdown - 1) * task_s)):
                tier.inject(delay_s=delay_s)
                before = tier.num_tasks_done
                rate = ls_rate(engine, args.ls_tokens)
                if repeat:
                    rates[name].append(rate)
                    progress[name].append(tier.num_tasks_done - before)
        tier.inject(delay_s=0.0)
    ratio = statistics.median(slow / full for slow, full in zip(rates["slowed"], rates["full speed"], strict=True))
    print(f"host attention: {1e6 * task_s:.0f} us a task; slowed: {1e6 * args.slowdown * task_s:.0f} us")
    for name in rates:
        tasks = statistics.median(progress[name])
        print(f"  {name:10s}: {statistics.median(rates[name]):6.1f} LS tokens/s, {tasks:.0f} host tasks meanwhile")
    print(f"  LS rate, slowed / full speed (median of pairs): {ratio:.3f}")
    results = {"ls_tokens_per_s": rates, "host_tasks": progress, "ratio": ratio, "task_s": task_s}
    write_record(args.record, name="asynchrony", config=vars(args) | {"model": SMOLLM_135M}, seed=0, results=results)


if __name__ == "__main__":
    main()
