"""Decode rate of the engine beside ``transformers``' ``generate``, same model, same run, interleaved.

    python -m benchmarks.decode_rate --record benchmarks/results/decode_rate.json

A model with random bf16 weights in SmolLM-135M's shape, in the dtype that ``--dtype auto`` takes on this CPU, on both
sides; greedy; 32 prompt tokens.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common.engine_run import request
from benchmarks.common.models import SMOLLM_135M, random_llama
from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser
from benchmarks.common.timing import in_turn, median_ratio, seconds
from omniserve import Engine, EngineConfig, ExecutionConfig


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


def main() -> None:
    parser = argument_parser(
        __doc__, "decode_rate", batches=[1, 8, 32], prompt=32, output=33, repeats=5, no_compile=False,
    )  # fmt: skip
    args = parser.parse_args()
    plain = random_llama(**SMOLLM_135M)
    config = EngineConfig(
        device_kv_bytes=256 << 20, host_kv_bytes=0, execution=ExecutionConfig(compile=not args.no_compile)
    )
    results = {}
    with Engine(random_llama(**SMOLLM_135M), config) as engine:
        for batch in args.batches:
            serves: dict[str, Callable[[int], object]] = {
                "generate": functools.partial(generate, plain, batch, args.prompt),
                "engine": functools.partial(serve_engine, engine, batch, args.prompt),
            }
            rates = in_turn(
                {name: functools.partial(decode_rate, serve, batch, args.output) for name, serve in serves.items()},
                args.repeats,
            )
            medians = {name: statistics.median(values) for name, values in rates.items()}
            ratio = median_ratio(rates["engine"], rates["generate"])
            results[str(batch)] = {"tokens_per_s": medians, "ratio": ratio, "raw": rates}
            print(
                f"batch {batch:3d}: generate {medians['generate']:7.1f} tok/s  engine {medians['engine']:7.1f} tok/s  "
                f"ratio {ratio:.2f}  (TPOT {1e3 * batch / medians['engine']:.1f} ms)"
            )
    config_record = vars(args) | {"model": SMOLLM_135M, "threads": torch.get_num_threads()}
    write_record(args.record, name="decode_rate", config=config_record, seed=0, results=results)


if __name__ == "__main__":
    main()
