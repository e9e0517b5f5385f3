"""Fleet: engines alike which share a load and, if there are any, prefill engines. Each has a clock of its own.

A request goes where the router says (``omniserve/routing``), which knows what a server's front would know: the engine's
load as it was told last, and what was sent since.

The unfinished engine whose clock is behind the others' takes the next step. So whatever it asks of a prefill engine, it
asks before the others ask for anything more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from omniserve.core.errors import RequestRejected
from omniserve.core.load import EngineLoad
from omniserve.core.request import ClassSpec, Request, RequestOutput, ServiceClass
from omniserve.core.stats import SchedulerStats, summed
from omniserve.routing.books import Call, EngineBooks, Sent
from omniserve.routing.routers import ROUTERS
from omniserve.simulate.engine import SimulatedEngine


class Fleet:
    """Shares requests out to engines.

    Args:
        engines: They have the same settings.
        classes: The settings' classes, by name.
        router: A name in ROUTERS.
    """

    def __init__(
        self, engines: Sequence[SimulatedEngine], classes: Mapping[str, ClassSpec], router: str = "fewest-requests"
    ) -> None:
        self.engines, self._classes = tuple(engines), classes
        self._fronts = [_Front(number, engine) for number, engine in enumerate(engines)]
        self._router = ROUTERS[router]()
        self._sent: dict[str, tuple[_Front, Sent]] = {}
        """The engine that has each unfinished request, by the request's id, and the entry in the engine's books."""
        self._stepped = self._fronts[0]
        """The engine that took the last step."""

    @property
    def now_s(self) -> float:
        """Return the clock of the engine that goes on next: nothing happens before that time any more."""
        return self._next().now_s

    @property
    def has_unfinished(self) -> bool:
        """Return whether an engine may have something to do."""
        return any(engine.stepper.has_unfinished for engine in self.engines)

    @property
    def last_plan_was_empty(self) -> bool:
        """Return whether the last step had nothing to compute or collect."""
        return self._stepped.engine.stepper.last_plan_was_empty

    def _next(self) -> SimulatedEngine:
        """Return the engine that goes on next: of those with requests, if any has one."""
        return self._next_front().engine

    def _next_front(self) -> _Front:
        if len(self._fronts) == 1:
            return self._fronts[0]
        return min(self._fronts, key=lambda front: (not front.engine.stepper.has_unfinished, front.engine.now_s))

    def add(self, request_id: str, request: Request, *, arrival_s: float) -> None:
        """Give a request to an engine, or to the next one if that refuses it; one without requests takes it at once.

        Raises:
            RequestRejected: Its objectives cannot be met at present load by any engine.
        """
        if len(self._fronts) == 1:
            self._fronts[0].add(request_id, request, arrival_s)
            return
        spec = self._classes[request.service_class]
        slo = spec.slo if request.slo is None else request.slo
        call = Call(
            kind=ServiceClass(spec.kind),
            service_class=spec.name,
            prompts=[request.prompt_token_ids],
            max_tokens=request.sampling.max_tokens,
            ttft_s=slo.ttft_s,
        )
        # Of equal ones the one that has been idle for longer comes first.
        by_clock = sorted(self._fronts, key=lambda front: front.engine.now_s)
        for front in by_clock:
            front.hear_until(arrival_s)
        order = self._router.order(call, [front.books for front in by_clock])
        for i, books in enumerate(order):
            front = self._fronts[books.number]
            sent = books.expect(call)
            books.send(call, sent)
            try:
                front.add(request_id, request, arrival_s)
            except RequestRejected:
                books.end(sent)
                if i == len(order) - 1:
                    raise
            else:
                self._sent[request_id] = front, sent
                return

    def step(self) -> Sequence[RequestOutput]:
        """Run a step of the engine that goes on next; see ``Stepper.step``."""
        self._stepped = self._next_front()
        outputs = self._stepped.engine.step()
        if self._sent:
            for output in outputs:
                if output.finish_reason is not None:
                    front, sent = self._sent.pop(output.request_id)
                    front.books.end(sent)
            self._stepped.tell_load()
        return outputs

    @property
    def stepped_s(self) -> float:
        """Return the clock of the engine of the last step."""
        return self._stepped.engine.now_s

    def next_event_s(self) -> float:
        """Return when something comes that the engine of the last step waits for; infinity: nothing does."""
        return self._stepped.engine.next_event_s()

    def wait_until(self, at_s: float) -> None:
        """Let time pass for the engine of the last step, which had nothing to compute."""
        engine = self._stepped.engine
        engine.now_s = max(engine.now_s, at_s)

    def skip_to(self, at_s: float) -> None:
        """Let time pass for all engines, none of which has a request."""
        for engine in self.engines:
            engine.now_s = max(engine.now_s, at_s)

    def stats(self) -> SchedulerStats:
        """Return the gauges and counters of all engines together."""
        stats: SchedulerStats = summed([engine.scheduler.stats() for engine in self.engines])
        return stats

    @property
    def host_busy_s(self) -> float:
        """Return the seconds that the hosts of all engines have attended."""
        return sum(engine.tier.busy_s for engine in self.engines if engine.tier is not None)

    @property
    def num_steps(self) -> int:
        """Return the steps that computed something."""
        return sum(engine.num_steps for engine in self.engines)

    @property
    def end_s(self) -> float:
        """Return the latest time that an engine has come to."""
        return max(engine.now_s for engine in self.engines)

    def check_integrity(self) -> None:
        """Verify the invariants of each engine; see ``Scheduler.check_integrity``."""
        for engine in self.engines:
            engine.scheduler.check_integrity()


class _Front:
    """An engine as a server's front has it: its books, and the word on its load that is on its way."""

    _LOAD_EVERY_S = 0.02  # as a server's engines tell it

    def __init__(self, number: int, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.books = EngineBooks(number, engine.pool_tokens)
        self._told: deque[tuple[float, EngineLoad]] = deque()
        self._told_s = -math.inf
        self._num_taken = 0

    def add(self, request_id: str, request: Request, arrival_s: float) -> None:
        """Give the engine a request."""
        if not self.engine.stepper.has_unfinished:
            self.engine.now_s = max(self.engine.now_s, arrival_s)
        self._num_taken += 1
        self.engine.add(request_id, request, arrival_s=arrival_s)

    def tell_load(self) -> None:
        """Have the engine tell its load after a step, if it is time to, or if it has no requests any more."""
        now_s = self.engine.now_s
        if now_s - self._told_s >= self._LOAD_EVERY_S or not self.engine.stepper.has_unfinished:
            self._told_s = now_s
            self._told.append((now_s, self.engine.scheduler.load(now_s, self._num_taken)))

    def hear_until(self, at_s: float) -> None:
        """Take what the engine has told by a time: its clock may be ahead of that, in the middle of a step."""
        while self._told and self._told[0][0] <= at_s:
            self.books.hear(self._told[0][1], self._told.popleft()[0])
