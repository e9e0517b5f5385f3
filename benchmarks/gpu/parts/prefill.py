"""Prompts, as shares of what the matrix unit does."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.bench import Bench, Measured
from benchmarks.gpu.clock import seconds
from benchmarks.gpu.engines import config_of, open_engine, request
from benchmarks.gpu.models import LLAMA_8B, Shape
from benchmarks.gpu.table import Goal
from omniserve import Engine
from omniserve.spec import ModelSpec

GOAL = Goal(at_least=0.6)
_REPEATS = 5


def run(bench: Bench) -> None:
    """Time prompts that are one step each, and one in pieces."""
    model = bench.shelf.patched(LLAMA_8B)
    prompts = (32, 64) if bench.dry else (2048, 8192)
    time_prompts(bench, model, LLAMA_8B, prompts)
    time_prompts(bench, model, LLAMA_8B, prompts[-1:], chunk=prompts[0])


def time_prompts(bench: Bench, model: Any, shape: Shape, prompts: Sequence[int], *, chunk: int | None = None) -> None:
    """Put a row for each length into the table.

    Args:
        bench: The part's.
        model: A patched model.
        shape: Its.
        prompts: Lengths in tokens.
        chunk: Tokens a step; None: all at once.
    """
    spec: ModelSpec = model.omniserve.spec
    longest = max(prompts)
    config = config_of(
        model, scheduler="sarathi", host_kv_bytes=0, device_kv_bytes=(longest // 64 + 4) * spec.kv_block_bytes(64),
        max_model_len=longest + 2, max_step_tokens=chunk or longest, ls_reserve_fraction=0.0,
    )  # fmt: skip
    with open_engine(model, config) as engine:
        for prompt in prompts:
            name = f"{bench.name_of(shape)}, prompt of {prompt} tokens" + (f" in steps of {chunk}" if chunk else "")
            bench.take(
                name, "TFLOP/s",
                functools.partial(_rate, bench, engine, model, prompt),
                floor=bench.limits.matmul_flops / 1e12, goal=GOAL,
            )  # fmt: skip


def flops(model: Any, tokens: int) -> float:
    """Return the floating-point operations of a prompt: every weight of the layers, causal attention, one row's logits.

    Args:
        model: A patched model.
        tokens: Of the prompt.
    """
    spec: ModelSpec = model.omniserve.spec
    outer = {id(model.get_output_embeddings().weight), id(model.get_input_embeddings().weight)}
    in_layers = sum(p.numel() for p in model.parameters() if id(p) not in outer)
    attention = 2 * spec.num_layers * spec.num_heads * spec.head_size * tokens * (tokens + 1)
    return 2.0 * in_layers * tokens + attention + 2.0 * spec.vocab_size * spec.hidden_size


def _rate(bench: Bench, engine: Engine, model: Any, prompt: int) -> Measured:
    times_s = []
    for i in range(_REPEATS + 2):
        engine.add(request(f"ls{i}", prompt, 1, engine.spec.vocab_size))

        def whole() -> None:
            while engine.has_unfinished:
                engine.step()

        times_s.append(seconds(whole, bench.device))
    taken_s = statistics.median(times_s[2:])
    details = {"seconds": times_s[2:], "tokens_per_s": prompt / taken_s}
    return Measured(value=flops(model, prompt) / taken_s / 1e12, note=f"{1e3 * taken_s:.4g} ms", details=details)
