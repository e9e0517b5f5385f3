"""LS requests beside batch work over HTTP: attainment of objectives, BE throughput, and what admission control does.

    python -m benchmarks.frontier --record benchmarks/results/frontier.json

`frontier`: a Poisson stream of LS requests (1/s, 128 tokens in, 32 out) and 64 BE requests (512 in, 64 out) that all
come at once, under each policy and pair of objectives (`sarathi` with its usual budget of 512 tokens a step, and with
such as keep the TPOT); the stream alone under `sarathi` (nothing can do better); the BE requests alone. LS figures are
of the requests that overlap BE work. BE tokens/s count input and output, from the first request to the last token.
`overload`: LS requests at twice the rate that the server completes, with and without admission control. Policies
alternate; each one has a server of its own, and a fresh one every repeat. A random-weight bf16 model in SmolLM-135M's
shape.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.client import LS_TIER, LoadRequest, backlog, drive, few_of_each, poisson_stream, warm_server
from benchmarks.common.models import SMOLLM_135M, saved_smollm
from benchmarks.common.record import write_record
from benchmarks.common.summary import cells, medians, summarize_co_serving
from benchmarks.common.terminal import argument_parser, table_of

OBJECTIVES = {"tight": (0.3, 0.06), "loose": (1.0, 0.25)}
BUDGETS = {"tight": 48, "loose": 256}
DRAIN_S = 60.0
OVERLOAD_S = 20.0


@dataclass(frozen=True, kw_only=True)
class FrontierLoad:
    """The sizes of a load."""

    ls_rate: float = 1.0
    ls_prompt: int = 128
    ls_output: int = 32
    seconds: float
    be_requests: int = 64
    be_prompt: int = 512
    be_output: int = 64
    vocab_size: int = SMOLLM_135M["vocab_size"]
    objectives: Mapping[str, tuple[float, float]]
    budgets: Mapping[str, int]
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


def warm_up(load: FrontierLoad) -> list[LoadRequest]:
    """Return a few requests of both kinds, so that nothing is measured in its first run."""
    sizes = (load.ls_prompt, load.ls_output), (load.be_prompt, load.be_output)
    return few_of_each(*sizes, vocab_size=load.vocab_size, slo=(60.0, 60.0))


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the frontier's table."""

    name: str
    scheduler: str
    objective: str | None
    has_ls: bool = True
    has_be: bool = True
    flags: tuple[str, ...] = ()


def frontier_rows(objectives: Mapping[str, tuple[float, float]], budgets: Mapping[str, int]) -> list[Row]:
    """Return what the frontier compares."""
    rows = [Row(name="BE alone, omniserve", scheduler="omniserve", objective=None, has_ls=False)]
    for objective in objectives:
        name, by_step = f"omniserve, {objective}", ("--scheduler-option", "slack=step")
        rows.append(Row(name=name, scheduler="omniserve", objective=objective))
        rows.append(Row(name=f"{name}, slack=step", scheduler="omniserve", objective=objective, flags=by_step))
    first = next(iter(objectives))
    rows.append(Row(name="LS alone, sarathi", scheduler="sarathi", objective=first, has_be=False))
    rows.append(Row(name="sarathi", scheduler="sarathi", objective=first))
    for objective, tokens in budgets.items():
        name, flags = f"sarathi, {tokens} tokens a step, {objective}", ("--max-num-batched-tokens", str(tokens))
        rows.append(Row(name=name, scheduler="sarathi", objective=objective, flags=flags))
    return [*rows, Row(name="fcfs", scheduler="fcfs", objective=first)]


def measure_row(row: Row, load: FrontierLoad, flags: Sequence[str], seed: int) -> dict[str, Any]:
    """Run one row on a server of its own."""
    slo = load.objectives[row.objective] if row.objective is not None else None
    ls = ls_stream(load, seed, slo, load.ls_rate) if row.has_ls and slo is not None else []
    be = be_pile(load, seed) if row.has_be else []
    with warm_server("frontier", [*flags, "--scheduler", row.scheduler, *row.flags], warm_up(load)) as server:
        records, end_s = drive(server, [*ls, *be], cutoff_s=load.seconds + DRAIN_S)
        return summarize_co_serving(records, slo, end_s=end_s, stream_s=load.seconds)


def measure_overload(load: FrontierLoad, flags: Sequence[str], seed: int) -> dict[str, Any]:
    """Return attainment at twice the rate that the server completes, with and without admission control."""
    slo = next(iter(load.objectives.values()))
    results: dict[str, Any] = {}
    rate = 0.0
    for name, more in (
        ("without admission control", ["--scheduler-option", "admission=false"]),
        ("with admission control", []),
    ):
        with warm_server("frontier", [*flags, *more], warm_up(load)) as server:
            if not rate:
                burst = ls_stream(load, seed, (600.0, 600.0), 1000.0)[:48]
                records, _ = drive(server, burst, cutoff_s=10.0 + DRAIN_S)
                rate = 2 * len(burst) / max(record.last_token_s or 0.0 for record in records)
            stream = [request for request in ls_stream(load, seed, slo, rate) if request.send_at_s < OVERLOAD_S]
            records, end_s = drive(server, stream, cutoff_s=OVERLOAD_S + DRAIN_S, may_be_cut_off=True)
            results[name] = summarize_co_serving(records, slo, end_s=end_s)
    return {"rate_per_s": rate, **results}


def main() -> None:
    parser = argument_parser(__doc__, "frontier", repeats=3, seconds=(60.0, "length of an LS stream"), seed=0)
    parser.add_argument("server_args", nargs="*", help="more flags of every server, after --")
    args = parser.parse_args()
    flags = ["--model", str(saved_smollm()), "--device-kv-gib", "2"]
    flags += args.server_args
    load = FrontierLoad(seconds=args.seconds, objectives=OBJECTIVES, budgets=BUDGETS)
    rows = frontier_rows(load.objectives, load.budgets)
    runs: dict[str, list[dict[str, Any]]] = {row.name: [] for row in rows}
    for repeat in range(args.repeats):
        for row in rows:
            runs[row.name].append(measure_row(row, load, flags, args.seed + repeat))
            print(row.name, repeat, cells(runs[row.name][-1]), flush=True)
    middle = {name: medians(samples) for name, samples in runs.items()}
    print(f"medians of {args.repeats}\n{table_of([{'': name} | cells(result) for name, result in middle.items()])}")
    overload = measure_overload(load, flags, args.seed)
    print(f"overload, {overload['rate_per_s']:.1f} LS requests/s")
    print(table_of([{"": name} | cells(found) for name, found in overload.items() if isinstance(found, dict)]))
    config = vars(args) | {"model": "smollm", "load": load, "flags": flags}
    results = {"frontier": {"medians": middle, "runs": runs}, "overload": overload}
    write_record(args.record, name="frontier", config=config, seed=args.seed, results=results)


if __name__ == "__main__":
    main()
