"""Measures a step's time outside of kernels: scheduling, tensors of the plan, layers' calls, sampling.

    python -m benchmarks.step_overhead --record benchmarks/results/step_overhead.json

The model has SmolLM-135M's depth and almost no width, so what is left of a step is overhead.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import omniserve.runner.layer_loop
from benchmarks.common.engine_run import request
from benchmarks.common.models import SMOLLM_135M, random_llama
from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser
from omniserve import Engine, EngineConfig

NARROW = SMOLLM_135M | {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip


def timed(owner: Any, name: str, samples: list[float]) -> None:
    """Replace a method or function by one that also records its time."""
    inner: Callable[..., Any] = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            samples.append(time.perf_counter() - began_s)

    setattr(owner, name, wrapper)


def measure(num_requests: int, num_steps: int) -> dict[str, float]:
    """Return the median microseconds of each part of a decode step with ``num_requests`` requests."""
    model = random_llama(**NARROW)
    config = EngineConfig(device_kv_bytes=256 << 20, host_kv_bytes=0, max_num_seqs=num_requests)
    samples: dict[str, list[float]] = defaultdict(list)
    with Engine(model, config) as engine:
        for i in range(num_requests):
            engine.add(request(f"ls{i}", 16, num_steps + 20))
        for _ in range(10):  # prefill, compilation
            engine.step()
        original = omniserve.runner.layer_loop.make_step_inputs
        try:
            timed(engine.scheduler, "schedule", samples["schedule"])
            timed(engine.scheduler, "update", samples["update"])
            timed(omniserve.runner.layer_loop, "make_step_inputs", samples["step inputs"])
            timed(engine.runner, "_run_layers", samples["layers"])
            timed(engine.runner._sampler, "launch", samples["sample"])
            timed(engine.runner, "collect", samples["collect"])
            timed(engine, "step", samples["step"])
            for _ in range(num_steps):
                engine.step()
        finally:
            omniserve.runner.layer_loop.make_step_inputs = original
    return {part: 1e6 * statistics.median(times) for part, times in samples.items()}


def main() -> None:
    parser = argument_parser(__doc__, "step_overhead", requests=[1, 8, 64], steps=200)
    args = parser.parse_args()
    results = {}
    print("median microseconds of a decode step, 30 layers of hidden size 64")
    for num_requests in args.requests:
        parts = measure(num_requests, args.steps)
        rest = parts["step"] - sum(value for part, value in parts.items() if part != "step")
        results[str(num_requests)] = parts | {"rest": rest}
        cells = "  ".join(f"{part} {value:.0f}" for part, value in results[str(num_requests)].items())
        print(f"  {num_requests:4d} requests: {cells}  ({parts['layers'] / 30:.0f} per layer)")
    write_record(args.record, name="step_overhead", config=vars(args), seed=0, results=results)


if __name__ == "__main__":
    main()
