"""Decode steps and prompts of a known model's shape, beside memory bandwidth and matrix rate; transformers' own.

A decode step's limit is the time that reading weights and KV takes, a prompt's the rate of one large product. Both are
measured in the same run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import GenerationConfig

from benchmarks.common.engine_run import request
from benchmarks.common.timing import seconds, wait_for
from benchmarks.decode_rate import decode_rate, generate, prompts_of
from benchmarks.gpu.engines import (
    LLAMA_8B,
    QWEN_32B,
    TINY,
    config_of,
    drain,
    kv_token_bytes,
    open_decoding,
    open_engine,
    patched_model,
    random_model,
    reclaim_memory,
    step_ms,
    weight_bytes,
)
from benchmarks.gpu.script import Case, NotHere, Script

MODES: dict[str, dict[str, Any]] = {
    "no step graphs": {"step_graphs": "off"},
    "no async steps": {"async_steps": False},
    "neither": {"step_graphs": "off", "async_steps": False},
}
"""Settings for other ways to run the same steps."""
_GENERATED = 33
BATCHES = (256, 128, 64, 32, 8, 1)
"""Largest first: the others are what is left of it when requests are aborted."""


def llama(script: Script) -> None:
    model, name = patched_model(LLAMA_8B, script), TINY.name if script.dry else LLAMA_8B.name
    batches, few, prompts, chunk = list(BATCHES), [32, 8], [512, 2048, 8192], 2048
    if script.dry:
        batches, few, prompts, chunk = [4, 1], [4, 1], [32, 64], 32
    time_batches(script, model, name, batches)
    time_prompts(script, model, name, prompts)
    time_prompts(script, model, name, prompts[-1:], chunk=chunk)
    for mode in MODES:
        time_batches(script, model, name, few, mode)


def qwen(script: Script) -> None:
    model, name = patched_model(QWEN_32B, script), TINY.name if script.dry else QWEN_32B.name
    time_batches(script, model, name, (4, 1) if script.dry else BATCHES)
    time_prompts(script, model, name, (32, 64) if script.dry else (512, 2048))


def time_batches(script: Script, model: Any, name: str, batches: Sequence[int], mode: str | None = None) -> None:
    """Time decode steps of each batch, the largest that fits first; without a mode, how idle the GPU is, too."""
    context, steps = (40, 5) if script.dry else (1024, 40)
    output = (len(batches) + 1) * (steps + 16)
    label = "" if mode is None else f", {mode}"
    script.limits.copy_bytes_per_s  # noqa: B018 - it takes memory: measured before the engine has it
    reclaim_memory(script.device)
    free = torch.cuda.mem_get_info(script.device)[0] if script.on_gpu else 1 << 40
    most = (0.92 * free - (2 << 30)) / ((context + output + 64) * kv_token_bytes(model))
    fitting = [batch for batch in batches if batch < most]
    for batch in set(batches) - set(fitting):
        with script.case(f"{name}, batch {batch}, {context} tokens{label}"):
            raise NotHere("its KV does not fit beside the weights")
    with script.case(f"{name}: engine made, first step over{label}") as made:
        if not fitting:
            raise NotHere("no batch fits")
        began_s, running = time.perf_counter(), fitting[0]
        execution = MODES[mode] if mode is not None else {}
        with open_decoding(model, batch=running, context=context, output=output, execution=execution) as engine:
            engine.step()
            wait_for(script.device)
            made.figure(time.perf_counter() - began_s, "s")
            for batch in fitting:
                for i in range(batch, running):
                    engine.abort(f"ls{i}")
                running = batch
                case_name = f"{name}, batch {batch}, {context} tokens{label}"
                with script.case(case_name) as case:
                    middle = context + engine.stats().steps + steps // 2  # it grows
                    read = weight_bytes(model) + batch * middle * kv_token_bytes(model)
                    taken_ms, walls_ms = step_ms(engine, steps)
                    case.figure(
                        taken_ms, "ms", limit=1e3 * read / script.limits.copy_bytes_per_s, at_most=1.25,
                        bytes_read=read, model=name, step={"kind": "decode", "batch": batch, "context": context},
                        step_ms=taken_ms, **walls_ms,
                    )  # fmt: skip
                if mode is None:
                    with script.case(f"{case_name}: GPU idle") as case:
                        script.needs_gpu()
                        idle, kernels = idle_share(engine.step, script.device, count=8)
                        note = f"{kernels} kernels a step"
                        case.figure(idle, "of the time", at_most=0.03, note=note, kernels=kernels)
            drain(engine, [f"ls{i}" for i in range(running)])


def time_prompts(script: Script, model: Any, name: str, prompts: Sequence[int], *, chunk: int | None = None) -> None:
    """Time prompts of these lengths, in one step each or in steps of ``chunk`` tokens."""
    longest = max(prompts)
    config = config_of(
        model, scheduler="sarathi", host_kv_bytes=0, device_kv_bytes=(longest + 256) * kv_token_bytes(model),
        max_model_len=longest + 2, max_num_batched_tokens=chunk or longest,
        scheduler_options={"ls_reserve_fraction": 0.0},
    )  # fmt: skip
    script.limits.matmul_flops  # noqa: B018 - as above
    with open_engine(model, config) as engine:

        def serve() -> None:
            while engine.has_unfinished:
                engine.step()

        for prompt in prompts:
            with script.case(f"{name}, prompt of {prompt} tokens" + (f" in steps of {chunk}" if chunk else "")) as case:
                times_s = []
                for i in range(7):
                    engine.add(request(f"ls{i}", prompt, 1))
                    times_s.append(seconds(serve, script.device))
                taken_s = statistics.median(times_s[2:])
                case.figure(
                    flops(model, prompt) / taken_s / 1e12, "TFLOP/s", limit=script.limits.matmul_flops / 1e12,
                    at_least=0.6, note=f"{1e3 * taken_s:.4g} ms", seconds=times_s[2:], tokens_per_s=prompt / taken_s,
                    model=name, step_ms=1e3 * taken_s,
                    step={"kind": "several" if chunk else "chunk", "num_tokens": prompt, "context": 0},
                )  # fmt: skip


def flops(model: Any, tokens: int) -> float:
    """Return the operations of a patched model's prompt: the layers' weights, causal attention, one row's logits."""
    spec = model.omniserve.spec
    outer = {id(model.get_output_embeddings().weight), id(model.get_input_embeddings().weight)}
    in_layers = sum(p.numel() for p in model.parameters() if id(p) not in outer)
    attention = 2 * spec.num_layers * spec.num_heads * spec.head_size * tokens * (tokens + 1)
    return 2.0 * in_layers * tokens + attention + 2.0 * spec.vocab_size * spec.hidden_size


