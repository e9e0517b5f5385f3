"""Fleet: engines alike which share a load and, if there are any, prefill engines. Each has a clock of its own.

The unfinished engine whose clock is behind the others' takes the next step. So whatever it asks of a prefill engine, it
asks before the others ask for anything more.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from omniserve.core.request import Request, RequestOutput, ServiceClass
from omniserve.core.stats import SchedulerStats
from omniserve.simulate.engine import SimulatedEngine


class Fleet:
    """Shares requests out to engines: each goes to the one with the fewest unfinished requests of its kind.

    Args:
        engines: They have the same settings.
        kinds: The kind of each class.
    """

    def __init__(self, engines: Sequence[SimulatedEngine], kinds: Mapping[str, ServiceClass]) -> None:
        self.engines, self._kinds = tuple(engines), kinds
        self._unfinished: list[Counter[ServiceClass]] = [Counter() for _ in engines]
        self._stepped = self.engines[0]
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
        return self._stepped.stepper.last_plan_was_empty

    def _next(self) -> SimulatedEngine:
        """Return the engine that goes on next: of those with requests, if any has one."""
        if len(self.engines) == 1:
            return self.engines[0]
        return min(self.engines, key=lambda engine: (not engine.stepper.has_unfinished, engine.now_s))

    def add(self, request_id: str, request: Request, *, arrival_s: float) -> None:
        """Give a request to an engine; one without requests takes it as it arrives.

        Raises:
            RequestRejected: Its objectives cannot be met at present load.
        """
        kind = self._kinds[request.service_class]

        def load(number: int) -> tuple[int, int, float]:
            unfinished = self._unfinished[number]
            return unfinished[kind], unfinished.total(), self.engines[number].now_s

        number = min(range(len(self.engines)), key=load)
        engine = self.engines[number]
        if not engine.stepper.has_unfinished:
            engine.now_s = max(engine.now_s, arrival_s)
        engine.add(request_id, request, arrival_s=arrival_s)
        self._unfinished[number][kind] += 1

    def step(self) -> Sequence[RequestOutput]:
        """Run a step of the engine that goes on next; see ``Stepper.step``."""
        self._stepped = self._next()
        unfinished = self._unfinished[self.engines.index(self._stepped)]
        outputs = self._stepped.step()
        for output in outputs:
            if output.finish_reason is not None:
                unfinished[self._kinds[output.service_class]] -= 1
        return outputs

    @property
    def stepped_s(self) -> float:
        """Return the clock of the engine of the last step."""
        return self._stepped.now_s

    def next_event_s(self) -> float:
        """Return when something comes that the engine of the last step waits for; infinity: nothing does."""
        return self._stepped.next_event_s()

    def wait_until(self, at_s: float) -> None:
        """Let time pass for the engine of the last step, which had nothing to compute."""
        self._stepped.now_s = max(self._stepped.now_s, at_s)

    def skip_to(self, at_s: float) -> None:
        """Let time pass for all engines, none of which has a request."""
        for engine in self.engines:
            engine.now_s = max(engine.now_s, at_s)

    def stats(self) -> SchedulerStats:
        """Return the gauges and counters of all engines together."""
        first, *others = (engine.scheduler.stats() for engine in self.engines)
        for other in others:
            fields = (field.name for field in dataclasses.fields(first))
            first = SchedulerStats(**{name: _sum(getattr(first, name), getattr(other, name)) for name in fields})
        return first

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


def _sum(one: Any, other: Any) -> Any:
    """Return the sum of two numbers, or of two mappings by key."""
    if isinstance(one, Mapping):
        return {key: _sum(one.get(key, 0), other.get(key, 0)) for key in one.keys() | other.keys()}
    return one + other
