"""What sampling takes a step: temperature alone and with each filter, by vocabulary and by rows.

    python -m benchmarks.sampling --record benchmarks/results/sampling.json

Milliseconds from logits to tokens on this machine's CPU; bf16 logits, normal with a standard deviation of 3. All cases
take turns, so that a change of the machine's speed is in each of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.record import write_record
from omniserve import SamplingParams
from omniserve.sampling.sampler import Sampler

FILTERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.6},
    "top_p 0.9": {"temperature": 0.6, "top_p": 0.9},
    "top_k 50": {"temperature": 0.6, "top_k": 50},
    "min_p 0.05": {"temperature": 0.6, "min_p": 0.05},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[49_152, 128_256], help="SmolLM's, Llama 3's")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--record", type=Path, default=Path(".cache/sampling.json"))
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    cases: dict[str, tuple[Sampler, torch.Tensor, list[str]]] = {}
    for vocab_size in args.vocabulary:
        for rows in args.rows:
            logits_RV = (3 * torch.randn(rows, vocab_size, generator=generator)).bfloat16()
            names = [str(row) for row in range(rows)]
            for label, settings in FILTERS.items():
                sampler = Sampler(vocab_size=vocab_size, device=torch.device("cpu"), seed=0)
                for row, name in enumerate(names):
                    sampler.add(name, SamplingParams(**settings, seed=row), [1])
                cases[f"{vocab_size} tokens, {rows} rows, {label}"] = sampler, logits_RV, names
    seconds: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(args.repeats + 1):
        for case, (sampler, logits_RV, names) in cases.items():
            began_s = time.perf_counter()
            sampler.sample(logits_RV, names)
            seconds[case].append(time.perf_counter() - began_s)
    results = {case: {"ms": 1e3 * statistics.median(times[1:])} for case, times in seconds.items()}
    for case, figures in results.items():
        print(f"  {case:40s} {figures['ms']:8.2f} ms")
    write_record(args.record, name="sampling", config=vars(args), seed=0, results=results)


if __name__ == "__main__":
    main()
