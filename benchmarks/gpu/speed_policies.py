"""Policies on one load of LS requests and BE work while device KV is short; rows that leave a step for LS requests."""

from __future__ import annotations

import itertools
import random
from argparse import Namespace
from contextlib import ExitStack
from typing import Any

from benchmarks.common.engine_run import EngineRun
from benchmarks.features.preemption import measure_overhead, measure_stream
from benchmarks.gpu.engines import (
    LLAMA_8B,
    config_of,
    drain,
    kv_token_bytes,
    open_engine,
    patched_model,
    reclaim_memory,
)
from benchmarks.gpu.script import NotHere, Script
from omniserve import SLO, Engine
from omniserve.profiling import find_or_make_profile
from omniserve.simulate import Load
from omniserve.simulate.load import fixed_lengths, poisson, requests

POLICIES = ("omniserve", "sarathi", "fcfs")
"""The first is compared with the others."""
KEPT = 0.9
"""Share of the LS requests that must meet their objectives for a rate to count as kept."""
OBJECTIVES = SLO(ttft_s=1.0, tpot_s=0.05)
_BUDGET_SHARE = 0.6
"""Share of a TPOT for the token budget, at the rate of one large product: the rest is for slower kernels and for
decodes."""


def policies(script: Script) -> None:
    rates, seconds = ([8.0], 1.0) if script.dry else ([4.0, 8.0, 12.0], 12.0)
    model = patched_model(LLAMA_8B, script)
    attained: dict[tuple[str, float], float] = {}
    be_rates: dict[tuple[str, float], float] = {}
    with ExitStack() as stack:
        engines = {policy: stack.enter_context(engine_of(script, model, policy)) for policy in POLICIES}
        for engine in engines.values():  # kernels for the sizes of this load
            serve(script, engine, 8.0, min(seconds, 4.0), SLO(ttft_s=60.0, tpot_s=60.0))
        for rate, (policy, engine) in itertools.product(rates, engines.items()):
            with script.case(f"{policy}, {rate:g} LS/s: LS requests that met their objectives") as case:
                run = serve(script, engine, rate, seconds, OBJECTIVES)
                ls, be = run.of_class("LS", OBJECTIVES), run.of_class("BE", SLO())
                if ls.num_rejected == ls.num_requests:
                    raise NotHere(f"no LS request was admitted in {seconds:g} s")
                attained[policy, rate] = ls.attainment
                be_rates[policy, rate] = be_rate = be.output_tokens_per_s + be.prompt_tokens_per_s
                counts = {name: run.grown(name) for name in ("host_output_tokens", "preemptions")}
                times = f"TTFT p99 {ls.ttft_p99_s:.3g} s, TPOT p99 {1e3 * ls.tpot_p99_s:.3g} ms"
                note = f"{be_rate:.0f} BE tokens/s; {times}, {counts}"
                case.figure(ls.attainment, "of all", note=note, be_tokens_per_s=be_rate,
                            rejected=ls.num_rejected, **counts)  # fmt: skip
    ours, *others = POLICIES
    for other in others:
        kept = [rate for rate in rates if attained.get((ours, rate), 0.0) >= KEPT and be_rates.get((other, rate))]
        with script.case(f"BE tokens/s of {ours} over {other}, at the highest rate kept") as case:
            if not kept:
                raise NotHere(f"no rate at which {ours} kept {KEPT:.0%}, and {other} brought BE tokens")
            mine, theirs = (ours, kept[-1]), (other, kept[-1])
            note = f"{kept[-1]:g} LS/s; attained {attained[mine]:.0%}, {other} {attained[theirs]:.0%}"
            case.figure(be_rates[mine] / be_rates[theirs], "x", at_least=1.0, note=note)


def serve(script: Script, engine: Engine, rate: float, seconds: float, slo: SLO) -> EngineRun:
    """Send short LS prompts beside long BE prompts, of which there are more than there is memory for."""
    ls, be, num_be = (16, 4), (64, 60), 400
    if not script.dry:
        ls, be, num_be = (1024, 64), (6144, 256), 128
    rng = random.Random(0)
    load = Load(
        latency_sensitive=requests(poisson(rate, seconds, rng), fixed_lengths(*ls), rng),
        best_effort=requests([0.0] * num_be, fixed_lengths(*be), rng), backlog=num_be, duration_s=seconds,
    )  # fmt: skip
    run = EngineRun(engine, load, slo=slo)
    run.run(drain_s=2.0)
    drain(engine, [name for name, result in run.results.items() if result.finished_s is None and not result.rejected])
    return run


def engine_of(script: Script, model: Any, policy: str) -> Any:
    """Return a context that gives an engine; one that reads objectives has a profile, measured for this once."""
    has_host = policy == POLICIES[0]
    tokens = 64 if script.dry else 2048
    if policy == "sarathi" and not script.dry:  # what the TPOT objective leaves time for (Sarathi-Serve 4.3)
        assert OBJECTIVES.tpot_s is not None
        flops = 2 * sum(p.numel() for p in model.parameters())  # of a token
        fitting = int(_BUDGET_SHARE * OBJECTIVES.tpot_s * script.limits.matmul_flops / flops)
        tokens = min(tokens, max(256, fitting // 64 * 64))
    config = config_of(
        model, scheduler=policy, device_kv_bytes=256 << 10 if script.dry else 8 << 30,
        max_model_len=512 if script.dry else 8192, max_num_batched_tokens=tokens, kv="tiered" if has_host else "paged",
        host_kv_bytes=(8 << 20 if script.dry else 12 << 30) if has_host else 0,
        max_num_seqs=64,  # as many as there is memory for; of fewer rows there are fewer shapes to capture
    )  # fmt: skip
    limit_s = 2.0 if script.dry else 12.0
    return open_engine(model, config, find_or_make_profile(model, config, time_limit_s=limit_s) if has_host else None)


def safepoints(script: Script) -> None:
    """Time a BE decode step with and without looks for requests, and how soon rows are gone when one has come."""
    model = patched_model(LLAMA_8B, script)
    args = Namespace(
        rate=1.0, seconds=20.0, steps=60, be=64, be_prompt=4096, be_output=2, ls_prompt=64, ls_output=4, ttft=0.2,
        tpot=0.1, profile_s=12.0,
    )  # fmt: skip
    if script.dry:
        vars(args).update(rate=20.0, seconds=1.0, steps=5, be=4, be_prompt=64, ls_prompt=8, profile_s=1.0)
    config = config_of(
        model, scheduler="conserve", host_kv_bytes=0, max_model_len=2 * args.be_prompt,
        max_num_batched_tokens=2 * args.be_prompt, device_kv_bytes=20 * args.be_prompt * kv_token_bytes(model),
    )  # fmt: skip
    reclaim_memory(script.device)
    with script.case(f"step of {args.be} BE rows that looks for requests") as case:
        found = measure_overhead(model, config, args)
        note = f"limit: the same without looks; a look takes {1e6 * found['look_s']:.2g} us"
        case.figure(1e3 * found["with_s"], "ms", limit=1e3 * found["without_s"], at_most=1.005, note=note)
    with script.case("from an LS request's arrival to the end of the BE step that it comes in") as case:
        stream = measure_stream(model, config, args, True, iter([0]))
        if not stream["delays_s"]:
            raise NotHere("no LS request came in a step of BE work alone")
        whole_ms, layers = 1e3 * stream["alone_step_p50_s"], model.omniserve.num_layers
        note = f"limit: a layer; a step of BE work alone takes {whole_ms:.4g} ms"
        case.figure(1e3 * stream["delay_p50_s"], "ms", limit=whole_ms / layers, note=note, **stream)
