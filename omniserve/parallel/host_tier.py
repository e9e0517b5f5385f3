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

from omniserve.core.stats import HostTierStats
from omniserve.core.work import (
    AttentionResult,
    Done,
    HostEvent,
    HostJoined,
    HostLost,
    PrefillEngineJoined,
    PrefillEngineLost,
)
from omniserve.host.arrived_results import ArrivedResults
from omniserve.host.tier import CANCELLED, HostTier
from omniserve.parallel import messages
from omniserve.parallel.place import Place
from omniserve.remote.network_hosts import NetworkHosts
from omniserve.remote.prefill_engines import PrefillEngines
from omniserve.runner.lora_loads import LoRALoads

_Joined = HostJoined | PrefillEngineJoined
_Lost = HostLost | PrefillEngineLost
_LOOK_AGAIN_S = 0.0005


@dataclass(slots=True)
class _Joining:
    """A CPU host or prefill engine, from when ranks begin to connect to it until all have lost it."""

    joined: list[_Joined]
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
        self,
        num_shards: int,
        num_stages: int = 1,
        *,
        drop: Callable[[_Lost], None] = lambda lost: None,
        allow: Callable[[_Lost], None] = lambda lost: None,
    ) -> None:
        self._drop, self._allow = drop, allow
        self._joining: dict[tuple[bool, int], _Joining] = {}
        """Hosts and prefill engines that ranks connect to, by (it is a prefill engine, its number)."""
        self._num_shards, self._num_ranks = num_shards, num_shards * num_stages
        self._done: dict[int, list[Done]] = {}
        """Ends of a copy or prefill that some ranks have told, by its number."""
        self._results: dict[tuple[int, int, int, int], list[AttentionResult]] = {}
        """Results that some ranks have told, by slot, epoch, layer and position."""
        self._cancelled: dict[tuple[int, int], int] = {}  # slot, epoch -> ranks on which nothing uses it any more

    def add(self, events: Iterable[HostEvent]) -> list[HostEvent]:
        """Take the events of one rank; return those that all ranks have told now."""
        told: list[HostEvent] = []
        for event in events:
            match event:
                case AttentionResult(message=message) if message == CANCELLED:
                    told += self._cancel(event)
                case AttentionResult():
                    told += self._add_result(event)
                case Done():
                    told += self._add_done(event)
                case HostJoined() | PrefillEngineJoined():
                    told += self._join(event)
                case HostLost() | PrefillEngineLost():
                    told += self._lose(event)
                case _:
                    raise AssertionError(f"no rank tells {event}")
        return told

    def _add_result(self, event: AttentionResult) -> list[AttentionResult]:
        key = event.slot, event.epoch, event.layer, event.position
        told = self._results.setdefault(key, [])
        told.append(event)
        if len(told) < self._num_shards:  # those of the layer's stage
            return []
        del self._results[key]
        return [next((each for each in told if not each.ok), event)]

    def _add_done(self, event: Done) -> list[Done]:
        told = self._done.setdefault(event.move_id, [])
        told.append(event)
        if len(told) < self._num_ranks:
            return []
        del self._done[event.move_id]
        worst = next((each for each in told if not each.ok), event)
        prefilled = [each.prefilled for each in told if each.prefilled is not None]
        if worst.prefilled is not None:
            worst = dataclasses.replace(
                worst,
                prefilled=dataclasses.replace(
                    worst.prefilled,
                    at_s=max(each.at_s for each in prefilled),
                    num_blocks=min(each.num_blocks for each in prefilled),
                ),
            )
        return [dataclasses.replace(worst, seconds=max(each.seconds for each in told))]

    def _cancel(self, event: AttentionResult) -> list[AttentionResult]:
        """Count that nothing uses a slot on one more rank: every rank tells that of every slot that is cancelled."""
        slot = event.slot, event.epoch
        self._cancelled[slot] = self._cancelled.get(slot, 0) + 1
        if self._cancelled[slot] < self._num_ranks:
            return []
        del self._cancelled[slot]
        for key in [key for key in self._results if key[:2] == slot]:  # some ranks had a result before
            del self._results[key]
        return [event]

    def _of(self, event: _Joined | _Lost) -> tuple[tuple[bool, int], _Joining]:
        """Return the key and the state of what an event is of."""
        key = (False, event.host) if isinstance(event, HostJoined | HostLost) else (True, event.engine)
        return key, self._joining.setdefault(key, _Joining([]))

    def _join(self, event: _Joined) -> list[_Joined]:
        """Count a rank that is connected; each tells it at most once."""
        _, state = self._of(event)
        state.joined.append(event)
        if len(state.joined) < self._num_ranks or state.num_lost:
            return []
        hosts = [each for each in state.joined if isinstance(each, HostJoined)]
        if isinstance(event, HostJoined):
            event = dataclasses.replace(
                event,
                num_blocks=min(each.num_blocks for each in hosts),
                num_threads=min(each.num_threads for each in hosts),
            )
        return [event]

    def _lose(self, event: _Lost) -> list[_Lost]:
        """Count a rank that is not connected any more, or gives up to connect; each tells it at most once."""
        key, state = self._of(event)
        state.num_lost += 1
        is_first = state.num_lost == 1
        if is_first:
            self._drop(event)
        if state.num_lost == self._num_ranks:
            del self._joining[key]
            self._allow(event)
        return [event] if is_first and len(state.joined) == self._num_ranks else []


