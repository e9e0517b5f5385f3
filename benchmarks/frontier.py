"""LS requests beside batch work over HTTP: attainment of objectives, BE throughput, and what admission control does.

    python -m benchmarks.frontier --record benchmarks/results/frontier.json
    python -m benchmarks.frontier --quick

`frontier`: a Poisson stream of LS requests (1/s, 128 tokens in, 32 out) and 64 BE requests (512 in, 64 out) that all
come at once, under each policy and pair of objectives (`sarathi` with its usual budget of 512 tokens a step, and with
such as keep the TPOT); the stream alone under `sarathi` (nothing can do better); the BE requests alone. LS figures are
of the requests that overlap BE work. BE tokens/s count input and output, from the first request to the last token.
`overload`: LS requests at twice the rate that the server completes, with and without admission control. Policies
alternate; each one has a server of its own, and a fresh one every repeat. A random-weight bf16 model in SmolLM-135M's
shape, or the built-in one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import argument_parser
from benchmarks.common.client import LS_TIER, LoadRequest, drive
from benchmarks.common.loads import backlog, poisson_stream
from benchmarks.common.models import SMOLLM_135M, saved_random_llama
from benchmarks.common.record import write_record
from benchmarks.common.server import ServerProcess
from benchmarks.common.summary import medians, summarize_co_serving

SECTIONS = ("frontier", "overload")
OBJECTIVES = {"tight": (0.3, 0.06), "loose": (1.0, 0.25)}
DRAIN_S = 60.0
OVERLOAD_S = 20.0


@dataclass(frozen=True, kw_only=True)
class FrontierLoad:
    """The sizes of a load."""

    ls_rate: float
    ls_prompt: int
    ls_output: int
    seconds: float
    be_requests: int
    be_prompt: int
    be_output: int
    vocab_size: int
    objectives: dict[str, tuple[float, float]]
    budgets: dict[str, int]
    """Tokens a step with which a fixed budget keeps the objective's TPOT."""


def ls_stream(load: FrontierLoad, seed: int, slo: tuple[float, float], rate: float) -> list[LoadRequest]:
    """Return a Poisson stream of LS requests."""
    return poisson_stream(
        random.Random(seed), rate=rate, seconds=load.seconds, prompt=load.ls_prompt, output=load.ls_output,
        tier=LS_TIER, vocab_size=load.vocab_size, slo=slo,
    )  # fmt: skip


