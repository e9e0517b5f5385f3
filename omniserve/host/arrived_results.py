"""ArrivedResults: which results of host attention have come to a rank of a stage, for steps that look for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from omniserve.core.plan import PiggybackJoin
from omniserve.core.work import AttentionResult, HostEvent


class ArrivedResults:
    """The result of each slot that came last: a slot has one token at a time, at one layer."""

    def __init__(self) -> None:
        self._newest: dict[int, tuple[int, int, int]] = {}
        """Slot -> epoch, layer and position."""

    def note(self, events: Iterable[HostEvent]) -> None:
        """Take note of what a host tier tells."""
        for event in events:
            if isinstance(event, AttentionResult) and event.ok:
                self._newest[event.slot] = event.epoch, event.layer, event.position

    def has(self, join: PiggybackJoin) -> bool:
        """Return whether the result that a join waits for has come."""
        return self._newest.get(join.slot) == (join.epoch, join.layer, join.position)


@dataclass(frozen=True, slots=True)
class StageEvents:
    """What the host tier of one rank of a stage has told."""

    arrived: ArrivedResults
    poll: Callable[[], Sequence[HostEvent]]
    """Brings ``arrived`` up to date, and returns the events that the scheduler still has to be told by the runner."""
