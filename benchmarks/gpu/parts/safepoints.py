"""Rows that leave a step between two layers: what looking for who has come costs, and how soon rows are gone."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.gpu.bench import Bench, Measured
from benchmarks.gpu.clock import wait_for
from benchmarks.gpu.engines import config_of, drain, open_decoding, open_engine, request, step_times
from benchmarks.gpu.models import LLAMA_8B
from benchmarks.gpu.primed import PRIMED, PRIMED_CONSERVE
from benchmarks.gpu.table import Goal
from omniserve import Engine

GOAL = Goal(at_most=1.005)


def run(bench: Bench) -> None:
    """Time BE decode steps with and without looks, turn and turn about; then have long prompts leave at random.

    Rows that may leave are in no graph, and no step of theirs overlaps another: what that costs is a row of its own.
    """
    model = bench.shelf.patched(LLAMA_8B)
    case, looking_ms = _take_cost(bench, model)
    if looking_ms is not None:
        bench.take(
            f"{case}, over steps that nobody may leave", "ms",
            lambda: Measured(value=looking_ms, floor=_unlooking_ms(bench, model), note="floor: recorded, overlapping"),
        )  # fmt: skip
    _take_delay(bench, model)


@contextmanager
def _open_best_effort(bench: Bench, model: Any, scheduler: str) -> Iterator[Engine]:
    """Give an engine with BE requests that decode on the device."""
    batch, context, steps = _sizes(bench)
    output = 4 * steps + 50
    with open_decoding(
        model, batch=0, context=context, output=output, scheduler=scheduler, max_num_requests=batch,
        device_kv_bytes=(batch * ((context + output) // 64 + 1) + 1) * model.omniserve.spec.kv_block_bytes(64),
    ) as engine:  # fmt: skip
        for i in range(batch):
            engine.add(request(f"be{i}", context, output, engine.spec.vocab_size))
        yield engine


def _sizes(bench: Bench) -> tuple[int, int, int]:
    """Return batch, context and steps."""
    return (2, 40, 5) if bench.dry else (64, 1024, 60)


def _unlooking_ms(bench: Bench, model: Any) -> float:
    """Return the milliseconds of the same rows in steps that are recorded and overlap, as those of others are."""
    _, _, steps = _sizes(bench)
    with _open_best_effort(bench, model, PRIMED) as engine:
        return 1e3 * step_times(engine, 2 * steps, warm_up=10).mean_s


def _take_cost(bench: Bench, model: Any) -> tuple[str, float | None]:
    batch, _, steps = _sizes(bench)
    case = f"step of {batch} BE rows that looks who has come"
    with _open_best_effort(bench, model, PRIMED_CONSERVE) as engine:
        times: dict[bool, list[float]] = {True: [], False: []}

        def measure() -> Measured:
            for number in range(2 * steps + 10):
                looks = number % 2 == 0
                engine.runner.loop.safepoint = _stay if looks else None
                began_s = time.perf_counter()
                engine.step()
                if number >= 10:
                    times[looks].append(time.perf_counter() - began_s)
            with_s, without_s = (statistics.median(times[looks]) for looks in (True, False))
            return Measured(value=1e3 * with_s, floor=1e3 * without_s, note="floor: the same without looks")

        return case, bench.take(case, "ms", measure, goal=GOAL)


def _stay() -> bool:
    return False


def _take_delay(bench: Bench, model: Any) -> None:
    prompt, repeats = (64, 4) if bench.dry else (8192, 12)
    config = config_of(
        model, scheduler="conserve", host_kv_bytes=0, max_model_len=prompt + 2, max_step_tokens=prompt,
        device_kv_bytes=(2 * prompt // 64 + 4) * model.omniserve.spec.kv_block_bytes(64),
    )  # fmt: skip
    with open_engine(model, config) as engine:
        # The first ones compile kernels, and find memory.
        step_s = [_prompt_step_s(engine, prompt, None)[0] for _ in range(3)][-1]
        rng = random.Random(0)

        def measure() -> Measured:
            delays = [_prompt_step_s(engine, prompt, rng.uniform(0.1, 0.8) * step_s)[1] for _ in range(repeats)]
            left = [delay for delay in delays if delay is not None]
            if not left:
                raise RuntimeError(f"none of {repeats} prompts left its step")
            layer_ms = 1e3 * step_s / engine.spec.num_layers
            return Measured(
                value=1e3 * statistics.median(left), floor=layer_ms, details={"delays_s": left},
                note=f"floor: a layer; most {1e3 * max(left):.3g} ms; step {1e3 * step_s:.4g} ms; "
                f"{len(left)} of {repeats} left",
            )  # fmt: skip

        bench.take(f"from a signal to the end of a step of {prompt} BE rows", "ms", measure)


def _prompt_step_s(engine: Engine, prompt: int, signal_after_s: float | None) -> tuple[float, float | None]:
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
