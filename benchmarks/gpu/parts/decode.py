"""Decode steps beside the time that reading weights and KV takes; ways to run them; how idle the GPU is meanwhile."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Measured
from benchmarks.gpu.clock import reclaim_memory, wait_for
from benchmarks.gpu.engines import (
    drain,
    kv_token_bytes,
    modes,
    open_decoding,
    step_times,
    weight_bytes,
)
from benchmarks.gpu.models import LLAMA_8B, Shape
from benchmarks.gpu.table import Goal
from benchmarks.gpu.trace import idle_share
from omniserve import Engine

BATCHES = (256, 128, 32, 8, 1)
"""Largest first: the others are what is left of it when requests are aborted."""
DRY_BATCHES = (4, 1)
GOAL = Goal(at_most=1.25)
IDLE_GOAL = Goal(at_most=0.03, of="measured")
_MEMORY_SHARE = 0.92
_MODE_NEEDS_S = 15.0


def run(bench: Bench) -> None:
    """Time all batches as configured, then other modes at two of them."""
    model = bench.shelf.patched(LLAMA_8B)
    batches = DRY_BATCHES if bench.dry else BATCHES
    first, *other_modes = modes()
    time_batches(bench, model, LLAMA_8B, batches, mode=first)
    some = DRY_BATCHES if bench.dry else (32, 8)
    for mode in other_modes:
        time_batches(bench, model, LLAMA_8B, some, mode=mode, label=f", {mode}", needs_s=_MODE_NEEDS_S)


def time_batches(
    bench: Bench,
    model: Any,
    shape: Shape,
    batches: Sequence[int],
    *,
    mode: str,
    label: str = "",
    needs_s: float = 0.0,
) -> None:
    """Put a row for each batch into the table; the largest that fits first, and the GPU's idle share at the last two.

    Args:
        bench: The part's.
        model: A patched model.
        shape: Its.
        batches: Largest first.
        mode: Of the engine.
        label: What it is called in the table.
        needs_s: No engine is made with less time left: its start alone takes seconds.
    """
    context, steps = (40, 5) if bench.dry else (1024, 40)
    output = (len(batches) + 1) * (steps + 16)
    names = {batch: f"{bench.name_of(shape)}, batch {batch}, {context} tokens{label}" for batch in batches}
    if bench.left_s < needs_s:
        for batch in batches:
            bench.skip(names[batch], "ms", "out of time", GOAL)
        return
    bench.limits.copy_bytes_per_s  # noqa: B018 - it takes memory: measured before the engine has it
    reclaim_memory(bench.device)
    fitting = [b for b in batches if _fits(bench, model, b, context + output)]
    for batch in batches:
        if batch not in fitting:
            bench.skip(names[batch], "ms", "its KV does not fit beside the weights", GOAL)
    if not fitting:
        return
    began_s = time.perf_counter()
    try:
        with open_decoding(model, batch=fitting[0], context=context, output=output, mode=mode) as engine:
            if not label:  # weights are there; compiling comes with the first step, graphs may be recorded now
                engine.step()
                wait_for(bench.device)
                ready_s = time.perf_counter() - began_s
                bench.take(
                    f"{bench.name_of(shape)}: engine made, first step over", "s", functools.partial(float, ready_s)
                )
            for batch, larger in zip(fitting, (None, *fitting), strict=False):
                if larger is not None:
                    for i in range(batch, larger):
                        engine.abort(f"ls{i}")
                _time_batch(bench, engine, model, names[batch], batch, context, steps, with_idle=not label)
            drain(engine, [f"ls{i}" for i in range(fitting[-1])])
    except (ValueError, RuntimeError, ImportError) as error:  # the other modes go on
        bench.fail(f"{bench.name_of(shape)}{label or ', decode'}", "ms", error, GOAL)


def _time_batch(
    bench: Bench, engine: Engine, model: Any, name: str, batch: int, context: int, steps: int, *, with_idle: bool
) -> None:
    context += engine.stats().steps + steps // 2  # it grows: its middle counts
    read = weight_bytes(model) + batch * context * kv_token_bytes(engine.spec)
    floor_ms = 1e3 * read / bench.limits.copy_bytes_per_s

    def step_ms() -> Measured:
        times = step_times(engine, steps)
        details = {"wall_p50_ms": 1e3 * times.p50_s, "wall_p99_ms": 1e3 * times.p99_s}
        return Measured(value=1e3 * times.mean_s, details=details)

    bench.take(name, "ms", step_ms, floor=floor_ms, goal=GOAL)
    if with_idle:
        bench.take(
            f"{name}: GPU idle", "of the time", lambda: idle_share(engine.step, bench.device, count=8), goal=IDLE_GOAL
        )


def _fits(bench: Bench, model: Any, batch: int, tokens: int) -> bool:
    if not bench.on_gpu:
        return True
    free, _ = torch.cuda.mem_get_info(bench.device)
    return batch * (tokens + 64) * kv_token_bytes(model.omniserve.spec) < _MEMORY_SHARE * free - (2 << 30)
