"""Policies on one load of LS requests and BE work while device KV is short, on an engine in this process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.common.loads import Arrivals, TraceSlice
from benchmarks.common.summary import summarize_co_serving
from benchmarks.coserving.load import CoServingLoad
from benchmarks.coserving.report import ATTAINED, BE_RATE
from benchmarks.gpu.bench import Bench, Measured, NotHere
from benchmarks.gpu.engines import config_of, open_engine
from benchmarks.gpu.in_process import InProcessLoad
from benchmarks.gpu.models import LLAMA_8B
from benchmarks.gpu.table import Goal
from omniserve import Engine
from omniserve.profiling import find_or_make_profile

POLICIES = ("omniserve", "sarathi", "fcfs")
"""The first is compared with the others."""
RATES = (8.0, 12.0, 4.0, 16.0)
"""LS requests a second; the first ones if there is little time."""
KEPT = 0.9
"""Share of the LS requests that must meet their objectives for a rate to count as kept."""
_SEED = 0
_OVERHEAD_S, _LEAST_S = 2.0, 8.0
_TPOT_S = 0.05
_PROFILE_S = 12.0
_MOST_TOKENS = 2048
_BUDGET_SHARE = 0.6
"""Of a TPOT, at the rate of one large product: the rest is for what reaches less, and for decodes."""


def run(bench: Bench) -> None:
    """Serve each rate with every policy, lowest rate first, then compare BE throughput at the highest rate kept."""
    model = bench.shelf.patched(LLAMA_8B)
    figures: dict[tuple[str, float], dict[str, Any]] = {}
    with ExitStack() as stack:
        engines = {policy: stack.enter_context(_engine(bench, model, policy)) for policy in POLICIES}
        warm_up = _load(bench, model, seconds=1.0).warm_up((60.0, 60.0))
        for policy in POLICIES:  # kernels for the sizes of this load
            InProcessLoad(engines[policy], warm_up).run(least_s=0.0, cutoff_s=10.0)
        rates = _rates(bench)
        if not rates:
            reason = f"{bench.left_s:.0f} s left after profile and engines, each window takes {_LEAST_S:.0f}"
            bench.skip("LS requests that met their objectives", "of all", reason)
            return
        each_s = 1.0 if bench.dry else bench.left_s / (len(rates) * len(POLICIES)) - _OVERHEAD_S
        load = _load(bench, model, seconds=min(20.0, each_s))
        for rate in rates:
            for policy in POLICIES:
                bench.take(
                    f"{policy}, {rate:g} LS/s: LS requests that met their objectives", "of all",
                    functools.partial(_serve, engines[policy], load, policy, rate, figures),
                    needs_s=0.7 * each_s,
                )  # fmt: skip
                if (policy, rate) in figures:
                    rate_beside = figures[policy, rate][BE_RATE]
                    case = f"{policy}, {rate:g} LS/s: BE prompt and output tokens beside LS"
                    bench.take(case, "tokens/s", functools.partial(float, rate_beside))
    for other in POLICIES[1:]:
        _compare(bench, figures, rates, other)


def _rates(bench: Bench) -> list[float]:
    """Return the rates that there is time for, ascending."""
    if bench.dry:
        return [8.0, 16.0]
    fitting = int(bench.left_s / (len(POLICIES) * (_LEAST_S + _OVERHEAD_S)))
    return sorted(RATES[:fitting])


def _engine(bench: Bench, model: Any, policy: str) -> Any:
    """Return a context that gives an engine; one that reads objectives has a profile, measured for this once."""
    has_host = policy == "omniserve"
    sizes: dict[str, Any] = {
        "device_kv_bytes": 256 << 10 if bench.dry else 8 << 30, "max_model_len": 512 if bench.dry else 8192,
        "max_step_tokens": _step_tokens(bench, model, policy), "kv": "tiered" if has_host else "paged",
        "host_kv_bytes": (8 << 20 if bench.dry else 12 << 30) if has_host else 0,
        "max_num_requests": 64,  # as many as there is memory for; of fewer rows there are fewer shapes to record
    }  # fmt: skip
    config = config_of(model, scheduler=policy, **sizes)
    profile = None
    if has_host:
        limit_s = 2.0 if bench.dry else min(_PROFILE_S, 0.2 * bench.left_s)
        profile = find_or_make_profile(model, config, time_limit_s=limit_s)
    return open_engine(model, config, profile)


def _step_tokens(bench: Bench, model: Any, policy: str) -> int:
    """Return a policy's token budget; Sarathi-Serve's is what the TPOT objective leaves time for (its section 4.3)."""
    if bench.dry:
        return 64
    if policy != "sarathi":
        return _MOST_TOKENS
    flops = 2 * sum(p.numel() for p in model.parameters())  # of a token
    tokens = _BUDGET_SHARE * _TPOT_S * bench.limits.matmul_flops / flops
    return min(_MOST_TOKENS, max(256, int(tokens) // 64 * 64))


def _load(bench: Bench, model: Any, *, seconds: float) -> CoServingLoad:
    ls_input, ls_output, be_input, be_output = (16, 4, 64, 60) if bench.dry else (1024, 64, 6144, 256)
    piece = TraceSlice(seconds=seconds, max_input=1, max_output=1)
    return CoServingLoad(
        arrivals=Arrivals(process="poisson"), seconds=seconds, ls_input=ls_input, ls_output=ls_output, ls_trace=None,
        ls_slice=piece, be_requests=400 if bench.dry else 128, be_input=be_input, be_output=be_output, be_trace=None,
        be_slice=piece, slo_ttft_s=1.0, slo_tpot_s=_TPOT_S, vocab_size=min(1000, model.omniserve.spec.vocab_size),
        drain_s=2.0,
    )  # fmt: skip


def _serve(
    engine: Engine, load: CoServingLoad, policy: str, rate: float, figures: dict[tuple[str, float], dict[str, Any]]
) -> Measured:
    slo = load.slo(1.0)
    before = engine.stats()
    served = InProcessLoad(engine, load.requests(rate, _SEED, slo))
    end_s = served.run(least_s=load.seconds, cutoff_s=load.seconds + load.drain_s)
    after = engine.stats()
    summary = summarize_co_serving(served.records, slo, end_s=end_s, stream_s=load.seconds)
    summary["host_tokens"] = after.host_output_tokens - before.host_output_tokens
    summary["preemptions"] = after.preemptions - before.preemptions
    if ATTAINED not in summary:
        raise NotHere(f"no LS request came in {load.seconds:.0f} s")
    figures[policy, rate] = summary
    note = f"{summary['ls_requests']} requests, {summary['rejected']} rejected"
    if "ttft_p99_s" in summary:
        note += f", TTFT p99 {1e3 * summary['ttft_p99_s']:.0f} ms"
    if summary.get("tpot_p99_s") is not None:
        note += f", TPOT p99 {1e3 * summary['tpot_p99_s']:.1f} ms"
    note += f", {summary['host_tokens']} BE output tokens on the host"
    return Measured(value=summary[ATTAINED], note=note, details=summary)


def _compare(
    bench: Bench, figures: dict[tuple[str, float], dict[str, Any]], rates: Sequence[float], other: str
) -> None:
    first = POLICIES[0]
    kept = [rate for rate in rates if figures.get((first, rate), {}).get(ATTAINED, 0.0) >= KEPT]
    kept = [rate for rate in kept if (other, rate) in figures]
    case = f"BE tokens/s of {first} over {other}"
    if not kept:
        bench.take(f"{case}, at the highest rate kept", "x", _none_kept, goal=Goal(at_least=1, of="measured"))
        return
    mine, theirs = figures[first, kept[-1]], figures[other, kept[-1]]
    note = f"attained {mine[ATTAINED]:.0%}, {other} {theirs.get(ATTAINED, 0.0):.0%}"

    def ratio() -> Measured:
        if not theirs[BE_RATE]:
            raise NotHere(f"{other} brought no BE token; {first} {mine[BE_RATE]:.0f} tokens/s")
        return Measured(value=mine[BE_RATE] / theirs[BE_RATE], note=note)

    bench.take(f"{case}, {kept[-1]:g} LS/s", "x", ratio, goal=Goal(at_least=1, of="measured"))


def _none_kept() -> float:
    raise NotHere(f"no rate with {KEPT:.0%} of the LS requests within their objectives was measured for both")
