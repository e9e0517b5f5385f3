"""transformers' own ways to decode, on the shapes of ``llama``: a static cache compiled, and continuous batching."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from transformers import GenerationConfig

from benchmarks.decode_rate import decode_rate, generate, prompts_of
from benchmarks.gpu.engines import LLAMA_8B, TINY, random_model
from benchmarks.gpu.script import Case, NotHere, Script

_TOKENS = 33


def transformers(script: Script) -> None:
    model = random_model(TINY if script.dry else LLAMA_8B, script.device)
    static: dict[str, Any] = {"cache_implementation": "static", "pad_token_id": 0, "disable_compile": not script.on_gpu}
    batches, context = ((2,), 40) if script.dry else ((8, 1, 32), 1024)
    for batch in batches:
        name = f"transformers, batch {batch}, {context} tokens"
        with script.case(f"{name}: generate_batch") as case:
            script.needs_gpu()
            if not hasattr(model, "generate_batch"):
                raise NotHere("this transformers has no generate_batch")
            time_token(case, partial(generate_batch, model, batch, context), batch)
        with script.case(f"{name}: generate, static cache, compiled") as case:
            time_token(case, partial(generate, model, batch, context, **static), batch)


def time_token(case: Case, serve: Callable[[int], object], batch: int) -> None:
    """Set the milliseconds of a token more, all requests decoding; the first runs compile and do not count."""
    times_ms = [1e3 * batch / decode_rate(serve, batch, _TOKENS) for _ in range(4)][1:]
    case.figure(median(times_ms), "ms", times_ms=times_ms)


def generate_batch(model: Any, batch: int, context: int, output: int) -> None:
    """Let continuous batching serve a batch."""
    config = GenerationConfig(max_new_tokens=output, do_sample=False, pad_token_id=0, eos_token_id=-1)
    prompts = prompts_of(batch, context).tolist()
    outputs = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
    missing = [len(done.generated_tokens) for done in outputs.values() if len(done.generated_tokens) != output]
    if missing or len(outputs) != batch:
        raise RuntimeError(f"some of {batch} requests did not get their {output} tokens: {missing}; see the log")
