"""Decode rate of the engine beside ``transformers``' ``generate``, same model, same run, interleaved.

python -m benchmarks.decode_rate --record benchmarks/results/decode_rate.json
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common.cases import Benchmark, Trials
from benchmarks.common.engine_run import request
from benchmarks.common.models import SMOLLM_135M, random_llama
from benchmarks.common.timing import seconds
from omniserve import Engine, EngineConfig, ExecutionConfig

RATE = Benchmark("decode_rate")


def prompts_of(batch: int, prompt: int) -> torch.Tensor:
    """Return prompts that differ, ``[batch, prompt]``."""
    return torch.arange(1, prompt + 1).repeat(batch, 1) + torch.arange(batch)[:, None]


def generate(model: Any, batch: int, prompt: int, output: int, **options: Any) -> None:
    """Let ``transformers`` serve a batch."""
    ids = prompts_of(batch, prompt).to(model.device)
    lengths = {"max_new_tokens": output, "min_new_tokens": output}
    model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths, **options)


def serve_engine(engine: Engine, batch: int, prompt: int, output: int) -> None:
    """Let the engine serve as many requests of these lengths."""
    engine.generate([request(f"ls{i}", prompt, output) for i in range(batch)])


def decode_rate(serve: Callable[[int], object], batch: int, output: int) -> float:
    """Return tokens a second between two runs that differ in output length (``output`` and 1): prefill cancels out."""
    short_s, long_s = (seconds(functools.partial(serve, count)) for count in (1, output))
    return batch * (output - 1) / (long_s - short_s)


@RATE.case(
    batches=[1, 8, 32], prompt=32, output=33, repeats=5, no_compile=False,
    tiny={"batches": [1, 2], "output": 3, "repeats": 1, "no_compile": True},
)  # fmt: skip
def decode(args: argparse.Namespace) -> Trials:
    """Decode rate of the engine beside ``transformers``' ``generate``, same model.

    A model with random bf16 weights in SmolLM-135M's shape, in the dtype that ``--dtype auto`` takes on this CPU, on
    both sides; greedy.
    """
    plain = random_llama(**SMOLLM_135M)
    config = EngineConfig(
        device_kv_bytes=256 << 20, host_kv_bytes=0, execution=ExecutionConfig(compile=not args.no_compile)
    )

    def rate(serve: Callable[[int], object], batch: int) -> dict[str, float]:
        tokens_per_s = decode_rate(serve, batch, args.output)
        return {"tokens_per_s": tokens_per_s, "tpot_ms": 1e3 * batch / tokens_per_s}

    with Engine(random_llama(**SMOLLM_135M), config) as engine:
        for batch in args.batches:
            yield (
                str(batch),
                {
                    "generate": functools.partial(rate, functools.partial(generate, plain, batch, args.prompt), batch),
                    "engine": functools.partial(
                        rate, functools.partial(serve_engine, engine, batch, args.prompt), batch
                    ),
                },
            )


if __name__ == "__main__":
    sys.exit(RATE.main())
