"""Policies on one load of LS requests and BE work while device KV is short, on engines in this process."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.common.client import BE_TIER, LoadRequest, RequestRecord
from benchmarks.common.loads import Arrivals, TraceSlice
from benchmarks.common.summary import summarize_co_serving
from benchmarks.coserving.load import CoServingLoad
from benchmarks.coserving.report import ATTAINED, BE_RATE
from benchmarks.gpu.engines import config_of, open_engine
from benchmarks.gpu.models import LLAMA_8B, patched_model
from benchmarks.gpu.script import Case, NotHere, Script, argument_parser
from omniserve import SLO, Engine, Request, RequestOutput, RequestRejected, SamplingParams
from omniserve.profiling import find_or_make_profile

POLICIES = ("omniserve", "sarathi", "fcfs")
"""The first is compared with the others."""
KEPT = 0.9
"""Share of the LS requests that must meet their objectives for a rate to count as kept."""
_TPOT_S = 0.05
_MOST_TOKENS = 2048
_BUDGET_SHARE = 0.6
"""Of a TPOT, at the rate of one large product: the rest is for what reaches less, and for decodes."""
_IDLE_WAIT_S = 0.002


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[4.0, 8.0, 12.0], help="LS requests a second")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each load (default: %(default)s)")
    script = Script("policies", args := parser.parse_args(arguments))
    rates, seconds = ([8.0], 1.0) if script.dry else (sorted(args.rates), args.seconds)
    model = patched_model(LLAMA_8B, script)
    load = load_of(script, model, seconds)
    figures: dict[tuple[str, float], dict[str, Any]] = {}
    with ExitStack() as stack:
        engines = {policy: stack.enter_context(engine_of(script, model, policy)) for policy in POLICIES}
        for engine in engines.values():  # kernels for the sizes of this load
            serve(engine, load.warm_up((60.0, 60.0)), least_s=0.0, cutoff_s=2.0 if script.dry else 8.0)
        for rate in rates:
            for policy, engine in engines.items():
                name = f"{policy}, {rate:g} LS/s"
                with script.case(f"{name}: LS requests that met their objectives") as case:
                    figures[policy, rate] = time_load(case, engine, load, rate)
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
        max_model_len=512 if script.dry else 8192, max_step_tokens=tokens, kv="tiered" if has_host else "paged",
        host_kv_bytes=(8 << 20 if script.dry else 12 << 30) if has_host else 0,
        max_num_requests=64,  # as many as there is memory for; of fewer rows there are fewer shapes to capture
    )  # fmt: skip
    limit_s = 2.0 if script.dry else 12.0
    profile = find_or_make_profile(model, config, time_limit_s=limit_s) if has_host else None
    return open_engine(model, config, profile)


def time_load(case: Case, engine: Engine, load: CoServingLoad, rate: float) -> dict[str, Any]:
    """Serve a load at a rate and return its figures."""
    slo, before = load.slo(1.0), engine.stats()
    cutoff_s = load.seconds + load.drain_s
    records, end_s = serve(engine, load.requests(rate, 0, slo), least_s=load.seconds, cutoff_s=cutoff_s)
    after = engine.stats()
    summary = summarize_co_serving(records, slo, end_s=end_s, stream_s=load.seconds)
    summary["host_tokens"] = after.host_output_tokens - before.host_output_tokens
    summary["preemptions"] = after.preemptions - before.preemptions
    if ATTAINED not in summary:
        raise NotHere(f"no LS request came in {load.seconds:.0f} s")
    note = f"{summary['ls_requests']} requests, {summary['rejected']} rejected"
    for key, unit in (("ttft_p99_s", "TTFT"), ("tpot_p99_s", "TPOT")):
        if summary.get(key) is not None:
            note += f", {unit} p99 {1e3 * summary[key]:.1f} ms"
    note += f", {summary['host_tokens']} BE output tokens on the host"
    case.figure(summary[ATTAINED], "of all", note=note, **summary)
    return summary


def serve(
    engine: Engine, requests: Sequence[LoadRequest], *, least_s: float, cutoff_s: float
) -> tuple[list[RequestRecord], float]:
    """Send requests at their times, whatever becomes of those before, until all LS requests have ended.

    Args:
        engine: Without requests.
        requests: Of token ids, in any order.
        least_s: Shortest time, unless everything has ended.
        cutoff_s: Longest time; what is unfinished then is aborted.

    Returns:
        What a client over HTTP would have seen of each request, and when it ended.
    """
    records = [
        RequestRecord(service_tier=r.service_tier, send_at_s=r.send_at_s, num_prompt_tokens=len(r.prompt))
        for r in requests
    ]
    due = sorted(range(len(requests)), key=lambda i: requests[i].send_at_s, reverse=True)
    running: dict[str, RequestRecord] = {}
    began_s, now_s = time.monotonic(), 0.0

    def goes_on() -> bool:
        if now_s < least_s:
            return bool(due or running)
        return any(r.service_tier != BE_TIER for r in (*running.values(), *(records[i] for i in due)))

    while now_s < cutoff_s and goes_on():
        while due and requests[due[-1]].send_at_s <= now_s:
            index = due.pop()
            if _send(engine, requests[index], records[index], f"load-{index}", began_s):
                running[f"load-{index}"] = records[index]
        outputs = engine.step()
        now_s = time.monotonic() - began_s
        for output in outputs:
            _book(running[output.request_id], output, now_s)
            if output.finished:
                del running[output.request_id]
        if engine.last_plan_was_empty:
            _pause(engine)
    for request_id in running:
        engine.abort(request_id)
    while engine.has_unfinished:
        engine.step()
        _pause(engine)
    return records, now_s


def _pause(engine: Engine) -> None:
    if engine.host_tier is not None:
        engine.wait(_IDLE_WAIT_S)
    else:
        time.sleep(_IDLE_WAIT_S / 4)


def _send(engine: Engine, wanted: LoadRequest, record: RequestRecord, name: str, began_s: float) -> bool:
    """Add a request to the engine; False: it was rejected."""
    request = Request(
        prompt_token_ids=[int(token) for token in wanted.prompt],
        sampling=SamplingParams(max_tokens=wanted.max_tokens, ignore_eos=True),
        service_class="BE" if wanted.service_tier == BE_TIER else "LS",
        slo=SLO(ttft_s=wanted.slo[0], tpot_s=wanted.slo[1]) if wanted.slo is not None else None,
        request_id=name,
    )
    record.sent_s = time.monotonic() - began_s
    try:
        engine.add(request, arrival_s=began_s + wanted.send_at_s)
    except RequestRejected:
        record.rejected = True
        return False
    record.predicted_ttft_s = engine.predicted_ttft_s(name)
    return True


def _book(record: RequestRecord, output: RequestOutput, now_s: float) -> None:
    if output.new_token_ids:
        record.token_times_s.append(now_s)
        record.last_token_s = now_s
        if record.first_token_s is None:
            record.first_token_s = now_s
    if output.finished:
        record.finished = True
        record.num_output_tokens = output.num_output_tokens


if __name__ == "__main__":
    sys.exit(main())
