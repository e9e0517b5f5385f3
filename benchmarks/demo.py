"""What best-effort work costs latency-sensitive requests: the load generator of ``make demo``.

For each scheduler it starts the server with the built-in model and too little device memory for the load, measures a
Poisson stream of LS requests alone, then the same stream beside a pile of BE requests, and prints one table.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import random
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

from tqdm import tqdm

from benchmarks.common.arguments import argument_parser
from benchmarks.common.client import BE_TIER, LS_TIER, LoadRequest, RequestRecord, drive, run_load
from benchmarks.common.record import write_record
from benchmarks.common.server import BE_TOKENS, HOST_TOKENS, ServerFailed, ServerProcess
from benchmarks.common.summary import LatencySummary, summarize
from omniserve.sched.policy import known_options
from omniserve.simulate.load import poisson

WARM_UP_TIMEOUT_S = 120.0


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
    text = "\n".join(topics.topics.values())

    def request(rng: random.Random, at_s: float, chars: int, max_tokens: int, tier: str) -> LoadRequest:
        start = rng.randrange(len(text) - chars)
        return LoadRequest(
            send_at_s=at_s, prompt=text[start : start + chars], max_tokens=max_tokens, service_tier=tier
        )  # fmt: skip

    load = [
        request(ls_rng, at_s, settings.ls_prompt_chars, settings.ls_output_tokens, LS_TIER)
        for at_s in poisson(settings.ls_rate, duration_s, random.Random(settings.seed + 2))
    ]
    if with_be:
        load += [
            request(be_rng, 0.0, settings.be_prompt_chars, settings.be_output_tokens, BE_TIER)
            for _ in range(settings.be_requests)
        ]
    return load


def check(server: ServerProcess, records: Sequence[RequestRecord]) -> None:
    """Raise ServerFailed if the server has ended or a request was answered with an error."""
    server.check_alive()
    if error := next((record.error for record in records if record.error), None):
        raise ServerFailed(f"a request failed: {error}\n{server.log_tail()}")


async def run_phase(
    server: ServerProcess, settings: argparse.Namespace, scheduler: str, *, with_be: bool, progress: tqdm
) -> Phase:
    """Send one phase's load and return what came of it."""
    duration_s = settings.beside_s if with_be else settings.alone_s
    name = "LS + BE" if with_be else "LS alone"
    load = make_load(settings, duration_s, with_be=with_be)
    before = server.metrics()
    shown_s = 0.0

    async def watch(now_s: float, records: Sequence[RequestRecord]) -> None:
        nonlocal shown_s
        check(server, records)
        progress.update(round(min(now_s, duration_s) - shown_s, 3))
        shown_s = min(now_s, duration_s)
        done = {tier: sum(r.finished for r in records if r.service_tier == tier) for tier in (LS_TIER, BE_TIER)}
        progress.set_postfix_str(f"{scheduler}, {name}: {done[LS_TIER]} LS and {done[BE_TIER]} BE finished")

    records, end_s = await run_load(
        server.base_url,
        load,
        must_finish=lambda request: request.service_tier == LS_TIER,
        cutoff_s=duration_s + settings.drain_s,
        watch=watch,
    )
    check(server, records)
    after = server.metrics()
    progress.update(round(duration_s - shown_s, 3))
    return Phase(
        scheduler=scheduler,
        name=name,
        duration_s=end_s,
        ls=summarize((record for record in records if record.service_tier == LS_TIER), end_s),
        be_tokens=after.get(BE_TOKENS, 0.0) - before.get(BE_TOKENS, 0.0),
        be_host_tokens=after[HOST_TOKENS] - before[HOST_TOKENS],
        records=records,
    )


def warm_up(server: ServerProcess, settings: argparse.Namespace) -> None:
    """Let the server compile and allocate: a few short requests of both classes, which are not measured."""
    load = make_load(settings, settings.beside_s, with_be=True)
    few = [dataclasses.replace(request, send_at_s=0.0, max_tokens=8) for request in (*load[:2], *load[-2:])]

    drive(server, few, cutoff_s=WARM_UP_TIMEOUT_S)


def run_scheduler(settings: argparse.Namespace, scheduler: str, log_path: Path, progress: tqdm) -> list[Phase]:
    """Start a server with ``scheduler`` and measure both phases."""
    options = known_options(scheduler, {"admission": False})  # every request is to be measured
    arguments = [
        "--scheduler", scheduler,
        "--device-kv-gib", str(settings.device_kv_gib),
        "--host-kv-gib", str(settings.host_kv_gib),
        "--ls-ttft-slo", str(settings.ls_ttft_slo),
        "--ls-tpot-slo", str(settings.ls_tpot_slo),
        *(f"--scheduler-option={name}={value}" for name, value in options.items()),
        *settings.server_args,
    ]  # fmt: skip
    progress.set_postfix_str(f"{scheduler}: the server starts")
    with ServerProcess(arguments, log_path) as server:
        server.wait_until_healthy()
        warm_up(server, settings)
        return [
            asyncio.run(run_phase(server, settings, scheduler, with_be=with_be, progress=progress))
            for with_be in (False, True)
        ]


def table(phases: Sequence[Phase]) -> str:
    """Return the results as text."""
    head = (
        f"{'scheduler':<10} {'phase':<9} {'LS done':>9} {'TTFT p50':>9} {'TTFT p99':>9} {'TPOT p50':>9} {'TPOT p99':>9}"
        f" {'BE tok/s':>9} {'BE tokens':>10} {'on host':>8}"
    )
    lines = [head, "-" * len(head)]
    for phase in phases:
        ls = phase.ls
        bound = ">" if ls.num_started < ls.num_requests else ""
        ttfts = (f"{bound}{seconds * 1e3:.1f}" for seconds in (ls.ttft_p50_s, ls.ttft_p99_s))
        tpots = ("-" if math.isnan(seconds) else f"{seconds * 1e3:.1f}" for seconds in (ls.tpot_p50_s, ls.tpot_p99_s))
        lines.append(
            f"{phase.scheduler:<10} {phase.name:<9} {f'{ls.num_finished}/{ls.num_requests}':>9}"
            + "".join(f" {text:>9}" for text in (*ttfts, *tpots))
            + f" {phase.be_tokens / phase.duration_s:>9.0f} {phase.be_tokens:>10.0f} {phase.be_host_tokens:>8.0f}"
        )
    lines += [
        "",
        "TTFT, TPOT: time to first token, time per output token after it; milliseconds, of LS requests, at the client.",
        "> : some LS requests had no first token when the phase ended; they count with the time they had waited.",
        "on host: BE output tokens whose attention the host tier computed.",
    ]
    return "\n".join(lines)


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
    bar_format = "{l_bar}{bar}| {n:.0f}/{total:.0f} s{postfix}"
    with tempfile.TemporaryDirectory() as folder, tqdm(total=total_s, bar_format=bar_format, leave=False) as progress:
        for scheduler in settings.schedulers:
            try:
                phases += run_scheduler(settings, scheduler, Path(folder) / f"{scheduler}.log", progress)
            except ServerFailed as error:
                progress.close()
                print(f"demo: scheduler {scheduler}: {error}", file=sys.stderr)
                return 1
    print(table(phases))
    write_record(
        settings.record, name="demo", config=vars(settings), seed=settings.seed, results={"phases": phases}
    )  # fmt: skip
    print(f"record: {settings.record}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
