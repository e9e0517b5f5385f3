"""Decode rate of the engine beside ``transformers``' ``generate``, same model, same run, interleaved.

    python -m benchmarks.decode_rate --record benchmarks/results/decode_rate.json

A model with random bf16 weights in SmolLM-135M's shape, in the dtype that ``--dtype auto`` takes on this CPU, on both
sides; greedy; 32 prompt tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.models import SMOLLM_135M, random_llama
from benchmarks.common.record import write_record
from omniserve import Engine, EngineConfig, Request, SamplingParams


def time_generate(model: Any, batch: int, prompt: int, output: int) -> float:
    """Return seconds that ``model.generate`` takes for a batch."""
    ids = torch.arange(1, prompt + 1).repeat(batch, 1) + torch.arange(batch)[:, None]
    began_s = time.perf_counter()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=output, min_new_tokens=output, do_sample=False
    )
    return time.perf_counter() - began_s


def time_engine(engine: Engine, batch: int, prompt: int, output: int) -> float:
    """Return seconds that the engine takes for the same requests."""
    requests = [
        Request(
            prompt_token_ids=[1 + i + j for j in range(prompt)],
            sampling=SamplingParams(max_tokens=output, ignore_eos=True),
        )
        for i in range(batch)
    ]
    began_s = time.perf_counter()
    engine.generate(requests)
    return time.perf_counter() - began_s


def decode_rate(long_s: float, short_s: float, batch: int, output: int) -> float:
    """Tokens a second between two runs that differ only in output length (``output`` and 1): prefill cancels out."""
    return batch * (output - 1) / (long_s - short_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--output", type=int, default=33)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--record", type=Path, default=Path(".cache/decode_rate.json"))
    args = parser.parse_args()
    plain = random_llama(**SMOLLM_135M)
    config = EngineConfig(device_kv_bytes=256 << 20, host_kv_bytes=0, compile=not args.no_compile)
    results = {}
    with Engine(random_llama(**SMOLLM_135M), config) as engine:
        for batch in args.batches:
            rates: dict[str, list[float]] = {"generate": [], "engine": []}
            for repeat in range(args.repeats + 1):
                for name, run in (
                    ("generate", lambda n, b=batch: time_generate(plain, b, args.prompt, n)),
                    ("engine", lambda n, b=batch: time_engine(engine, b, args.prompt, n)),
                ):
                    short_s, long_s = run(1), run(args.output)
                    if repeat:  # the first one warms up
                        rates[name].append(decode_rate(long_s, short_s, batch, args.output))
            medians = {name: statistics.median(values) for name, values in rates.items()}
            ratio = statistics.median(e / g for e, g in zip(rates["engine"], rates["generate"], strict=True))
            results[str(batch)] = {"tokens_per_s": medians, "ratio": ratio, "raw": rates}
            print(
                f"batch {batch:3d}: generate {medians['generate']:7.1f} tok/s  engine {medians['engine']:7.1f} tok/s  "
                f"ratio {ratio:.2f}  (TPOT {1e3 * batch / medians['engine']:.1f} ms)"
            )
    config_record = vars(args) | {"model": SMOLLM_135M, "threads": torch.get_num_threads()}
    write_record(args.record, name="decode_rate", config=config_record, seed=0, results=results)


if __name__ == "__main__":
    main()