class GroupHostTier(HostTier):
    """The host tier of rank 0. ``follow`` must be called before its first task."""

    def follow(
        self,
        place: Place,
        news: Callable[[], tuple[list[list[HostEvent]], bool, bool]],
        tell: Callable[[Any], None],
        tell_each: Callable[[Iterable[Any]], None],
    ) -> None:
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
        self._loras: LoRALoads | None = None
        self._lost: list[_Lost] = []
        self._others_healthy, self._others_stalled = True, False
        self.arrived = ArrivedResults()
        """The results that have come to this rank."""

    def poll(self) -> list[HostEvent]:
        """Return the events of all that has finished on every rank since the last call. Never blocks."""
        own = super().poll()
        if self._network is not None:
            own = self._network.poll(own)
        if self._prefills is not None:
            of_prefills = self._prefills.poll()
            self._have_others_join(of_prefills, self._prefills)
            own += of_prefills
        if self._loras is not None:
            own += self._loras.poll()
        self.arrived.note(own)
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

    def use_loras(self, loras: LoRALoads) -> None:
        """Take the ends of the loads of adapters, too; the other ranks read them as well."""
        self._loras = loras

    def _have_others_join(self, events: Iterable[HostEvent], prefills: PrefillEngines) -> None:
        """Have the other ranks connect to a prefill engine that this one has joined."""
        for event in events:
            if isinstance(event, PrefillEngineJoined):
                welcome = prefills.welcome(event.engine)
                self._tell_each(
                    messages.JoinPrefillEngine(event.engine, welcome.session, address) for address in welcome.ranks
                )

    def _drop(self, lost: _Lost) -> None:
        if isinstance(lost, HostLost):
            assert self._network is not None
            self._tell(messages.DropHost(lost.host))
            self._network.drop(lost.host)
        else:
            assert self._prefills is not None
            self._tell(messages.DropPrefillEngine(lost.engine))
            self._prefills.drop(lost.engine)

    def take_lost(self) -> list[_Lost]:
        """Return, once, the CPU hosts and prefill engines that all ranks have lost."""
        lost, self._lost = self._lost, []
        return lost

    def allow(self, lost: _Lost) -> None:
        """Let all ranks connect again to what all have lost, now that the scheduler knows of that."""
        if isinstance(lost, HostLost):
            assert self._network is not None
            self._tell(messages.AllowHost(lost.host))
            self._network.allow(lost.host)
        else:
            assert self._prefills is not None
            self._prefills.allow(lost.engine)  # the others follow

    def wait(self, timeout_s: float) -> None:
        """Sleep until this rank's tier has something to tell, or a moment: other ranks' tiers wake no caller."""
        super().wait(min(timeout_s, _LOOK_AGAIN_S))

    def inject(self, *, only_others: bool = False, **faults: Any) -> None:
        """Inject faults into the tiers of all ranks, or of all others, for tests; arguments as of ``HostTier``."""
        if not only_others:
            super().inject(**faults)
        self._tell(messages.Inject(faults))

    def stats(self) -> HostTierStats:
        """Return the gauges and counters of this rank's tier, which is healthy only while those of all ranks are."""
        own = super().stats()
        return own if self._others_healthy else dataclasses.replace(own, healthy=False)

    @property
    def is_stalled(self) -> bool:
        """True once that of one rank is."""
        return super().is_stalled or self._others_stalled
