"""Policies beside each other on one load: LS requests at a rate, BE work behind them, objectives tight or loose.

    python -m benchmarks.coserve --policies omniserve sarathi --rates 0.5 1 2 --slo-scales 0.5 1 2 --plot coserve.png
    python -m benchmarks.coserve --load memory
    python -m benchmarks.coserve --ls-trace azure.csv --trace-scale 0.2 0.4 --length-scale 0.1
    python -m benchmarks.coserve --url http://127.0.0.1:8000 --name vLLM --priority-field --record vllm.json
    python -m benchmarks.coserve --report .cache/coserve.json vllm.json --plot both.png

Every run is one policy, rate and seed on a fresh server (a random-weight bf16 model in SmolLM-135M's shape, unless
--model says otherwise), warmed up by a few requests of both kinds. Within a repeat all policies serve the same requests
one after the other, and each repeat begins with another policy, so that drift of the machine hits all alike. A policy
is a scheduler, with flags of its server if need be: `conserve,kv=incremental`. Flags after `--` go to every server.
Device memory holds less than half of the BE work by default, and a few requests at a time with --load memory (the
built-in model): what a policy does then, host attention, swapping or recomputing, decides what BE requests get.

With --ls-fronts, --ls-chats and --be-fronts prompts begin alike (``benchmarks/common/prefixes.py``): --ls-input and
--be-input are then what is new in each. `LS found`, `BE found`: the share of prompt tokens that the prefix cache had.

LS requests arrive as a Poisson, gamma (--cv) or square-wave process, or as a trace (CSV with the columns arrival_s,
input_tokens, output_tokens), of which --seconds choose a slice and --trace-scale the speed. BE work is a backlog that
is there from the start, or a trace. Prompts are random tokens.

Objectives are --slo-ttft and --slo-tpot times each of --slo-scales. A policy that reads objectives runs once for each;
one that does not (``Policy.predicts``) runs once and is compared with all of them.

The table has medians over the repeats. `attained`: met both objectives, of the requests that were not rejected, or `of
all`. `BE tok/s beside LS`: in the first --seconds, while LS requests come; `in all`: until the BE work was done, or cut
off --drain-s later. `frontier`: no other policy is better in `of all` or `BE tok/s beside LS` without being worse in
the other. `others busy`: cores that other processes took during the run: beside much more than 0, figures say little.
`on host`, `of BE`: output tokens whose attention the host tier computed, and their share of BE's. `preempted`,
`recomputed`: how often a request lost its memory, and how many tokens had to be computed once more. What each figure
counts: `benchmarks/common/summary.py`.

With --url the server is one that is there, measured by the same client, run after run; it gets token ids and
`ignore_eos`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.client import OMNISERVE_WIRE, Wire
from benchmarks.common.models import saved_smollm
from benchmarks.common.prefixes import PrefixStructure
from benchmarks.common.record import write_record
from benchmarks.common.server import ServerFailed
from benchmarks.common.summary import cells, without_samples
from benchmarks.common.terminal import argument_parser, table_of
from benchmarks.coserving import (
    PROCESSES,
    Arrivals,
    CoServingLoad,
    Servers,
    TraceSlice,
    joined_records,
    measure,
    plan_runs,
    rows_of,
    scheduler_of,
)
from omniserve.sched import SCHEDULERS
from omniserve.simulate.report import require_matplotlib

LOADS: dict[str, dict[str, Any]] = {
    "time": {},
    "memory": {
        "policies": [
            "omniserve", "neo", "apex", "conserve,kv=incremental",
            "bros,scheduler-option=checkpoint_kv=true", "llumnix", "sarathi", "fcfs"
        ],
        "model": "builtin", "device_kv_gib": 0.006, "seconds": 20.0, "drain_s": 5.0, "rates": [4.0], "slo_ttft": 0.1,
        "slo_tpot": 0.012, "be_requests": 256, "be_input": 384, "be_output": 256,
    },
    "prefixes": {
        "policies": [
            "omniserve", "omniserve,execution=prefix_cache=false", "sarathi", "sarathi,execution=prefix_cache=false"
        ],
        "seconds": 30.0, "drain_s": 5.0, "ls_input": 32, "ls_fronts": 4, "ls_front": 192, "ls_chats": 8,
        "be_requests": 400, "be_input": 64, "be_output": 32, "be_fronts": 16, "be_front": 512,
    },
}  # fmt: skip
"""Values of the arguments that are not given. memory: the device has 2,048 tokens of KV (half as many where auto
takes fp32) of the 164,000 that the BE work needs, and of these LS requests take their part. Its model has six layers: a
request on the host tier gets a token every seven steps, so that 200 of them bring more than the four that fit on the
device; with SmolLM's 30 they would not. prefixes: LS requests are turns of chats with their tenant's system prompt, BE
prompts are lines of batches with templates, in random order; the device has KV for 11,000 tokens, of which the
templates would take 8,000."""


Row = Mapping[str, Any]
"""Figures of ``summarize_co_serving`` (medians, or one run's), and ``policy``, ``rate`` (LS requests a second) and
``scale`` (factor of the objectives that they were compared with)."""

ATTAINED, BE_RATE = "attained_of_all", "be_tokens_per_s_beside_ls"
"""The frontier's two figures: rejected requests are misses; both are of the time in which LS requests come."""
LABELS = {ATTAINED: "LS requests that met their objectives", BE_RATE: "BE tokens/s beside LS"}


def pareto_optimal(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Return for each point if no other is at least as good in both figures and better in one."""
    return [
        not any(other != point and other[0] >= point[0] and other[1] >= point[1] for other in points)
        for point in points
    ]


def frontier_of(rows: Iterable[Row], rate: float, scale: float) -> list[tuple[Row, bool]]:
    """Return the rows of one rate and scale that have both figures, each with whether it is Pareto-optimal."""
    group = [row for row in rows if (row["rate"], row["scale"]) == (rate, scale) and ATTAINED in row and BE_RATE in row]
    return list(zip(group, pareto_optimal([(row[ATTAINED], row[BE_RATE]) for row in group]), strict=True))


def markdown_table(rows: Sequence[Row]) -> str:
    """Return a Markdown table by rate, scale and the order of the rows."""
    best = [id(row) for place in _places(rows) for row, is_best in frontier_of(rows, *place) if is_best]
    lines = []
    for row in sorted(rows, key=lambda row: (row["rate"], row["scale"])):
        line = {"policy": row["policy"], "LS/s": f"{row['rate']:.3g}", "SLO x": f"{row['scale']:g}", **cells(row)}
        for name, key, form in (
            ("on host", "host_tokens", "g"), ("of BE", "host_share", ".0%"), ("preempted", "preemptions", "g"),
            ("recomputed", "recomputed_tokens", "g"), ("LS found", "ls_found", ".0%"), ("BE found", "be_found", ".0%"),
            ("others busy", "others_busy_cores", ".1f"),
        ):  # fmt: skip
            if key in row:
                line[name] = format(row[key], form)
        lines.append(line | {"frontier": "*" if id(row) in best else ""})
    return table_of(lines)


def plot(rows: Sequence[Row], runs: Sequence[Row], path: Path) -> None:
    """Draw one line of panels a scale: attainment and BE tokens/s against the rate, and each rate's frontier.

    Without a second rate there is nothing to draw against it, and the frontier stands alone. On it, rows are full where
    nothing is better in both figures; small dots are the single ``runs`` that ``rows`` are the medians of.
    """
    places = [place for place in _places(rows) if frontier_of(rows, *place)]
    if not places:
        raise ValueError("there is nothing to draw: no run has both LS requests and BE work")
    pyplot = require_matplotlib()
    rates, scales = (list(dict.fromkeys(place[i] for place in places)) for i in (0, 1))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    colours = {policy: pyplot.get_cmap("tab20")(number % 20) for number, policy in enumerate(policies)}
    against = LABELS if len(rates) > 1 else {}
    columns = len(against) + len(rates)
    figure, axes = pyplot.subplots(
        len(scales), columns, figsize=(5 * columns + 1, 4.2 * len(scales) + 0.6), squeeze=False, layout="constrained"
    )
    for line, scale in zip(axes, scales, strict=True):
        for panel, (name, label) in zip(line, against.items(), strict=False):
            for policy in policies:
                own = [row for row in rows if row["policy"] == policy and row["scale"] == scale and name in row]
                own.sort(key=lambda row: row["rate"])
                panel.plot([r["rate"] for r in own], [r[name] for r in own], "o-", color=colours[policy], markersize=4)
            panel.set(xlabel="LS requests/s", ylabel=label, title=f"objectives x {scale:g}", ylim=(0, None))
        for panel, rate in zip(line[len(against) :], rates, strict=True):
            for row, _ in frontier_of(runs, rate, scale):
                panel.plot(row[BE_RATE], row[ATTAINED], ".", color=colours[row["policy"]], markersize=3, alpha=0.6)
            for row, is_best in frontier_of(rows, rate, scale):
                colour = colours[row["policy"]]
                face = colour if is_best else "none"
                panel.plot(row[BE_RATE], row[ATTAINED], "o", markeredgecolor=colour, markerfacecolor=face, markersize=8)
            panel.set(xlabel=LABELS[BE_RATE], ylabel=LABELS[ATTAINED], ylim=(-0.04, 1.08), xlim=(0, None))
            panel.set_title(f"{rate:.3g} LS requests/s, objectives x {scale:g}")
    handles = [pyplot.Line2D([], [], marker="o", color=colours[policy], label=policy) for policy in policies]
    figure.legend(handles=handles, ncols=3 * columns, loc="outside lower center", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _places(rows: Iterable[Row]) -> list[tuple[float, float]]:
    """Return the pairs of rate and scale, by scale."""
    return sorted({(row["rate"], row["scale"]) for row in rows}, key=lambda place: place[::-1])


def report(runs: Sequence[Mapping[str, Any]], plot_path: Path | None) -> None:
    """Print the table, and draw the plots if a file is named."""
    rows, single = rows_of(runs)
    print(markdown_table(rows))
    if plot_path is not None:
        plot(rows, single, plot_path)
        print(f"plot: {plot_path}")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line; a bad one ends the program."""
    parser = argument_parser(
        __doc__, "coserve", model=("smollm", "smollm (random weights in its shape), builtin, a path or hub id"),
        device_kv_gib=(0.25, "of each server"), rates=([1.0], "LS requests a second; 0: BE work alone"),
        cv=(2.0, "gamma: coefficient of variation of the gaps"), seconds=(20.0, "how long LS requests come"),
        ls_input=(128, "tokens"), ls_output=(32, "tokens"), slo_ttft=(0.3, "objective, seconds"),
        slo_tpot=(0.06, "objective, seconds"), slo_scales=([1.0], "factors of both objectives"),
        ls_fronts=(0, "first parts that LS prompts begin with, such as system prompts; 0: none"),
        ls_front=(0, "tokens of one"), ls_chats=(0, "open chats that LS requests are turns of; 0: none"),
        be_fronts=(0, "first parts that BE prompts begin with, such as templates"), be_front=(0, "tokens of one"),
        be_requests=(48, "backlog at the start; 0: none"), be_input=(512, "tokens"), be_output=(64, "tokens"),
        drain_s=(40.0, "longest wait for what is not finished when LS requests have come"),
        trace_scale=([1.0], "with --ls-trace, instead of --rates: how many times as fast it is sent"),
        length_scale=(1.0, "factor of the traces' lengths"), repeats=1, seed=0,
    )  # fmt: skip
    add = parser.add_argument
    add("--load", choices=LOADS, default="time", help="sets the defaults (default: %(default)s)")
    add("--policies", nargs="+", default=SCHEDULERS.names(), metavar="NAME[,FLAG[=VALUE]...]",
        help="schedulers by name or as package.module:Class (default: all)")  # fmt: skip
    add("--arrivals", choices=PROCESSES, default="poisson")
    add("--ls-trace", type=Path, help="CSV of LS requests")
    add("--be-trace", type=Path, help="CSV instead of a backlog")
    add("--url", help="measure this server, which is running, and start none")
    add("--name", help="--url: what to call it in the table")
    add("--priority-field", action="store_true", help="--url: send vLLM's priority, 0 for LS and 1 for BE")
    add("--model-name", help="--url: model to ask for, if the server insists on one")
    add("--plot", type=Path, help="file for the plots (.png, .svg, .pdf)")
    add("--report", type=Path, nargs="+", metavar="RECORD", help="measure nothing: table and plots of these records")
    add("server_args", nargs="*", help="more flags of every server, after --")
    parser.set_defaults(**LOADS[parser.parse_args(arguments).load])
    args = parser.parse_args(arguments)
    if (args.url is None) != (args.name is None):
        parser.error("--url and --name come together")
    if args.url is None and (args.priority_field or args.model_name):
        parser.error("--priority-field and --model-name are for a server at --url")
    if args.url is not None and args.server_args:
        parser.error(f"{args.server_args} cannot be given to a server that is running")
    if min(args.repeats, args.seconds, *args.slo_scales) <= 0 or args.drain_s < 0:
        parser.error("--repeats, --seconds and --slo-scales must be > 0, --drain-s >= 0")
    try:
        for policy in args.policies if args.url is None else ():
            SCHEDULERS.get(scheduler_of(policy))
        if args.plot is not None:  # now, not when everything has been measured
            require_matplotlib()
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    return args


def load_of(args: argparse.Namespace) -> tuple[CoServingLoad, list[float]]:
    """Return the load, and the rates, or scales of the trace, at which it is sent."""
    piece = TraceSlice(seconds=args.seconds, length_scale=args.length_scale, max_input=1024, max_output=256)
    load = CoServingLoad(
        arrivals=None if args.ls_trace else Arrivals(process=args.arrivals, cv=args.cv), seconds=args.seconds,
        ls_input=args.ls_input, ls_output=args.ls_output, ls_trace=str(args.ls_trace) if args.ls_trace else None,
        ls_slice=piece, be_requests=args.be_requests, be_input=args.be_input, be_output=args.be_output,
        be_trace=str(args.be_trace) if args.be_trace else None, be_slice=piece,
        ls_prefixes=PrefixStructure(fronts=args.ls_fronts, front_tokens=args.ls_front, chats=args.ls_chats),
        be_prefixes=PrefixStructure(fronts=args.be_fronts, front_tokens=args.be_front), slo_ttft_s=args.slo_ttft,
        slo_tpot_s=args.slo_tpot, vocab_size=1000, drain_s=args.drain_s,
    )  # fmt: skip
    return load, args.trace_scale if args.ls_trace else args.rates


def servers_of(args: argparse.Namespace) -> Servers:
    """Return where the runs go."""
    if args.url is not None:
        wire = Wire(omniserve_fields=False, priority_field=args.priority_field, model=args.model_name)
        return Servers(url=args.url, wire=wire, arguments=())
    model = args.model
    if model == "smollm":
        model = str(saved_smollm())
    arguments = [] if model == "builtin" else ["--model", model]
    arguments += ["--device-kv-gib", str(args.device_kv_gib), *args.server_args]
    return Servers(url=None, wire=OMNISERVE_WIRE, arguments=tuple(arguments))


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    try:
        if args.report is not None:
            report(joined_records(args.report, args.load), args.plot)
            return 0
        load, points = load_of(args)
        for point in points:  # a bad number or trace shows now, not after the first runs
            if not load.requests(point, args.seed, load.slo(1.0)):
                raise ValueError(f"there is nothing to send: rate {point:g} and no BE work")
    except (OSError, ValueError) as error:
        print(f"coserve: {error}", file=sys.stderr)
        return 2
    servers = servers_of(args)
    policies = [args.name] if args.url is not None else list(dict.fromkeys(args.policies))
    # One run of a policy that reads no objective shows what it does under all.
    blind = {name for name in policies if args.url or not SCHEDULERS.get(scheduler_of(name)).predicts}
    runs = plan_runs(policies, points, args.slo_scales, args.repeats, blind=blind)
    results: dict[str, Any] = {"runs": [], "failed": []}
    for number, run in enumerate(runs, start=1):
        print(f"run {number} of {len(runs)}: {run.policy}, {run.point:g}, objectives x {run.told_scale:g}", flush=True)
        try:
            results["runs"].append(measure(run, load, servers, args.seed))
        except (ServerFailed, httpx.HTTPError) as error:  # the others are still worth their time
            print(f"coserve: {run.policy}: {error}", file=sys.stderr)
            results["failed"].append(dataclasses.asdict(run) | {"error": str(error)})
        kept, raw = without_samples(results, "requests")
        write_record(
            args.record, name="coserve", case=args.load, seed=args.seed, results=kept, raw=raw,
            config=vars(args) | {"load": load, "server_flags": servers.arguments},
        )  # fmt: skip
    if results["runs"]:
        report(results["runs"], args.plot)
    print(f"record: {args.record}")
    for failed in results["failed"]:
        print(f"coserve: {failed['policy']} failed, see above", file=sys.stderr)
    return 1 if results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
