"""Stepper: the order of a step's parts, one step after the other or overlapping (``async_steps``).

StepLog has what is kept of the steps that ran: counters, the trace, what the latency model learns from. Nothing here
needs torch: the engine and the simulator take the same steps, with other runners.

With ``async_steps`` on a GPU the device does not wait for the host between steps. As a step is launched,
``Scheduler.advance`` books what is certain of it, with ``PENDING_TOKEN`` for each token that it samples. The next step
is planned and launched, and gets those tokens on the device (``PendingTokens``). Only then does the host wait for the
first step's tokens, and ``settle`` fills them in. So at most one step is ahead of another.

* A request that ends meanwhile has its row in the next step dropped. Its blocks are free at once, as device work runs
  in the order of its launch. A request whose pending token is certainly its last is ENDING: it has given its KV back,
  and no policy sees it.
* Late joins are assumed to join (``HostResidents.assume``). If ``settle`` finds that one did not, its token is again
  where it was, and the row that the next step already has for it misses that step, too.
* A plan whose outcome decides more than that ends before the next one is made: safepoints, a second sub-batch, prompt
  log-probabilities, a grammar, drafts that it verifies, late joins at the last layer. A pending token behind which a
  request could have drafts is waited for first (``Scheduler.awaits_tokens``).
* A step's bound counts from ``Policy.busy_until_s``, when the step in flight ends. The price: a request that comes
  while a step runs is in the step after the next, and so is a host result at the last layer.

With several stages as many steps are in flight, all of them advanced before they are known (``omniserve.parallel``).
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from omniserve.core.plan import StepOutput, StepPlan, is_whole, without_missed
from omniserve.core.request import SLO, RequestOutput
from omniserve.core.work import HostEvent
from omniserve.engine.outputs import OutputCollector
from omniserve.latency import CorrectedModel, ModelShape, features_of
from omniserve.latency.trace import StepTracer
from omniserve.sched import Scheduler


class Runner(Protocol):
    """Runs steps. The engine's computes them (``ModelRunner``), the simulator's takes their time on a virtual clock."""

    host_works: bool
    """The host tier attended when the last step began."""

    def poll_host(self) -> list[HostEvent]:
        """Return the events of the host tier since the last call."""
        ...

    def launch(self, plan: StepPlan) -> Any:
        """Begin a step, which may be empty, and return what ``collect`` takes."""
        ...

    def collect(self, step: Any) -> StepOutput:
        """Wait for a launched step and return its output."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request, which has ended."""
        ...


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """The facts about a request that is unfinished, or that ended in the step under way."""

    service_class: str
    slo: SLO
    """The objectives that hold."""
    predicted_ttft_s: float | None
    """The TTFT that admission predicted, in seconds from arrival."""
    scaled_slo: SLO | None = None
    """The objectives that hold if admission has scaled those of the class; None: it has not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedStep:
    """A step that computed something."""

    plan: StepPlan
    result: StepOutput
    outputs: Sequence[RequestOutput]
    """Outputs that requests got from the step."""
    host_works: bool
    """The host tier worked during the step."""
    started_s: float
    """Begin of the step, on the clock of the outputs' times."""
    seconds: float
    ran_alone: bool
    """No other step was in another stage of the model meanwhile."""
    requests: Mapping[str, OpenRequest]
    """The requests of the outputs, and if steps are traced those of the plan."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was launched and not collected yet."""

    plan: StepPlan
    launched: Any
    scheduled_s: float
    host_works: bool
    requests: Mapping[str, OpenRequest]
    """The requests of its outputs, and if steps are traced those of the plan."""
    is_advanced: bool
    """The scheduler has booked of it what is certain."""
    began_alone: bool = True
    """No other step was in an earlier or later stage when it was launched."""


