"""Measures what best-effort work costs latency-sensitive requests: the load generator of ``make demo``.

For each scheduler it starts the server with the built-in model and too little device memory for the load, measures a
Poisson stream of LS requests alone, then the same stream beside a pile of BE requests, and prints one table.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.common.client import BE_TIER, LS_TIER, LoadRequest, RequestRecord, drive, text_request, warm_server
from benchmarks.common.record import write_record
from benchmarks.common.server import BE_TOKENS, HOST_TOKENS, ServerFailed, ServerProcess
from benchmarks.common.summary import LatencySummary, summarize, without_samples
from benchmarks.common.terminal import argument_parser, table_of
from omniserve.sched.policy import known_options
from omniserve.simulate.load import poisson

ALONE, BESIDE = "LS alone", "LS + BE"
FIRST_START_S, START_S = 75.0, 15.0
"""Seconds that the server takes to start, roughly, when its model was never compiled and measured here, and else."""

Tell = Callable[[str, float], object]
"""Is told which stage begins, and about how many seconds it takes."""

NOTES = """
LS: latency-sensitive requests, {rate:g} a second. BE: best-effort ones, a pile of {pile} from the start of "LS + BE".
LS done: how many LS requests had their whole answer when the phase ended, of those sent.
TTFT, TPOT: time to first token, and time per output token after it; milliseconds, of LS requests, at the client.
p50, p99: half of the requests had less than that, and 99 of 100.
>: some LS requests had no first token when the phase ended; they count with the time they had waited.
BE tok/s: output tokens of BE requests a second. On host: those whose attention CPU threads computed from CPU memory.
"""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Result of one phase."""

    scheduler: str
    name: str
    duration_s: float
    ls: LatencySummary
    be_tokens: float
    be_host_tokens: float
    records: list[RequestRecord]


def make_load(settings: argparse.Namespace, duration_s: float, *, with_be: bool) -> list[LoadRequest]:
    """Return the requests of a phase. The LS stream is the same with and without BE requests, up to its length."""
    ls_rng, be_rng = random.Random(settings.seed), random.Random(settings.seed + 1)
    arrivals = poisson(settings.ls_rate, duration_s, random.Random(settings.seed + 2))
    ls = (settings.ls_prompt_chars, settings.ls_output_tokens)
    be = (settings.be_prompt_chars, settings.be_output_tokens)
    load = [text_request(ls_rng, at_s, *ls, LS_TIER) for at_s in arrivals]
    return load + [text_request(be_rng, 0.0, *be, BE_TIER) for _ in range(settings.be_requests if with_be else 0)]


def run_phase(
    server: ServerProcess, settings: argparse.Namespace, scheduler: str, *, with_be: bool, tell: Tell
) -> Phase:
    """Send one phase's load and return what came of it."""
    duration_s, name = (settings.beside_s, BESIDE) if with_be else (settings.alone_s, ALONE)
    tell(f"{scheduler}: {name}", duration_s + (settings.drain_s if with_be else 0.0))
    before = server.metrics()
    records, end_s = drive(
        server, make_load(settings, duration_s, with_be=with_be), cutoff_s=duration_s + settings.drain_s,
        may_be_cut_off=True, must_finish=lambda request: request.service_tier == LS_TIER,
    )  # fmt: skip
    after = server.metrics()
    return Phase(
        scheduler=scheduler, name=name, duration_s=end_s, records=records,
        ls=summarize((record for record in records if record.service_tier == LS_TIER), end_s),
        be_tokens=after.get(BE_TOKENS, 0.0) - before.get(BE_TOKENS, 0.0),
        be_host_tokens=after[HOST_TOKENS] - before[HOST_TOKENS],
    )  # fmt: skip


def run_scheduler(settings: argparse.Namespace, scheduler: str, tell: Tell, *, start_s: float = START_S) -> list[Phase]:
    """Start a server with ``scheduler``, let it compile and allocate, and measure both phases."""
    options = known_options(scheduler, {"admission": False})  # every request is to be measured
    arguments = [
        "--scheduler", scheduler, "--device-kv-gib", str(settings.device_kv_gib),
        "--host-kv-gib", str(settings.host_kv_gib), "--ls-ttft-slo", str(settings.ls_ttft_slo),
        "--ls-tpot-slo", str(settings.ls_tpot_slo),
        *(f"--scheduler-option={name}={value}" for name, value in options.items()), *settings.server_args,
    ]  # fmt: skip
    tell(f"{scheduler}: the server starts", start_s)
    load = make_load(settings, settings.beside_s, with_be=True)
    few = [dataclasses.replace(request, send_at_s=0.0, max_tokens=8) for request in (*load[:2], *load[-2:])]
    with warm_server("demo", arguments, few) as server:
        phases = [run_phase(server, settings, scheduler, with_be=with_be, tell=tell) for with_be in (False, True)]
    return phases