def be_pile(load: FrontierLoad, seed: int) -> list[LoadRequest]:
    """Return the BE requests."""
    rng = random.Random(seed + 10_000)
    return backlog(
        rng, count=load.be_requests, prompt=load.be_prompt, output=load.be_output, vocab_size=load.vocab_size
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the frontier's table."""

    name: str
    scheduler: str
    objective: str | None
    has_ls: bool = True
    has_be: bool = True
    flags: tuple[str, ...] = ()


def frontier_rows(objectives: dict[str, tuple[float, float]], budgets: dict[str, int]) -> list[Row]:
    """Return what the frontier compares."""
    rows = [Row(name="BE alone, omniserve", scheduler="omniserve", objective=None, has_ls=False)]
    for objective in objectives:
        rows += [
            Row(name=f"omniserve, {objective}", scheduler="omniserve", objective=objective),
            Row(
                name=f"omniserve, {objective}, slack=step", scheduler="omniserve", objective=objective,
                flags=("--scheduler-option", "slack=step"),
            ),
        ]  # fmt: skip
    first = next(iter(objectives))
    rows += [
        Row(name="LS alone, sarathi", scheduler="sarathi", objective=first, has_be=False),
        Row(name="sarathi", scheduler="sarathi", objective=first),
        *(
            Row(
                name=f"sarathi, {tokens} tokens a step, {objective}", scheduler="sarathi", objective=objective,
                flags=("--max-num-batched-tokens", str(tokens)),
            )
            for objective, tokens in budgets.items()
        ),
        Row(name="fcfs", scheduler="fcfs", objective=first),
    ]  # fmt: skip
    return rows


def measure_row(row: Row, load: FrontierLoad, flags: Sequence[str], seed: int) -> dict[str, Any]:
    """Run one row on a server of its own."""
    slo = load.objectives[row.objective] if row.objective is not None else None
    requests: list[LoadRequest] = []
    if row.has_ls and slo is not None:
        requests += ls_stream(load, seed, slo, load.ls_rate)
    if row.has_be:
        requests += be_pile(load, seed)
    arguments = [*flags, "--scheduler", row.scheduler, *row.flags]
    with ServerProcess(arguments, Path(".cache/frontier.log")) as server:
        server.wait_until_healthy()
        warm_up(server, load)
        records, end_s = drive(server, requests, cutoff_s=load.seconds + DRAIN_S)
        return summarize_co_serving(records, slo, end_s=end_s, stream_s=load.seconds)


def warm_up(server: ServerProcess, load: FrontierLoad) -> None:
    """Send a few requests of both kinds, so that nothing is measured in its first run."""
    ls = ls_stream(load, 77, (60.0, 60.0), 4.0)[:4]
    drive(server, [*ls, *be_pile(load, 77)[:4]], cutoff_s=10.0 + DRAIN_S)


def measure_overload(load: FrontierLoad, flags: Sequence[str], seed: int) -> dict[str, Any]:
    """Return attainment at twice the rate that the server completes, with and without admission control."""
    slo = next(iter(load.objectives.values()))
    results: dict[str, Any] = {}
    rate = 0.0
    for name, more in (
        ("without admission control", ["--scheduler-option", "admission=false"]),
        ("with admission control", []),
    ):
        with ServerProcess([*flags, *more], Path(".cache/frontier.log")) as server:
            server.wait_until_healthy()
            warm_up(server, load)
            if not rate:
                burst = ls_stream(load, seed, (600.0, 600.0), 1000.0)[:48]
                records, _ = drive(server, burst, cutoff_s=10.0 + DRAIN_S)
                rate = 2 * len(burst) / max(record.last_token_s or 0.0 for record in records)
            stream = [request for request in ls_stream(load, seed, slo, rate) if request.send_at_s < OVERLOAD_S]
            records, end_s = drive(server, stream, cutoff_s=OVERLOAD_S + DRAIN_S, may_be_cut_off=True)
            results[name] = summarize_co_serving(records, slo, end_s=end_s)
    return {"rate_per_s": rate, **results}


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return one line a row."""
    lines = [
        f"{'':34s}{'BE tokens/s':>12s}{'attained':>10s}{'TTFT':>7s}{'TPOT':>7s}{'rejected':>10s}"
        f"{'TTFT p50/p99 ms':>18s}{'TPOT p50/p99 ms':>18s}"
    ]
    for name, result in results.items():
        be = f"{result['be_tokens_per_s']:.0f}" if "be_tokens_per_s" in result else ""
        if "attained" not in result:
            lines.append(f"{name:34s}{be:>12s}")
            continue
        ttft = f"{1e3 * result['ttft_p50_s']:.0f}/{1e3 * result['ttft_p99_s']:.0f}"
        tpots = [result.get(name) for name in ("tpot_p50_s", "tpot_p99_s")]
        tpot = "/".join("-" if seconds is None else f"{1e3 * seconds:.1f}" for seconds in tpots)
        rejected = f"{result['rejected']}/{result['ls_requests']}"
        lines.append(
            f"{name:34s}{be:>12s}{result['attained']:10.1%}{result['ttft_attained']:7.0%}"
            f"{result['tpot_attained']:7.0%}{rejected:>10s}{ttft:>18s}{tpot:>18s}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argument_parser(
        __doc__, "frontier", repeats=3, seconds=(60.0, "length of an LS stream"),
        quick=(False, "one short run of each row"), seed=0,
    )  # fmt: skip
    parser.add_argument("--model", choices=("smollm", "builtin"), default="smollm")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--only", nargs="+", default=[], help="parts of names of frontier rows; others are left out")
    parser.add_argument("server_args", nargs="*", help="more flags of every server, after --")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.seconds = 1, 15.0
    if args.model == "smollm":
        flags = ["--model", str(saved_random_llama("smollm-135m-shape", **SMOLLM_135M)), "--device-kv-gib", "2"]
        load = FrontierLoad(
            ls_rate=1.0, ls_prompt=128, ls_output=32, seconds=args.seconds, be_requests=64, be_prompt=512,
            be_output=64, vocab_size=SMOLLM_135M["vocab_size"], objectives=OBJECTIVES,
            budgets={"tight": 48, "loose": 256},
        )  # fmt: skip
    else:  # a tenth of the time a token, so ten times the load
        flags = ["--device-kv-gib", "0.5"]
        load = FrontierLoad(
            ls_rate=8.0, ls_prompt=128, ls_output=32, seconds=args.seconds, be_requests=640, be_prompt=300,
            be_output=64, vocab_size=1000, objectives={"tight": (0.1, 0.02), "loose": (0.3, 0.05)},
            budgets={"tight": 256, "loose": 1024},
        )  # fmt: skip
    flags += args.server_args
    results: dict[str, Any] = {}

    def write() -> None:
        write_record(
            args.record, name="frontier", config=vars(args) | {"load": load, "flags": flags}, seed=args.seed,
            results=results,
        )  # fmt: skip

    if "frontier" in args.sections:
        rows = frontier_rows(load.objectives, load.budgets)
        rows = [row for row in rows if not args.only or any(part in row.name for part in args.only)]
        if not rows:
            parser.error(f"--only {args.only} leaves no row")
        runs: dict[str, list[dict[str, Any]]] = {row.name: [] for row in rows}
        for repeat in range(args.repeats):
            for row in rows:
                runs[row.name].append(measure_row(row, load, flags, args.seed + repeat))
                print(table({f"{row.name} ({repeat})": runs[row.name][-1]}).splitlines()[-1], flush=True)
        middle = {name: medians(samples) for name, samples in runs.items()}
        print(f"medians of {args.repeats}\n{table(middle)}")
        results["frontier"] = {"medians": middle, "runs": runs}
        write()
    if "overload" in args.sections:
        overload = results["overload"] = measure_overload(load, flags, args.seed)
        print(f"overload, {overload['rate_per_s']:.1f} LS requests/s")
        print(table({name: result for name, result in overload.items() if isinstance(result, dict)}))
        write()


if __name__ == "__main__":
    main()
