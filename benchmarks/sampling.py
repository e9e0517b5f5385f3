"""Measures what sampling takes a step: temperature alone and with each filter, by vocabulary and by rows.

    python -m benchmarks.sampling --record benchmarks/results/sampling.json

Milliseconds from logits to tokens on this machine's CPU; bf16 logits, normal with a standard deviation of 3. All cases
take turns, so that a change of the machine's speed is in each of them.
"""

from __future__ import annotations

import functools
import statistics
from typing import Any

import torch

from benchmarks.common.record import write_record
from benchmarks.common.terminal import argument_parser
from benchmarks.common.timing import in_turn, seconds
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
    parser = argument_parser(
        __doc__, "sampling", vocabulary=([49152, 128256], "SmolLM's, Llama 3's"), rows=[1, 8, 32], repeats=9,
    )  # fmt: skip
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
    calls = {
        case: functools.partial(seconds, functools.partial(sampler.sample, logits_RV, names))
        for case, (sampler, logits_RV, names) in cases.items()
    }
    results = {case: {"ms": 1e3 * statistics.median(times)} for case, times in in_turn(calls, args.repeats).items()}
    for case, figures in results.items():
        print(f"  {case:40s} {figures['ms']:8.2f} ms")
    write_record(args.record, name="sampling", config=vars(args), seed=0, results=results)


if __name__ == "__main__":
    main()