def idle_share(run: Callable[[], object], device: torch.device, *, count: int) -> tuple[float, int]:
    """Return the share of the time, from the first kernel of ``count`` calls to the last, in which none ran, and the
    kernels a call. Kernels that run at a time are rare here, and count twice.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as trace:  # to trace the CPU would slow the host down
        for _ in range(count):
            run()
        wait_for(device)
    # Not `is`: the profiler makes its own instances.
    spans = [event.time_range for event in trace.events() or () if event.device_type == DeviceType.CUDA]
    if not spans:
        raise RuntimeError("the profiler saw no kernel")
    whole_us = max(span.end for span in spans) - min(span.start for span in spans)
    return max(0.0, 1 - sum(span.elapsed_us() for span in spans) / whole_us), len(spans) // count


def transformers(script: Script) -> None:
    """Time transformers' own ways to decode: a static cache compiled, and continuous batching."""
    model = random_model(TINY if script.dry else LLAMA_8B, script.device)
    static: dict[str, Any] = {"cache_implementation": "static", "pad_token_id": 0, "disable_compile": not script.on_gpu}
    batches, context = ((2,), 40) if script.dry else ((8, 1, 32), 1024)
    for batch in batches:
        name = f"transformers, batch {batch}, {context} tokens"
        with script.case(f"{name}: generate_batch") as case:
            script.needs_gpu()
            if not hasattr(model, "generate_batch"):
                raise NotHere("this transformers has no generate_batch")
            time_token(case, partial(generate_batch, model, batch, context), batch)
        with script.case(f"{name}: generate, static cache, compiled") as case:
            time_token(case, partial(generate, model, batch, context, **static), batch)


def time_token(case: Case, serve: Callable[[int], object], batch: int) -> None:
    """Set the milliseconds of a token more, all requests decoding; the first runs compile and do not count."""
    times_ms = [1e3 * batch / decode_rate(serve, batch, _GENERATED) for _ in range(4)][1:]
    case.figure(statistics.median(times_ms), "ms", times_ms=times_ms)


def generate_batch(model: Any, batch: int, context: int, output: int) -> None:
    """Let continuous batching serve a batch."""
    config = GenerationConfig(max_new_tokens=output, do_sample=False, pad_token_id=0, eos_token_id=-1)
    prompts = prompts_of(batch, context).tolist()
    outputs = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
    missing = [len(done.generated_tokens) for done in outputs.values() if len(done.generated_tokens) != output]
    if missing or len(outputs) != batch:
        raise RuntimeError(f"some of {batch} requests did not get their {output} tokens: {missing}; see the log")
