"""simulate: a load through the engine's stepper, scheduler and KV manager, on a virtual clock.

It begins with the first arrival and ends with the last LS request. Requests end by their number of tokens: tokens are
invented. Prompts begin alike as far as the load says so (``TraceRequest.hash_ids``), and outputs are like no prompt.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from omniserve.core.config import EngineConfig
from omniserve.core.errors import RequestRejected
from omniserve.core.request import Arrival, ClassSpec, Request, RequestOutput, SamplingParams, ServiceClass
from omniserve.core.stats import SchedulerStats
from omniserve.routing.routers import ROUTERS
from omniserve.sched.policy import policy_of
from omniserve.simulate.engine import SimulatedEngine
from omniserve.simulate.fleet import Fleet
from omniserve.simulate.load import MOST_HASH_IDS, Load, TraceRequest
from omniserve.simulate.machine import Machine
from omniserve.simulate.results import RequestResult, Result, summarise
from omniserve.simulate.runner import Chances, PrefillPeers, StepRecord

_POLL_S = 0.05
"""Seconds after which an engine that waits for its host tier looks again, as the server does."""
_PATIENCE_S = 600.0
"""Seconds without a computed step and without a new request after which a run is stuck."""
_SEEDS_APART = 7919
"""Difference of the seeds of two engines, which have noise of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationConfig:
    """The settings of a simulation.

    Raises:
        ValueError: There is no load, or a number is out of range.
    """

    machine: Machine
    engine: EngineConfig
    """The engine's settings; those of tensors (execution, threads, dtypes) mean nothing here. There is a host tier if
    the machine has hosts, the KV manager has one, and ``host_kv_bytes`` is not 0."""
    load: Load
    num_engines: int = 1
    """Engines alike, each on such a machine, which share the load and the machine's prefill engines."""
    router: str = "fewest-requests"
    """How requests are divided among several engines, a name in ROUTERS."""
    seed: int = 0
    """Seed of the noise and of the machine's spread."""
    noise: float = 0.0
    """Standard deviation of the noise on steps' times, as in SimulatedRunner."""
    drain_s: float | None = None
    """Seconds to go on after the load for unfinished LS requests, which miss their objectives if they still are
    unfinished then; None: a quarter of the load's, at least a minute. Infinite: until all requests have ended,
    best-effort ones too."""
    drafts_right: float = 0.0
    """Probability that a draft is right if those before it are, for requests of classes with ``speculation``; 0: no
    request has drafts."""
    check: bool = False
    """Verify the integrity of scheduler and KV manager after each step (slow)."""

    def __post_init__(self) -> None:
        load = self.load
        if self.num_engines < 1:
            raise ValueError(f"num_engines must be >= 1, got {self.num_engines}")
        if self.router not in ROUTERS:
            raise ValueError(f"router must be one of {', '.join(ROUTERS)}, got {self.router!r}")
        if not load.latency_sensitive and not load.best_effort:
            raise ValueError("there is nothing to simulate: the load has no requests")
        if load.hash_tokens < 1:
            raise ValueError(f"hash_tokens must be >= 1, got {load.hash_tokens}")
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
        if not 0 <= self.drafts_right <= 1:
            raise ValueError(f"drafts_right must be a share in [0, 1], got {self.drafts_right}")
        if not (math.isfinite(self.noise) and self.noise >= 0):
            raise ValueError(f"noise must be a number >= 0, got {self.noise}")


def simulate(
    config: SimulationConfig,
    *,
    progress: Callable[[float], object] = lambda now_s: None,
    on_step: Callable[[StepRecord], object] = lambda step: None,
) -> Result:
    """Run a simulation. The same configuration gives the same result.

    Args:
        config: The machine, the engine's settings and the load.
        progress: Told the simulated time now and then.
        on_step: Called with each step that computed something.

    Raises:
        ValueError: The settings do not fit the machine, a request is of no class, or none fits the engine.
        RuntimeError: The scheduler left requests unfinished that nothing would ever go on with.
    """
    return _Run(config, progress, on_step).run()


