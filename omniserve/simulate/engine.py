"""SimulatedEngine: the engine's stepper, scheduler and KV manager, with a runner that moves a virtual clock."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from omniserve.core.config import EngineConfig
from omniserve.core.plan import HostEvent, SampledToken, StepOutput, StepPlan, is_whole
from omniserve.core.request import Request, RequestOutput, ServiceClass
from omniserve.core.stats import SchedulerStats
from omniserve.engine.capacity import max_model_len, num_blocks
from omniserve.engine.outputs import OutputCollector
from omniserve.engine.stepping import FinishedStep, OpenRequest, Stepper
from omniserve.kv import KV_MANAGERS
from omniserve.latency import BatchFeatures, CorrectedModel, Predictor, features_of
from omniserve.sched import Forecast, Scheduler, SchedulerLimits, policy_of
from omniserve.sched.options import LayerPreemptionOptions
from omniserve.simulate.host_tier import SimulatedHostTier
from omniserve.simulate.machine import Machine

POLL_S = 0.05
"""An engine that waits for its host tier looks again after so long, as the server does."""
_TOKEN = SampledToken(token_id=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """A step's time and contents, for reports."""

    plan: StepPlan
    start_s: float
    seconds: float
    host_works: bool


class SimulatedRunner:
    """Runs steps on a virtual clock: a machine says what they take, and tokens are invented.

    Args:
        machine: How long everything takes.
        tier: Its host tier, if it has one.
        noise: Standard deviation of the logarithm of what a step takes over what it takes otherwise; the mean stays.
        seed: Of the noise and of the machine's spread.
        keeps_halted: Rows that left a step go on from the layer where they left it.
        must_leave: Asked between two layers, with the times of the last and of this question, whether preemptible rows
            must leave the step for a request that came in between.
    """

    def __init__(
        self, machine: Machine, tier: SimulatedHostTier | None, *, noise: float, seed: int, keeps_halted: bool,
        must_leave: Callable[[float, float], bool],
    ) -> None:  # fmt: skip
        self._machine = machine
        self._tier = tier
        self._shape = machine.shape
        self._noise = noise
        self._rng = random.Random(seed)
        self._draw = machine.spread.draws(random.Random(f"{seed} spread")) if machine.spread is not None else None
        self._keeps_halted = keeps_halted
        self._must_leave = must_leave
        self.now_s = 0.0
        """The virtual clock."""
        self.host_works = False
        self.features = BatchFeatures()
        """Those of the last step that computed something."""
        self.seconds = 0.0
        """What that step took."""

    def poll_host(self) -> list[HostEvent]:
        """Return the events of the host tier up to now."""
        return self._tier.poll(self.now_s) if self._tier is not None else []

    def launch(self, plan: StepPlan) -> StepOutput:
        """Let the time of a step pass, and return its output; an empty plan takes none."""
        start_s = self.now_s
        if self._tier is not None:
            self._tier.start_moves(plan, start_s)
        if plan.is_empty:
            return StepOutput()
        has_host_rows = bool(plan.entries or plan.joins or plan.pipelined)
        self.host_works = has_host_rows or (self._tier is not None and self._tier.attends)
        self.features = features_of(plan, self._shape, host_works=self.host_works)
        self.seconds, halted = self._take(plan)
        if self._tier is not None:
            self._tier.submit(plan, start_s, self.seconds, during_step=self._machine.sends_during_step)
        self.now_s = start_s + self.seconds
        last_layer = self._machine.spec.num_layers - 1
        tokens = {c.request_id: _TOKEN for c in plan.chunks if c.samples and c.request_id not in halted}
        tokens.update((join.request_id, _TOKEN) for join in plan.joins if join.layer == last_layer)
        tokens.update((row.request_id, _TOKEN) for row in plan.pipelined)
        return StepOutput(tokens=tokens, halted=halted)

    def collect(self, step: StepOutput) -> StepOutput:
        """Return the output of a launched step."""
        return step

    def forget(self, request_id: str) -> None:
        """Drop what the host tier keeps of a request, which has ended."""
        if self._tier is not None:
            self._tier.forget(request_id)

    def _take(self, plan: StepPlan) -> tuple[float, dict[str, int]]:
        """Return the seconds of a step, and the layers that chunks left it before."""
        factor = math.exp(self._rng.gauss(-(self._noise**2) / 2, self._noise)) if self._noise else 1.0
        step_s = self._machine.device.step_s(self.features)
        if self._draw is not None:
            factor *= self._draw(step_s)
        if plan.preemptible or any(chunk.from_layer for chunk in plan.chunks):
            return self._layer_by_layer(plan, factor)
        return factor * step_s, {}

    def _layer_by_layer(self, plan: StepPlan, factor: float) -> tuple[float, dict[str, int]]:
        """Do the same for a step that rows leave or enter between two layers (conserve 4.3).

        Each layer takes its share of a step that consists of the rows that are there.
        """
        halted: dict[str, int] = {}
        looked_s = time_s = self.now_s
        num_layers, layer_s, present = self._machine.spec.num_layers, 0.0, -1
        for layer in range(num_layers):
            if layer and not halted and self._must_leave(looked_s, time_s):
                left = layer if self._keeps_halted else 0
                for chunk in plan.chunks:
                    if chunk.request_id in plan.preemptible:
                        # A row that would have gone on at this layer or later stays where it is.
                        halted[chunk.request_id] = chunk.from_layer if chunk.from_layer >= layer else left
            looked_s = time_s
            chunks = tuple(c for c in plan.chunks if c.from_layer <= layer and c.request_id not in halted)
            if len(chunks) != present:
                present = len(chunks)
                part = dataclasses.replace(plan, chunks=chunks)
                features = features_of(part, self._shape, host_works=self.host_works)
                layer_s = factor * self._machine.device.step_s(features) / num_layers
            time_s += layer_s
        return time_s - self.now_s, halted


