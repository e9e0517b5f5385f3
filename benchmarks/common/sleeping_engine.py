"""SleepingEngine: an engine that does everything but compute. Each step sleeps for as long as a machine would take.

Its scheduler, KV manager, prefix cache and admission are the engine's own, as in a simulation; but its clock is that of
the machine it runs on, so that a real server and its processes can be measured with engines of machines that are not
there. What planning a step takes here is part of the step's time, not added to it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from omniserve.core.config import EngineConfig
from omniserve.core.load import EngineLoad
from omniserve.core.lora import LoRA, LoRAError
from omniserve.core.request import SLO, ClassSpec, Request, RequestLimits, RequestOutput, ServiceClass
from omniserve.core.stats import EngineStats, FreedKV, LatencyStats
from omniserve.core.upkeep import Upkeep
from omniserve.sampling.grammar import Grammar
from omniserve.server.engines.process import TakesArrivals
from omniserve.simulate.analytic import analytic_machine, engine_config_for
from omniserve.simulate.engine import SimulatedEngine
from omniserve.simulate.hardware import find_devices
from omniserve.simulate.machine import Machine
from omniserve.simulate.models import find_model
from omniserve.simulate.runner import Chances

_WORD = 500
"""The token of all outputs: one that has a text."""
SEEDS_APART = 7919
"""Difference of the seeds of two engines."""


class SleepingEngine:
    """The part of an engine's interface that its process calls, over a machine that only takes time.

    Args:
        machine: What it pretends to run on.
        config: Its settings.
        chances: The noise of its steps.
    """

    preemption: TakesArrivals | None = None
    upkeep: Upkeep | None = None

    def __init__(self, machine: Machine, config: EngineConfig, chances: Chances) -> None:
        self.config = config
        self._engine = SimulatedEngine(machine, config, chances, caches_prefixes=True)
        self.limits = RequestLimits(
            vocab_size=machine.spec.vocab_size,
            max_model_len=self._engine.max_model_len,
            pool_tokens=self._engine.pool_tokens,
            has_tokenizer=False,
        )
        self.loras = _NoLoRAs()
        self._num_added, self._step_seconds, self._late_seconds = 0, 0.0, 0.0

    @property
    def has_unfinished(self) -> bool:
        """True while a step may have something to do."""
        return self._engine.stepper.has_unfinished

    @property
    def last_plan_was_empty(self) -> bool:
        """The last step had nothing to compute."""
        return self._engine.stepper.last_plan_was_empty

    def add(self, request: Request, *, arrival_s: float | None = None, grammar: Grammar | None = None) -> str:
        """Take a request; see ``Engine.add``."""
        self.limits.check(request)
        self._engine.now_s = time.monotonic()
        self._num_added += 1
        request_id = request.request_id or f"warm-up-{self._num_added}"
        self._engine.add(request_id, request, arrival_s=self._engine.now_s if arrival_s is None else arrival_s)
        return request_id

    def compile_grammar(self, grammar: str) -> Future[Grammar]:
        """Refuse a grammar: tokens are invented."""
        refused: Future[Grammar] = Future()
        refused.set_exception(ValueError("an engine that computes nothing has no grammars"))
        return refused

    def prepare_grammars(self) -> None:
        """Do nothing."""

    def predicted_ttft_s(self, request_id: str) -> float | None:
        """Return what admission predicted."""
        return self._engine.stepper.requests[request_id].predicted_ttft_s

    def scaled_slo(self, request_id: str) -> SLO | None:
        """Return the objectives of a request if admission has scaled those of its class."""
        return self._engine.stepper.requests[request_id].scaled_slo

    def abort(self, request_id: str) -> bool:
        """End a request now."""
        self._engine.now_s = time.monotonic()
        return self._engine.stepper.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Run a step, and sleep until it would have ended."""
        begun_s = self._engine.now_s = time.monotonic()
        outputs = self._engine.step()
        ends_s = self._engine.now_s
        left_s = ends_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
        self._step_seconds += ends_s - begun_s
        self._late_seconds += max(0.0, time.monotonic() - ends_s)
        return [dataclasses.replace(output, new_token_ids=(_WORD,) * len(output.new_token_ids)) for output in outputs]

    def wait(self, timeout_s: float) -> None:
        """Sleep."""
        time.sleep(timeout_s)

    def load(self, num_taken: int = 0) -> EngineLoad:
        """Return the load; see ``Engine.load``."""
        return self._engine.scheduler.load(time.monotonic(), num_taken)

    def stats(self) -> EngineStats:
        """Return gauges and counters; the drift says how much longer steps took here than on the machine."""
        return EngineStats(
            scheduler=self._engine.scheduler.stats(),
            kv=self._engine.kv.usage(),
            admittable_per_s=self._engine.scheduler.admittable_per_s(time.monotonic()),
            latency=LatencyStats(drift=1.0 + self._late_seconds / max(self._step_seconds, 1e-9)),
            block_size=self.config.block_size,
            steps=self._engine.num_steps,
            step_seconds=self._step_seconds + self._late_seconds,
        )

    def clear_prefixes(self, sessions: Iterable[str] | None = None) -> FreedKV:
        """Refuse: benchmarks start new engines instead."""
        raise NotImplementedError("a sleeping engine keeps its prefix cache")

    def close(self) -> None:
        """Do nothing."""


class _NoLoRAs:
    def read(self, name: str, folder: str) -> LoRA:
        raise LoRAError("an engine that computes nothing has no adapters")

    def add(self, lora: LoRA) -> None:
        raise LoRAError("an engine that computes nothing has no adapters")

    def remove(self, name: str) -> None:
        raise LoRAError(f"no adapter {name!r} is loaded")

    def clear(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class SleepingLoader:
    """Makes a sleeping engine in the process that calls it. Plain data."""

    model: str = "llama-3.1-8b"
    device: str = "A10"
    scheduler: str = "omniserve"
    speed: float = 1.0
    """Speed of the machine beside the device's: with 0.5, each step takes twice as long, and half the engine's CPU."""
    ttft_s: float = 1.0
    """Objectives of the class LS in seconds."""
    tpot_s: float = 0.1
    noise: float = 0.05
    seed: int = 0

    def for_replica(self, number: int, count: int) -> SleepingLoader:
        """Return the maker of one of several engines, whose noise is its own."""
        return dataclasses.replace(self, seed=self.seed + SEEDS_APART * number)

    def __call__(self, progress: Callable[[str], Any]) -> SleepingEngine:
        count, device = find_devices(self.device)
        slower = dataclasses.replace(
            device, flops=device.flops * self.speed, bytes_per_s=device.bytes_per_s * self.speed
        )
        machine = analytic_machine(find_model(self.model), slower, count)
        classes = (
            ClassSpec(name="LS", kind=ServiceClass.LS, slo=SLO(ttft_s=self.ttft_s, tpot_s=self.tpot_s)),
            ClassSpec(name="BE", kind=ServiceClass.BE),
        )
        config = engine_config_for(machine, scheduler=self.scheduler, classes=classes)
        return SleepingEngine(machine, config, Chances(self.seed, self.noise))
