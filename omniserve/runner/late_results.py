"""LateResults: results of the host tier that come while a step runs, and which rows of it they let join.

Where the device is given all layers of a step at once, it looks for them itself (``PiggybackRows.receive``), and
``MissedJoins`` tells the scheduler later what it has found.

Paper: omniserve 3.2.3; apex 3.4 (the device asks before a layer's post-attention whether the results are there).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from omniserve.core.plan import HostEvent, HostEventKind, PiggybackJoin
from omniserve.host.tier import HostTier
from omniserve.ops.streams import AsyncHostCopy


class LateResults:
    """Keeps the host events that a step comes upon before the scheduler asks for them."""

    def __init__(self, tier: HostTier | None) -> None:
        self._tier = tier
        self._events: list[HostEvent] = []

    def keep(self, event: HostEvent) -> None:
        """Keep an event for the scheduler."""
        self._events.append(event)

    def take_events(self) -> list[HostEvent]:
        """Return, once, the events that were kept, in their order, but for those of results that joined late."""
        events, self._events = self._events, []
        return events

    def settle(self, joins: Sequence[PiggybackJoin], *, as_one: bool) -> list[bool]:
        """Return which of a layer's joins have their result by now; those that were late have joined then.

        With ``as_one`` all or none have.
        """
        assert self._tier is not None
        self._events += self._tier.poll()
        done = {
            (event.slot, event.epoch, event.layer, event.position): event
            for event in self._events
            if event.kind is HostEventKind.ATTENTION_DONE
        }
        results = [done.get((join.slot, join.epoch, join.layer, join.position)) for join in joins]
        came = [join.is_ready or result is not None for join, result in zip(joins, results, strict=True)]
        if as_one and not all(came):
            return [False] * len(joins)
        used = {id(result) for result in results if result is not None}
        self._events = [event for event in self._events if id(event) not in used]
        return came


class MissedJoins:
    """Which of a step's joins did not join, while the device still tells the host.

    ``request_ids`` has the request of each seat of each layer with late joins, "" for a seat that is empty, in the
    order of ``joined``: int64 on the device, -1 where the seat's row did not join.
    """

    def __init__(self, request_ids: Sequence[str], joined: Tensor) -> None:
        self._request_ids = request_ids
        self._copy = AsyncHostCopy([joined])

    def result(self) -> frozenset[str]:
        """Wait for the step, and return the requests whose joins did not join."""
        (joined,) = self._copy.wait()
        slots = joined.flatten().tolist()
        return frozenset(
            request_id for request_id, slot in zip(self._request_ids, slots, strict=True) if request_id and slot < 0
        )
