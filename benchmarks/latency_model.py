"""Measures how well each latency model predicts an engine's steps: fitted on one load, tested on another.

    python -m benchmarks.latency_model --trace azure.csv --record benchmarks/results/latency_model.json

A model is profiled, each latency model is fitted to 100 steps of a synthetic load, and predicts 1,000 steps of another:
a piece of a trace, or a synthetic load of other lengths and rates. ``device``: the host tier is off; ``tiers``: device
memory is short, and best-effort requests decode on the host. ``learning`` is the same model behind CorrectedModel,
which sees each step after predicting it, as in the engine.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.models import MODELS
from benchmarks.common.record import write_record
from benchmarks.common.summary import without_samples
from benchmarks.common.terminal import argument_parser
from omniserve import Engine, EngineConfig, Request, SamplingParams
from omniserve.core.request import ServiceClass
from omniserve.latency import (
    LATENCY_MODELS,
    Accuracy,
    CorrectedModel,
    Predictor,
    Profile,
    StepSample,
    accuracy_of,
    accuracy_of_errors,
)
from omniserve.profiling import Arrival, measure_steps, mixed_load, profile_model
from omniserve.profiling.summary import summarise
from omniserve.simulate.load import read_trace

FIT_SEED, TEST_SEED = 11, 5
BLOCKS = {"device": (160, 0), "tiers": (32, 256)}
NUM_FIT = 100


def trace_load(
    path: Path, seed: int, *, num_steps: int, vocab_size: int, max_prompt: int, max_output: int, mean_active: float
) -> list[Arrival]:
    """Cut a piece of a trace, at a random place, and scale it to a small model.

    Lengths are divided so that the trace's 95th percentiles become ``max_prompt`` and ``max_output``, and cut off
    there; spacing is stretched so that about ``mean_active`` requests of each class are there at a time, and cut off at
    ``num_steps``. Classes and tokens are drawn. The trace is a CSV, also gzipped, with arrival_s, input_tokens and
    output_tokens.
    """
    rows = read_trace(path)
    if len(rows) < 100:
        raise ValueError(f"{path} has {len(rows)} requests; a load is drawn from 100 or more")
    rng = random.Random(seed)
    p95 = int(0.95 * (len(rows) - 1))
    prompt_scale = max(1.0, sorted(row.input_tokens for row in rows)[p95] / max_prompt)
    output_scale = max(1.0, sorted(row.output_tokens for row in rows)[p95] / max_output)
    mean_output = sum(min(max_output, row.output_tokens / output_scale) for row in rows) / len(rows)
    per_second = len(rows) / (rows[-1].arrival_s - rows[0].arrival_s)
    steps_per_second = per_second * mean_output / (2 * mean_active)
    first = rng.randrange(len(rows) // 2)
    arrivals: list[Arrival] = []
    for row in rows[first:]:
        at_step = int((row.arrival_s - rows[first].arrival_s) * steps_per_second)
        if at_step >= num_steps:
            break
        prompt_tokens = max(1, min(max_prompt, round(row.input_tokens / prompt_scale)))
        max_tokens = max(1, min(max_output, round(row.output_tokens / output_scale)))
        request = Request(
            prompt_token_ids=rng.choices(range(vocab_size), k=prompt_tokens),
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            service_class=rng.choice(tuple(ServiceClass)),
        )
        arrivals.append(Arrival(at_step=at_step, request=request))
    return arrivals


def measure(engine: Engine, load: Sequence[Arrival], count: int, limit_s: float) -> list[StepSample]:
    """Return up to ``count`` samples, as many as there are within ``limit_s``."""
    deadline_s = time.monotonic() + limit_s
    return measure_steps(engine, load, max_samples=count, go_on=lambda: time.monotonic() < deadline_s)


def learning_accuracy(model: Predictor, samples: Sequence[StepSample]) -> Accuracy:
    """Return the accuracy of predictions made before each step by a CorrectedModel that has seen those before it."""
    corrected = CorrectedModel(model)
    errors, now_s = [], 0.0
    for sample in samples:
        errors.append(abs(corrected.step_s(sample.features) - sample.seconds) / sample.seconds)
        now_s += sample.seconds
        corrected.observe(sample.features, sample.seconds, now_s)
    return accuracy_of_errors(errors)


def compare(profile: Profile, fit: Sequence[StepSample], test: Sequence[StepSample]) -> dict[str, Any]:
    """Fit each latency model, test it, and print a line for it."""
    results: dict[str, Any] = {}
    for name in sorted(LATENCY_MODELS.names(), key="omniserve".__eq__):
        model = LATENCY_MODELS.get(name).from_profile(dataclasses.replace(profile, steps=tuple(fit[:NUM_FIT])))
        result = results[name] = {"tested": accuracy_of(model, test), "learning": learning_accuracy(model, test)}
        print(f"    {name:<10} tested {result['tested']}  learning {result['learning']}")
    return results


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Profile a model and compare the latency models on it."""
    model = MODELS[name]()
    print(f"{name}")
    base = EngineConfig(device_kv_bytes=512 << 20, host_kv_bytes=512 << 20)
    profile = profile_model(model, base, time_limit_s=args.profile_time)
    print("    " + summarise(profile).replace("\n", "\n    "))
    spec = model.__dict__["omniserve"].spec
    block_bytes = spec.kv_block_bytes(base.block_size)
    results: dict[str, Any] = {"profile": profile}
    for load, (device_blocks, host_blocks) in BLOCKS.items():
        config = dataclasses.replace(
            base, device_kv_bytes=device_blocks * block_bytes, host_kv_bytes=host_blocks * block_bytes
        )
        with Engine(model, config) as engine:
            sizes = {"num_steps": 10 * NUM_FIT, "vocab_size": spec.vocab_size, "max_prompt": 600, "max_output": 48}
            measure(engine, mixed_load(FIT_SEED + 1, **sizes), 20, args.load_time)  # warms the engine up
            fit = measure(engine, mixed_load(FIT_SEED, **sizes), NUM_FIT, args.load_time)
            sizes = {"num_steps": 10 * args.steps, "vocab_size": spec.vocab_size, "max_output": 96}
            if args.trace is None:
                tested = mixed_load(TEST_SEED, max_prompt=300, mean_active=8, **sizes)
            else:
                tested = trace_load(args.trace, TEST_SEED, max_prompt=400, mean_active=10, **sizes)
            test = measure(engine, tested, args.steps, args.load_time)
        print(f"  {load}: {len(fit)} steps to fit, {len(test)} to test, ", end="")
        print(f"{1e3 * statistics.mean(s.seconds for s in test):.1f} ms each on average")
        results[load] = {"models": compare(profile, fit, test), "fit": fit, "test": test}
    return results


def main() -> None:
    parser = argument_parser(
        __doc__, "latency_model", steps=(1000, "to test on"), profile_time=(60.0, "seconds of profiling"),
        load_time=(600.0, "most seconds of a load"),
    )  # fmt: skip
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--trace", type=Path, help="CSV with arrival_s, input_tokens, output_tokens to test on")
    args = parser.parse_args()
    kept, raw = without_samples({name: run(name, args) for name in args.models}, "profile", "fit", "test")
    write_record(args.record, name="latency_model", config=vars(args), seed=TEST_SEED, results=kept, raw=raw)
    print(f"record: {args.record}")


if __name__ == "__main__":
    main()
