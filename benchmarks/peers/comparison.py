"""Runs the comparison: contenders take turns on each load, with samples of the machine's speed between the rounds."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx

from benchmarks.common.bandwidth import available_bytes
from benchmarks.common.client import few_of_each
from benchmarks.common.machine_speed import SpeedMeter
from benchmarks.common.server import ServerFailed
from benchmarks.common.timing import OtherLoad
from benchmarks.peers.engines import Contender, Settings, contenders
from benchmarks.peers.loads import Case, Sizes, cases
from benchmarks.peers.processes import Engine, Pool, cpu_seconds, start_times
from benchmarks.peers.report import line
from benchmarks.peers.weights import LLAMA_CPP, OMNISERVE, VLLM, Weights

Turn = TypeVar("Turn")
ENGINE_BYTES = {OMNISERVE: 2 << 30, VLLM: 2 << 30, LLAMA_CPP: 1 << 28}
"""Memory of an engine beside weights and KV, roughly; while it loads, too, as it reads its file in pieces."""


def interleaved(names: Sequence[Turn], rounds: int) -> list[tuple[int, Turn]]:
    """Return pairs of round and name in the order of the runs; each round begins with another name."""
    order = []
    for number in range(rounds):
        first = number % len(names)
        order += [(number, name) for name in (*names[first:], *names[:first])]
    return order


def needed_bytes(engines: Collection[Engine], settings: Settings) -> int:
    """Return roughly what the servers take in memory if all are loaded."""
    by_label = {weights.label: weights.memory_bytes for weights in settings.weights}
    return sum(by_label[engine.weights] + (settings.kv_gib << 30) + ENGINE_BYTES[engine.name] for engine in engines)


class Comparison:
    """Collects the samples of a comparison.

    Args:
        engines: By name, OmniServe first, for each form of weights.
        settings: What they were made with.
        sizes: Sizes of the loads.
        rounds: How often each contender meets each load.
        seed: Seed of the first round; round ``i`` has ``seed + i``.
        in_turns: Start servers in turns, although memory may hold all.
        folder: For logs and caches.
        save: Called with the results so far after each sample.
        earlier: Results of a run of the same comparison that was interrupted; what it has is not measured again.
    """

    def __init__(
        self, engines: Mapping[str, Engine], settings: Settings, *, sizes: Sizes, rounds: int, seed: int,
        in_turns: bool, folder: Path, save: Callable[[Mapping[str, Any]], object],
        earlier: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._engines, self._settings, self._sizes = engines, settings, sizes
        self._rounds, self._seed, self._folder, self._save = rounds, seed, folder, save
        self.in_turns = in_turns or needed_bytes(engines.values(), settings) > available_bytes()
        self.results: dict[str, Any] = {
            "in_turns": self.in_turns, "samples": [], "speeds": [], "failed": [], "idle_cores": {}, "first_tokens": {},
        } | {name: value for name, value in (earlier or {}).items() if name not in ("in_turns", "failed")}  # fmt: skip

    def run(self, phases: Sequence[str]) -> None:
        """Measure the phases; what fails is noted, and the others go on."""
        if "start" in phases:  # first: there is memory for it, and nothing is in the way
            self._start()
        vocab_size = self._settings.vocab_size
        if not any(cases(phase, self._sizes, vocab_size) for phase in phases):
            return
        self._meter = SpeedMeter(self._settings.cpus, seed=self._seed)
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
            self.results["idle_cores"] |= pool.idle_cores
            self.results["first_tokens"] |= pool.first_tokens
        self._check_models()
        if self._meter.flop_per_s_by_product:
            self.results["flop_per_s_by_product"] = self._meter.flop_per_s_by_product
        self._save(self.results)

    def _of(self, weights: Weights) -> dict[str, Engine]:
        """Return the engines that serve these weights."""
        return {key: engine for key, engine in self._engines.items() if engine.weights == weights.label}

    def _start(self) -> None:
        turns = [(weights, key) for weights in self._settings.weights for key in self._of(weights)]
        with tempfile.TemporaryDirectory(prefix="peers-") as place:
            for number, (weights, key) in interleaved(turns, self._rounds):
                plain = key.replace(", ", "-")
                folder, log = Path(place) / f"{number}-{plain}", self._folder / f"{plain}-start.log"
                about = {
                    "phase": "start", "case": self._settings.named("to the first token", weights), "round": number,
                    "contender": self._engines[key].name,
                }  # fmt: skip
                cpus = self._settings.cpus
                self._attempt(about, partial(start_times, self._engines[key], cpus=cpus, folder=folder, log=log))

    def _case(self, case: Case, pool: Pool) -> None:
        turns = [
            (weights, contender)
            for weights in self._settings.weights
            for contender in contenders(self._of(weights), case.phase)
        ]
        for number, (weights, contender) in interleaved(turns, self._rounds):
            key = {"phase": case.phase, "case": self._settings.named(case.name, weights), "round": number}
            if not any(key.items() <= sample.items() for sample in self.results["speeds"]):
                self._sample_speed(case, weights, key)  # all servers rest
            about = key | {"contender": contender.label}
            self._attempt(about, partial(self._measure, pool, case, contender, self._seed + number))

    def _measure(self, pool: Pool, case: Case, contender: Contender, seed: int) -> dict[str, Any]:
        with pool.active(contender.engine) as server:
            others, began_s, before_s = OtherLoad(), time.monotonic(), cpu_seconds(server.group)
            figures = case.measure(server, contender, seed)
            own = (cpu_seconds(server.group) - before_s) / (time.monotonic() - began_s)
            return figures | {"server_cores": own, "others_busy_cores": max(0.0, others.cores() - own)}

    def _sample_speed(self, case: Case, weights: Weights, key: Mapping[str, Any]) -> None:
        speed = self._meter.sample()
        floor = case.floor(weights.cost, speed) if weights.cost is not None else {}
        self.results["speeds"].append({**key, **dataclasses.asdict(speed), "floor": floor})

    def _check_models(self) -> None:
        """Note the engines whose first tokens are mostly others than OmniServe's with the same weights; rounding alone
        changes a few."""
        found: Mapping[str, Sequence[str]] = self.results["first_tokens"]
        for weights in self._settings.weights:
            ours = found.get(self._settings.named(OMNISERVE, weights))
            for name in self._of(weights).keys() & found.keys():
                theirs = found[name]
                same = sum(one == other for one, other in zip(ours or theirs, theirs, strict=True))
                if 2 * same <= len(theirs):
                    error = f"{same} of {len(theirs)} first tokens are {OMNISERVE}'s: it serves another model"
                    print(f"peers: {name}: {error}", file=sys.stderr)
                    self.results["failed"].append({"contender": name, "error": error})

    def _attempt(self, about: dict[str, Any], measure: Callable[[], Mapping[str, Any]]) -> None:
        if any(about.items() <= sample.items() for sample in self.results["samples"]):
            return  # by an earlier run
        try:
            figures = measure()
        except (ServerFailed, httpx.HTTPError, ValueError) as error:  # the others are still worth their time
            print(f"peers: {', '.join(map(str, about.values()))}: {error}", file=sys.stderr, flush=True)
            self.results["failed"].append(about | {"error": str(error)})
        else:
            self.results["samples"].append(about | {"figures": figures})
            print(line(self.results["samples"][-1]), flush=True)
        self._save(self.results)
