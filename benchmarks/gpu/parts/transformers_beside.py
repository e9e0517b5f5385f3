"""transformers' own ways to decode, on the shapes of ``decode``: a static cache compiled, and continuous batching."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from transformers import GenerationConfig

from benchmarks.gpu.bench import Bench, Measured, NotHere
from benchmarks.gpu.clock import seconds
from benchmarks.gpu.models import LLAMA_8B

_COMPILES_S = 45.0
_TOKENS, _FEW = 32, 4
"""Tokens of the two runs, whose difference is measured."""


def run(bench: Bench) -> None:
    """Time a token of each."""
    model = bench.shelf.plain(LLAMA_8B)
    batches, context = ((2,), 40) if bench.dry else ((8, 1, 32), 1024)
    for batch in batches:
        name = f"transformers, batch {batch}, {context} tokens"
        bench.take(
            f"{name}: generate_batch", "ms", functools.partial(_generate_batch, bench, model, batch, context),
            needs_s=0.0 if bench.dry else 10.0,
        )  # fmt: skip
        bench.take(
            f"{name}: generate, static cache, compiled", "ms",
            functools.partial(_generate, bench, model, batch, context),
            needs_s=0.0 if bench.dry else _COMPILES_S / 2,
        )  # fmt: skip


def _prompts(model: Any, batch: int, context: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, model.config.vocab_size, (batch, context), generator=generator).tolist()


def _generate(bench: Bench, model: Any, batch: int, context: int) -> Measured:
    """Return the milliseconds that a token more takes; prefill is in both runs and cancels out."""
    ids = torch.tensor(_prompts(model, batch, context), device=bench.device)
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids), "do_sample": False, "cache_implementation": "static",
        "pad_token_id": 0, "disable_compile": not bench.on_gpu,
    }  # fmt: skip

    def generate(count: int) -> float:
        return seconds(lambda: model.generate(ids, max_new_tokens=count, min_new_tokens=count, **options), bench.device)

    # The cache's length is part of what is compiled: both runs, once each, before they are timed.
    for count in (_TOKENS, _FEW):
        generate(count)
    runs = [(generate(_TOKENS), generate(_FEW)) for _ in range(3)]
    long_s, short_s = map(median, zip(*runs, strict=True))
    return Measured(value=1e3 * (long_s - short_s) / (_TOKENS - _FEW), details={"seconds": runs})


def _generate_batch(bench: Bench, model: Any, batch: int, context: int) -> Measured:
    if not hasattr(model, "generate_batch"):
        raise NotHere("this transformers has no generate_batch")
    if not bench.on_gpu:
        raise NotHere("generate_batch needs a GPU")
    config = GenerationConfig(max_new_tokens=_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=-1)
    outputs = model.generate_batch(
        inputs=_prompts(model, batch, context), generation_config=config, record_timestamps=True, progress_bar=False
    )
    return Measured(value=1e3 * token_s(outputs.values(), batch), note="median of the gaps between tokens")


def token_s(outputs: Iterable[Any], batch: int) -> float:
    """Return the median seconds from one token to the next while all requests decode, from ``GenerationOutput``.

    Raises:
        RuntimeError: A request failed or came short, which ``generate_batch`` only logs.
    """
    times = [output.timestamps for output in outputs if len(output.generated_tokens) == _TOKENS]
    if len(times) < batch:
        raise RuntimeError(f"{batch - len(times)} of {batch} requests did not get their {_TOKENS} tokens; see the log")
    decoding_s = max(stamps[0] for stamps in times)  # from the last first token on
    gaps = [after - before for stamps in times for before, after in pairwise(stamps) if before >= decoding_s]
    if not gaps:
        raise RuntimeError("no two tokens of a request came while all of them decoded")
    return median(gaps)
