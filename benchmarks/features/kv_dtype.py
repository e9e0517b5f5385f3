"""KV of int8 on the device beside KV in the model's dtype: decode steps, prompts, and memory."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Literal

from benchmarks.common.cases import Arm, Trials
from benchmarks.common.models import random_llama
from benchmarks.features import FEATURES
from benchmarks.peers.model import SHAPES
from omniserve import EngineConfig, ExecutionConfig, patch
from omniserve.profiling.bench import ModuleBench

_KV_DTYPES: tuple[Literal["auto", "int8"], ...] = ("auto", "int8")


@FEATURES.case(
    models=(["tinyllama-1.1b-shape"], "shapes of random models"), num_requests=([8, 32], "requests that decode"),
    context=1024, chunk=(256, "tokens of a prompt that are computed behind as many"), steps=8, repeats=7,
    no_compile=False,
    tiny={"models": ["tiny"], "num_requests": [2], "context": 40, "chunk": 16, "steps": 1, "repeats": 1,
          "no_compile": True},
)  # fmt: skip
def kv_dtype(args: argparse.Namespace) -> Trials:
    """Decode steps of a random bf16 model with KV in bf16 and in int8, and the memory that the KV takes.

    Dense halves of all layers, then K, V and attention of all layers, then the choice of tokens, each as an engine on
    this machine's cores runs it; the weights push the KV out of the caches. ``prefill_ms`` is attention alone, for a
    chunk of a prompt.
    """
    for name in args.models:
        model = random_llama(**SHAPES[name])
        patched = patch(model, compile=not args.no_compile).omniserve
        for num_requests in args.num_requests:
            tokens = max(num_requests * (args.context + 64), 2 * args.chunk + 64)
            arms: dict[str, Arm] = {}
            for dtype in _KV_DTYPES:
                config = EngineConfig(device_kv_bytes=1 << 30, execution=ExecutionConfig(kv_dtype=dtype))
                bench = ModuleBench(patched, config, tokens)
                passes = (
                    bench.dense(num_requests),
                    bench.attention([(1, args.context)] * num_requests),
                    bench.head(num_requests),
                )
                prompt = bench.attention([(args.chunk, args.chunk)])
                num_bytes = bench.storage.k_LBKSH.nbytes + bench.storage.v_LBKSH.nbytes
                arms[dtype] = functools.partial(_figures, passes, prompt, num_requests, args.steps, num_bytes)
            yield f"{name}, {num_requests} requests", arms


def _figures(
    passes: tuple[Callable[[], object], ...],
    prompt: Callable[[], object],
    num_requests: int,
    steps: int,
    num_bytes: int,
) -> dict[str, float]:
    began_s, attention_s = time.perf_counter(), 0.0
    for _ in range(steps):
        for number, each in enumerate(passes):
            before_s = time.perf_counter()
            each()
            attention_s += (time.perf_counter() - before_s) * (number == 1)
    took_s, before_s = time.perf_counter() - began_s, time.perf_counter()
    prompt()
    return {
        "tokens_per_s": steps * num_requests / took_s, "attention_ms": 1e3 * attention_s / steps,
        "prefill_ms": 1e3 * (time.perf_counter() - before_s), "kv_mib": num_bytes / (1 << 20),
    }  # fmt: skip
