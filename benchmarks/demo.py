"""What best-effort work costs latency-sensitive requests: the load generator of ``make demo``.

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
from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm

from benchmarks.common.client import BE_TIER, LS_TIER, LoadRequest, RequestRecord, drive, text_request, warm_server
from benchmarks.common.record import write_record
from benchmarks.common.server import BE_TOKENS, HOST_TOKENS, ServerFailed, ServerProcess
from benchmarks.common.summary import LatencySummary, summarize
from benchmarks.common.terminal import argument_parser, table_of
from omniserve.sched.policy import known_options
from omniserve.simulate.load import poisson

NOTES = """
TTFT, TPOT: time to first token, time per output token after it; milliseconds, of LS requests, at the client.
> : some LS requests had no first token when the phase ended; they count with the time they had waited.
on host: BE output tokens whose attention the host tier computed."""


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
    server: ServerProcess, settings: argparse.Namespace, scheduler: str, *, with_be: bool, progress: tqdm
) -> Phase:
    """Send one phase's load and return what came of it."""
    duration_s, name = (settings.beside_s, "LS + BE") if with_be else (settings.alone_s, "LS alone")
    before, shown_s = server.metrics(), 0.0

    def show(now_s: float, records: Sequence[RequestRecord]) -> None:
        nonlocal shown_s
        progress.update(round(min(now_s, duration_s) - shown_s, 3))
        shown_s = min(now_s, duration_s)
        done = {tier: sum(r.finished for r in records if r.service_tier == tier) for tier in (LS_TIER, BE_TIER)}
        progress.set_postfix_str(f"{scheduler}, {name}: {done[LS_TIER]} LS and {done[BE_TIER]} BE finished")

    records, end_s = drive(
        server, make_load(settings, duration_s, with_be=with_be), cutoff_s=duration_s + settings.drain_s,
        may_be_cut_off=True, must_finish=lambda request: request.service_tier == LS_TIER, show=show,
    )  # fmt: skip
    progress.update(round(duration_s - shown_s, 3))
    after = server.metrics()
    return Phase(
        scheduler=scheduler, name=name, duration_s=end_s, records=records,
        ls=summarize((record for record in records if record.service_tier == LS_TIER), end_s),
        be_tokens=after.get(BE_TOKENS, 0.0) - before.get(BE_TOKENS, 0.0),
        be_host_tokens=after[HOST_TOKENS] - before[HOST_TOKENS],
    )  # fmt: skip


def run_scheduler(settings: argparse.Namespace, scheduler: str, progress: tqdm) -> list[Phase]:
    """Start a server with ``scheduler``, let it compile and allocate, and measure both phases."""
    options = known_options(scheduler, {"admission": False})  # every request is to be measured
    arguments = [
        "--scheduler", scheduler, "--device-kv-gib", str(settings.device_kv_gib),
        "--host-kv-gib", str(settings.host_kv_gib), "--ls-ttft-slo", str(settings.ls_ttft_slo),
        "--ls-tpot-slo", str(settings.ls_tpot_slo),
        *(f"--scheduler-option={name}={value}" for name, value in options.items()), *settings.server_args,
    ]  # fmt: skip
    progress.set_postfix_str(f"{scheduler}: the server starts")
    load = make_load(settings, settings.beside_s, with_be=True)
    few = [dataclasses.replace(request, send_at_s=0.0, max_tokens=8) for request in (*load[:2], *load[-2:])]
    with warm_server("demo", arguments, few) as server:
        return [run_phase(server, settings, scheduler, with_be=with_be, progress=progress) for with_be in (False, True)]


def cells(phase: Phase) -> dict[str, str]:
    """Return a phase's line of the table."""
    ls, found = phase.ls, {"scheduler": phase.scheduler, "phase": phase.name}
    bound = ">" if ls.num_started < ls.num_requests else ""
    found["LS done"] = f"{ls.num_finished}/{ls.num_requests}"
    for name in ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99"):
        time_s, mark = getattr(ls, f"{name}_s"), bound if name.startswith("ttft") else ""
        found[name.upper().replace("_P", " p")] = "-" if math.isnan(time_s) else f"{mark}{1e3 * time_s:.1f}"
    return found | {
        "BE tok/s": f"{phase.be_tokens / phase.duration_s:.0f}", "BE tokens": f"{phase.be_tokens:.0f}",
        "on host": f"{phase.be_host_tokens:.0f}",
    }  # fmt: skip


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


def main() -> int:
    settings = parse_arguments()
    phases: list[Phase] = []
    total_s = len(settings.schedulers) * (settings.alone_s + settings.beside_s)
    with tqdm(total=total_s, bar_format="{l_bar}{bar}| {n:.0f}/{total:.0f} s{postfix}", leave=False) as progress:
        for scheduler in settings.schedulers:
            try:
                phases += run_scheduler(settings, scheduler, progress)
            except ServerFailed as error:
                progress.close()
                print(f"demo: scheduler {scheduler}: {error}", file=sys.stderr)
                return 1
    print(f"{table_of([cells(phase) for phase in phases])}\n{NOTES}")
    write_record(settings.record, name="demo", config=vars(settings), seed=settings.seed, results={"phases": phases})
    print(f"record: {settings.record}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
