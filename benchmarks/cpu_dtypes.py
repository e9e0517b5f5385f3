"""What a step takes on this CPU in bf16, in fp32, and in fp32 with weights that came from bf16.

    python -m benchmarks.cpu_dtypes --record benchmarks/results/cpu_dtypes.json

Random weights in SmolLM-135M's shape, one engine each in this process; the engines take turns, step by step, and the
table has medians. ``--dtype auto`` serves a bf16 model as the third where the CPU has no bf16 products.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.models import SMOLLM_135M, random_llama
from benchmarks.common.record import write_record
from omniserve import Engine, EngineConfig, Request, SamplingParams

MODELS = {
    "bf16": lambda: random_llama(dtype=torch.bfloat16, **SMOLLM_135M),
    "fp32": lambda: random_llama(dtype=torch.float32, **SMOLLM_135M),
    "fp32 of bf16 weights": lambda: random_llama(dtype=torch.bfloat16, **SMOLLM_135M).float(),
}
WARM_UP_STEPS = 3


def step_ms(engine: Engine) -> float:
    began_s = time.perf_counter()
    engine.step()
    return 1e3 * (time.perf_counter() - began_s)


def begin(engine: Engine, requests: int, prompt: int, output: int) -> None:
    """Add requests of equal length; nothing else may be running."""
    for i in range(requests):
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        engine.add(Request(prompt_token_ids=[1 + i] * prompt, sampling=sampling))


def decode_ms(engines: dict[str, Engine], rows: int, steps: int) -> dict[str, list[float]]:
    """Return what steps of so many decoding requests take."""
    for engine in engines.values():
        begin(engine, rows, 8, WARM_UP_STEPS + steps + 1)
        for _ in range(WARM_UP_STEPS):
            engine.step()
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(steps):
        for name, engine in engines.items():
            times[name].append(step_ms(engine))
    for engine in engines.values():
        while engine.has_unfinished:
            engine.step()
    return times


def prompt_ms(engines: dict[str, Engine], prompt: int, repeats: int) -> dict[str, list[float]]:
    """Return what the one step of a prompt takes."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for repeat in range(repeats + 1):
        for name, engine in engines.items():
            begin(engine, 1, prompt, 1)
            ms = step_ms(engine)
            if repeat:
                times[name].append(ms)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="decoding requests")
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512], help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--repeats", type=int, default=5, help="of a prompt")
    parser.add_argument("--record", type=Path, default=Path(".cache/cpu_dtypes.json"))
    args = parser.parse_args()
    config = EngineConfig(device_kv_bytes=256 << 20, host_kv_bytes=0, scheduler="fcfs")
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(Engine(make(), config)) for name, make in MODELS.items()}
        cases = {f"{rows} decodes": lambda rows=rows: decode_ms(engines, rows, args.steps) for rows in args.rows}
        cases |= {f"prompt of {n}": lambda n=n: prompt_ms(engines, n, args.repeats) for n in args.prompts}
        print(f"{'ms a step':16s}" + "".join(f"{name:>22}" for name in MODELS))
        for case, measure in cases.items():
            raw = measure()
            medians = {name: statistics.median(times) for name, times in raw.items()}
            print(f"{case:16s}" + "".join(f"{ms:22.1f}" for ms in medians.values()), flush=True)
            results[case] = {"ms": medians, "raw_ms": raw}
    write_record(
        args.record, name="cpu_dtypes", config=vars(args) | {"model": SMOLLM_135M}, seed=0, results=results
    )  # fmt: skip


if __name__ == "__main__":
    main()