class Stepper:
    """Schedules, launches, collects and books steps. Not thread-safe.

    Args:
        outputs: Makes of tokens what requests get; a stop string may end a request there.
        record: Is given each step that computed something, as it is collected.
        clock: Monotonic seconds.
        overlaps: Launch a step while the one before it runs, where its plan is certain.
        num_stages: Stages of the model: with several, as many steps are in flight. ``overlaps`` is then of no use.
        keeps_names: Every step needs its requests as they were, also those that end while it runs: it is traced.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Runner,
        outputs: OutputCollector,
        record: Callable[[FinishedStep], None],
        clock: Callable[[], float],
        overlaps: bool = False,
        keeps_names: bool = False,
        num_stages: int = 1,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._outputs = outputs
        self._record = record
        self._clock = clock
        self._overlaps = overlaps
        self._keeps_names = keeps_names
        self._num_stages = num_stages
        self.requests: dict[str, OpenRequest] = {}
        """Unfinished requests, and those that ended in the step under way."""
        self.last_plan_was_empty = False
        """The last step had nothing to compute or collect."""
        self._in_flight: _Flight | None = None
        self._in_stages: deque[_Flight] = deque()
        """The steps in flight, the oldest first, if there are several stages."""
        self._last_end_s: float | None = None

    @property
    def has_unfinished(self) -> bool:
        """True while a step may have something to do, be it to collect what another one launched."""
        return self.is_in_flight or self._scheduler.has_unfinished

    @property
    def is_in_flight(self) -> bool:
        """A step was launched and not collected."""
        return self._in_flight is not None or bool(self._in_stages)

    def step(self) -> list[RequestOutput]:
        """Run one step, or launch it and collect the one before; see `Engine.step`."""
        if self._num_stages > 1:
            return self._step_in_stages()
        scheduler = self._scheduler
        outputs: list[RequestOutput] = []
        before, self._in_flight = self._in_flight, None
        was_in_flight = before is not None
        if before is not None and scheduler.awaits_tokens:
            outputs += self._collect(before)
            before, scheduler.policy.busy_until_s = None, -math.inf
        scheduled_s = self._clock()
        scheduler.notify(self._runner.poll_host())
        plan = scheduler.schedule(scheduled_s)
        self.last_plan_was_empty = plan.is_empty and not was_in_flight
        overlaps = self._overlaps and not plan.is_empty and scheduler.is_certain(plan)
        requests = dict(self.requests) if self._overlaps and self._keeps_names else self.requests
        if before is not None and not overlaps:
            outputs += self._collect(before)
            before, plan = None, scheduler.refresh(plan)
        launched = self._runner.launch(plan)
        flight = _Flight(plan, launched, scheduled_s, self._runner.host_works, requests, is_advanced=overlaps)
        if overlaps:
            scheduler.advance(plan)
            self._in_flight = flight
            if before is not None:
                outputs += self._collect(before)
            scheduler.policy.busy_until_s = self._expected_end_s(flight)
        else:
            outputs += self._collect(flight)
            scheduler.policy.busy_until_s = -math.inf
        return outputs

    def start_moves(self) -> list[RequestOutput]:
        """Begin copies between the tiers without a step, and take note of those that have ended.

        While a step is in flight this does nothing.
        """
        if self.is_in_flight:
            return []
        scheduler, scheduled_s = self._scheduler, self._clock()
        scheduler.notify(self._runner.poll_host())
        plan = scheduler.schedule_moves(scheduled_s)
        launched = self._runner.launch(plan)
        flight = _Flight(plan, launched, scheduled_s, self._runner.host_works, self.requests, is_advanced=False)
        return self._collect(flight)

    def _step_in_stages(self) -> list[RequestOutput]:
        """Launch a step; collect the oldest if each stage has one now, or if the new one has nothing to compute."""
        scheduler, scheduled_s = self._scheduler, self._clock()
        scheduler.notify(self._runner.poll_host())
        plan = scheduler.schedule(scheduled_s)
        self.last_plan_was_empty = plan.is_empty and not self._in_stages
        requests = dict(self.requests) if self._keeps_names else self.requests
        launched = self._runner.launch(plan)
        scheduler.advance(plan)
        is_alone = not self._in_stages
        flight = _Flight(plan, launched, scheduled_s, self._runner.host_works, requests, True, is_alone)
        self._in_stages.append(flight)
        outputs: list[RequestOutput] = []
        if plan.is_empty or len(self._in_stages) == self._num_stages:
            outputs += self._collect(self._in_stages.popleft())
            while self._in_stages and self._in_stages[0].plan.is_empty:
                outputs += self._collect(self._in_stages.popleft())
        return outputs

    def finish(self) -> None:
        """Wait for the steps in flight, and drop what they give. Nothing is stepped after this."""
        while self._in_stages:
            self._runner.collect(self._in_stages.popleft().launched)

    def abort(self, request_id: str) -> bool:
        """End a request now and free what it holds; False if it is unknown or has finished."""
        if self._scheduler.abort(request_id, self._clock()) is None:
            return False
        self._runner.forget(request_id)
        self._outputs.close(request_id)
        del self.requests[request_id]
        return True

    def _collect(self, flight: _Flight) -> list[RequestOutput]:
        """Wait for a step's tokens, book them, and return what requests get from it.

        Its seconds run from the end of the step before, or from its own planning after a pause: they are what it adds
        to the time of all decoding requests, and also what the device takes for it if the host keeps ahead.
        """
        plan = flight.plan
        # Steps that follow one another: what is between them (outputs, new requests) belongs to the step's period.
        started_s = self._last_end_s if self._last_end_s is not None else flight.scheduled_s
        result = self._runner.collect(flight.launched)
        now_s = self._clock()
        book = self._scheduler.settle if flight.is_advanced else self._scheduler.update
        outputs = [self._finish(output, now_s) for output in book(plan, result, now_s)]
        ended_s = self._clock()
        self._last_end_s = ended_s if self.has_unfinished and not plan.is_empty else None
        if not plan.is_empty:
            step = FinishedStep(
                plan=plan, result=result, outputs=outputs, host_works=flight.host_works, started_s=started_s,
                seconds=ended_s - started_s, requests=flight.requests,
                ran_alone=flight.began_alone and all(other.plan.is_empty for other in self._in_stages),
            )  # fmt: skip
            self._record(step)
        for output in outputs:
            if output.finished:
                del self.requests[output.request_id]
        return outputs

    def _expected_end_s(self, flight: _Flight) -> float:
        """Return when a step in flight will have ended, as predicted; -inf: nothing is predicted."""
        decision = flight.plan.decision
        if decision is None or decision.predicted_s is None:
            return -math.inf
        began_s = flight.scheduled_s if self._last_end_s is None else max(flight.scheduled_s, self._last_end_s)
        return began_s + decision.predicted_s

    def _finish(self, output: RequestOutput, now_s: float) -> RequestOutput:
        """Look for stop strings, and forget a request that ended."""
        left = self._outputs.push(output, now_s)
        if left.finished:
            self._runner.forget(left.request_id)
            self._scheduler.discount(output, left)
            self._scheduler.abort(left.request_id, now_s)  # no-op unless a stop string ended it
        return left


class StepLog:
    """Counts steps, traces them (the tracer is closed with the log), and tells the latency model of every whole one."""

    def __init__(self, shape: ModelShape, *, latency: CorrectedModel | None, tracer: StepTracer | None) -> None:
        self._shape = shape
        self._latency = latency
        self._tracer = tracer
        self.num_steps = 0
        self.seconds = 0.0
        self.num_device_tokens = 0
        self.num_piggyback_rows = 0

    def record(self, step: FinishedStep) -> None:
        """Take a step that computed something."""
        self.num_steps += 1
        self.seconds += step.seconds
        self.num_device_tokens += step.plan.num_device_tokens
        plan = without_missed(step.plan, step.result.missed)  # what was computed
        self.num_piggyback_rows += sum(join.num_rows for join in plan.joins)
        if self._tracer is None and self._latency is None:
            return
        features = features_of(plan, self._shape, host_works=step.host_works)
        if self._tracer is not None:
            terms: dict[str, float] = {}
            if self._latency is not None:
                terms = dict(zip(self._latency.term_names, self._latency.terms(features), strict=True))
            self._tracer.record(
                plan, started_s=step.started_s, seconds=step.seconds, features=dataclasses.asdict(features),
                terms=terms, halted=step.result.halted, outputs=step.outputs,
                slos={name: entry.slo for name, entry in step.requests.items()},
                classes={name: entry.service_class for name, entry in step.requests.items()},
            )  # fmt: skip
        if self._latency is not None and step.ran_alone and is_whole(step.plan, step.result.halted):
            self._latency.observe(features, step.seconds, step.started_s + step.seconds)

    def close(self) -> None:
        """End the trace. A second call does nothing."""
        if self._tracer is not None:
            self._tracer.close()
