"""Rows that leave a step between two layers: what looking for new requests costs, and how soon rows are gone."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.common.engine_run import request
from benchmarks.common.timing import wait_for
from benchmarks.gpu.engines import (
    LLAMA_8B,
    PRIMED,
    PRIMED_CONSERVE,
    config_of,
    drain,
    kv_token_bytes,
    open_decoding,
    open_engine,
    patched_model,
    step_ms,
)
from benchmarks.gpu.script import Script
from omniserve import Engine


def safepoints(script: Script) -> None:
    model = patched_model(LLAMA_8B, script)
    batch, context, steps = (2, 40, 5) if script.dry else (64, 1024, 60)
    output = 4 * steps + 50

    @contextmanager
    def best_effort(scheduler: str) -> Iterator[Engine]:
        blocks = batch * ((context + output) // 64 + 1) + 1
        with open_decoding(model, batch=0, context=context, output=output, scheduler=scheduler, max_num_seqs=batch,
                           device_kv_bytes=blocks * 64 * kv_token_bytes(model)) as engine:  # fmt: skip
            for i in range(batch):
                engine.add(request(f"be{i}", context, output, engine.spec.vocab_size))
            yield engine

    name, looking_ms = f"step of {batch} BE rows that looks for requests", 0.0
    with script.case(name) as case, best_effort(PRIMED_CONSERVE) as engine:
        times: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * steps + 10):  # turn and turn about
            looks = number % 2 == 0
            engine.runner.loop.safepoint = (lambda: False) if looks else None
            began_s = time.perf_counter()
            engine.step()
            if number >= 10:
                times[looks].append(time.perf_counter() - began_s)
        looking_ms, without_ms = (1e3 * statistics.median(times[looks]) for looks in (True, False))
        case.figure(looking_ms, "ms", limit=without_ms, at_most=1.005, note="limit: the same without looks")
    # Rows that may leave are in no graph, and no step of theirs overlaps another: that has a price of its own.
    with script.case(f"{name}, over captured steps that overlap") as case, best_effort(PRIMED) as engine:
        other_ms, _ = step_ms(engine, 2 * steps, warm_up=10)
        case.figure(looking_ms, "ms", limit=other_ms, note="limit: captured, overlapping")
    time_leaving(script, model)


def time_leaving(script: Script, model: Any) -> None:
    """Have long prompts leave their step at random moments."""
    prompt, repeats = (64, 4) if script.dry else (8192, 12)
    config = config_of(
        model, scheduler="conserve", host_kv_bytes=0, max_model_len=prompt + 2, max_num_batched_tokens=prompt,
        device_kv_bytes=(2 * prompt + 256) * kv_token_bytes(model),
    )  # fmt: skip
    name = f"from a signal to the end of a step of {prompt} BE rows"
    with script.case(name) as case, open_engine(model, config) as engine:
        # The first ones compile kernels, and find memory.
        step_s = [_step_s(engine, prompt, None)[0] for _ in range(3)][-1]
        rng = random.Random(0)
        latest = 0.0 if script.dry else 0.8 * step_s
        delays = [_step_s(engine, prompt, rng.uniform(latest / 8, latest))[1] for _ in range(repeats)]
        left = [delay for delay in delays if delay is not None]
        if not left:
            raise RuntimeError(f"none of {repeats} prompts left its step")
        note = (
            f"limit: a layer; most {1e3 * max(left):.3g} ms; step {1e3 * step_s:.4g} ms; {len(left)} of {repeats} left"
        )
        case.figure(1e3 * statistics.median(left), "ms", limit=1e3 * step_s / engine.spec.num_layers, note=note,
                    delays_s=left)  # fmt: skip


def _step_s(engine: Engine, prompt: int, signal_after_s: float | None) -> tuple[float, float | None]:
    """Return the seconds of a prompt's step, and those from the signal to its end; None: the rows stayed to its end."""
    engine.add(request("be", prompt, 2, engine.spec.vocab_size))
    before = engine.stats().layer_preemptions
    began_s = time.perf_counter()
    signal_s = began_s + signal_after_s if signal_after_s is not None else float("inf")
    engine.runner.loop.safepoint = lambda: time.perf_counter() >= signal_s
    engine.step()
    wait_for(engine.model.device)
    ended_s = time.perf_counter()
    has_left = engine.stats().layer_preemptions > before
    drain(engine, ["be"])
    return ended_s - began_s, ended_s - signal_s if has_left else None
