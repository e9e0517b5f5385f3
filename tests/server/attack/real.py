"""A real server with the model that comes with OmniServe, and the longer attacks on it."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from omniserve.launch.models import BUILTIN_MODEL_NAME
from tests.server.attack.load import Tally, send_all, send_at_rate
from tests.server.attack.processes import Held, held

FLAGS = ("--port", "0", "--dtype", "float32", "--device-kv-gib", "0.004", "--host-kv-gib", "0.1")
_LS_OF = 5  # of so many requests all but one are latency-sensitive
_LOOK_EVERY_S = 0.25


def requests() -> Iterator[dict[str, Any]]:
    """Yield requests without an end, four in five of them latency-sensitive."""
    for i in itertools.count():
        yield {
            "model": BUILTIN_MODEL_NAME,
            "prompt": f"{i} The with statement is used to wrap the execution of a block",
            "max_tokens": 16,
            "stream": True,
            "ignore_eos": True,
            "service_tier": "flex" if i % _LS_OF == 0 else "default",
        }


@dataclass(frozen=True, slots=True)
class Overload:
    """The outcome of an overload."""

    tally: Tally
    capacity_per_s: float
    """Requests that the server completes when it always has 32."""
    offered_per_s: float
    before: Held
    most: Held
    after: Held
    num_health: int
    """Times that /health was answered while it lasted."""
    slowest_health_s: float
    objectives: Counter[tuple[str, str]]
    """Objectives of the admitted latency-sensitive requests, by the server's clock: (objective, whether it was met)."""

    def kept(self, objective: str) -> float:
        """Return the share of the admitted latency-sensitive requests that met an objective."""
        met, missed = self.objectives[objective, "true"], self.objectives[objective, "false"]
        return met / max(1, met + missed)

    def __str__(self) -> str:
        mib = 1 << 20
        places = (("before", self.before), ("most", self.most), ("after", self.after))
        return "; ".join(
            [
                f"{self.offered_per_s:.0f} requests/s offered, {self.capacity_per_s:.0f} are what it completes",
                f"{len(self.tally.fates)} sent: {dict(self.tally.outcomes)}",
                f"LS attainment of the admitted: TTFT {self.kept('ttft'):.1%}, TPOT {self.kept('tpot'):.1%}",
                f"/health answered {self.num_health} times, slowest {self.slowest_health_s:.2f} s",
                *(
                    f"{when}: API {at.api_bytes / mib:.0f} MiB, engine {at.engine_bytes / mib:.0f} MiB, "
                    f"{at.num_files} files"
                    for when, at in places
                ),
            ]
        )


async def overload(server: Any, *, factor: float, seconds: float, capacity_s: float) -> Overload:
    """Send ``factor`` times what a server completes, for ``seconds``; wait until it is free again.

    Raises:
        AssertionError: Somebody was neither answered nor refused with a Retry-After, or something is held afterwards.
    """
    source = requests()
    await send_all(server.url, itertools.islice(source, 8))
    capacity_per_s = await _capacity(server.url, source, capacity_s)
    before = most = held(server)
    objectives = _objectives(server)
    offered_per_s = factor * capacity_per_s
    flood = asyncio.create_task(send_at_rate(server.url, source, per_s=offered_per_s, seconds=seconds))
    num_health, slowest_s = 0, 0.0
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        while not flood.done():
            asked_s = time.monotonic()
            assert (await http.get("/health")).status_code == 200
            num_health, slowest_s = num_health + 1, max(slowest_s, time.monotonic() - asked_s)
            now = held(server)
            most = Held(
                max(most.api_bytes, now.api_bytes),
                max(most.engine_bytes, now.engine_bytes),
                max(most.num_files, now.num_files),
            )
            await asyncio.sleep(_LOOK_EVERY_S)
    tally = await flood
    tally.check(len(tally.fates))
    await asyncio.to_thread(server.wait_until_free)
    await asyncio.to_thread(server.wait_for_metric, 'omniserve_kv_blocks_used{tier="host"}', 0)
    objectives = _objectives(server) - objectives
    return Overload(tally, capacity_per_s, offered_per_s, before, most, held(server), num_health, slowest_s, objectives)


async def _capacity(url: str, source: Iterator[dict[str, Any]], seconds: float) -> float:
    begin_s, num_done = time.monotonic(), 0
    while time.monotonic() - begin_s < seconds:
        tally = await send_all(url, itertools.islice(source, 32))
        num_done += tally.outcomes["200"]
    return num_done / (time.monotonic() - begin_s)


def _objectives(server: Any) -> Counter[tuple[str, str]]:
    """Return how many latency-sensitive requests met or missed what objective."""
    text, counts = httpx.get(f"{server.url}/metrics", timeout=60).text, Counter[tuple[str, str]]()
    for labels, value in re.findall(r"^omniserve_slo_total\{(.*)\} (\S+)$", text, re.MULTILINE):
        label = dict(re.findall(r'(\w+)="(\w+)"', labels))
        if label["service_class"] == "LS":
            counts[label["objective"], label["met"]] += int(float(value))
    return counts
