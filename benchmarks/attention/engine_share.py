"""Measures the share of the read limit that the host tier sustains inside the engine, and where its other time goes.

A small model with large attention decodes best-effort requests whose KV is on the host tier: the dense work is little,
so what is lost is lost by the engine's loop, not by the size of a model.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention.sizes import Size
from benchmarks.common.bandwidth import ReadLimit
from benchmarks.common.engine_run import request
from benchmarks.common.models import random_llama
from benchmarks.common.timing import OtherLoad
from omniserve import Engine, EngineConfig, ExecutionConfig

MODEL: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 512,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,  # attention of Llama 3 8B
    "max_position_embeddings": 8192, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
IDLE_WAIT_S = 0.05
STEADY_TIMEOUT_S = 300.0


class _HostThreads:
    """CPU time of this process's host tier threads, and time that they waited for a core, in seconds."""

    def __init__(self) -> None:
        tasks = Path("/proc/self/task").iterdir()
        self._tasks = [task for task in tasks if (task / "comm").read_text().startswith("omni-host")]

    def times_s(self) -> tuple[float, float]:
        on_core_ns, waited_ns = 0, 0
        for task in self._tasks:
            on_core, waited, _ = (task / "schedstat").read_text().split()
            on_core_ns += int(on_core)
            waited_ns += int(waited)
        return on_core_ns * 1e-9, waited_ns * 1e-9


def make_engine(size: Size, seed: int, host_threads: int) -> Engine:
    """Return an engine with the requests added; its device tier holds one of them, the host tier all."""
    num_requests, prompt_tokens = size.engine
    model = random_llama(seed, **MODEL)
    # Enough for all windows: a token comes at most every few steps, and its K and V have to be read.
    max_tokens = max(prompt_tokens // 2, 64)
    total = prompt_tokens + max_tokens + 64
    kv_width = 2 * MODEL["num_key_value_heads"] * MODEL["head_dim"]
    pool_bytes = total * MODEL["num_hidden_layers"] * kv_width * model.dtype.itemsize
    engine = Engine(model, EngineConfig(
        device_kv_bytes=pool_bytes, host_kv_bytes=num_requests * pool_bytes, host_threads=host_threads,
        max_num_batched_tokens=512, execution=ExecutionConfig(compile=size.compiles), seed=seed,
        # what is on the host tier stays there
        scheduler_options={"ls_reserve_fraction": 0.0, "swap_in_delay_s": 1 << 30},
    ))  # fmt: skip
    for i in range(num_requests):
        engine.add(request(f"be{i}", prompt_tokens, max_tokens))
    return engine


def measure_engine(limit: ReadLimit, size: Size, seed: int) -> dict[str, Any]:
    """Return, by number of host threads, windows of the steady state."""
    results: dict[str, Any] = {}
    for host_threads in sorted({1, len(limit.cpus)}):
        limit.gb_per_s(host_threads)  # finds it
        limit.everywhere()  # the engine's threads must not sit on the first core
        torch.set_num_threads(len(limit.cpus))
        with make_engine(size, seed, host_threads) as engine:
            began_s = time.perf_counter()
            _until_steady(engine, size.engine[0])
            to_steady_s = time.perf_counter() - began_s
            windows = [_measure_window(limit, engine, size, host_threads) for _ in range(size.repeats)]
        medians = {key: statistics.median(window[key] for window in windows) for key in windows[0]}
        results[f"{host_threads} host thread{'s' if host_threads > 1 else ''}"] = {
            "to_steady_s": to_steady_s, "medians": medians, "windows": windows,
        }  # fmt: skip
    return results


def _until_steady(engine: Engine, num_requests: int) -> None:
    """Step until all requests but the one that the device tier keeps have decoded on the host tier."""
    deadline_s = time.perf_counter() + STEADY_TIMEOUT_S
    while True:
        stats = engine.stats()
        if stats.scheduler.host_requests >= num_requests - 1 and not any(stats.scheduler.waiting.values()):
            break
        if time.perf_counter() > deadline_s:
            raise RuntimeError(f"after {STEADY_TIMEOUT_S} s the engine is not in its steady state: {asdict(stats)}")
        _step(engine)
    tokens = stats.scheduler.host_output_tokens
    while engine.stats().scheduler.host_output_tokens < tokens + num_requests:
        _step(engine)


def _step(engine: Engine) -> None:
    engine.step()
    if engine.last_plan_was_empty:
        engine.wait(IDLE_WAIT_S)


def _measure_window(limit: ReadLimit, engine: Engine, size: Size, host_threads: int) -> dict[str, float]:
    """Return rates and shares of one window."""
    tier = engine.host_tier
    assert tier is not None
    engine_threads = torch.get_num_threads()

    def limit_now() -> float:
        while tier.busy:
            time.sleep(0.001)
        sample = limit.gb_per_s(host_threads)
        limit.everywhere()
        torch.set_num_threads(engine_threads)  # what the engine believes to be set
        return sample

    limit_before = limit_now()
    _run_for(engine, min(0.2, size.seconds))  # the queues fill
    threads, others = _HostThreads(), OtherLoad()
    before, tier_before, (on_core_s, waited_s) = engine.stats(), tier.stats(), threads.times_s()
    began_s = time.perf_counter()
    in_hand = _run_for(engine, size.seconds)
    wall_s = time.perf_counter() - began_s
    after, tier_after, (on_core_after_s, waited_after_s) = engine.stats(), tier.stats(), threads.times_s()
    if after.scheduler.host_requests < size.engine[0] - 1:
        raise RuntimeError(f"only {after.scheduler.host_requests} requests are left on the host tier: take longer ones")
    busy_cores = others.cores()
    limit_mean = (limit_before + limit_now()) / 2

    read_gb = (tier_after.kv_bytes_read - tier_before.kv_bytes_read) / 1e9
    busy_s = tier_after.busy_seconds - tier_before.busy_seconds
    on_core_s, waited_s = on_core_after_s - on_core_s, waited_after_s - waited_s
    thread_s = wall_s * host_threads
    steps = max(1, after.steps - before.steps)
    tokens = after.scheduler.host_output_tokens - before.scheduler.host_output_tokens
    return {
        "limit_gb_per_s": limit_mean,
        "gb_per_s": read_gb / wall_s,
        "share": read_gb / wall_s / limit_mean,
        "share_while_busy": read_gb / busy_s * host_threads / limit_mean if busy_s else 0.0,
        "host_tokens_per_s": tokens / wall_s,
        "threads_busy": busy_s / thread_s,
        "threads_wait_for_core": waited_s / thread_s,
        "threads_asleep": max(0.0, thread_s - on_core_s - waited_s) / thread_s,
        "steps_per_s": steps / wall_s,
        "rows_per_step": (after.piggyback_rows - before.piggyback_rows) / steps,
        # A request advances by at most one layer a step: if this is less than the step, the threads have to wait.
        "attention_per_step_s": busy_s / host_threads / steps,
        "step_mean_s": wall_s / steps,
        "steps_that_find_tier_idle": in_hand.count(0) / len(in_hand),
        "others_busy_cores": busy_cores,
    }


def _run_for(engine: Engine, seconds: float) -> list[int]:
    """Step for ``seconds``; return the tasks in hand before each step."""
    assert engine.host_tier is not None
    in_hand, end_s = [], time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        in_hand.append(engine.host_tier.stats().tasks_in_hand)
        _step(engine)
    return in_hand
