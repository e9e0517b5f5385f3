"""Decode steps and prompts of a known model's shape, beside memory bandwidth and matrix rate.

A decode step's limit is the time that reading weights and KV takes, a prompt's the rate of one large product. Both are
measured in the same run.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.common.requests import request
from benchmarks.common.timing import seconds, wait_for
from benchmarks.gpu.engines import (
    MODES,
    config_of,
    drain,
    kv_token_bytes,
    open_decoding,
    open_engine,
    step_times,
    weight_bytes,
)
from benchmarks.gpu.models import LLAMA_8B, QWEN_32B, TINY, patched_model
from benchmarks.gpu.script import NotHere, Script, argument_parser
from benchmarks.gpu.timing import idle_share, reclaim_memory
from omniserve import Engine

SHAPES = {"llama": LLAMA_8B, "qwen": QWEN_32B}
BATCHES = (256, 128, 64, 32, 8, 1)
"""Largest first: the others are what is left of it when requests are aborted."""
_MEMORY_SHARE = 0.92
_REPEATS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama")
    args = parser.parse_args(arguments)
    script = Script(args.shape, args)
    shape = SHAPES[args.shape]
    name = TINY.name if script.dry else shape.name
    model = patched_model(shape, script)
    first, *others = MODES
    batches = (4, 1) if script.dry else BATCHES
    time_batches(script, model, name, batches, mode=first)
    is_llama = args.shape == "llama"
    prompts = (32, 64) if script.dry else (512, 2048, 8192) if is_llama else (512, 2048)
    time_prompts(script, model, name, prompts)
    if is_llama:
        time_prompts(script, model, name, prompts[-1:], chunk=32 if script.dry else 2048)
        for mode in others:
            time_batches(script, model, name, batches if script.dry else (32, 8), mode=mode)
    return script.end()


def time_batches(script: Script, model: Any, name: str, batches: Sequence[int], *, mode: str) -> None:
    """Time decode steps of each batch, the largest that fits first.

    Args:
        script: Gets the cases.
        model: A patched model.
        name: Its.
        batches: Largest first.
        mode: In ``MODES``; by the default one, how idle the GPU is meanwhile, too.
    """
    context, steps = (40, 5) if script.dry else (1024, 40)
    output = (len(batches) + 1) * (steps + 16)
    is_default = mode == next(iter(MODES))
    label = "" if is_default else f", {mode}"
    script.limits.copy_bytes_per_s  # noqa: B018 - it takes memory: measured before the engine has it
    reclaim_memory(script.device)
    fitting = [batch for batch in batches if _fits(script, model, batch, context + output)]
    for batch in set(batches) - set(fitting):
        with script.case(f"{name}, batch {batch}, {context} tokens{label}"):
            raise NotHere("its KV does not fit beside the weights")
    engine: Engine | None = None
    with ExitStack() as stack:
        with script.case(f"{name}: engine made, first step over{label}") as case:
            if not fitting:
                raise NotHere("no batch fits")
            began_s = time.perf_counter()
            engine = stack.enter_context(
                open_decoding(model, batch=fitting[0], context=context, output=output, mode=mode)
            )
            engine.step()
            wait_for(script.device)
            case.figure(time.perf_counter() - began_s, "s")
        if engine is None:
            return
        running = fitting[0]
        for batch in fitting:
            for i in range(batch, running):
                engine.abort(f"ls{i}")
            running = batch
            case_name = f"{name}, batch {batch}, {context} tokens{label}"
            with script.case(case_name) as case:
                middle = context + engine.stats().steps + steps // 2  # it grows
                read = weight_bytes(model) + batch * middle * kv_token_bytes(engine.spec)
                times = step_times(engine, steps)
                case.figure(
                    1e3 * times.mean_s, "ms", limit=1e3 * read / script.limits.copy_bytes_per_s, at_most=1.25,
                    wall_p50_ms=1e3 * times.p50_s, wall_p99_ms=1e3 * times.p99_s, bytes_read=read,
                    model=name, step={"kind": "decode", "batch": batch, "context": context}, step_ms=1e3 * times.mean_s,
                )  # fmt: skip
            if is_default:
                with script.case(f"{case_name}: GPU idle") as case:
                    if not script.on_gpu:
                        raise NotHere("needs a GPU")
                    idle, kernels = idle_share(engine.step, script.device, count=8)
                    case.figure(idle, "of the time", at_most=0.03, note=f"{kernels} kernels a step", kernels=kernels)
        drain(engine, [f"ls{i}" for i in range(running)])


def _fits(script: Script, model: Any, batch: int, tokens: int) -> bool:
    if not script.on_gpu:
        return True
    free, _ = torch.cuda.mem_get_info(script.device)
    return batch * (tokens + 64) * kv_token_bytes(model.omniserve.spec) < _MEMORY_SHARE * free - (2 << 30)


def time_prompts(script: Script, model: Any, name: str, prompts: Sequence[int], *, chunk: int | None = None) -> None:
    """Time prompts of these lengths, in one step each or in steps of ``chunk`` tokens."""
    longest, spec = max(prompts), model.omniserve.spec
    config = config_of(
        model, scheduler="sarathi", host_kv_bytes=0, device_kv_bytes=(longest // 64 + 4) * spec.kv_block_bytes(64),
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
                for i in range(_REPEATS + 2):
                    engine.add(request(f"ls{i}", prompt, 1, engine.spec.vocab_size))
                    times_s.append(seconds(serve, script.device))
                taken_s = statistics.median(times_s[2:])
                case.figure(
                    flops(model, prompt) / taken_s / 1e12, "TFLOP/s", limit=script.limits.matmul_flops / 1e12,
                    at_least=0.6, note=f"{1e3 * taken_s:.4g} ms", seconds=times_s[2:], tokens_per_s=prompt / taken_s,
                    model=name, step_ms=1e3 * taken_s,
                    step={"kind": "several" if chunk else "chunk", "num_tokens": prompt, "context": 0},
                )  # fmt: skip


def flops(model: Any, tokens: int) -> float:
    """Return the floating-point operations of a prompt: every weight of the layers, causal attention, one row's logits.

    Args:
        model: A patched model.
        tokens: Of the prompt.
    """
    spec = model.omniserve.spec
    outer = {id(model.get_output_embeddings().weight), id(model.get_input_embeddings().weight)}
    in_layers = sum(p.numel() for p in model.parameters() if id(p) not in outer)
    attention = 2 * spec.num_layers * spec.num_heads * spec.head_size * tokens * (tokens + 1)
    return 2.0 * in_layers * tokens + attention + 2.0 * spec.vocab_size * spec.hidden_size


if __name__ == "__main__":
    sys.exit(main())
