"""Stepper: the order of a step's parts, and a queue of the steps in flight, which were launched and not collected yet.

Nothing here needs torch: the engine and the simulator take the same steps, with other runners. There are three modes,
by the depth of the queue:

* **Depth 1**: a step is planned, launched and collected before the next one.
* **Depth 2** (``async_steps``): the device does not wait for the host between steps. As a step is launched,
  ``Scheduler.advance`` books what is certain of it, with ``PENDING_TOKEN`` for each token that it samples. The next
  step is planned and launched, and gets those tokens on the device (``PendingTokens``). Only then does the host wait
  for the first step's tokens, and ``settle`` fills them in. So at most one step is ahead of another.
* **As deep as the model has stages**: steps run side by side, each in another stage, and all of them are advanced
  before they are known (``omniserve.parallel``, ``sched/stages.py``). An empty plan is a step there, too.

What depth 2 asks for:

* A request that ends meanwhile has its row in the next step dropped. Its blocks are free at once, as device work runs
  in the order of its launch. A request whose pending token is certainly its last is ENDING: it has given its KV back,
  and no policy sees it.
* A host row that may miss its step is booked as if it does not (``HostBooking``). If ``settle`` finds that it did, its
  token is again where it was, and the row that the next step already has for it misses that step, too.
* A plan whose outcome decides more than that is not certain (``Scheduler.is_certain``): the step before it is collected
  before it is launched, and it is collected itself before the next one is made. Some tokens are waited for before the
  plan is made (``Scheduler.awaits_tokens``).
* A step's bound counts from ``Policy.busy_until_s``, when the step in flight ends. The price: a request that comes
  while a step runs is in the step after the next, and so is a host result at the last layer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from omniserve.core.plan import StepOutput, StepPlan
from omniserve.core.request import SLO, RequestOutput
from omniserve.core.work import HostEvent
from omniserve.engine.outputs import OutputCollector
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
    began_alone: bool
    """No other step was in an earlier or later stage when it was launched."""


class Stepper:
    """Schedules, launches, collects and books steps. Not thread-safe.

    Args:
        outputs: Makes of tokens what requests get; a stop string may end a request there.
        record: Is given each step that computed something, as it is collected.
        clock: Monotonic seconds.
        depth: Number of steps in flight with which the oldest is collected; 1: each step as soon as it is launched.
        side_by_side: Steps in flight run at the same time, each in another stage of the model; False: one after the
            other.
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
        depth: int = 1,
        side_by_side: bool = False,
        keeps_names: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._outputs = outputs
        self._record = record
        self._clock = clock
        self._depth = depth
        self._side_by_side = side_by_side
        self._keeps_names = keeps_names and depth > 1
        self.requests: dict[str, OpenRequest] = {}
        """Unfinished requests, and those that ended in the step under way."""
        self.last_plan_was_empty = False
        """The last step had nothing to compute or collect."""
        self._flights: deque[_Flight] = deque()
        """The steps in flight, the oldest first."""
        self._last_end_s: float | None = None

    @property
    def has_unfinished(self) -> bool:
        """True while a step may have something to do, be it to collect what another one launched."""
        return self.is_in_flight or self._scheduler.has_unfinished

    @property
    def is_in_flight(self) -> bool:
        """A step was launched and not collected."""
        return bool(self._flights)

    def step(self) -> list[RequestOutput]:
        """Plan and launch a step, and collect the oldest in flight if it is time for that; see `Engine.step`."""
        scheduler, flights, was_idle = self._scheduler, self._flights, not self._flights
        outputs: list[RequestOutput] = []
        if flights and scheduler.awaits_tokens:
            outputs += self._collect_all()
            self._tell_policy()
        plan, scheduled_s = self._plan(scheduler.schedule)
        outputs += self._end_failed()
        self.last_plan_was_empty = plan.is_empty and was_idle
        runs_ahead = self._depth > 1 and scheduler.is_certain(plan)
        if flights and not runs_ahead:
            outputs += self._collect_all()
            plan = scheduler.refresh(plan)
        self._launch(plan, scheduled_s, runs_ahead=runs_ahead)
        if not runs_ahead or plan.is_empty or len(flights) == self._depth:
            outputs += self._collect()
        while flights and flights[0].plan.is_empty:
            outputs += self._collect()
        self._tell_policy()
        return outputs

    def start_moves(self) -> list[RequestOutput]:
        """Begin copies between the tiers without a step, and take note of those that have ended.

        While a step is in flight this does nothing.
        """
        if self._flights:
            return []
        plan, scheduled_s = self._plan(self._scheduler.schedule_moves)
        self._launch(plan, scheduled_s, runs_ahead=False)
        return [*self._end_failed(), *self._collect()]

    def _end_failed(self) -> list[RequestOutput]:
        """End the requests that cannot begin."""
        outputs = [self._finish(output, self._clock()) for output in self._scheduler.end_failed(self._clock())]
        for output in outputs:
            del self.requests[output.request_id]
        return outputs

    def finish(self) -> None:
        """Wait for the steps in other stages, and drop what they give. Nothing is stepped after this."""
        while self._side_by_side and self._flights:
            self._runner.collect(self._flights.popleft().launched)

    def abort(self, request_id: str) -> bool:
        """End a request now and free what it holds; False if it is unknown or has finished."""
        if self._scheduler.abort(request_id, self._clock()) is None:
            return False
        self._runner.forget(request_id)
        self._outputs.close(request_id)
        del self.requests[request_id]
        return True

    def _plan(self, schedule: Callable[[float], StepPlan]) -> tuple[StepPlan, float]:
        """Tell the scheduler what finished beside the steps, and have a plan made; return it with its time."""
        scheduled_s = self._clock()
        self._scheduler.notify(self._runner.poll_host())
        return schedule(scheduled_s), scheduled_s

    def _launch(self, plan: StepPlan, scheduled_s: float, *, runs_ahead: bool) -> None:
        """Begin a step; if another one is to be launched before it is collected, book what is certain of it."""
        requests = dict(self.requests) if self._keeps_names else self.requests
        launched = self._runner.launch(plan)
        if runs_ahead:
            self._scheduler.advance(plan)
        is_alone = not (self._side_by_side and self._flights)
        flight = _Flight(plan, launched, scheduled_s, self._runner.host_works, requests, runs_ahead, is_alone)
        self._flights.append(flight)

    def _collect_all(self) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        while self._flights:
            outputs += self._collect()
        return outputs

    def _collect(self) -> list[RequestOutput]:
        """Wait for the tokens of the oldest step in flight, book them, and return what requests get from it.

        Its seconds run from the end of the step before, or from its own planning after a pause: they are what it adds
        to the time of all decoding requests, and also what the device takes for it if the host keeps ahead.
        """
        flight = self._flights.popleft()
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
            had_others = self._side_by_side and any(not other.plan.is_empty for other in self._flights)
            step = FinishedStep(
                plan=plan,
                result=result,
                outputs=outputs,
                host_works=flight.host_works,
                started_s=started_s,
                seconds=ended_s - started_s,
                requests=flight.requests,
                ran_alone=flight.began_alone and not had_others,
            )
            self._record(step)
        for output in outputs:
            if output.finished:
                del self.requests[output.request_id]
        return outputs

    def _tell_policy(self) -> None:
        """Tell the policy when the step in flight will have ended, as predicted, and with it when the next one begins.

        That is -inf if no step is in flight, or nothing is predicted. A step in another stage holds up none.
        """
        ends_s = -math.inf
        if self._flights and not self._side_by_side:
            decision, begins_s = self._flights[-1].plan.decision, self._flights[-1].scheduled_s
            if decision is not None and decision.predicted_s is not None:
                begins_s = begins_s if self._last_end_s is None else max(begins_s, self._last_end_s)
                ends_s = begins_s + decision.predicted_s
        self._scheduler.policy.busy_until_s = ends_s

    def _finish(self, output: RequestOutput, now_s: float) -> RequestOutput:
        """Look for stop strings, and forget a request that ended."""
        left = self._outputs.push(output, now_s)
        if left.finished:
            self._runner.forget(left.request_id)
            self._scheduler.discount(output, left)
            self._scheduler.abort(left.request_id, now_s)  # no-op unless a stop string ended it
        return left
