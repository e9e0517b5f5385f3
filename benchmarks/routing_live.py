"""Routers beside each other, live: the real server, its processes and its wire, and engines that sleep.

python -m benchmarks.routing_live --traces FOLDER --vllm-router VENV/bin/vllm-router \
    --record benchmarks/results/routing_live.json

Each engine is a process that does everything but compute (``benchmarks/common/sleeping_engine.py``). The routers of the
server stand before them in one server; ``vllm-router``, a program of another project, stands before as many servers of
one such engine each. Everyone gets the same requests, by their seed:

* single latency-sensitive requests, at times and of lengths of ``servegen_mmid_1h.csv``, which is bursty;
* chats, a third of which begin with one of four long system prompts; each turn repeats what was said. Lengths are those
  of ``lengths/sharegpt_v3_first_turn.csv``;
* floods of best-effort requests, with lengths of ``lengths/arxiv_summarization_llama2.csv``.

All servers are there at the same time, and take turns: with each seed, each router has its run. A run that was measured
is kept in ``--runs``, and not measured again; one whose steps were too late, because other programs had the cores, is
not kept. The figures say whether this machine limits them: by how much steps end
later than they should (``late``), the cores that a run uses, client and all (``cores``), and those in use in all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.common.client import LS_TIER
from benchmarks.common.record import write_record
from benchmarks.common.routing_load import Ask, Workload, asks
from benchmarks.common.server import ServerProcess
from benchmarks.common.sleeping_engine import SEEDS_APART
from benchmarks.common.sources import ROOT

_SLEEPING = ("-m", "benchmarks.common.sleeping_server")
_START_S = 180.0
_VLLM = "vllm-router"


@dataclasses.dataclass(slots=True)
class Seen:
    """A request as the client saw it; seconds from when it was to be sent."""

    tier: str
    num_tokens: int
    late_s: float = 0.0
    """Seconds after its time at which the client sent it."""
    first_s: float | None = None
    last_s: float | None = None
    """When the last of what has come came."""
    num_events: int = 0
    """Events of the stream that have come, of a token each."""
    status: int = 0

    def kept(self, workload: Workload) -> bool:
        """Return whether both objectives were met; the pace of an answer that has not ended is that of its tokens."""
        if self.first_s is None or self.last_s is None:
            return False
        num_tokens = min(self.num_events, self.num_tokens)
        paced = self.last_s - self.first_s <= workload.tpot_s * max(1, num_tokens - 1)
        return paced and self.first_s <= workload.ttft_s


async def send(host: str, port: int, asked: Ask, seen: Seen, began_s: float) -> None:
    """Send a request at its time, and note when its answer begins and ends.

    The client has little of two cores: it reads the stream's bytes, and parses none.
    """
    await asyncio.sleep(max(0.0, began_s + asked.at_s - time.perf_counter()))
    due_s = began_s + asked.at_s
    seen.late_s = time.perf_counter() - due_s
    body = json.dumps(
        {
            "model": "sleeping", "prompt": asked.prompt, "max_tokens": asked.max_tokens, "temperature": 0,
            "ignore_eos": True, "stream": asked.tier == LS_TIER, "service_tier": asked.tier,
        }
    ).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        status = await reader.readuntil(b"\r\n\r\n")
        seen.status = int(status.split(None, 2)[1])
        while data := await reader.read(1 << 16):
            if seen.status == 200 and b"data:" in data:
                seen.last_s = time.perf_counter() - due_s
                seen.num_events += data.count(b"data:")
                if seen.first_s is None:
                    seen.first_s = seen.last_s
    finally:
        writer.close()


async def drive(url: str, requests: Sequence[Ask], seconds: float) -> list[Seen]:
    """Send all requests at their times, for so long; latency-sensitive ones may end some seconds later."""
    host, port = url.removeprefix("http://").split(":")
    found = [Seen(ask.tier, ask.max_tokens) for ask in requests]
    began_s = time.perf_counter() + 0.5
    tasks = [
        asyncio.create_task(send(host, int(port), ask, seen, began_s))
        for ask, seen in zip(requests, found, strict=True)
    ]
    await asyncio.sleep(0.5 + seconds)
    patient = [task for task, ask in zip(tasks, requests, strict=True) if ask.tier == LS_TIER]
    await asyncio.wait(patient, timeout=10.0)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A router under way."""

    url: str
    """The address to send to."""
    servers: Sequence[ServerProcess]
    """The servers with the engines."""
    groups: Sequence[int]
    """The process groups of all that runs."""


