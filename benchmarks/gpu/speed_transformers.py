"""transformers' own ways to decode, on the shapes of ``llama``: a static cache compiled, and continuous batching."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from transformers import GenerationConfig

from benchmarks.common.timing import seconds
from benchmarks.gpu.engines import LLAMA_8B, TINY, random_model
from benchmarks.gpu.script import NotHere, Script

_TOKENS, _FEW = 32, 4
"""Tokens of the two runs, whose difference is measured."""


def transformers(script: Script) -> None:
    model = random_model(TINY if script.dry else LLAMA_8B, script.device)
    batches, context = ((2,), 40) if script.dry else ((8, 1, 32), 1024)
    for batch in batches:
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(1, model.config.vocab_size, (batch, context), generator=generator)
        name = f"transformers, batch {batch}, {context} tokens"
        with script.case(f"{name}: generate_batch") as case:
            script.needs_gpu()
            if not hasattr(model, "generate_batch"):
                raise NotHere("this transformers has no generate_batch")
            config = GenerationConfig(max_new_tokens=_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=-1)
            outputs = model.generate_batch(
                inputs=prompts.tolist(), generation_config=config, record_timestamps=True, progress_bar=False
            )
            taken_s = token_s(outputs.values(), batch)
            case.figure(1e3 * taken_s, "ms", note="median of the gaps between tokens")
        with script.case(f"{name}: generate, static cache, compiled") as case:
            taken_s, runs = generate_s(script, model, prompts.to(script.device))
            case.figure(1e3 * taken_s, "ms", seconds=runs)


def generate_s(script: Script, model: Any, ids: torch.Tensor) -> tuple[float, list[tuple[float, float]]]:
    """Return the seconds that a token more takes, and the runs; prefill is in both runs and cancels out."""

    def generate(count: int) -> float:
        return seconds(lambda: model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
            cache_implementation="static", pad_token_id=0, disable_compile=not script.on_gpu,
        ), script.device)  # fmt: skip

    # The cache's length is part of what is compiled: both runs, once each, before they are timed.
    runs = [(generate(_TOKENS), generate(_FEW)) for _ in range(4)][1:]
    long_s, short_s = map(median, zip(*runs, strict=True))
    return (long_s - short_s) / (_TOKENS - _FEW), runs


def token_s(outputs: Iterable[Any], batch: int) -> float:
    """Return the median seconds from one token to the next while all requests decode, from ``GenerationOutput``."""
    times = [output.timestamps for output in outputs if len(output.generated_tokens) == _TOKENS]
    if len(times) < batch:
        raise RuntimeError(f"{batch - len(times)} of {batch} requests did not get their {_TOKENS} tokens; see the log")
    decoding_s = max(stamps[0] for stamps in times)  # from the last first token on
    gaps = [after - before for stamps in times for before, after in pairwise(stamps) if before >= decoding_s]
    if not gaps:
        raise RuntimeError("no two tokens of a request came while all of them decoded")
    return median(gaps)
