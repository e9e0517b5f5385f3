"""SimulatedEngine: the engine's stepper, scheduler and KV manager over a machine that only takes time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any

from omniserve.core.config import EngineConfig
from omniserve.core.plan import MAX_DRAFTS, is_whole
from omniserve.core.request import Arrival, Request, RequestOutput
from omniserve.engine.capacity import largest_part, max_model_len, num_blocks, prefix_settings
from omniserve.engine.outputs import OutputCollector
from omniserve.engine.stepping import FinishedStep, OpenRequest, Stepper
from omniserve.kv import KV_MANAGERS, KVManager, Tier
from omniserve.latency import CorrectedModel, Predictor
from omniserve.sched import Forecast, Scheduler, SchedulerLimits, policy_of
from omniserve.sched.admission import scaled_slo
from omniserve.sched.features.base import FeatureSettings
from omniserve.sched.options import LayerPreemptionOptions, PolicyOptions
from omniserve.simulate.forecast import forecast_for
from omniserve.simulate.host_tier import SimulatedHostTier
from omniserve.simulate.machine import Machine, host_speed_of
from omniserve.simulate.runner import Chances, PrefillPeers, SimulatedRunner, StepRecord

if TYPE_CHECKING:
    from omniserve.sched.features.drafter import Drafter


class SimulatedEngine:
    """An engine with a clock of its own, which stands still between steps.

    Args:
        machine: What it runs on.
        config: Its settings.
        caches_prefixes: Have a prefix cache, if the settings allow one; without need it only costs time.
        chances: See ``SimulatedRunner``.
        prefills: See ``SimulatedRunner``.
        arrivals: Returns the requests that come after a time and by another, as the queue that is polled between the
            layers of a step that rows may leave.
        on_step: Called with each step that computed something.

    Raises:
        ValueError: The settings do not fit the machine.
    """

    def __init__(
        self,
        machine: Machine,
        config: EngineConfig,
        chances: Chances,
        *,
        caches_prefixes: bool,
        prefills: PrefillPeers | None = None,
        arrivals: Callable[[float, float], Iterable[Arrival]] = lambda after_s, now_s: (),
        on_step: Callable[[StepRecord], object] = lambda step: None,
    ) -> None:
        _check(machine, config)
        self._config, self._chances, self._on_step = config, chances, on_step
        _, options = policy_of(config)
        spec, num_stages = machine.spec, config.parallel.pipeline_parallel_size
        part, has_hosts = largest_part(config, spec), bool(machine.hosts)
        num_device_blocks, num_host_blocks = num_blocks(config, part, has_hosts=has_hosts)
        sizes = {"num_device_blocks": num_device_blocks, "num_host_blocks": num_host_blocks}
        caches: dict[str, Any] = prefix_settings(config, spec, **sizes) if caches_prefixes else {}
        self.kv: KVManager = KV_MANAGERS.get(config.kv)(**sizes, block_size=config.block_size, **caches)
        self.tier = _host_tier(machine, config, self.kv, num_host_blocks)
        self._believed = forecast_for(machine, config, pool_tokens=num_device_blocks * config.block_size)
        self._corrected = _corrected(machine, self._believed, chances, options)
        self.scheduler = self._make_scheduler(machine)
        self.runner = SimulatedRunner(
            machine,
            self.tier,
            chances,
            prefills=prefills,
            num_stages=num_stages,
            must_leave=_must_leave(self.scheduler, config, arrivals) if options.preempts else None,
            keeps_halted=not isinstance(options, LayerPreemptionOptions) or options.keep_halted,
            safepoint_every=options.safepoint_every if isinstance(options, LayerPreemptionOptions) else 1,
        )
        self._outputs = OutputCollector(tokenizer=None)
        self.stepper = Stepper(
            scheduler=self.scheduler,
            runner=self.runner,
            outputs=self._outputs,
            record=self._record,
            clock=lambda: self.runner.now_s,
            depth=num_stages,
            side_by_side=num_stages > 1,
        )
        self.num_steps = 0
        """Counter: steps that computed something."""
        self.max_model_len, self.pool_tokens = max_model_len(config, spec), num_device_blocks * config.block_size
        """Most tokens of a request, and those that the device pool holds."""
        self.caches_prefixes = bool(caches)
        """The engine has a prefix cache."""

    def _make_scheduler(self, machine: Machine) -> Scheduler:
        policy, options = policy_of(self._config)
        num_stages = self._config.parallel.pipeline_parallel_size
        has_drafts = self.kv.num_host_blocks and self._chances.drafts_right
        limits = SchedulerLimits.of(
            self._config,
            options,
            machine.spec,
            self.kv,
            max_model_len=max_model_len(self._config, machine.spec),
            late_layers=machine.late_layers,
            max_host_drafts=MAX_DRAFTS if has_drafts else 0,
        )
        forecast = Forecast(
            self._corrected or self._believed,
            machine.shape,
            host_has_own_cores=machine.host_has_own_cores,
            host=host_speed_of(machine.hosts),
        )
        scheduler = Scheduler
        if num_stages > 1:
            from omniserve.sched.stages import StagedScheduler as scheduler
        settings = FeatureSettings(drafter_of=self._drafter)
        return scheduler(policy, options, limits=limits, kv=self.kv, forecast=forecast, settings=settings)

    @property
    def now_s(self) -> float:
        """The engine's clock."""
        return self.runner.now_s

    @now_s.setter
    def now_s(self, at_s: float) -> None:
        self.runner.now_s = at_s

    def add(self, request_id: str, request: Request, *, arrival_s: float) -> None:
        """Take a request.

        Raises:
            RequestRejected: Its objectives cannot be met at present load.
        """
        spec = self._config.class_named(request.service_class)
        slo = request.slo if request.slo is not None else spec.slo
        ttft_s = self.scheduler.add(request_id, request, slo, self.now_s, arrival_s=arrival_s)
        scaled = scaled_slo(self.scheduler.requests.states[request_id])
        self.stepper.requests[request_id] = OpenRequest(request.service_class, scaled or slo, ttft_s, scaled)
        self._outputs.open(request_id, request)

    def step(self) -> Sequence[RequestOutput]:
        """Run a step; see ``Stepper.step``."""
        return self.stepper.step()

    def next_event_s(self) -> float:
        """Return when something comes that an engine without anything to compute waits for; infinity: nothing does."""
        return self.runner.next_event_s()

    def _drafter(self, request_id: str, request: Request) -> Drafter:
        from omniserve.simulate.drafter import SimulatedDrafter

        return SimulatedDrafter(
            self._chances.drafts_right, len(request.prompt_token_ids), f"{self._chances.seed} {request_id}"
        )

    def _record(self, step: FinishedStep) -> None:
        """Count and report a step, and let the latency model learn from it."""
        self.num_steps += 1
        if self._corrected is not None and step.ran_alone and is_whole(step.plan, step.result.halted):
            self._corrected.observe(self.runner.features, self.runner.seconds, step.started_s + step.seconds)
        # Of a step that ran alone they are exact; a difference of two times of the clock is not.
        seconds = self.runner.seconds if step.ran_alone else step.seconds
        self._on_step(StepRecord(plan=step.plan, start_s=step.started_s, seconds=seconds))


