"""GroupHostTier: the host tier of rank 0, which speaks for those of all ranks.

Each rank's tier holds the KV of its heads and layers, in the same blocks, and gets the same moves. So the end of a move
comes once from every rank, and that of a task from each rank of the layer's stage. It counts when the last one has told
it, and as failed if one of them has failed.

Each rank has connections of its own to CPU hosts on the network and to prefill engines. Such a peer has joined when all
ranks are connected to it. It is lost when the first one has lost it: the others then drop it, and none connects again
before all have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from omniserve.core.plan import HostEvent, HostEventKind
from omniserve.host.tier import CANCELLED, HostTier
from omniserve.parallel import messages
from omniserve.parallel.place import Place
from omniserve.remote.network_hosts import NetworkHosts
from omniserve.remote.prefill_engines import PrefillEngines

_FAILURES = (HostEventKind.ATTENTION_FAILED, HostEventKind.MOVE_FAILED, HostEventKind.PREFILL_FAILED)
_OF_ATTENTION = (HostEventKind.ATTENTION_DONE, HostEventKind.ATTENTION_FAILED)
_JOINED = (HostEventKind.HOST_JOINED, HostEventKind.PREFILL_JOINED)
_LOST = (HostEventKind.HOST_LOST, HostEventKind.PREFILL_LOST)
_OF_PREFILLS = (
    HostEventKind.PREFILL_DONE, HostEventKind.PREFILL_FAILED, HostEventKind.PREFILL_JOINED, HostEventKind.PREFILL_LOST
)  # fmt: skip
_LOOK_AGAIN_S = 0.0005


@dataclass(slots=True)
class _Joining:
    """A CPU host or prefill engine, from when ranks begin to connect to it until all have lost it."""

    joined: list[HostEvent]
    """Events of the ranks that are connected, or were."""
    num_lost: int = 0
    """Ranks that have lost it, or given up to connect."""


class EventMerge:
    """Counts the events of ranks, and returns each once the last rank that has to has told it.

    Args:
        num_shards: Ranks of a stage.
        num_stages: Stages.
        drop: Called with the event if a rank has lost a CPU host or prefill engine: all ranks must drop it.
        allow: Called if all have lost it: they may connect again once the scheduler knows of it.
    """

    def __init__(
        self, num_shards: int, num_stages: int = 1, *, drop: Callable[[HostEvent], None] = lambda lost: None,
        allow: Callable[[HostEvent], None] = lambda lost: None,
    ) -> None:  # fmt: skip
        self._drop, self._allow = drop, allow
        self._joining: dict[tuple[bool, int], _Joining] = {}
        """Hosts and prefill engines that ranks connect to, by (it is a prefill engine, its number)."""
        self._num_shards, self._num_ranks = num_shards, num_shards * num_stages
        self._told: dict[tuple[int, ...], list[HostEvent]] = {}
        self._cancelled: dict[tuple[int, int], int] = {}  # slot, epoch -> ranks on which nothing uses it any more

    def add(self, events: Iterable[HostEvent]) -> list[HostEvent]:
        """Take the events of one rank; return those that all ranks have told now."""
        done: list[HostEvent] = []
        for event in events:
            if event.message == CANCELLED:
                done += self._cancel(event)
                continue
            if event.kind in _JOINED or event.kind in _LOST:
                done += self._join_or_lose(event)
                continue
            key = (event.slot, event.epoch, event.layer, event.position, event.move_id, event.kind in _OF_PREFILLS)
            told = self._told.setdefault(key, [])
            told.append(event)
            if len(told) == (self._num_shards if event.kind in _OF_ATTENTION else self._num_ranks):
                del self._told[key]
                worst = next((each for each in told if each.kind in _FAILURES), event)
                done.append(dataclasses.replace(
                    worst, seconds=max(each.seconds for each in told), at_s=max(each.at_s for each in told),
                    num_blocks=min(each.num_blocks for each in told),
                ))  # fmt: skip
        return done

    def _cancel(self, event: HostEvent) -> list[HostEvent]:
        """Count that nothing uses a slot on one more rank: every rank tells that of every slot that is cancelled."""
        slot = event.slot, event.epoch
        self._cancelled[slot] = self._cancelled.get(slot, 0) + 1
        if self._cancelled[slot] < self._num_ranks:
            return []
        del self._cancelled[slot]
        for key in [key for key in self._told if key[:2] == slot]:  # some ranks had a result before
            del self._told[key]
        return [event]

    def _join_or_lose(self, event: HostEvent) -> list[HostEvent]:
        """Count a rank that is connected, or that is not any more; each tells both at most once."""
        number = event.kind in _OF_PREFILLS, event.host
        state = self._joining.setdefault(number, _Joining([]))
        if event.kind in _JOINED:
            state.joined.append(event)
            if len(state.joined) < self._num_ranks or state.num_lost:
                return []
            blocks, threads = (min(getattr(e, name) for e in state.joined) for name in ("num_blocks", "num_threads"))
            return [dataclasses.replace(event, num_blocks=blocks, num_threads=threads)]
        state.num_lost += 1
        is_first = state.num_lost == 1
        if is_first:
            self._drop(event)
        if state.num_lost == self._num_ranks:
            del self._joining[number]
            self._allow(event)
        return [event] if is_first and len(state.joined) == self._num_ranks else []


class GroupHostTier(HostTier):
    """The host tier of rank 0. ``follow`` must be called before its first task."""

    def follow(
        self, place: Place, news: Callable[[], tuple[list[list[HostEvent]], bool, bool]], tell: Callable[[Any], None],
        tell_each: Callable[[Iterable[Any]], None],
    ) -> None:  # fmt: skip
        """Speak for the tiers of all ranks from now on.

        Args:
            place: This rank's.
            news: Returns the events of the others since the last call, a list for each message, whether all of them
                are healthy, and whether one is stalled. Never waits.
            tell: Sends a message to the others.
            tell_each: Sends each of the others a message of its own, in their order.
        """
        self._merge = EventMerge(
            place.num_shards, place.num_stages, drop=self._drop, allow=lambda lost: self._lost.append(lost)
        )
        self._news, self._tell, self._tell_each = news, tell, tell_each
        self._network: NetworkHosts | None = None
        self._prefills: PrefillEngines | None = None
        self._lost: list[HostEvent] = []
        self._others_healthy, self._others_stalled = True, False

    def poll(self) -> list[HostEvent]:
        """Return the events of all that has finished on every rank since the last call. Never blocks."""
        own = super().poll()
        if self._network is not None:
            own = self._network.poll(own)
        if self._prefills is not None:
            of_prefills = self._prefills.poll()
            self._have_others_join(of_prefills, self._prefills)
            own += of_prefills
        merged = self._merge.add(own)
        told, self._others_healthy, self._others_stalled = self._news()
        for events in told:
            merged += self._merge.add(events)
        return merged

    def use(self, network: NetworkHosts) -> None:
        """Have CPU hosts on the network from now on; the other ranks have the same."""
        self._network = network

    def use_prefills(self, prefills: PrefillEngines) -> None:
        """Take the events of prefill engines, too; the other ranks have the same."""
        self._prefills = prefills

    def _have_others_join(self, events: Iterable[HostEvent], prefills: PrefillEngines) -> None:
        """Have the other ranks connect to a prefill engine that this one has joined."""
        for event in events:
            if event.kind is HostEventKind.PREFILL_JOINED:
                welcome = prefills.welcome(event.host)
                self._tell_each(
                    messages.JoinPrefillEngine(event.host, welcome.session, address) for address in welcome.ranks
                )

    def _drop(self, lost: HostEvent) -> None:
        if lost.kind is HostEventKind.HOST_LOST:
            assert self._network is not None
            self._tell(messages.DropHost(lost.host))
            self._network.drop(lost.host)
        else:
            assert self._prefills is not None
            self._tell(messages.DropPrefillEngine(lost.host))
            self._prefills.drop(lost.host)

    def take_lost(self) -> list[HostEvent]:
        """Return, once, the CPU hosts and prefill engines that all ranks have lost."""
        lost, self._lost = self._lost, []
        return lost

    def allow(self, lost: HostEvent) -> None:
        """Let all ranks connect again to what all have lost, now that the scheduler knows of that."""
        if lost.kind is HostEventKind.HOST_LOST:
            assert self._network is not None
            self._tell(messages.AllowHost(lost.host))
            self._network.allow(lost.host)
        else:
            assert self._prefills is not None
            self._prefills.allow(lost.host)  # the others follow

    def wait(self, timeout_s: float) -> None:
        """Sleep until this rank's tier has something to tell, or a moment: other ranks' tiers wake no caller."""
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
