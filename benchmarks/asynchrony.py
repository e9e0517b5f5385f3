"""LS tokens a second while host attention runs at its speed and 100 times slower: the device never waits for the host.

    python -m benchmarks.asynchrony --record benchmarks/results/asynchrony.json

One LS request decodes beside BE requests whose attention is on the host tier. The two speeds alternate in one run.
"""

from __future__ import annotations

import functools
import statistics
import time

from benchmarks.common.engine_run import request
from benchmarks.common.models import SMOLLM_135M, random_llama
from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser
from benchmarks.common.timing import in_turn, median_ratio
from omniserve import Engine, EngineConfig


def ls_rate(engine: Engine, num_tokens: int, delay_s: float) -> tuple[float, int]:
    """Return tokens a second of one LS request, its prefill left out, and the tasks of the host tier meanwhile."""
    tier = engine.host_tier
    assert tier is not None
    tier.inject(delay_s=delay_s)
    before = tier.stats().tasks_done
    request_id = engine.add(request("ls", 16, num_tokens + 1))
    first_s = None
    while True:
        for output in engine.step():
            if output.request_id == request_id:
                first_s = first_s if first_s is not None else time.perf_counter()
                if output.finished:
                    return num_tokens / (time.perf_counter() - first_s), tier.stats().tasks_done - before


def main() -> None:
    parser = argument_parser(
        __doc__, "asynchrony", be=(24, "BE requests"), be_prompt=256, ls_tokens=60, repeats=5, slowdown=100.0,
    )  # fmt: skip
    args = parser.parse_args()
    config = EngineConfig(
        device_kv_bytes=64 << 20, host_kv_bytes=1 << 30, scheduler_options={"swap_in_delay_s": 1 << 30}
    )
    with Engine(random_llama(**SMOLLM_135M), config) as engine:
        tier = engine.host_tier
        assert tier is not None
        for i in range(args.be):
            engine.add(request(f"be{i}", args.be_prompt, 1500))
        while (now := engine.stats().scheduler).host_requests < args.be // 2 or now.host_output_tokens < args.be:
            engine.step()
        stats = tier.stats()
        task_s = stats.busy_seconds / max(1, stats.tasks_done)
        delays = {"full speed": 0.0, "slowed": (args.slowdown - 1) * task_s}
        runs = in_turn(
            {name: functools.partial(ls_rate, engine, args.ls_tokens, delay_s) for name, delay_s in delays.items()},
            args.repeats,
        )
        tier.inject(delay_s=0.0)
    rates = {name: [rate for rate, _ in pairs] for name, pairs in runs.items()}
    progress = {name: [tasks for _, tasks in pairs] for name, pairs in runs.items()}
    ratio = median_ratio(rates["slowed"], rates["full speed"])
    print(f"host attention: {1e6 * task_s:.0f} us a task; slowed: {1e6 * args.slowdown * task_s:.0f} us")
    for name in rates:
        tasks = statistics.median(progress[name])
        print(f"  {name:10s}: {statistics.median(rates[name]):6.1f} LS tokens/s, {tasks:.0f} host tasks meanwhile")
    print(f"  LS rate, slowed / full speed (median of pairs): {ratio:.3f}")
    results = {"ls_tokens_per_s": rates, "host_tasks": progress, "ratio": ratio, "task_s": task_s}
    write_record(args.record, name="asynchrony", config=vars(args) | {"model": SMOLLM_135M}, seed=0, results=results)


if __name__ == "__main__":
    main()