def _check(machine: Machine, config: EngineConfig) -> None:
    """Raise ValueError if the settings do not fit the machine."""
    num_stages = config.parallel.pipeline_parallel_size
    if config.disk_kv.gib:
        raise ValueError("simulated machines have no disk: set disk_kv.gib to 0")
    kv_dtype = machine.profile.fingerprint.kv_dtype if machine.profile is not None else "auto"
    if config.execution.kv_dtype != kv_dtype:
        raise ValueError(f"the machine's steps are those with kv_dtype {kv_dtype}: set it to that")
    if num_stages != machine.num_stages:
        raise ValueError(
            f"the machine has {machine.num_stages} stages: set pipeline_parallel_size to that, not to {num_stages}"
        )
    if num_stages > 1:
        from omniserve.sched.stages import check_stages

        check_stages(config)


def _corrected(
    machine: Machine, believed: Predictor, chances: Chances, options: PolicyOptions
) -> CorrectedModel | None:
    """Return the model that steps are compared with; None with perfect predictions, where that costs as much."""
    is_exact = chances.noise == 0 and machine.spread is None and believed is machine.device
    return None if is_exact else CorrectedModel(believed, learns=options.correct_model)


def _must_leave(
    scheduler: Scheduler, config: EngineConfig, arrivals: Callable[[float, float], Iterable[Arrival]]
) -> Callable[[float, float], Set[str]]:
    """Return ``must_leave`` of ``SimulatedRunner``."""
    from omniserve.engine.preemption import Preemption

    preemption = Preemption(scheduler.policy, config.classes)
    return lambda after_s, now_s: preemption.leaving_for(arrivals(after_s, now_s), now_s)


def _host_tier(machine: Machine, config: EngineConfig, kv: KVManager, num_blocks: int) -> SimulatedHostTier | None:
    if not num_blocks:
        return None
    return SimulatedHostTier(
        machine.hosts,
        machine.copies,
        machine.spec,
        config.block_size,
        kv_dtype=config.execution.kv_dtype,
        num_blocks=num_blocks,
        num_stages=config.parallel.pipeline_parallel_size,
        held=lambda request_id: kv.num_held(request_id, Tier.HOST),
    )
