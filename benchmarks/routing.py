"""Routing policies beside each other: the same requests through several simulated engines, divided by each router.

python -m benchmarks.routing --record benchmarks/results/routing.json

The engines run the real scheduler on a virtual clock (``omniserve/simulate``); the router is the server's own, and
knows what its front would know: loads told every 20 ms, and what was sent since. Latency-sensitive requests are chats:
each turn repeats the whole conversation, a third of the conversations begin with one of four long system prompts, and
they come in bursts. Best-effort work comes in floods. Every router has the same requests, of several seeds.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import random
import statistics
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.record import write_record
from omniserve.core.load import PROMPT_SIZES, EngineLoad
from omniserve.core.request import SLO, ClassSpec, ServiceClass
from omniserve.routing.books import Call, EngineBooks, Sent
from omniserve.routing.routers import ROUTERS
from omniserve.simulate import Load, SimulationConfig, simulate
from omniserve.simulate.analytic import analytic_machine, engine_config_for
from omniserve.simulate.hardware import find_devices, find_hosts
from omniserve.simulate.load import TraceRequest, gamma
from omniserve.simulate.models import find_model

HASH_TOKENS = 64
LOAD_EVERY_S = 0.02
"""Seconds after which an engine tells its load again."""
TTFT_S, TPOT_S = 1.0, 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """What comes, and on what."""

    engines: int
    minutes: float
    conversations_per_s: float
    """Conversations that begin in a second, for each engine."""
    be_per_flood: int
    """Best-effort requests of a flood, for each engine."""


def chats(workload: Workload, rng: random.Random) -> list[TraceRequest]:
    """Return the turns of conversations: a third share a long system prompt, and each turn repeats what was said."""
    duration_s = 60 * workload.minutes
    rows: list[TraceRequest] = []
    ids = iter(range(1, 1 << 40))
    systems = [tuple(next(ids) for _ in range(16)) for _ in range(4)]  # of 1,024 tokens
    for begin_s in gamma(workload.conversations_per_s * workload.engines, 2.5, duration_s, rng):
        history = rng.choice(systems) if rng.random() < 1 / 3 else ()
        at_s = begin_s
        for _ in range(1 + min(int(rng.expovariate(0.4)), 8)):
            asked, answered = 32 + int(rng.expovariate(1 / 200)), 16 + int(rng.expovariate(1 / 120))
            history = (*history, *(next(ids) for _ in range(-(-asked // HASH_TOKENS))))
            if at_s >= duration_s or len(history) * HASH_TOKENS > 6000:
                break
            rows.append(TraceRequest(at_s, len(history) * HASH_TOKENS, answered, hash_ids=history))
            history = (*history, *(next(ids) for _ in range(-(-answered // HASH_TOKENS))))
            at_s += answered * 0.05 + rng.expovariate(1 / 8)  # it is read, and the next question written
    return sorted(rows, key=lambda row: row.arrival_s)


def floods(workload: Workload, rng: random.Random) -> list[TraceRequest]:
    """Return best-effort requests: a third of all at the start, then a flood each minute."""
    rows = []
    for minute in range(int(workload.minutes)):
        for _ in range(workload.be_per_flood * workload.engines * (2 if minute == 0 else 1)):
            rows.append(
                TraceRequest(60.0 * minute, 64 + int(rng.expovariate(1 / 400)), 32 + int(rng.expovariate(1 / 200)))
            )
    return rows


def run(router: str, workload: Workload, seed: int) -> dict[str, float]:
    """Return the figures of one run."""
    rng = random.Random(seed)
    load = Load(
        latency_sensitive=chats(workload, rng),
        best_effort=floods(workload, rng),
        hash_tokens=HASH_TOKENS,
        duration_s=60 * workload.minutes,
    )
    (_, device), (_, host) = find_devices("A10"), find_hosts("Xeon-6342")
    machine = analytic_machine(find_model("llama-3.1-8b"), device, hosts=(host,))
    classes = (
        ClassSpec(name="LS", kind=ServiceClass.LS, slo=SLO(ttft_s=TTFT_S, tpot_s=TPOT_S)),
        ClassSpec(name="BE", kind=ServiceClass.BE),
    )
    config = SimulationConfig(
        machine=machine,
        engine=engine_config_for(machine, scheduler="omniserve", classes=classes),
        load=load,
        num_engines=workload.engines,
        router=router,
        seed=seed,
        noise=0.05,
    )
    result = simulate(config)
    ls, be = result.classes["LS"], result.classes["BE"]
    return {
        "attainment": ls.attainment,
        "refused": ls.num_rejected / max(1, len(load.latency_sensitive)),
        "ttft_p99_s": ls.ttft_p99_s,
        "be_tokens_per_s": be.output_tokens_per_s,
        "cached": ls.cached_share,
        "wall_s": result.wall_s,
    }


def cost(router: str, *, engines: int, requests_per_s: int, seconds: float, seed: int) -> dict[str, float]:
    """Measure what a router costs the front: the CPU of its decisions and of the books that it reads.

    Chats and best-effort requests come by turns, each engine tells its load every 20 ms, and a request ends two seconds
    after it came. Time is virtual; what is measured is the CPU of the thread: medians, of which the share is made.
    """
    rng, chosen = random.Random(seed), ROUTERS[router]()
    books = [EngineBooks(number, 40_000) for number in range(engines)]
    loads = [
        EngineLoad(num_taken=0, ttft_s={"LS": [rng.random() + size * 2e-4 for size in PROMPT_SIZES]}, be_tokens=0)
        for _ in books
    ]
    systems = [[rng.randrange(4000) for _ in range(1024)] for _ in range(16)]
    kinds = itertools.cycle((ServiceClass.LS, ServiceClass.BE))
    calls = [
        Call(
            kind=(kind := next(kinds)),
            service_class=str(kind),
            prompts=[[*rng.choice(systems), *(rng.randrange(4000) for _ in range(rng.randrange(32, 1500)))]],
            max_tokens=200,
            ttft_s=TTFT_S if kind is ServiceClass.LS else None,
        )
        for _ in range(int(requests_per_s * seconds))
    ]
    running: deque[tuple[EngineBooks, Sent]] = deque()
    told_s = 0.0
    taken_s: dict[str, list[float]] = {"hear": [], "route": []}
    for number, call in enumerate(calls):
        now_s = number / requests_per_s
        while told_s <= now_s:
            before_s = time.thread_time()
            for each, load in zip(books, loads, strict=True):
                each.hear(load, told_s)
            taken_s["hear"].append(time.thread_time() - before_s)
            told_s += LOAD_EVERY_S
        before_s = time.thread_time()
        best = chosen.order(call, books)[0]
        sent = best.expect(call)
        best.send(call, sent)
        running.append((best, sent))
        if len(running) > 2 * requests_per_s:
            ended, its = running.popleft()
            ended.end(its)
        taken_s["route"].append(time.thread_time() - before_s)
    route_s, hear_s = (statistics.median(taken_s[what]) for what in ("route", "hear"))
    return {"ms_a_request": 1e3 * route_s, "share_of_core": requests_per_s * route_s + hear_s / LOAD_EVERY_S}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all routers, print a table, and write the record if one is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", nargs="+", default=list(ROUTERS), choices=list(ROUTERS))
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--conversations", type=float, nargs="+", default=[0.3, 0.5, 0.7], help="a second and engine")
    parser.add_argument("--be-per-flood", type=int, default=60, help="of each engine")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--cost", action="store_true", help="only what routers cost the front, of 64 engines")
    args = parser.parse_args(arguments)
    if args.cost:
        costs = {router: cost(router, engines=64, requests_per_s=2000, seconds=2.5, seed=0) for router in args.routers}
        for router, figures in costs.items():
            print(
                f"  {router:16} {figures['ms_a_request']:.3f} ms a request, {figures['share_of_core']:.0%} of a core "
                "at 2,000 requests a second"
            )
        if args.record is not None:
            scale = {"engines": 64, "requests_per_s": 2000, "seconds": 2.5}
            write_record(args.record, name="routing", case="cost", config=scale, seed=0, results=costs)
        return
    results: dict[str, dict[str, dict[str, float]]] = {}
    with concurrent.futures.ProcessPoolExecutor(args.jobs) as pool:
        runs = {
            (rate, router, seed): pool.submit(
                run, router, Workload(args.engines, args.minutes, rate, args.be_per_flood), seed
            )
            for rate in args.conversations
            for seed in range(args.seeds)
            for router in args.routers
        }
        for rate in args.conversations:
            print(f"{rate:g} conversations a second and engine: LS attainment, refused, p99 TTFT, BE tokens/s, cached")
            for router in args.routers:
                each = [runs[rate, router, seed].result() for seed in range(args.seeds)]
                means = {name: statistics.fmean(one[name] for one in each) for name in each[0]}
                spread = statistics.stdev(one["attainment"] for one in each) if args.seeds > 1 else 0.0
                results.setdefault(f"{rate:g}", {})[router] = means | {"attainment_stdev": spread}
                print(
                    f"  {router:16} {means['attainment']:6.1%} ±{spread:.1%} {means['refused']:6.1%} "
                    f"{means['ttft_p99_s']:6.2f} s {means['be_tokens_per_s']:7.0f} {means['cached']:6.1%}",
                    flush=True,
                )
    if args.record is not None:
        config = vars(args) | {"simulated": True, "record": None}
        write_record(args.record, name="routing", config=config, seed=0, results=results)


if __name__ == "__main__":
    main()
