"""Measures what a neighbour costs: decode steps with all cores and with one less, beside a process that takes a share
of one.

    python -m benchmarks.shared_cores --record benchmarks/results/shared_cores.json

The neighbour works for its share of every 10 ms. For each share both thread counts take turns, in runs of some steps;
milliseconds are the median of the runs' means, since what a neighbour costs comes in single long steps.

The second section asks whether a client takes a core away: a server makes steps for best-effort work all the time, and
a client on the same machine sends latency-sensitive requests, half a request a second; spans with and without it take
turns. Both sections want a machine on which nothing else runs.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import torch

from benchmarks.common.client import BE_TIER, LS_TIER, drive, poisson_stream, warm_server
from benchmarks.common.engine_run import request
from benchmarks.common.models import MODELS, saved_smollm
from benchmarks.common.record import write_record
from benchmarks.common.server import ServerProcess
from benchmarks.common.terminal import argument_parser
from benchmarks.common.timing import in_turn, seconds
from omniserve import Engine, EngineConfig
from omniserve.host.cores import available_cores

PERIOD_S = 0.01
WARM_UP_STEPS = 20
SECTIONS = ("neighbour", "client")
VOCAB_SIZE = 500


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


@contextmanager
def best_effort_work(server: ServerProcess, requests: int) -> Iterator[None]:
    """Keep so many best-effort requests in the server meanwhile. Their answers are not streamed: that costs no CPU."""
    ends = threading.Event()
    body = {"prompt": [5] * 32, "max_tokens": 256, "ignore_eos": True, "temperature": 0, "service_tier": BE_TIER}

    def ask() -> None:
        while not ends.is_set():
            httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=None).raise_for_status()

    threads = [threading.Thread(target=ask) for _ in range(requests)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def steps_by_threads(server: ServerProcess) -> Counter[int]:
    """Return the number of steps that the server has made with each number of threads."""
    name = "omniserve_steps_by_threads_total"
    samples = {key: value for key, value in server.metrics().items() if key.startswith(name)}
    return Counter({int(key.split('"')[1]): int(value) for key, value in samples.items()})


def watch(server: ServerProcess, rate: float, span_s: float, seed: int) -> dict[str, Any]:
    """Return the steps by threads of a span with a client that sends so many requests a second, and its CPU time."""
    before, began_s, cpu_s = steps_by_threads(server), time.monotonic(), time.process_time()
    load = poisson_stream(
        random.Random(seed), rate=rate, seconds=span_s, prompt=128, output=64, tier=LS_TIER, vocab_size=VOCAB_SIZE
    )
    drive(server, load, cutoff_s=span_s + 60)
    time.sleep(max(0.0, began_s + span_s - time.monotonic()))
    steps, seconds_taken = steps_by_threads(server) - before, time.monotonic() - began_s
    return {
        "requests": len(load), "steps_by_threads": dict(sorted(steps.items())),
        "share_with_all": steps[max(steps)] / steps.total(), "steps_per_s": steps.total() / seconds_taken,
        "client_cores": (time.process_time() - cpu_s) / seconds_taken,
    }  # fmt: skip


def measure_client(name: str, args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Return the spans with and without a client."""
    flags = ["--model", str(saved_smollm())] if name == "SmolLM-135M" else []
    warm_up = poisson_stream(
        random.Random(0), rate=2, seconds=2, prompt=128, output=16, tier=LS_TIER, vocab_size=VOCAB_SIZE
    )
    with warm_server("shared_cores", flags, warm_up) as server, best_effort_work(server, args.best_effort):
        time.sleep(args.span / 2)  # its first steps compile
        seeds = iter(range(1, 1 + 2 * (1 + args.repeats)))
        spans = in_turn(
            {
                "with a client": lambda: watch(server, args.rate, args.span, next(seeds)),
                "without": lambda: watch(server, 0.0, args.span, next(seeds)),
            },
            args.repeats,
        )
    for which, rows in spans.items():
        shares = ", ".join(f"{row['share_with_all']:.3f}" for row in rows)
        print(f"  {name}, {which}: share of steps with all cores {shares}")
    return spans


def measure_neighbours(cores: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of all models and numbers of requests."""
    context = multiprocessing.get_context("spawn")
    share = context.Value("d", 0.0, lock=False)
    neighbour = context.Process(target=be_a_neighbour, args=(share,), daemon=True)
    neighbour.start()
    try:
        return {
            f"{name}, {requests} requests": measure(name, requests, cores, share, args)
            for name in MODELS
            for requests in args.requests
        }
    finally:
        neighbour.kill()


def main() -> None:
    parser = argument_parser(
        __doc__, "shared_cores", shares=[0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0], requests=[8, 64], steps=15,
        repeats=5, best_effort=(4, "requests that the server works on all the time"),
        rate=(0.5, "requests a second that the client sends"), span=(20.0, "seconds with the client, and without"),
        sections=(list(SECTIONS), f"of {', '.join(SECTIONS)}"), models=(list(MODELS), "of the client's servers"),
    )  # fmt: skip
    args = parser.parse_args()
    cores = available_cores()
    if cores < 2:
        parser.error("there is one core only: none can be left to a neighbour")
    results = measure_neighbours(cores, args) if "neighbour" in args.sections else {}
    if "client" in args.sections:
        results |= {f"{name}, client": measure_client(name, args) for name in args.models}
    write_record(args.record, name="shared_cores", config=vars(args) | {"cores": cores}, seed=0, results=results)


if __name__ == "__main__":
    main()
