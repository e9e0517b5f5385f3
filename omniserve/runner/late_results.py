"""LateResults: results of the host tier that come while a step runs, and which rows of it they let join.

A GPU is given all layers of a step at once and looks for the results itself (``PiggybackRows.receive``).
``MissedJoins`` tells the host which joins found none.

No step waits for the host tier. A late join whose result has not come leaves its seat empty in that layer, is not sent
to the next layer, and is named in ``StepOutput.missed``; the scheduler then books nothing of it.

Paper: omniserve 3.2.3; apex 3.4 (the device asks before a layer's post-attention whether the results are there).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from omniserve.core.plan import PiggybackJoin, StepPlan, joins_by_layer
from omniserve.core.work import AttentionResult, HostEvent
from omniserve.host.tier import HostTier
from omniserve.ops.streams import AsyncHostCopy
from omniserve.runner.rank_broadcast import RankBroadcast


class LateResults:
    """Keeps the host events that a step comes upon before the scheduler asks for them."""

    def __init__(self, tier: HostTier | None, broadcast: RankBroadcast) -> None:
        self._tier, self._broadcast = tier, broadcast
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
        return self._broadcast.agree(lambda: self._came(joins, as_one))

    def _came(self, joins: Sequence[PiggybackJoin], as_one: bool) -> list[bool]:
        assert self._tier is not None
        self._events += self._tier.poll()
        done = {
            (event.slot, event.epoch, event.layer, event.position): event
            for event in self._events
            if isinstance(event, AttentionResult) and event.ok
        }
        results = [done.get((join.slot, join.epoch, join.layer, join.position)) for join in joins]
        came = [join.is_ready or result is not None for join, result in zip(joins, results, strict=True)]
        if as_one and not all(came):
            return [False] * len(joins)
        used = {id(result) for result in results if result is not None}
        self._events = [event for event in self._events if id(event) not in used]
        return came


class MissedJoins:
    """Copies to the host which of a step's joins did not join, as the device has found out.

    ``joined_LP`` is int64 on the device, for each of ``layers``: the row of each seat, -1 if it did not join. On a CPU
    nothing may write to it later.
    """

    def __init__(self, plan: StepPlan, layers: Iterable[int], joined_LP: Tensor) -> None:
        by_layer = joins_by_layer(plan)
        self._joins = [by_layer.get(layer, ()) for layer in layers]
        self._copy = AsyncHostCopy([joined_LP])

    def result(self) -> frozenset[str]:
        """Wait for the copy, and return the requests whose joins did not join.

        Raises:
            Stalled: The device did not finish the step in time.
        """
        (joined_LP,) = self._copy.wait()
        missed: set[str] = set()
        for joins, rows in zip(self._joins, joined_LP.tolist(), strict=True):
            seat = 0
            for join in joins:
                if rows[seat] < 0:
                    missed.add(join.request_id)
                seat += join.num_rows  # drafts do as their token
        return frozenset(missed)