def start(router: str, workload: Workload, args: argparse.Namespace, stack: contextlib.ExitStack) -> Place:
    """Start a router and its engines, all of which end with ``stack``."""
    objectives = ["--sleep-slo", str(workload.ttft_s), str(workload.tpot_s), "--sleep-speed", str(workload.speed)]
    logs = ROOT / ".cache" / "routing_live"

    def serve(name: str, *flags: str) -> ServerProcess:
        arguments = [*objectives, "--log-level", "warning", *flags]
        program = (sys.executable, *_SLEEPING)
        server = stack.enter_context(ServerProcess(arguments, logs / f"{name}.log", program=program))
        server.wait_until_healthy(_START_S)
        return server

    if not router.startswith(_VLLM):
        server = serve(router, "--replicas", str(workload.engines), "--router", router)
        return Place(server.base_url, [server], [server.group])
    seeds = [str(SEEDS_APART * number) for number in range(workload.engines)]  # as those of replicas
    servers = [serve(f"behind-{number}", "--sleep-seed", seed) for number, seed in enumerate(seeds)]
    policy = router.removeprefix(_VLLM).removeprefix(":") or "cache_aware"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        metrics_port = str(free.getsockname()[1])
    arguments = ["--policy", policy, "--prometheus-port", metrics_port, "--max-concurrent-requests", "8192"]
    arguments += ["--worker-urls", *(server.base_url for server in servers)]
    front = ServerProcess(arguments, logs / f"{_VLLM}.log", program=(str(args.vllm_router),))
    stack.enter_context(front).wait_until_healthy(_START_S)
    return Place(front.base_url, servers, [front.group, *(server.group for server in servers)])


