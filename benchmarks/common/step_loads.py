"""Loads for measured steps: requests with lengths and spacing of a recorded trace, in steps instead of seconds."""

from __future__ import annotations

import random
from pathlib import Path

from omniserve.core.request import Request, SamplingParams, ServiceClass
from omniserve.profiling import Arrival
from omniserve.simulate.load import read_trace


def trace_load(
    path: Path, seed: int, *, num_steps: int, vocab_size: int, max_prompt: int, max_output: int, mean_active: float
) -> list[Arrival]:
    """Cut a piece of a trace, at a random place, and scale it to a small model.

    Lengths are divided so that the trace's 95th percentiles become ``max_prompt`` and ``max_output``, and cut off
    there; spacing is stretched so that about ``mean_active`` requests of each class are there at a time, and cut off at
    ``num_steps``. Classes and tokens are drawn. The trace is a CSV, also gzipped, with arrival_s, input_tokens and
    output_tokens.
    """
    rows = [(row.arrival_s, row.input_tokens, row.output_tokens) for row in read_trace(path)]
    if len(rows) < 100:
        raise ValueError(f"{path} has {len(rows)} requests; a load is drawn from 100 or more")
    rng = random.Random(seed)
    prompt_scale = max(1.0, _percentile([row[1] for row in rows], 0.95) / max_prompt)
    output_scale = max(1.0, _percentile([row[2] for row in rows], 0.95) / max_output)
    mean_output = sum(min(max_output, row[2] / output_scale) for row in rows) / len(rows)
    per_second = len(rows) / (rows[-1][0] - rows[0][0])
    steps_per_second = per_second * mean_output / (2 * mean_active)
    first = rng.randrange(len(rows) // 2)
    arrivals: list[Arrival] = []
    for arrival_s, prompt, output in rows[first:]:
        at_step = int((arrival_s - rows[first][0]) * steps_per_second)
        if at_step >= num_steps:
            break
        prompt_tokens = max(1, min(max_prompt, round(prompt / prompt_scale)))
        request = Request(
            prompt_token_ids=rng.choices(range(vocab_size), k=prompt_tokens),
            sampling=SamplingParams(max_tokens=max(1, min(max_output, round(output / output_scale))), ignore_eos=True),
            service_class=rng.choice(tuple(ServiceClass)),
        )
        arrivals.append(Arrival(at_step=at_step, request=request))
    return arrivals


def _percentile(values: list[int], share: float) -> int:
    return sorted(values)[int(share * (len(values) - 1))]
