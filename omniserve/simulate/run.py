"""simulate: a load through a simulated engine, from the first arrival to the end of the last LS request."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from omniserve.core.config import EngineConfig
from omniserve.core.errors import RequestRejected
from omniserve.core.request import Request, RequestOutput, SamplingParams, ServiceClass
from omniserve.simulate.engine import SimulatedEngine, StepRecord
from omniserve.simulate.load import TraceRequest
from omniserve.simulate.machine import Machine
from omniserve.simulate.results import ClassResult, RequestResult, Result, summarise

_PATIENCE_S = 600.0
"""A run in which nothing is computed for so long, and no request comes, is stuck."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The arrivals of both classes, by the names of the engine's configuration."""

    latency_sensitive: Sequence[TraceRequest] = ()
    """LS requests by arrival."""
    best_effort: Sequence[TraceRequest] = ()
    """BE requests by arrival; with a backlog only their lengths count."""
    backlog: int = 0
    """Keep so many best-effort requests unfinished until the load ends, of ``best_effort`` over and over: a pile of
    batch work that has no end. 0: they arrive."""
    duration_s: float | None = None
    """Seconds of the load; None: up to the last arrival, or without arrivals up to the end of all requests."""
    warm_up_s: float = 0.0
    """Seconds at the start that are left out of all figures, with their requests: pools and queues fill first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationConfig:
    """The settings of a simulation.

    Raises:
        ValueError: There is no load, or a number is out of range.
    """

    machine: Machine
    engine: EngineConfig
    load: Load
    seed: int = 0
    """Seed of the noise and of the machine's spread."""
    noise: float = 0.0
    """See SimulatedEngine."""
    drain_s: float | None = None
    """How long to go on after the load for LS requests that are unfinished, which miss their objectives if they still
    are; None: a quarter of it, at least a minute. Infinite: until all requests have ended, best-effort ones too."""
    check: bool = False
    """Verify integrity after each step (slow)."""

    def __post_init__(self) -> None:
        load = self.load
        if not load.latency_sensitive and not load.best_effort:
            raise ValueError("there is nothing to simulate: the load has no requests")
        if load.backlog < 0:
            raise ValueError(f"backlog must be >= 0, got {load.backlog}")
        if load.backlog and not load.best_effort:
            raise ValueError("a backlog needs best_effort requests to take from")
        if load.backlog and load.duration_s is None:
            raise ValueError("a backlog has no end of its own: give the load's duration_s")
        if load.duration_s is not None and not (math.isfinite(load.duration_s) and load.duration_s > 0):
            raise ValueError(f"duration_s must be a number of seconds > 0 or None, got {load.duration_s}")
        if load.warm_up_s and not 0 < load.warm_up_s < (load.duration_s or 0.0):
            raise ValueError(f"warm_up_s must be >= 0 and less than duration_s, got {load.warm_up_s}")
        if self.drain_s is not None and not self.drain_s >= 0:
            raise ValueError(f"drain_s must be >= 0 or None, got {self.drain_s}")


def simulate(
    config: SimulationConfig,
    *,
    progress: Callable[[float], object] | None = None,
    on_step: Callable[[StepRecord], object] | None = None,
) -> Result:
    """Run a simulation. The same configuration gives the same result.

    Args:
        config: The machine, the engine's settings and the load.
        progress: Told the simulated time now and then.
        on_step: Called with each step that computed something.

    Raises:
        ValueError: The settings do not fit the machine, or no request fits the engine.
        RuntimeError: The scheduler left requests unfinished that nothing would ever go on with.
    """
    return _Run(config, progress, on_step).run()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counters:
    """The work that had been done at some time."""

    output_tokens: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    host_output_tokens: int = 0
    host_busy_s: float = 0.0


