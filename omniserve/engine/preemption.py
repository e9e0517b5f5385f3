"""Preemption: asks the policy which rows must leave the running step for requests that have come meanwhile.

Between two layers a runner calls ``must_leave``, which polls a queue of arrivals: in a server, what the socket has
received. The requests themselves are added to the engine after the step. An engine has this only if the rows of its
policy's steps may leave them. Paper: conserve 4.3, omniserve 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from omniserve.core.request import Arrival, ClassSpec, ServiceClass
from omniserve.sched import Policy


class Preemption:
    """Polls the requests that have come, and knows what the policy says of them."""

    def __init__(self, policy: Policy, classes: Iterable[ClassSpec]) -> None:
        self._policy = policy
        self._classes = {spec.name: spec for spec in classes}
        self.arrivals: Callable[[], Iterable[Arrival]] = tuple
        """Returns the requests that have come since the last call; a server sets it to its queue. By default: none."""

    def must_leave(self, now_s: float) -> frozenset[str]:
        """Return the requests whose rows must leave the step for those that have come since the last call."""
        return self.leaving_for(self.arrivals(), now_s)

    def leaving_for(self, arrivals: Iterable[Arrival], now_s: float) -> frozenset[str]:
        """Return the requests whose rows must leave the step for some that have come.

        A request of an unknown class is passed over: the engine refuses it when it is added.
        """
        leaving: frozenset[str] = frozenset()
        for arrival in arrivals:
            request = arrival.request
            spec = self._classes.get(request.service_class)
            if spec is not None and spec.kind is ServiceClass.LS:
                waited_s = 0.0 if arrival.arrival_s is None else max(0.0, now_s - arrival.arrival_s)
                slo = request.slo if request.slo is not None else spec.slo
                leaving |= self._policy.to_preempt(request, slo, waited_s, now_s)
        return leaving