class SimulatedEngine:
    """Steps as the engine does (``Stepper``), one after the other. Tokens are invented.

    Requests must have ``ignore_eos`` and end by ``max_tokens``: the tokens mean nothing.

    Args:
        machine: How long everything takes.
        config: The engine's settings; those of tensors (execution, threads, dtypes) mean nothing here, and there is a
            host tier if the machine has hosts, the KV manager has one, and ``host_kv_bytes`` is not 0.
        noise: As in ``SimulatedRunner``.
        seed: As in ``SimulatedRunner``.
        check: Verify the integrity of scheduler and KV manager after each step (slow; for tests).

    Raises:
        ValueError: A pool holds no block, the context is longer than the model's, or the noise is negative.
    """

    def __init__(
        self, machine: Machine, config: EngineConfig, *, noise: float = 0.0, seed: int = 0, check: bool = False
    ) -> None:
        if not (math.isfinite(noise) and noise >= 0):
            raise ValueError(f"noise must be a number >= 0, got {noise}")
        spec = machine.spec
        policy, options = policy_of(config)
        self.config = config
        self.machine = machine
        self.num_device_blocks, num_host_blocks = num_blocks(config, spec, has_hosts=bool(machine.hosts))
        self.tier: SimulatedHostTier | None = None
        if num_host_blocks:
            self.tier = SimulatedHostTier(machine.hosts, machine.copies, spec, config.block_size)
        self.kv = KV_MANAGERS.get(config.kv)(
            num_device_blocks=self.num_device_blocks, num_host_blocks=num_host_blocks, block_size=config.block_size
        )
        self.limits = SchedulerLimits.of(config, options, spec, self.kv, max_model_len=max_model_len(config, spec))
        # With perfect predictions there is nothing to correct, and correcting costs as much as predicting.
        is_exact = noise == 0 and machine.spread is None and machine.forecast is machine.device
        self._corrected = None if is_exact else CorrectedModel(machine.forecast)
        predictor: Predictor = self._corrected or machine.forecast
        forecast = Forecast(
            predictor, machine.shape, host_has_own_cores=machine.host_has_own_cores, host=machine.host_speed
        )
        self.scheduler = Scheduler(policy, options, limits=self.limits, kv=self.kv, forecast=forecast)
        self._runner = SimulatedRunner(
            machine, self.tier, noise=noise, seed=seed,
            keeps_halted=not isinstance(options, LayerPreemptionOptions) or options.keep_halted,
            must_leave=self._must_leave,
        )  # fmt: skip
        self._outputs = OutputCollector(tokenizer=None)
        self._stepper = Stepper(
            scheduler=self.scheduler, runner=self._runner, outputs=self._outputs, record=self._record,
            clock=lambda: self.now_s,
        )  # fmt: skip
        self._check = check
        self.num_steps = 0
        self.last_step: StepRecord | None = None
        """The last step; None if it had nothing to compute."""
        self.newcomers: Callable[[float, float], Iterable[tuple[float, Request]]] | None = None
        """Tells which requests come in ``(after_s, until_s]``, with their arrival; for steps with safepoints. It is
        asked for no time beyond the layer boundary that the step stands at."""

    @property
    def now_s(self) -> float:
        """The virtual clock."""
        return self._runner.now_s

    @now_s.setter
    def now_s(self, now_s: float) -> None:
        self._runner.now_s = now_s

    def fits(self, request: Request) -> bool:
        """Return whether the engine would take the request at all: its context and the device pool are long enough."""
        total = len(request.prompt_token_ids) + request.sampling.max_tokens
        return total <= min(self.limits.max_model_len, self.num_device_blocks * self.config.block_size)

    def add(self, request_id: str, request: Request, arrival_s: float) -> float | None:
        """Take a request that came at ``arrival_s``, at most now; return its predicted TTFT.

        Raises:
            RequestRejected: Admission control refuses it.
        """
        slo = request.slo if request.slo is not None else self.config.class_named(request.service_class).slo
        predicted_s = self.scheduler.add(request_id, request, slo, self.now_s, arrival_s=arrival_s)
        self._stepper.requests[request_id] = OpenRequest(request.service_class, slo, predicted_s)
        self._outputs.open(request_id, request)
        return predicted_s

    @property
    def has_unfinished(self) -> bool:
        return self._stepper.has_unfinished

    def step(self) -> list[RequestOutput]:
        """Run one step, which moves the clock; an empty plan moves nothing (see ``wait``)."""
        self.last_step = None
        outputs = self._stepper.step()
        if self._check:
            self.scheduler.check_integrity()
        return outputs

    def wait(self, until_s: float) -> None:
        """Let time pass after an empty step: to the next event of the host tier, at most to ``until_s`` or POLL_S."""
        event_s = self.tier.next_event_s() if self.tier is not None else None
        target_s = min(until_s, self.now_s + POLL_S)
        self.now_s = max(self.now_s, target_s if event_s is None else min(target_s, event_s))

    def stats(self) -> SchedulerStats:
        """Return the scheduler's gauges and counters."""
        return self.scheduler.stats()

    def _record(self, step: FinishedStep) -> None:
        """Keep a step for reports, and let the latency model learn from it."""
        seconds = self._runner.seconds  # exact; a difference of two times of the clock is not
        self.num_steps += 1
        self.last_step = StepRecord(plan=step.plan, start_s=step.started_s, seconds=seconds, host_works=step.host_works)
        if self._corrected is not None and is_whole(step.plan, step.result.halted):
            self._corrected.observe(self._runner.features, seconds)

    def _must_leave(self, after_s: float, now_s: float) -> bool:
        """Return whether preemptible rows must leave for a request that came since ``after_s``."""
        must = False
        for arrival_s, request in self.newcomers(after_s, now_s) if self.newcomers is not None else ():
            spec = self.config.class_named(request.service_class)
            if spec.kind is ServiceClass.LS:
                slo = request.slo if request.slo is not None else spec.slo
                must |= self.scheduler.policy.must_preempt(request, slo, now_s - arrival_s, now_s)
        return must