def _time(phase: Phase, name: str) -> str:
    """Return a quantile in milliseconds; ``>`` stands before one that counts requests which still waited."""
    time_s = getattr(phase.ls, f"{name}_s")
    waited = name.startswith("ttft") and phase.ls.num_started < phase.ls.num_requests
    return "-" if math.isnan(time_s) else f"{'>' if waited else ''}{1e3 * time_s:.1f}"


def cells(phase: Phase) -> dict[str, str]:
    """Return a phase's line of the table."""
    ls, found = phase.ls, {"scheduler": phase.scheduler, "load": phase.name}
    found["LS done"] = f"{ls.num_finished} of {ls.num_requests}"
    for name in ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99"):
        found[name.upper().replace("_P", " p")] = _time(phase, name)
    return found | {
        "BE tok/s": f"{phase.be_tokens / phase.duration_s:.0f}", "BE tokens": f"{phase.be_tokens:.0f}",
        "on host": f"{phase.be_host_tokens:.0f}",
    }  # fmt: skip


def cost(alone: Phase, beside: Phase) -> str:
    """Return what best-effort work costs the LS requests under one scheduler, in a line."""
    ttft, tpot = (f"{_time(alone, name)} -> {_time(beside, name)}" for name in ("ttft_p50", "tpot_p50"))
    done = f"{beside.ls.num_finished} of {beside.ls.num_requests} done"
    be_rate = beside.be_tokens / beside.duration_s
    return f"{beside.scheduler}: TTFT {ttft} ms, TPOT {tpot} ms, {done}; BE work got {be_rate:.0f} tokens/s"


def report(phases: Sequence[Phase], settings: argparse.Namespace) -> str:
    """Return the table, what it says in words, and what its words mean."""
    pairs = zip(phases[::2], phases[1::2], strict=True)  # of each scheduler, alone and beside
    costs = "\n".join(f"  {cost(alone, beside)}" for alone, beside in pairs)
    notes = NOTES.format(rate=settings.ls_rate, pile=settings.be_requests)
    head = "What BE work costs the LS requests, p50 alone -> beside it:"
    return f"{table_of([cells(phase) for phase in phases])}\n\n{head}\n{costs}\n{notes}"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the settings."""
    parser = argument_parser(
        __doc__, "demo", schedulers=["omniserve", "fcfs"],
        device_kv_gib=(0.004, "device KV pool: small, so that it runs short"), host_kv_gib=0.5,
        alone_s=(5.0, "length of the phase with LS requests alone"),
        beside_s=(10.0, "length of the phase with LS and BE requests"),
        drain_s=(5.0, "longest wait, after a phase, for LS requests that have not finished"),
        ls_rate=(3.0, "LS requests a second"), ls_prompt_chars=400, ls_output_tokens=32,
        ls_ttft_slo=(0.1, "seconds"), ls_tpot_slo=(0.012, "seconds"), be_requests=256, be_prompt_chars=1200,
        be_output_tokens=128, seed=0,
    )  # fmt: skip
    parser.add_argument("--server-args", type=shlex.split, default=[], help="more flags for the server, as one string")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    settings = parse_arguments(arguments)
    phases: list[Phase] = []
    began_s, is_first_run = time.monotonic(), not settings.record.exists()

    def tell(stage: str, expected_s: float) -> None:
        print(f"{time.monotonic() - began_s:4.0f} s: {stage}, about {expected_s:.0f} s", file=sys.stderr, flush=True)

    for scheduler in settings.schedulers:
        start_s = FIRST_START_S if is_first_run and not phases else START_S
        try:
            phases += run_scheduler(settings, scheduler, tell, start_s=start_s)
        except ServerFailed as error:
            print(f"demo: scheduler {scheduler}: {error}", file=sys.stderr)
            return 1
    print(report(phases, settings))
    kept, raw = without_samples({"phases": [vars(phase) for phase in phases]}, "records")
    write_record(settings.record, name="demo", config=vars(settings), seed=settings.seed, results=kept, raw=raw)
    print(f"record: {settings.record}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
