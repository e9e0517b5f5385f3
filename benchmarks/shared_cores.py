"""What a neighbour costs: decode steps with all cores and with one less, beside a process that takes a share of a core.

    python -m benchmarks.shared_cores --record benchmarks/results/shared_cores.json

The neighbour works for its share of every 10 ms. For each share both thread counts take turns, in runs of some steps;
milliseconds are the median of the runs' means, since what a neighbour costs comes in single long steps.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import statistics
import time
from typing import Any

import torch

from benchmarks.common.engine_run import request
from benchmarks.common.models import MODELS
from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser
from benchmarks.common.timing import in_turn, seconds
from omniserve import Engine, EngineConfig
from omniserve.host.cores import available_cores

PERIOD_S = 0.01
WARM_UP_STEPS = 20


def be_a_neighbour(share: Any) -> None:
    """Work for a share of each period, until killed."""
    while True:
        ends_s = time.perf_counter() + PERIOD_S
        while time.perf_counter() < ends_s - PERIOD_S * (1 - share.value):
            pass
        time.sleep(max(0.0, ends_s - time.perf_counter()))


def run_ms(engine: Engine, threads: int, steps: int) -> float:
    """Return the mean milliseconds of some steps with a number of threads; a first one does not count."""
    torch.set_num_threads(threads)
    engine.step()
    return 1e3 * seconds(lambda: [engine.step() for _ in range(steps)]) / steps


def measure(name: str, requests: int, cores: int, share: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each of the neighbour's shares."""
    rows = []
    num_steps = WARM_UP_STEPS + len(args.shares) * args.repeats * 2 * (args.steps + 1)
    # Threads that are asked for are not given to others.
    config = EngineConfig(
        device_kv_bytes=512 << 20, host_kv_bytes=0, device_threads=cores, max_num_seqs=requests, scheduler="fcfs"
    )
    with Engine(MODELS[name](), config) as engine:
        for i in range(requests):
            engine.add(request(f"ls{i}", 32, num_steps + 1))
        for _ in range(WARM_UP_STEPS):  # prefill, compilation
            engine.step()
        for share.value in args.shares:
            time.sleep(2 * PERIOD_S)
            calls = {str(n): functools.partial(run_ms, engine, n, args.steps) for n in (cores - 1, cores)}
            less, all_ = (statistics.median(runs) for runs in in_turn(calls, args.repeats, warm_up=0).values())
            row = {"neighbour": share.value, "ms_one_less": less, "ms_all": all_, "all_over_one_less": all_ / less}
            print(f"  {name}, {requests} requests: " + ", ".join(f"{key} {value:.2f}" for key, value in row.items()))
            rows.append(row)
    return rows


def main() -> None:
    parser = argument_parser(
        __doc__, "shared_cores", shares=[0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0], requests=[8, 64], steps=15,
        repeats=5,
    )  # fmt: skip
    args = parser.parse_args()
    cores = available_cores()
    if cores < 2:
        parser.error("there is one core only: none can be left to a neighbour")
    context = multiprocessing.get_context("spawn")
    share = context.Value("d", 0.0, lock=False)
    neighbour = context.Process(target=be_a_neighbour, args=(share,), daemon=True)
    neighbour.start()
    try:
        results = {
            f"{name}, {requests} requests": measure(name, requests, cores, share, args)
            for name in MODELS
            for requests in args.requests
        }
    finally:
        neighbour.kill()
    write_record(args.record, name="shared_cores", config=vars(args) | {"cores": cores}, seed=0, results=results)


if __name__ == "__main__":
    main()