class _Run:
    """A simulation under way."""

    def __init__(
        self,
        config: SimulationConfig,
        progress: Callable[[float], object] | None,
        on_step: Callable[[StepRecord], object] | None,
    ) -> None:
        self._config = config
        self._progress = progress
        self._on_step = on_step
        self._engine = SimulatedEngine(
            config.machine, config.engine, noise=config.noise, seed=config.seed, check=config.check
        )
        classes = config.engine.classes
        self._ls_name = next(spec.name for spec in classes if spec.kind is ServiceClass.LS)
        self._be_name = next(spec.name for spec in classes if spec.kind is ServiceClass.BE)
        self._too_long = 0
        ls = self._arrivals(config.load.latency_sensitive, self._ls_name)
        be = self._arrivals(config.load.best_effort, self._be_name)
        if not ls and not be:
            raise ValueError(
                f"none of the {self._too_long} requests fits: a request may have {self._engine.limits.max_model_len} "
                f"tokens, and the device pool holds {self._engine.num_device_blocks * config.engine.block_size}"
            )
        self._pile: Iterator[tuple[int, Request]] = iter(())
        if config.load.backlog:
            if not be:
                raise ValueError(
                    f"none of the {len(config.load.best_effort)} best-effort requests of the backlog fits: "
                    f"a request may have {self._engine.limits.max_model_len} tokens, and the device pool holds "
                    f"{self._engine.num_device_blocks * config.engine.block_size}"
                )
            self._pile = enumerate(itertools.cycle([request for *_, request in be]))
            be = []
        self._upcoming = sorted([*ls, *be], key=lambda arrival: arrival[0], reverse=True)
        self._engine.newcomers = self._newcomers
        self._results: dict[str, RequestResult] = {}
        self._unfinished = {self._ls_name: 0, self._be_name: 0}
        self._warm: _Counters | None = None if config.load.warm_up_s else _Counters()
        self._at_end_of_load: _Counters | None = None

    def run(self) -> Result:
        began_s = time.perf_counter()
        engine, upcoming = self._engine, self._upcoming
        duration_s = self._config.load.duration_s
        if duration_s is None and upcoming:
            duration_s = max(upcoming[0][0], 1e-3)  # reversed: the last to come
        end_s = self._end_of_drain(duration_s)
        active_s, told_s = 0.0, 0.0
        while True:
            now_s = engine.now_s
            if self._warm is None and now_s >= self._config.load.warm_up_s:
                self._warm = self._count()
            if self._at_end_of_load is None and duration_s is not None and now_s >= duration_s:
                self._at_end_of_load = self._count()
            if now_s >= end_s or self._is_over(duration_s, now_s):
                break
            if self._at_end_of_load is None:
                self._refill()
            while upcoming and upcoming[-1][0] <= now_s:
                self._add(*upcoming.pop())
            if not engine.has_unfinished:
                if not upcoming:
                    if duration_s is None or now_s >= duration_s:
                        break
                    engine.now_s = duration_s
                else:
                    engine.now_s = upcoming[-1][0]
                active_s = engine.now_s
                continue
            self._book(engine.step())
            if engine.last_step is not None:
                active_s = engine.now_s
                if self._on_step is not None:
                    self._on_step(engine.last_step)
            else:
                engine.wait(upcoming[-1][0] if upcoming else math.inf)
                if engine.now_s - active_s > _PATIENCE_S:
                    raise RuntimeError(f"stuck at {engine.now_s:.1f} s: nothing goes on with {engine.stats()}")
            if self._progress is not None and engine.now_s - told_s >= 1.0:
                told_s = engine.now_s
                self._progress(told_s)
        if self._at_end_of_load is None:
            self._at_end_of_load = self._count()
        return self._result(duration_s or engine.now_s, time.perf_counter() - began_s)

    def _end_of_drain(self, duration_s: float | None) -> float:
        if duration_s is None or self._config.drain_s == math.inf:
            return math.inf
        drain_s = self._config.drain_s
        return duration_s + (max(60.0, duration_s / 4) if drain_s is None else drain_s)

    def _is_over(self, duration_s: float | None, now_s: float) -> bool:
        """After the load, only LS requests are waited for (unless all are)."""
        if duration_s is None or now_s < duration_s or self._config.drain_s == math.inf:
            return False
        return self._unfinished[self._ls_name] == 0 and not self._upcoming

    def _arrivals(self, wanted: Sequence[TraceRequest], name: str) -> list[tuple[float, str, Request]]:
        arrivals = []
        for number, request in enumerate(wanted):
            engine_request = Request(
                prompt_token_ids=(0,) * request.input_tokens,
                sampling=SamplingParams(max_tokens=request.output_tokens, ignore_eos=True),
                service_class=name,
            )
            if self._engine.fits(engine_request):
                arrivals.append((request.arrival_s, f"{name}-{number}", engine_request))
            else:
                self._too_long += 1
        return arrivals

    def _newcomers(self, after_s: float, until_s: float) -> Iterator[tuple[float, Request]]:
        for arrival_s, _, request in reversed(self._upcoming):
            if arrival_s > until_s:
                return
            if arrival_s > after_s:
                yield arrival_s, request

    def _refill(self) -> None:
        while self._unfinished[self._be_name] < self._config.load.backlog:
            number, request = next(self._pile)
            self._add(self._engine.now_s, f"{self._be_name}-{number}", request)

    def _add(self, arrival_s: float, request_id: str, request: Request) -> None:
        result = self._results[request_id] = RequestResult(
            request.service_class, arrival_s, len(request.prompt_token_ids), request.sampling.max_tokens
        )
        try:
            self._engine.add(request_id, request, arrival_s)
        except RequestRejected:
            result.rejected = True
        else:
            self._unfinished[request.service_class] += 1

    def _book(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if output.num_output_tokens == 1 or output.finish_reason is not None:
                result, times = self._results[output.request_id], output.times
                assert times is not None
                result.first_token_s = times.first_token_s
                result.num_output_tokens = output.num_output_tokens
                if output.finish_reason is not None:
                    result.finished_s = times.finished_s
                    result.num_host_tokens = output.num_host_tokens
                    self._unfinished[output.service_class] -= 1

    def _count(self) -> _Counters:
        stats, tier = self._engine.stats(), self._engine.tier
        return _Counters(
            output_tokens=stats.output_tokens,
            prompt_tokens=stats.prompt_tokens,
            host_output_tokens=stats.host_output_tokens,
            host_busy_s=tier.busy_s if tier is not None else 0.0,
        )

    def _result(self, end_of_load_s: float, wall_s: float) -> Result:
        warm, end = self._warm, self._at_end_of_load
        assert warm is not None and end is not None
        warm_up_s = self._config.load.warm_up_s
        duration_s = end_of_load_s - warm_up_s
        counted = [result for result in self._results.values() if result.arrival_s >= warm_up_s]
        classes: dict[str, ClassResult] = {}
        for name in (self._ls_name, self._be_name):
            classes[name] = summarise(
                [result for result in counted if result.service_class == name],
                self._config.engine.class_named(name).slo,
                duration_s=duration_s,
                output_tokens=end.output_tokens.get(name, 0) - warm.output_tokens.get(name, 0),
                prompt_tokens=end.prompt_tokens.get(name, 0) - warm.prompt_tokens.get(name, 0),
            )
        best_effort = classes[self._be_name].output_tokens_per_s * duration_s
        num_hosts = len(self._config.machine.hosts)
        stats = self._engine.stats()
        return Result(
            duration_s=duration_s,
            end_s=self._engine.now_s,
            num_steps=self._engine.num_steps,
            classes=classes,
            host_share=(end.host_output_tokens - warm.host_output_tokens) / best_effort if best_effort else 0.0,
            host_tier_busy=(end.host_busy_s - warm.host_busy_s) / (duration_s * num_hosts) if num_hosts else 0.0,
            preemptions=stats.preemptions,
            swaps_out=stats.swaps_out,
            swaps_in=stats.swaps_in,
            num_too_long=self._too_long,
            wall_s=wall_s,
            requests=tuple(counted),
        )