class _Run:
    """A simulation under way."""

    def __init__(
        self, config: SimulationConfig, progress: Callable[[float], object], on_step: Callable[[StepRecord], object]
    ) -> None:
        self._config, self._progress = config, progress
        settings, load = config.engine, config.load
        self._ls, self._be = (
            next(each for each in settings.classes if each.kind is kind) for kind in (ServiceClass.LS, ServiceClass.BE)
        )
        self._classes = {each.name: each for each in settings.classes}
        has_ids = any(row.hash_ids for row in (*load.latency_sensitive, *load.best_effort))
        peers: Sequence[PrefillPeers | None] = (None,) * config.num_engines
        if nodes := config.machine.prefill_engines:
            from omniserve.simulate.prefill_engines import SimulatedPrefillEngines

            names = tuple(f"simulated:{number}" for number in range(1, len(nodes) + 1))
            asking = dataclasses.replace(settings.prefill, prefill_engines=names, prefill_secret_file="simulated")
            prefills = SimulatedPrefillEngines(
                config.machine, settings, seed=config.seed, num_askers=config.num_engines
            )
            peers, settings = prefills.askers, dataclasses.replace(settings, prefill=asking)
        if config.num_engines > 1 and policy_of(settings)[1].preempts:
            raise ValueError(
                "rows leave no step if several engines share the load: choose another scheduler or options"
            )
        engines = [
            SimulatedEngine(
                config.machine,
                settings,
                Chances(config.seed + _SEEDS_APART * number, config.noise, config.drafts_right),
                prefills=prefills_of_it,
                caches_prefixes=bool(settings.execution.prefix_cache or has_ids or nodes),
                arrivals=self._come,
                on_step=on_step,
            )
            for number, prefills_of_it in enumerate(peers)
        ]
        if nodes:
            from omniserve.simulate.prefill_engines import require_shared_kv

            require_shared_kv(engines[0], "an engine with prefill engines")
        self._engines = Fleet(engines, self._classes, config.router)
        self._longest = engines[0].max_model_len, engines[0].pool_tokens
        self._has_cache = engines[0].caches_prefixes
        self._too_long = 0
        self._results: dict[str, RequestResult] = {}
        self._own_texts = itertools.count(1 + MOST_HASH_IDS)
        self._unfinished = dict.fromkeys(self._classes, 0)
        self._queue_arrivals(config.load)

    def _queue_arrivals(self, load: Load) -> None:
        ls = self._arrivals(load.latency_sensitive, self._ls)
        be = self._arrivals(load.best_effort, self._be)
        limits = "a request may have {} tokens, and the device pool holds {}".format(*self._longest)
        if not ls and not be:
            raise ValueError(f"none of the {self._too_long} requests fits: {limits}")
        self._pile: Iterator[tuple[int, tuple[TraceRequest, Request]]] = iter(())
        if load.backlog:
            if not be:
                wanted = len(load.best_effort)
                raise ValueError(f"none of the {wanted} best-effort requests of the backlog fits: {limits}")
            self._pile = enumerate(itertools.cycle([(row, request) for row, _, request in be]))
            be = []
        arrivals = [(row.arrival_s, request_id, request) for row, request_id, request in (*ls, *be)]
        # The next to come is the last; of those that come at once it is the one that the load names first.
        self._upcoming = sorted(arrivals, key=lambda arrival: arrival[0])[::-1]

    def _arrivals(self, wanted: Sequence[TraceRequest], default: ClassSpec) -> list[tuple[TraceRequest, str, Request]]:
        """Return (row, id, request) of each request that the engine would take at all, of ``default``'s kind."""
        arrivals = []
        for number, row in enumerate(wanted):
            name = row.service_class or default.name
            if (kind := self._config.engine.class_named(name).kind) != default.kind:
                raise ValueError(f"class {name!r} is of kind {kind}, and stands among requests of kind {default.kind}")
            if row.input_tokens + row.output_tokens > min(self._longest):
                self._too_long += 1
                continue
            request = Request(
                prompt_token_ids=self._prompt(row),
                sampling=SamplingParams(max_tokens=row.output_tokens, ignore_eos=True),
                service_class=name,
                deadline_s=row.deadline_s,
                speculation=None if self._config.drafts_right else False,
            )
            arrivals.append((row, f"{name}-{number}", request))
        return arrivals

    def _prompt(self, row: TraceRequest) -> Sequence[int]:
        """Return the tokens of a prompt: the number of each piece, and where there is none one that no other has."""
        if not self._has_cache:
            return (0,) * row.input_tokens
        size = self._config.load.hash_tokens
        numbered = itertools.chain.from_iterable(itertools.repeat(1 + number, size) for number in row.hash_ids)
        known = tuple(itertools.islice(numbered, row.input_tokens))
        return (*known, *itertools.repeat(next(self._own_texts), row.input_tokens - len(known)))

    def run(self) -> Result:
        began_s = time.perf_counter()
        load, engines, upcoming = self._config.load, self._engines, self._upcoming
        duration_s = load.duration_s
        if duration_s is None:  # then there is no backlog: something is upcoming
            duration_s = max(upcoming[0][0], 1e-3)  # reversed: the last to come
        drain_s = max(60.0, duration_s / 4) if self._config.drain_s is None else self._config.drain_s
        warm = None if load.warm_up_s else self._counters()
        at_end_of_load = None
        active_s, told_s = 0.0, 0.0
        while True:
            now_s = engines.now_s
            if warm is None and now_s >= load.warm_up_s:
                warm = self._counters()
            if at_end_of_load is None and now_s >= duration_s:
                at_end_of_load = self._counters()
            if now_s >= duration_s + drain_s:
                break
            if at_end_of_load is not None and not (upcoming or self._has_unfinished_ls() or drain_s == math.inf):
                break
            if at_end_of_load is None:
                self._refill()
            while upcoming and upcoming[-1][0] <= engines.now_s:
                self._add(*upcoming.pop())
            if not engines.has_unfinished:
                if not upcoming and now_s >= duration_s:
                    break
                active_s = upcoming[-1][0] if upcoming else duration_s
                engines.skip_to(active_s)
                continue
            self._book(engines.step())
            if self._config.check:
                engines.check_integrity()
            if not engines.last_plan_was_empty:
                active_s = engines.now_s
            else:
                self._wait()
                if engines.now_s - active_s > _PATIENCE_S:
                    raise RuntimeError(f"stuck at {engines.now_s:.1f} s: nothing goes on with {engines.stats()}")
            if engines.now_s - told_s >= 1.0:
                told_s = engines.now_s
                self._progress(told_s)
        assert warm is not None
        end = at_end_of_load or self._counters()
        return self._result(duration_s, warm, end, time.perf_counter() - began_s)

    def _has_unfinished_ls(self) -> bool:
        return any(self._unfinished[name] for name, spec in self._classes.items() if spec.kind == ServiceClass.LS)

    def _wait(self) -> None:
        """Let time pass after an empty step: to the next arrival or event from elsewhere, at most _POLL_S."""
        now_s = self._engines.stepped_s
        next_s = [now_s + _POLL_S, self._engines.next_event_s()]
        if self._upcoming:
            next_s.append(self._upcoming[-1][0])
        self._engines.wait_until(min(next_s))

    def _refill(self) -> None:
        while self._unfinished[self._be.name] < self._config.load.backlog:
            number, (row, request) = next(self._pile)
            if self._has_cache:  # what comes again says something else behind what it has in common with others
                request = dataclasses.replace(request, prompt_token_ids=self._prompt(row))
            self._add(self._engines.now_s, f"{self._be.name}-{number}", request)

    def _add(self, arrival_s: float, request_id: str, request: Request) -> None:
        name = request.service_class
        result = self._results[request_id] = RequestResult(
            name, arrival_s, len(request.prompt_token_ids), request.sampling.max_tokens, deadline_s=request.deadline_s
        )
        try:
            self._engines.add(request_id, request, arrival_s=arrival_s)
        except RequestRejected:
            result.rejected = True
        else:
            self._unfinished[name] += 1

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
                    result.num_cached_tokens = output.num_cached_tokens
                    self._unfinished[output.service_class] -= 1

    def _come(self, after_s: float, now_s: float) -> Iterator[Arrival]:
        """Yield the requests that come in ``(after_s, now_s]``, of those that are still to be added."""
        for arrival_s, _, request in reversed(self._upcoming):
            if arrival_s > now_s:
                return
            if arrival_s > after_s:
                yield Arrival(request, arrival_s)

    def _counters(self) -> tuple[SchedulerStats, float]:
        """Return the work that has been done, and the seconds that hosts have attended."""
        return self._engines.stats(), self._engines.host_busy_s

    def _result(
        self, end_of_load_s: float, warm: tuple[SchedulerStats, float], end: tuple[SchedulerStats, float], wall_s: float
    ) -> Result:
        (before, busy_before_s), (after, busy_after_s) = warm, end
        warm_up_s = self._config.load.warm_up_s
        duration_s = end_of_load_s - warm_up_s
        counted = [result for result in self._results.values() if result.arrival_s >= warm_up_s]
        classes = {
            name: summarise(
                [result for result in counted if result.service_class == name],
                spec.slo,
                duration_s=duration_s,
                output_tokens=after.output_tokens.get(name, 0) - before.output_tokens.get(name, 0),
                prompt_tokens=after.prompt_tokens.get(name, 0) - before.prompt_tokens.get(name, 0),
                cached_tokens=after.cached_tokens.get(name, 0) - before.cached_tokens.get(name, 0),
                prefilled_tokens=after.loaded_from("prefilled")[name] - before.loaded_from("prefilled")[name],
            )
            for name, spec in self._classes.items()
        }
        best_effort = classes[self._be.name].output_tokens_per_s * duration_s
        num_hosts = len(self._config.machine.hosts) * self._config.num_engines
        stats = self._engines.stats()
        host_tokens = after.host_output_tokens - before.host_output_tokens
        host_layers = max(1, host_tokens * self._config.machine.spec.num_layers)
        be_host_tokens = host_tokens - (after.ls_host_output_tokens - before.ls_host_output_tokens)
        return Result(
            duration_s=duration_s,
            end_s=self._engines.end_s,
            num_steps=self._engines.num_steps,
            classes=classes,
            host_share=be_host_tokens / best_effort if best_effort else 0.0,
            host_tier_busy=(busy_after_s - busy_before_s) / (duration_s * num_hosts) if num_hosts else 0.0,
            warm_up_output_tokens=before.output_tokens.get(self._be.name, 0),
            host_steps_per_layer=(after.host_token_steps - before.host_token_steps) / host_layers,
            preemptions=stats.preemptions,
            accepted_drafts=stats.accepted_drafts,
            rejected_drafts=stats.rejected_drafts,
            swaps_out=stats.swaps_out,
            swaps_in=stats.swaps_in,
            num_too_long=self._too_long,
            wall_s=wall_s,
            requests=tuple(counted),
        )
