"""Runs the comparison: contenders take turns on each load, with samples of the machine's speed between the rounds."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.bandwidth import available_bytes
from benchmarks.common.client import few_of_each
from benchmarks.common.machine_speed import SpeedMeter
from benchmarks.common.server import ServerFailed
from benchmarks.common.timing import OtherLoad
from benchmarks.peers.engines import OMNISERVE, Contender, Settings, contenders
from benchmarks.peers.loads import Case, Sizes, cases
from benchmarks.peers.model import ModelCost
from benchmarks.peers.processes import Engine, Pool, cpu_seconds, start_times
from benchmarks.peers.report import line

ENGINE_BYTES = 2 << 30
"""Memory of an engine beside weights and KV, roughly."""


def interleaved(names: Sequence[str], rounds: int) -> list[tuple[int, str]]:
    """Return pairs of round and name in the order of the runs; each round begins with another name."""
    order = []
    for number in range(rounds):
        first = number % len(names)
        order += [(number, name) for name in (*names[first:], *names[:first])]
    return order


def needed_bytes(num_engines: int, settings: Settings) -> int:
    """Return roughly what the servers take in memory if all are loaded, one of them loading: it holds weights twice."""
    weights = settings.model.memory_bytes(settings.dtype)
    return num_engines * (weights + (settings.kv_gib << 30) + ENGINE_BYTES) + weights


class Comparison:
    """Collects the samples of a comparison.

    Args:
        engines: By name, OmniServe first.
        settings: What they were made with.
        sizes: Sizes of the loads.
        rounds: How often each contender meets each load.
        seed: Seed of the first round; round ``i`` has ``seed + i``.
        in_turns: Start servers in turns, although memory may hold all.
        folder: For logs and caches.
        save: Called with the results so far after each sample.
    """

    def __init__(
        self, engines: Mapping[str, Engine], settings: Settings, *, sizes: Sizes, rounds: int, seed: int,
        in_turns: bool, folder: Path, save: Callable[[Mapping[str, Any]], object],
    ) -> None:  # fmt: skip
        self._engines, self._settings, self._sizes = engines, settings, sizes
        self._rounds, self._seed, self._folder, self._save = rounds, seed, folder, save
        self._cost = ModelCost.of(settings.model.config)
        self.in_turns = in_turns or needed_bytes(len(engines), settings) > available_bytes()
        self.results: dict[str, Any] = {"in_turns": self.in_turns, "samples": [], "speeds": [], "failed": []}

    def run(self, phases: Sequence[str]) -> None:
        """Measure the phases; what fails is noted, and the others go on."""
        if "start" in phases:  # first: there is memory for it, and nothing is in the way
            self._start()
        if not any(cases(phase, self._sizes, self._settings.model.vocab_size) for phase in phases):
            return
        self._meter = SpeedMeter(self._settings.cpus, seed=self._seed)
        vocab_size = self._settings.model.vocab_size
        with Pool(
            self._engines, cpus=self._settings.cpus, folder=self._folder, in_turns=self.in_turns,
            warm_up=few_of_each(
                (self._sizes.ls_prompt, self._sizes.ls_output), (self._sizes.be_prompt, self._sizes.be_output),
                vocab_size=vocab_size,
            ),
        ) as pool:  # fmt: skip
            for phase in phases:
                for case in cases(phase, self._sizes, vocab_size):
                    self._case(case, pool)
            self.results["idle_cores"] = pool.idle_cores
            self._check_models(pool.first_tokens)
        self.results["flop_per_s_by_product"] = self._meter.flop_per_s_by_product
        self._save(self.results)

    def _start(self) -> None:
        with tempfile.TemporaryDirectory(prefix="peers-") as place:
            for number, name in interleaved(list(self._engines), self._rounds):
                folder, log = Path(place) / f"{number}-{name}", self._folder / f"{name}-start.log"
                about = {"phase": "start", "case": "to the first token", "round": number, "contender": name}
                cpus = self._settings.cpus
                self._attempt(about, partial(start_times, self._engines[name], cpus=cpus, folder=folder, log=log))

    def _case(self, case: Case, pool: Pool) -> None:
        contestants = {each.label: each for each in contenders(self._engines, case.phase)}
        for number, label in interleaved(list(contestants), self._rounds):
            about = {"phase": case.phase, "case": case.name, "round": number, "contender": label}
            key = {name: about[name] for name in ("phase", "case", "round")}
            if not any(key.items() <= sample.items() for sample in self.results["speeds"]):
                self._sample_speed(case, key)  # all servers rest
            self._attempt(about, partial(self._measure, pool, case, contestants[label], self._seed + number))

    def _measure(self, pool: Pool, case: Case, contender: Contender, seed: int) -> dict[str, Any]:
        with pool.active(contender.engine) as server:
            others, began_s, before_s = OtherLoad(), time.monotonic(), cpu_seconds(server.group)
            figures = case.measure(server, contender, seed)
            own = (cpu_seconds(server.group) - before_s) / (time.monotonic() - began_s)
            return figures | {"server_cores": own, "others_busy_cores": max(0.0, others.cores() - own)}

    def _sample_speed(self, case: Case, key: Mapping[str, Any]) -> None:
        speed = self._meter.sample()
        self.results["speeds"].append({**key, **dataclasses.asdict(speed), "floor": case.floor(self._cost, speed)})

    def _check_models(self, first_tokens: Mapping[str, Sequence[str]]) -> None:
        """Note the engines whose first tokens are mostly others than OmniServe's; rounding alone changes a few."""
        self.results["first_tokens"] = first_tokens
        ours = first_tokens.get(OMNISERVE)
        for name, theirs in first_tokens.items():
            same = sum(one == other for one, other in zip(ours or theirs, theirs, strict=True))
            if 2 * same <= len(theirs):
                error = f"{same} of {len(theirs)} first tokens are {OMNISERVE}'s: it serves another model"
                print(f"peers: {name}: {error}", file=sys.stderr)
                self.results["failed"].append({"contender": name, "error": error})

    def _attempt(self, about: dict[str, Any], measure: Callable[[], Mapping[str, Any]]) -> None:
        try:
            figures = measure()
        except (ServerFailed, httpx.HTTPError, ValueError) as error:  # the others are still worth their time
            print(f"peers: {', '.join(map(str, about.values()))}: {error}", file=sys.stderr, flush=True)
            self.results["failed"].append(about | {"error": str(error)})
        else:
            self.results["samples"].append(about | {"figures": figures})
            print(line(self.results["samples"][-1]), flush=True)
        self._save(self.results)