def run(router: str, place: Place, workload: Workload, seed: int, traces: Path) -> dict[str, float]:
    """Measure a run and return its figures."""
    requests = asks(workload, traces, seed)
    _wait_until_idle(place)
    before, busy_before_s, own_before_s = _counted(place), _busy_s(), _own_s(place)
    began_s = time.perf_counter()

    async def load() -> tuple[list[Seen], dict[str, float]]:
        driving = asyncio.create_task(drive(place.url, requests, workload.seconds))
        await asyncio.sleep(0.5 + workload.seconds)
        after = await asyncio.to_thread(_counted, place)
        return await driving, after

    found, after = asyncio.run(load())
    wall_s = time.perf_counter() - began_s
    busy_s, own_s = _busy_s() - busy_before_s, _own_s(place) - own_before_s
    if strange := [seen.status for seen in found if seen.status not in (0, 200, 429)]:
        raise RuntimeError(f"{router}: {len(strange)} answers of status {strange[0]}; see .cache/routing_live")
    ls = [seen for seen in found if seen.tier == LS_TIER]
    ttfts = sorted(seen.first_s for seen in ls if seen.first_s is not None)
    took_s = {when: each["step_s"] / each["drift"] for when, each in (("before", before), ("after", after))}
    late_s = (after["step_s"] - before["step_s"]) - (took_s["after"] - took_s["before"])
    return {
        "attainment": sum(seen.kept(workload) for seen in ls) / len(ls),
        "ttft_kept": sum(seen.first_s is not None and seen.first_s <= workload.ttft_s for seen in ls) / len(ls),
        "refused": sum(seen.status == 429 for seen in ls) / len(ls),
        "ttft_p50_s": ttfts[len(ttfts) // 2],
        "ttft_p99_s": ttfts[int(len(ttfts) * 0.99)],
        "be_tokens_per_s": (after["be"] - before["be"]) / workload.seconds,
        "cached": (after["cached"] - before["cached"]) / max(1.0, after["prompts"] - before["prompts"]),
        "late": late_s / (took_s["after"] - took_s["before"]),
        "sent_late_p99_s": sorted(seen.late_s for seen in found)[int(len(found) * 0.99)],
        "cores": own_s / wall_s,
        "busy": busy_s / (wall_s * (os.cpu_count() or 1)),
        "ls_requests": float(len(ls)),
    }


def _counted(place: Place) -> dict[str, float]:
    """Return what the servers of a place have counted, all together."""
    each = [server.metrics() for server in place.servers]

    def total(name: str, label: str) -> float:
        return sum(metrics.get(f'omniserve_{name}_total{{service_class="{label}"}}', 0.0) for metrics in each)

    return {
        "be": total("output_tokens", "BE") + total("prompt_tokens", "BE"),
        "prompts": total("prompt_tokens", "LS"),
        "cached": total("cached_tokens", "LS"),
        "drift": statistics.fmean(metrics["omniserve_latency_drift"] for metrics in each),
        "step_s": sum(metrics["omniserve_step_seconds_total"] for metrics in each),
    }


def _wait_until_idle(place: Place) -> None:
    """Wait until no engine has a request; what the client has left is aborted.

    Raises:
        RuntimeError: Requests are left after a minute.
    """
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        samples = [sample for server in place.servers for sample in server.metrics().items()]
        if not sum(
            value
            for name, value in samples
            if name.startswith(("omniserve_requests_waiting", "omniserve_requests_running"))
        ):
            return
        time.sleep(0.5)
    raise RuntimeError("an engine still has requests a minute after the load ended")


def _own_s(place: Place) -> float:
    """Return the seconds of CPU that this client and all processes of a place have used."""
    ticks = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            own = int(folder.name) == os.getpid() or int(fields[2]) in place.groups
            ticks += (int(fields[11]) + int(fields[12])) * own
    return ticks / os.sysconf("SC_CLK_TCK")


def _busy_s() -> float:
    """Return the seconds that the machine's cores were busy, those of other programs included."""
    with open("/proc/stat") as stat:
        user, nice, system, _, _, irq, soft = map(int, stat.readline().split()[1:8])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what was not run yet, print a table, and write the record if one is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, metavar="FOLDER", help="with the files named above")
    parser.add_argument("--vllm-router", type=Path, metavar="PROGRAM", help="vllm-router, in an environment of its own")
    parser.add_argument("--routers", nargs="+", default=["predicted", "round-robin", "least-loaded", _VLLM])
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=70.0)
    parser.add_argument("--singles", type=float, default=0.25, help="a second and engine")
    parser.add_argument("--chats", type=float, default=0.6, help="conversations a second and engine")
    parser.add_argument("--be-per-flood", type=int, default=7, help="of each engine")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument(
        "--most-late",
        type=float,
        default=0.05,
        help="keep no run whose steps took longer by such a share than they should",
    )
    parser.add_argument("--runs", type=Path, default=ROOT / ".cache" / "routing_live_runs", metavar="FOLDER")
    parser.add_argument("--record", type=Path, metavar="FILE")
    args = parser.parse_args(arguments)
    if any(name.startswith(_VLLM) for name in args.routers) and args.vllm_router is None:
        parser.error("--vllm-router PROGRAM is needed for this router; or leave it out of --routers")
    workload = Workload(args.engines, args.seconds, args.singles, args.chats, args.be_per_flood)
    files = {(router, seed): _file(args.runs, router, workload, seed) for seed in args.seeds for router in args.routers}
    wanted = [each for each, file in files.items() if not file.exists()]
    with contextlib.ExitStack() as stack, tqdm(total=len(wanted), unit="run", file=sys.stderr) as bar:
        bar.set_description("starting")
        places = {router: start(router, workload, args, stack) for router in dict(wanted)}
        for router, seed in wanted:
            bar.set_description(f"{router}, seed {seed}")
            figures = run(router, places[router], workload, seed, args.traces)
            text = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
            bar.update()
            if figures["late"] > args.most_late:
                tqdm.write(f"{router}, seed {seed}: not kept, as this machine has too much to do: {text}")
                continue
            tqdm.write(f"{router}, seed {seed}: {text}")
            files[router, seed].parent.mkdir(parents=True, exist_ok=True)
            files[router, seed].write_text(json.dumps(figures, indent=1) + "\n")
    if missing := [f"{router} {seed}" for (router, seed), file in files.items() if not file.exists()]:
        print(f"not measured yet, so run this command again when the machine has less to do: {', '.join(missing)}")
        return
    results = {
        router: _summary([json.loads(files[router, seed].read_text()) for seed in args.seeds])
        for router in args.routers
    }
    for router, line in results.items():
        print(
            f"{router:24} kept {line['attainment']:6.1%} ±{line['attainment_stdev']:.1%}, "
            f"refused {line['refused']:6.1%}, TTFT p50 {line['ttft_p50_s']:.2f} p99 {line['ttft_p99_s']:5.2f} s, "
            f"BE {line['be_tokens_per_s']:6.0f} "
            f"tokens/s, cached {line['cached']:5.1%}, late {line['late']:.1%}, cores {line['cores']:.2f} of "
            f"{line['busy'] * (os.cpu_count() or 1):.2f} busy"
        )
    if args.record is not None:
        config = {"workload": workload, "seeds": args.seeds, "traces": args.traces}
        write_record(args.record, name="routing_live", config=config, seed=args.seeds[0], results=results)


def _file(folder: Path, router: str, workload: Workload, seed: int) -> Path:
    """Return where the figures of a run are kept."""
    what = json.dumps([router, dataclasses.asdict(workload), seed])
    return folder / f"{router.replace(':', '-')}-{seed}-{hashlib.sha256(what.encode()).hexdigest()[:10]}.json"


def _summary(runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    means = {name: statistics.fmean(one[name] for one in runs) for name in runs[0]}
    spread = statistics.stdev(one["attainment"] for one in runs) if len(runs) > 1 else 0.0
    return means | {"attainment_stdev": spread, "runs": list(runs)}


if __name__ == "__main__":
    main()
