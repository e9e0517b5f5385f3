"""Host attention for as long as it lasts: BE tokens a second beside what main memory allows; LS steps beside it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.attention.bandwidth import available_bytes
from benchmarks.common.requests import request
from benchmarks.gpu.engines import add_decoding, kv_token_bytes, open_decoding, step_times, weight_bytes
from benchmarks.gpu.models import LLAMA_8B, patched_model
from benchmarks.gpu.script import Case, Script, argument_parser
from omniserve import Engine

_FILL_TOKENS = 2
_FILL_S = 30.0
_OVERLOAD = 1.3
_MEMORY_SHARE = 0.7


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__, seconds=(40.0, "of host attention alone"))
    script = Script("host", args := parser.parse_args(arguments))
    model = patched_model(LLAMA_8B, script)
    residents, batch, steps = (4, 2, 5) if script.dry else (512, 64, 100)
    be_output = 64 if script.dry else 256
    ls_context, ls_output = 40 if script.dry else 768, 2 * steps + 50
    token_bytes = kv_token_bytes(model.omniserve.spec)
    context, load = (40, 0.0) if script.dry else context_of(script, model, residents, be_output)
    device_tokens = batch * (ls_context + ls_output + 64) + context + be_output + 128
    with open_decoding(
        model, batch=batch, context=ls_context, output=ls_output, device_kv_bytes=device_tokens * token_bytes,
        host_kv_bytes=residents * (context + be_output + 64) * token_bytes, max_host_requests=residents,
        max_model_len=max(ls_context + ls_output, context + be_output),
    ) as engine:  # fmt: skip
        script.limits.host_read_bytes_per_s  # noqa: B018 - measured before the host tier works
        with script.case(f"TPOT of {batch} LS requests alone") as alone:
            alone.figure(1e3 * step_times(engine, steps).mean_s, "ms")
        for i in range(batch):
            engine.abort(f"ls{i}")
        for i in range(residents):
            engine.add(request(f"be{i}", context, be_output, engine.spec.vocab_size))
        until_s = time.monotonic() + _FILL_S
        while engine.stats().host_output_tokens < _FILL_TOKENS * residents and time.monotonic() < until_s:
            _step(engine)
        with script.case(f"TPOT of {batch} LS requests, {residents} BE requests on the host") as case:
            add_decoding(engine, batch, ls_context, ls_output)  # at the context that they had alone
            before, began_s = engine.stats(), time.perf_counter()
            times = step_times(engine, steps, warm_up=0)
            counts, wall_s = _counts(before, engine.stats()), time.perf_counter() - began_s
            note = f"limit: alone; {counts['host_output_tokens'] / wall_s:.0f} BE tokens/s beside"
            case.figure(1e3 * times.mean_s, "ms", limit=alone.measured, at_most=1.02, note=note, **counts)
        for i in range(batch):
            engine.abort(f"ls{i}")
        window_s = 1.0 if script.dry else args.seconds
        with script.case(f"BE tokens of {residents} requests on the host, no LS, {window_s:.0f} s") as case:
            count_tokens(script, case, engine, window_s, load)
    return script.end()


def context_of(script: Script, model: Any, residents: int, be_output: int) -> tuple[int, float]:
    """Return a context at which so many requests have more to attend to than host threads can read, if it fits.

    A token passes a layer in every second step at best; these steps read all weights. Beside it, what they then have to
    read at a time, as a share of what the threads can: below 1 the steps bound the rate, and not the host tier.
    """
    token_bytes = kv_token_bytes(model.omniserve.spec)
    step_s = 1.2 * weight_bytes(model) / script.limits.copy_bytes_per_s
    token_s = 2 * model.omniserve.num_layers * step_s
    wanted = _OVERLOAD * script.limits.host_read_bytes_per_s * token_s / (residents * token_bytes)
    fitting = _MEMORY_SHARE * available_bytes() / (residents * token_bytes) - be_output - 64
    context = int(max(128, min(wanted, fitting)))
    return context, _OVERLOAD * context / wanted


def count_tokens(script: Script, case: Case, engine: Engine, window_s: float, load: float) -> None:
    """Count the tokens that come back in a window; their KV is counted as it was read, longer contexts included."""
    for _ in range(3 if script.dry else 64):
        _step(engine)
    before, began_s = engine.stats(), time.perf_counter()
    while time.perf_counter() - began_s < window_s and engine.has_unfinished:
        _step(engine)
    wall_s = time.perf_counter() - began_s
    counts = _counts(before, engine.stats())
    tokens, read = counts["host_output_tokens"], counts["host_kv_bytes_read"]
    if not tokens:
        raise RuntimeError(f"no token came back from the host tier in {wall_s:.1f} s")
    busy = counts["host_busy_seconds"] / wall_s / script.limits.host_threads
    case.figure(
        tokens / wall_s, "tokens/s", at_least=0.85,
        # Tokens are many layers long: bytes read are exact, and the limit is of the contexts that there were.
        limit=script.limits.host_read_bytes_per_s / (read / tokens),
        note=f"{read / wall_s / 1e9:.1f} GB/s read, threads busy {busy:.0%}, asked for {load:.2f} of what they can",
        **counts,
    )  # fmt: skip


def _step(engine: Engine) -> None:
    engine.step()
    if engine.last_plan_was_empty:
        engine.wait(0.01)


def _counts(before: Any, after: Any) -> dict[str, float]:
    names = ("steps", "step_seconds", "piggyback_rows", "host_output_tokens", "host_kv_bytes_read", "host_busy_seconds")
    return {name: getattr(after, name) - getattr(before, name) for name in names}


if __name__ == "__main__":
    sys.exit(main())
