"""Host attention for as long as it lasts: BE tokens a second beside what main memory allows; LS steps beside it."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.attention.bandwidth import available_bytes
from benchmarks.gpu.bench import Bench, Measured
from benchmarks.gpu.engines import add_decoding, kv_token_bytes, open_decoding, request, step_times, weight_bytes
from benchmarks.gpu.models import LLAMA_8B
from benchmarks.gpu.table import Goal
from omniserve import Engine

GOAL = Goal(at_least=0.85)
TPOT_GOAL = Goal(at_most=1.02)
_FILL_TOKENS = 2
_OVERLOAD = 1.3
_MEMORY_SHARE = 0.7
_WINDOW_S, _LEAST_S, _TO_END_S = 60.0, 10.0, 3.0


def run(bench: Bench) -> None:
    """Time LS steps alone, let BE requests decode on the host, time LS steps beside them, and count BE tokens."""
    model = bench.shelf.patched(LLAMA_8B)
    residents, batch, steps = (4, 2, 5) if bench.dry else (512, 64, 100)
    be_output = 64 if bench.dry else 256
    ls_context, ls_output = 40 if bench.dry else 768, 2 * steps + 50
    token_bytes = kv_token_bytes(model.omniserve.spec)
    context, load = (40, 0.0) if bench.dry else _context(bench, model, residents, be_output)
    device_tokens = batch * (ls_context + ls_output + 64) + context + be_output + 128
    with open_decoding(
        model, batch=batch, context=ls_context, output=ls_output, device_kv_bytes=device_tokens * token_bytes,
        host_kv_bytes=residents * (context + be_output + 64) * token_bytes, max_host_requests=residents,
        max_model_len=max(ls_context + ls_output, context + be_output),
    ) as engine:  # fmt: skip
        bench.limits.host_read_bytes_per_s  # noqa: B018 - measured before the host tier works
        alone_ms = bench.take(
            f"TPOT of {batch} LS requests alone", "ms", lambda: 1e3 * step_times(engine, steps).mean_s
        )
        for i in range(batch):
            engine.abort(f"ls{i}")
        for i in range(residents):
            engine.add(request(f"be{i}", context, be_output, engine.spec.vocab_size))
        _until_each_has(engine, residents, _FILL_TOKENS, bench)
        if alone_ms is not None:
            add_decoding(engine, batch, ls_context, ls_output)  # at the context that they had alone
            bench.take(
                f"TPOT of {batch} LS requests, {residents} BE requests on the host", "ms",
                lambda: _ls_beside(engine, steps), floor=alone_ms, goal=TPOT_GOAL,
            )  # fmt: skip
        for i in range(batch):
            engine.abort(f"ls{i}")
        window_s = 1.0 if bench.dry else min(_WINDOW_S, bench.left_s - _TO_END_S)
        limit = bench.limits.host_read_bytes_per_s / (token_bytes * context)
        bench.take(
            f"BE tokens of {residents} requests on the host, no LS, {window_s:.0f} s", "tokens/s",
            lambda: _tokens_per_s(bench, engine, window_s, load), floor=limit, goal=GOAL, needs_s=_LEAST_S,
        )  # fmt: skip


def _context(bench: Bench, model: Any, residents: int, be_output: int) -> tuple[int, float]:
    """Return a context at which so many requests have more to attend to than host threads can read, if it fits.

    A token passes a layer in every second step at best; these steps read all weights. Beside it, what they then have to
    read at a time, as a share of what the threads can: below 1 the steps bound the rate, and not the host tier.
    """
    token_bytes = kv_token_bytes(model.omniserve.spec)
    step_s = 1.2 * weight_bytes(model) / bench.limits.copy_bytes_per_s
    token_s = 2 * model.omniserve.num_layers * step_s
    wanted = _OVERLOAD * bench.limits.host_read_bytes_per_s * token_s / (residents * token_bytes)
    fitting = _MEMORY_SHARE * available_bytes() / (residents * token_bytes) - be_output - 64
    context = int(max(128, min(wanted, fitting)))
    return context, _OVERLOAD * context / wanted


def _until_each_has(engine: Engine, residents: int, tokens: int, bench: Bench) -> None:
    """Step until the host tier brought so many tokens a request on average, or a quarter of the time is over."""
    until_s = time.monotonic() + max(1.0, 0.25 * bench.left_s)
    while engine.stats().host_output_tokens < tokens * residents and time.monotonic() < until_s:
        _step(engine)


def _step(engine: Engine) -> None:
    engine.step()
    if engine.last_plan_was_empty:
        engine.wait(0.01)


def _ls_beside(engine: Engine, steps: int) -> Measured:
    before, began_s = engine.stats(), time.perf_counter()
    times = step_times(engine, steps, warm_up=0)
    after, wall_s = engine.stats(), time.perf_counter() - began_s
    be_rate = (after.host_output_tokens - before.host_output_tokens) / wall_s
    return Measured(value=1e3 * times.mean_s, note=f"{be_rate:.0f} BE tokens/s beside", details=_rates(before, after))


def _tokens_per_s(bench: Bench, engine: Engine, window_s: float, load: float) -> Measured:
    """Return the tokens that came back in a window; their KV is counted as it was read, longer contexts included."""
    for _ in range(3 if bench.dry else 64):
        _step(engine)
    before, began_s = engine.stats(), time.perf_counter()
    while time.perf_counter() - began_s < window_s and engine.has_unfinished:
        _step(engine)
    after, wall_s = engine.stats(), time.perf_counter() - began_s
    tokens = after.host_output_tokens - before.host_output_tokens
    if not tokens:
        raise RuntimeError(f"no token came back from the host tier in {wall_s:.1f} s")
    read = after.host_kv_bytes_read - before.host_kv_bytes_read
    # Tokens are many layers long: bytes read are exact, and the limit is of the contexts that there were.
    limit = bench.limits.host_read_bytes_per_s / (read / tokens)
    busy = (after.host_busy_seconds - before.host_busy_seconds) / wall_s / bench.limits.host_threads
    note = f"{read / wall_s / 1e9:.1f} GB/s read, threads busy {busy:.0%}, asked for {load:.2f} of what they can"
    return Measured(value=tokens / wall_s, floor=limit, note=note, details=_rates(before, after))


def _rates(before: Any, after: Any) -> dict[str, float]:
    names = ("steps", "step_seconds", "piggyback_rows", "host_output_tokens", "host_kv_bytes_read", "host_busy_seconds")
    return {name: getattr(after, name) - getattr(before, name) for name in names}
