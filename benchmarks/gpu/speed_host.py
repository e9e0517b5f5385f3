"""Host attention for as long as it lasts: BE tokens a second beside what main memory allows; LS steps beside it."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.common.bandwidth import available_bytes
from benchmarks.common.engine_run import request
from benchmarks.gpu.engines import (
    LLAMA_8B,
    add_decoding,
    drain,
    kv_token_bytes,
    open_decoding,
    patched_model,
    renew,
    serve_step,
    step_ms,
    weight_bytes,
)
from benchmarks.gpu.script import Script
from omniserve.core.stats import EngineStats

_OVERLOAD = 1.3
_MEMORY_SHARE = 0.7


def host(script: Script) -> None:
    model = patched_model(LLAMA_8B, script)
    residents, batch, steps, be_output, window_s = (4, 2, 5, 64, 1.0) if script.dry else (512, 64, 100, 256, 40.0)
    ls_context, ls_output = 40 if script.dry else 768, 2 * steps + 50
    ls_names = [f"ls{i}" for i in range(batch)]
    context, load = (40, 0.0) if script.dry else context_of(script, model, residents, be_output)
    device_tokens = batch * (ls_context + ls_output + 64) + context + be_output + 128
    host_read = script.limits.host_read_bytes_per_s  # measured before the host tier works
    with open_decoding(
        model, batch=batch, context=ls_context, output=ls_output, max_host_requests=residents,
        device_kv_bytes=device_tokens * kv_token_bytes(model),
        host_kv_bytes=residents * (context + be_output + 64) * kv_token_bytes(model),
        max_model_len=max(ls_context + ls_output, context + be_output),
    ) as engine:  # fmt: skip

        def counts_since(before: EngineStats) -> dict[str, float]:
            began, now = _counts(before), _counts(engine.stats())
            return {name: now[name] - began[name] for name in now}

        with script.case(f"TPOT of {batch} LS requests alone") as alone:
            alone.figure(step_ms(engine, steps)[0], "ms")
        for name in ls_names:
            engine.abort(name)
        for i in range(residents):
            add_decoding(engine, request(f"be{i}", context, be_output))
        until_s = time.monotonic() + 30.0
        while engine.stats().scheduler.host_output_tokens < 2 * residents and time.monotonic() < until_s:
            serve_step(engine)
        with script.case(f"TPOT of {batch} LS requests, {residents} BE requests on the host") as case:
            renew(engine, batch, ls_context, ls_output)  # at the context that they had alone
            before, began_s = engine.stats(), time.perf_counter()
            taken_ms, _ = step_ms(engine, steps, warm_up=0)
            counts, wall_s = counts_since(before), time.perf_counter() - began_s
            note = f"limit: alone; {counts['host_output_tokens'] / wall_s:.0f} BE tokens/s beside"
            case.figure(taken_ms, "ms", limit=alone.measured, at_most=1.02, note=note, **counts)
        for name in ls_names:
            engine.abort(name)
        with script.case(f"BE tokens of {residents} requests on the host, no LS, {window_s:.0f} s") as case:
            for _ in range(3 if script.dry else 64):
                serve_step(engine)
            before, began_s = engine.stats(), time.perf_counter()
            while time.perf_counter() - began_s < window_s and engine.has_unfinished:
                serve_step(engine)
            wall_s, counts = time.perf_counter() - began_s, counts_since(before)
            tokens, read = counts["host_output_tokens"], counts["host_kv_bytes_read"]
            if not tokens:
                raise RuntimeError(f"no token came back from the host tier in {wall_s:.1f} s")
            busy = counts["host_busy_seconds"] / wall_s / script.limits.host_threads
            note = (
                f"{read / wall_s / 1e9:.1f} GB/s read, threads busy {busy:.0%}, asked for {load:.2f} of what they can"
            )
            # Tokens are many layers long: bytes read are exact, and the limit is of the contexts that there were.
            case.figure(tokens / wall_s, "tokens/s", limit=host_read / (read / tokens), at_least=0.85, note=note,
                        **counts)  # fmt: skip
        drain(engine, [f"be{i}" for i in range(residents)])


def context_of(script: Script, model: Any, residents: int, be_output: int) -> tuple[int, float]:
    """Return a context at which so many requests have more to attend to than host threads can read, if it fits.

    A token passes a layer in every second step at best; these steps read all weights. Beside it, what they then have to
    read at a time, as a share of what the threads can: below 1 the steps bound the rate, and not the host tier.
    """
    token_bytes = kv_token_bytes(model)
    step_s = 1.2 * weight_bytes(model) / script.limits.copy_bytes_per_s
    token_s = 2 * model.omniserve.num_layers * step_s
    wanted = _OVERLOAD * script.limits.host_read_bytes_per_s * token_s / (residents * token_bytes)
    fitting = _MEMORY_SHARE * available_bytes() / (residents * token_bytes) - be_output - 64
    context = int(max(128, min(wanted, fitting)))
    return context, _OVERLOAD * context / wanted


def _counts(stats: EngineStats) -> dict[str, float]:
    """Return the counters that a record has, by their names in it."""
    return {
        "steps": stats.steps, "step_seconds": stats.step_seconds, "piggyback_rows": stats.piggyback_rows,
        "host_output_tokens": stats.scheduler.host_output_tokens, "host_kv_bytes_read": stats.host.kv_bytes_read,
        "host_busy_seconds": stats.host.busy_seconds,
    }  # fmt: skip
