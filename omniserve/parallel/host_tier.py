"""GroupHostTier: the host tier of rank 0, which speaks for those of all ranks.

Each rank's tier holds its KV heads of the same blocks, and gets the same tasks and moves. So each event comes once from
every rank; it counts when the last one has told it, and as failed if one of them has failed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from omniserve.core.plan import HostEvent, HostEventKind
from omniserve.host.tier import HostTier
from omniserve.parallel import messages

_FAILURES = (HostEventKind.ATTENTION_FAILED, HostEventKind.MOVE_FAILED)
_LOOK_AGAIN_S = 0.0005


class EventMerge:
    """Counts the events of ``num_ranks`` ranks, and returns each once the last rank has told it."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._told: dict[tuple[int, ...], list[HostEvent]] = {}

    def add(self, events: Iterable[HostEvent]) -> list[HostEvent]:
        """Take the events of one rank; return those that all ranks have told now."""
        done: list[HostEvent] = []
        for event in events:
            key = (event.slot, event.epoch, event.layer, event.position, event.move_id)
            told = self._told.setdefault(key, [])
            told.append(event)
            if len(told) == self._num_ranks:
                del self._told[key]
                worst = next((each for each in told if each.kind in _FAILURES), event)
                done.append(dataclasses.replace(worst, seconds=max(each.seconds for each in told)))
        return done


class GroupHostTier(HostTier):
    """The host tier of rank 0. ``follow`` must be called before its first task."""

    def follow(
        self, num_ranks: int, news: Callable[[], tuple[list[list[HostEvent]], bool, bool]],
        tell: Callable[[Any], None],
    ) -> None:  # fmt: skip
        """Speak for the tiers of all ranks from now on.

        Args:
            num_ranks: How many there are, this one included.
            news: Returns the events of the others since the last call, a list for each message, whether all of them
                are healthy, and whether one is stalled. Never waits.
            tell: Sends a message to the others.
        """
        self._merge, self._news, self._tell = EventMerge(num_ranks), news, tell
        self._others_healthy, self._others_stalled = True, False

    def poll(self) -> list[HostEvent]:
        """Return the events of all that has finished on every rank since the last call. Never blocks."""
        merged = self._merge.add(super().poll())
        told, self._others_healthy, self._others_stalled = self._news()
        for events in told:
            merged += self._merge.add(events)
        return merged

    def wait(self, timeout_s: float) -> None:
        """Sleep until this rank's tier has something to tell, or a moment: those of other ranks wake nobody."""
        super().wait(min(timeout_s, _LOOK_AGAIN_S))

    def inject(self, *, only_others: bool = False, **faults: Any) -> None:
        """Inject faults into the tiers of all ranks, or of all others, for tests; arguments as of ``HostTier``."""
        if not only_others:
            super().inject(**faults)
        self._tell(messages.Inject(faults))

    @property
    def healthy(self) -> bool:
        """True while the tiers of all ranks are."""
        return super().healthy and self._others_healthy

    @property
    def is_stalled(self) -> bool:
        """True once that of one rank is."""
        return super().is_stalled or self._others_stalled
