"""Policies on one load of LS requests and BE work while device KV is short, on engines in this process."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.common.client import LS_TIER, LoadRequest, RequestRecord
from benchmarks.common.loads import Arrivals, TraceSlice
from benchmarks.common.summary import summarize_co_serving
from benchmarks.coserving.load import CoServingLoad
from benchmarks.gpu.engines import config_of, drain, open_engine
from benchmarks.gpu.models import LLAMA_8B, patched_model
from benchmarks.gpu.script import NotHere, Script, argument_parser, short
from omniserve import SLO, Engine, Request, RequestRejected, SamplingParams
from omniserve.profiling import find_or_make_profile

POLICIES = ("omniserve", "sarathi", "fcfs")
"""The first is compared with the others."""
KEPT = 0.9
"""Share of the LS requests that must meet their objectives for a rate to count as kept."""
ATTAINED, BE_RATE = "attained", "be_tokens_per_s_beside_ls"
_TPOT_S = 0.05
_MOST_TOKENS = 2048
_BUDGET_SHARE = 0.6
"""Of a TPOT, at the rate of one large product: the rest is for what reaches less, and for decodes."""
_IDLE_WAIT_S = 0.002


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser(
        __doc__, rates=([4.0, 8.0, 12.0], "LS requests a second"), seconds=(12.0, "of each load")
    )  # fmt: skip
    script = Script("policies", args := parser.parse_args(arguments))
    rates, seconds = ([8.0], 1.0) if script.dry else (sorted(args.rates), args.seconds)
    model = patched_model(LLAMA_8B, script)
    load = load_of(script, model, seconds)
    figures: dict[tuple[str, float], dict[str, Any]] = {}
    with ExitStack() as stack:
        engines = {policy: stack.enter_context(engine_of(script, model, policy)) for policy in POLICIES}
        for engine in engines.values():  # kernels for the sizes of this load
            serve(engine, load.warm_up((60.0, 60.0)), (60.0, 60.0), seconds=min(seconds, 4.0), drain_s=4.0)
        for rate in rates:
            for policy, engine in engines.items():
                name = f"{policy}, {rate:g} LS/s"
                with script.case(f"{name}: LS requests that met their objectives") as case:
                    slo = load.slo(1.0)
                    figure = serve(engine, load.requests(rate, 0, slo), slo, seconds=seconds, drain_s=load.drain_s)
                    if ATTAINED not in figure:
                        raise NotHere(f"no LS request was admitted in {seconds:g} s")
                    figures[policy, rate] = figure
                    note = ", ".join(f"{key} {short(figure[key])}" for key in figure if key not in (ATTAINED, BE_RATE))
                    case.figure(figure[ATTAINED], "of all", note=note, **figure)
                with script.case(f"{name}: BE prompt and output tokens beside LS") as case:
                    if (policy, rate) not in figures:
                        raise NotHere("the load was not served to its end")
                    case.figure(figures[policy, rate][BE_RATE], "tokens/s")
    for other in POLICIES[1:]:
        kept = [rate for rate in rates if figures.get((POLICIES[0], rate), {}).get(ATTAINED, 0.0) >= KEPT]
        with script.case(f"BE tokens/s of {POLICIES[0]} over {other}, at the highest rate kept") as case:
            if not kept or (other, kept[-1]) not in figures:
                raise NotHere(f"no rate with {KEPT:.0%} of the LS requests within their objectives for both")
            mine, theirs = figures[POLICIES[0], kept[-1]], figures[other, kept[-1]]
            if not theirs[BE_RATE]:
                raise NotHere(f"{other} brought no BE token; {POLICIES[0]} {mine[BE_RATE]:.0f} tokens/s")
            note = f"{kept[-1]:g} LS/s; attained {mine[ATTAINED]:.0%}, {other} {theirs.get(ATTAINED, 0.0):.0%}"
            case.figure(mine[BE_RATE] / theirs[BE_RATE], "x", at_least=1.0, note=note)
    return script.end()


def load_of(script: Script, model: Any, seconds: float) -> CoServingLoad:
    """Return the load: short LS prompts, long BE prompts and more of these than there is memory for."""
    ls_input, ls_output, be_input, be_output = (16, 4, 64, 60) if script.dry else (1024, 64, 6144, 256)
    piece = TraceSlice(seconds=seconds, max_input=1, max_output=1)
    return CoServingLoad(
        arrivals=Arrivals(process="poisson"), seconds=seconds, ls_input=ls_input, ls_output=ls_output, ls_trace=None,
        ls_slice=piece, be_requests=400 if script.dry else 128, be_input=be_input, be_output=be_output, be_trace=None,
        be_slice=piece, slo_ttft_s=1.0, slo_tpot_s=_TPOT_S, vocab_size=min(1000, model.omniserve.spec.vocab_size),
        drain_s=2.0,
    )  # fmt: skip


def engine_of(script: Script, model: Any, policy: str) -> Any:
    """Return a context that gives an engine; one that reads objectives has a profile, measured for this once."""
    has_host = policy == POLICIES[0]
    tokens = 64 if script.dry else _MOST_TOKENS
    if policy == "sarathi" and not script.dry:  # what the TPOT objective leaves time for (Sarathi-Serve 4.3)
        flops = 2 * sum(p.numel() for p in model.parameters())  # of a token
        tokens = min(tokens, max(256, int(_BUDGET_SHARE * _TPOT_S * script.limits.matmul_flops / flops) // 64 * 64))
    config = config_of(
        model, scheduler=policy, device_kv_bytes=256 << 10 if script.dry else 8 << 30,
        max_model_len=512 if script.dry else 8192, max_num_batched_tokens=tokens, kv="tiered" if has_host else "paged",
        host_kv_bytes=(8 << 20 if script.dry else 12 << 30) if has_host else 0,
        max_num_seqs=64,  # as many as there is memory for; of fewer rows there are fewer shapes to capture
    )  # fmt: skip
    limit_s = 2.0 if script.dry else 12.0
    profile = find_or_make_profile(model, config, time_limit_s=limit_s) if has_host else None
    return open_engine(model, config, profile)


def serve(
    engine: Engine, requests: Sequence[LoadRequest], slo: tuple[float, float], *, seconds: float, drain_s: float
) -> dict[str, Any]:
    """Send requests at their times, whatever becomes of those before.

    Args:
        engine: Without requests.
        requests: Of token ids, in any order.
        slo: Objectives that LS requests are compared with.
        seconds: How long LS requests come, and BE tokens count.
        drain_s: So long those that came then may still take; all that is unfinished is aborted.

    Returns:
        See ``summarize_co_serving``; and what the engine counted.
    """
    due = deque(sorted(requests, key=lambda wanted: wanted.send_at_s))
    running: dict[str, RequestRecord] = {}
    records: list[RequestRecord] = []
    before, began_s, now_s = engine.stats(), time.monotonic(), 0.0

    def ls_is_open() -> bool:
        tiers = [wanted.service_tier for wanted in due] + [record.service_tier for record in running.values()]
        return LS_TIER in tiers

    while now_s < seconds or (now_s < seconds + drain_s and ls_is_open()):
        while due and due[0].send_at_s <= now_s:
            wanted = due.popleft()
            record = RequestRecord(
                service_tier=wanted.service_tier, send_at_s=wanted.send_at_s, num_prompt_tokens=len(wanted.prompt)
            )
            records.append(record)
            try:
                running[_add(engine, wanted, began_s)] = record
            except RequestRejected:
                record.rejected = True
        outputs = engine.step()
        now_s = time.monotonic() - began_s
        for output in outputs:
            record = running[output.request_id]
            if output.new_token_ids:
                record.first_token_s = now_s if record.first_token_s is None else record.first_token_s
                record.last_token_s = now_s
                record.token_times_s += [now_s] * len(output.new_token_ids)
                record.num_output_tokens = len(record.token_times_s)
            if output.finished:
                del running[output.request_id]
                record.finished = True
        if engine.last_plan_was_empty:
            engine.wait(_IDLE_WAIT_S) if engine.host_tier is not None else time.sleep(_IDLE_WAIT_S)
    after = engine.stats()
    drain(engine, list(running))
    return summarize_co_serving(records, slo, end_s=now_s, stream_s=seconds) | {
        "host_tokens": after.host_output_tokens - before.host_output_tokens,
        "preemptions": after.preemptions - before.preemptions,
    }


def _add(engine: Engine, wanted: LoadRequest, began_s: float) -> str:
    request = Request(
        prompt_token_ids=[int(token) for token in wanted.prompt],
        sampling=SamplingParams(max_tokens=wanted.max_tokens, ignore_eos=True),
        service_class="LS" if wanted.slo is not None else "BE",
        slo=SLO(ttft_s=wanted.slo[0], tpot_s=wanted.slo[1]) if wanted.slo is not None else None,
    )
    return engine.add(request, arrival_s=began_s + wanted.send_at_s)


if __name__ == "__main__":
    sys.exit(main())
