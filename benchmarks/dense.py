"""Time the dense part of a step (no attention) for each way of running the halves, on a SmolLM-135M-shaped model.

    python -m benchmarks.dense --record benchmarks/results/dense.json

Variants are interleaved; the table shows medians. CPU time (all threads) is given beside wall time: on a machine that
does something else as well it is the steadier of the two. Weights are random; only shapes matter here.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common.arguments import argument_parser
from benchmarks.common.models import SMOLLM_135M, random_llama
from benchmarks.common.record import write_record
from benchmarks.common.timing import in_turn
from omniserve.launch.model_dtype import served_dtype
from omniserve.layers.patching import PatchedModel, patch

VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {"compile": False, "prepack": False},
    "compiled": {"compile": True, "prepack": False},
    "prepacked": {"compile": False, "prepack": True},
    "both": {"compile": True, "prepack": True},
}
MAX_LOGIT_ROWS = 8  # a chunked prefill needs the logits of few of its rows


def step(model: PatchedModel, num_tokens: int) -> None:
    """One step without attention: the queries stand in for its result."""
    ids = torch.arange(num_tokens)
    hidden = model.embed(ids, ids)
    cos, sin = model.rotary(ids) or (None, None)
    for layer in range(model.num_layers):
        q, _, _ = model.pre_attention(layer, hidden, cos, sin)
        hidden = model.post_attention(layer, q.flatten(1).contiguous(), hidden)
    model.logits(hidden[-MAX_LOGIT_ROWS:])


def measure(function: Callable[[], Any]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return {"wall_ms": (time.perf_counter() - wall) * 1e3, "cpu_ms": (time.process_time() - cpu) * 1e3}


def read_bandwidth(num_bytes: int = 1 << 29) -> float:
    """Bytes per second of summing a buffer larger than any cache; best of five."""
    buffer = torch.zeros(num_bytes // 8, dtype=torch.int64)
    return num_bytes / min(measure(buffer.sum)["wall_ms"] for _ in range(5)) * 1e3


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(arguments.threads)
    reference = random_llama(arguments.seed, **SMOLLM_135M)
    patched: dict[str, PatchedModel] = {}
    compile_s: dict[str, float] = {}
    for name, options in VARIANTS.items():
        model: Any = patch(random_llama(arguments.seed, **SMOLLM_135M), **options)
        patched[name] = model.omniserve
        compile_s[name] = measure(patched[name].warm_up)["wall_ms"] / 1e3

    samples: dict[str, dict[str, list[dict[str, float]]]] = {}
    for num_tokens in arguments.tokens:
        calls = {
            name: functools.partial(measure, functools.partial(step, model, num_tokens))
            for name, model in patched.items()
        }
        samples[str(num_tokens)] = in_turn(calls, arguments.repeats, warm_up=2)

    prompt = torch.arange(1, 33)[None]
    generate_ms = []
    for _ in range(3):
        short, long = (
            measure(lambda: reference.generate(prompt, max_new_tokens=count, do_sample=False, pad_token_id=0))  # noqa: B023
            for count in (2, 18)
        )
        generate_ms.append({key: (long[key] - short[key]) / 16 for key in long})
    num_bytes = sum(p.numel() * p.itemsize for p in reference.parameters())
    bandwidth = read_bandwidth()
    return {
        "warm_up_s": compile_s,
        "step_samples": samples,
        "hf_generate_step": generate_ms,
        "weight_bytes": num_bytes,
        "read_bytes_per_s": bandwidth,
        "read_floor_ms": num_bytes / bandwidth * 1e3,
    }


def table(record: dict[str, Any]) -> str:
    def cell(runs: list[dict[str, float]]) -> str:
        wall, cpu = (statistics.median(sample[key] for sample in runs) for key in ("wall_ms", "cpu_ms"))
        return f"{wall:9.1f} / {cpu:8.1f}"

    lines = ["ms a step, wall / CPU   " + "".join(f"{name:>22}" for name in VARIANTS)]
    for num_tokens, per_variant in record["step_samples"].items():
        lines.append(
            f"{num_tokens:>5} tokens           " + "".join(f"{cell(runs):>22}" for runs in per_variant.values())
        )
    lines.append(f"transformers generate(), batch 1, a token: {cell(record['hf_generate_step'])}")
    lines.append(f"reading the weights once: {record['read_floor_ms']:.1f} ms")
    lines.append("first use, s: " + ", ".join(f"{name} {value:.1f}" for name, value in record["warm_up_s"].items()))
    return "\n".join(lines)


def main() -> None:
    parser = argument_parser(__doc__, "dense", tokens=[1, 8, 64, 128, 512], repeats=9, seed=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    results = run(arguments)
    print(table(results))
    dtype = str(served_dtype(torch.bfloat16)).removeprefix("torch.")
    config = vars(arguments) | {"model": SMOLLM_135M, "dtype": dtype, "max_logit_rows": MAX_LOGIT_ROWS}
    write_record(arguments.record, name="dense", config=config, seed=arguments.seed, results=results)


if __name__ == "__main__":
    main()
