"""Measures a step on this CPU in bf16, in fp32, and in fp32 with weights that came from bf16.

    python -m benchmarks.cpu_dtypes --record benchmarks/results/cpu_dtypes.json

Random weights in SmolLM-135M's shape, one engine each in this process; the engines take turns, step by step, and the
table has medians. The third has its weights in bf16, too, and its activations in fp32.
"""

from __future__ import annotations

import functools
import statistics
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.common.engine_run import request
from benchmarks.common.models import SMOLLM_135M, random_llama
from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser
from benchmarks.common.timing import in_turn, seconds
from omniserve import Engine, EngineConfig

MODELS = {
    "bf16": lambda: random_llama(dtype=torch.bfloat16, **SMOLLM_135M),
    "fp32": lambda: random_llama(dtype=torch.float32, **SMOLLM_135M),
    "fp32 of bf16 weights": lambda: random_llama(dtype=torch.bfloat16, **SMOLLM_135M).float(),
}


def decode_s(engines: dict[str, Engine], rows: int, steps: int) -> dict[str, list[float]]:
    """Return what steps of so many decoding requests take."""
    for engine in engines.values():
        for i in range(rows):
            engine.add(request(f"ls{i}", 8, steps + 4))
    times = in_turn(
        {name: functools.partial(seconds, engine.step) for name, engine in engines.items()}, steps, warm_up=3
    )
    for engine in engines.values():
        while engine.has_unfinished:
            engine.step()
    return times


def prompt_s(engines: dict[str, Engine], prompt: int, repeats: int) -> dict[str, list[float]]:
    """Return what the one step of a prompt takes."""

    def serve(engine: Engine) -> float:
        engine.add(request("ls", prompt, 1))
        return seconds(engine.step)

    return in_turn({name: functools.partial(serve, engine) for name, engine in engines.items()}, repeats)


def main() -> None:
    parser = argument_parser(
        __doc__, "cpu_dtypes", rows=([1, 2, 4, 8, 16, 32], "decoding requests"),
        prompts=([128, 512], "tokens of a prompt"), steps=25, repeats=(5, "of a prompt"),
    )  # fmt: skip
    args = parser.parse_args()
    config = EngineConfig(device_kv_bytes=256 << 20, host_kv_bytes=0, scheduler="fcfs")
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(Engine(make(), config)) for name, make in MODELS.items()}
        cases = {f"{rows} decodes": functools.partial(decode_s, engines, rows, args.steps) for rows in args.rows}
        cases |= {f"prompt of {n}": functools.partial(prompt_s, engines, n, args.repeats) for n in args.prompts}
        print(f"{'ms a step':16s}" + "".join(f"{name:>22}" for name in MODELS))
        for case, measure in cases.items():
            raw = {name: [1e3 * taken_s for taken_s in times] for name, times in measure().items()}
            medians = {name: statistics.median(times) for name, times in raw.items()}
            print(f"{case:16s}" + "".join(f"{ms:22.1f}" for ms in medians.values()), flush=True)
            results[case] = {"ms": medians, "raw_ms": raw}
    write_record(args.record, name="cpu_dtypes", config=vars(args) | {"model": SMOLLM_135M}, seed=0, results=results)


if __name__ == "__main__":
    main()
