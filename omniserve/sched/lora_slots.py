"""LoRASlots: which adapters are in memory, and which requests wait for theirs.

A request whose adapter is not in memory waits beside its queue (LOADING) until the adapter has been read into a slot: a
free one, or that of the adapter that no request has used for the longest time. If requests use all slots, the adapters
that got theirs first *close*, one for each that waits: their requests that have begun go on, the others wait until the
adapter has a slot again, and the slot is given up when none of the former is left. An adapter that gets a slot while
others wait lets in as many requests as can run at a time. So adapters take turns, and none starves behind others,
however busy these are.

Adapters with an LS request wait before those without, and otherwise in the order in which they came. For an adapter
with an LS request the BE requests of a closing one that have not begun wait again at once: LS work may keep them from
running for as long as it comes. Of an adapter the requests are let in as they would be in their queue: by class, tenant
and due time.

Adapters are told apart by the digest of their files: two names of the same files have one slot, and share their KV.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from omniserve.core.lora import LoadLoRA, LoRA
from omniserve.core.request import ServiceClass
from omniserve.core.work import Done
from omniserve.sched.request_queue import RequestQueue
from omniserve.sched.side_work import SideWorkQueue
from omniserve.sched.state import BE, LS, RequestState


@dataclass(slots=True)
class _Resident:
    """An adapter that has a slot."""

    lora: LoRA
    slot: int
    is_ready: bool = False
    """Its weights have been read."""
    is_closing: bool = False
    """Another adapter waits for its slot, so it lets no more requests in."""
    is_in_turn: bool = False
    """Other adapters waited when it got its slot. The requests that it let in then run, although others wait."""
    has_served: bool = False
    """A request has ended since it got its slot. Before that it does not give the slot up, or adapters would come and
    go and nothing run."""
    has_sent_back: bool = False
    """Since it closed, those that had not begun wait again."""
    has_sent_back_be: bool = False
    """Likewise, the BE ones among them."""
    num_users: int = 0
    """Unfinished requests that may run."""
    used: int = 0
    """When a request last came or ended, on a clock of its own."""


@dataclass(slots=True)
class _Waiting:
    """An adapter that has no slot, or takes no requests, and the requests that wait for it."""

    lora: LoRA
    states: RequestQueue = field(default_factory=RequestQueue)
    """The requests; classes of kind LS come before those of kind BE."""

    @property
    def is_urgent(self) -> bool:
        first = self.states.first
        return first is not None and first.kind is LS


class LoRASlots:
    """The books of the adapters in memory, by the digests of their files.

    Args:
        num_slots: Most adapters in memory.
        turn: Most requests that an adapter lets in at once while others wait.
        side_work: Takes the loads.
        release: To be called with requests that need not wait any more.
        withdraw: Takes the requests of an adapter, by its digest, that are of some kinds and have not begun from their
            queues, to wait for it, and returns them.
    """

    def __init__(
        self,
        num_slots: int,
        turn: int,
        side_work: SideWorkQueue,
        *,
        release: Callable[[Iterable[RequestState]], None],
        withdraw: Callable[[str, Sequence[ServiceClass]], list[RequestState]],
    ) -> None:
        self._num_slots, self._turn, self._side_work = num_slots, turn, side_work
        self._release, self._withdraw = release, withdraw
        self._free = list(range(num_slots, 0, -1))
        self._residents: dict[str, _Resident] = {}
        """In the order in which they got their slots."""
        self._waiting: dict[str, _Waiting] = {}
        """In the order in which they came."""
        self._failed: dict[RequestState, str] = {}
        self._clock, self._move_ids = itertools.count(1), itertools.count(-1, -1)

    # -- requests ----------------------------------------------------------------------------------------------------

    def enter(self, state: RequestState) -> bool:
        """Take a new request; return whether it may run. Else it waits, and ``release`` is called in time."""
        lora = state.lora
        if lora is None:
            return True
        resident = self._residents.get(lora.digest)
        if resident is not None and resident.is_ready and not resident.is_closing:
            self._use(resident, state)
            return True
        self._waiting.setdefault(lora.digest, _Waiting(lora)).states.add(state)
        self._hand_out()
        return False

    def leave(self, state: RequestState) -> None:
        """Take note that a request which may run has ended."""
        if state.lora_slot:
            assert state.lora is not None
            resident = self._residents[state.lora.digest]
            resident.num_users -= 1
            resident.has_served = True
            resident.used = next(self._clock)
            if self._waiting:
                self._hand_out()

    def forget(self, state: RequestState) -> None:
        """Forget a request that has ended while it waited for its adapter."""
        assert state.lora is not None
        if self._failed.pop(state, None) is None:
            waiting = self._waiting[state.lora.digest]
            waiting.states.remove(state)
            if not waiting.states:
                del self._waiting[state.lora.digest]
            self._hand_out()

    def failed(self) -> dict[RequestState, str]:
        """Return the requests whose adapter could not be read, and why; they wait until they are ended."""
        return dict(self._failed)

    # -- slots -------------------------------------------------------------------------------------------------------

    def _use(self, resident: _Resident, state: RequestState) -> None:
        resident.num_users += 1
        resident.used = next(self._clock)
        state.lora_slot = resident.slot

    def _hand_out(self) -> None:
        """Give slots to adapters that wait, as far as there are any, and have as many others close as still wait."""
        wanted = self._give_slots()
        taken = [each for each in self._residents.values() if each.is_ready and each.num_users]
        for resident in taken[len(wanted) :]:
            resident.is_closing = resident.is_in_turn = resident.has_sent_back = resident.has_sent_back_be = False
            self._let_in(resident)
        for resident, other in zip(taken, wanted, strict=False):
            resident.is_closing = True
            if resident.has_served and not (resident.is_in_turn or resident.has_sent_back):
                resident.has_sent_back = True
                self._send_back(resident, (LS, BE))
            if other.is_urgent and not resident.has_sent_back_be:
                resident.has_sent_back_be = True
                self._send_back(resident, (BE,))
        if any(not resident.num_users for resident in taken[: len(wanted)]):
            self._hand_out()

    def _give_slots(self) -> list[_Waiting]:
        """Give slots to adapters that wait; return those for which there was none."""
        wanted = [each for digest, each in self._waiting.items() if digest not in self._residents]
        wanted.sort(key=lambda each: not each.is_urgent)
        while wanted and (slot := self._free_slot()) is not None:
            self._load(wanted.pop(0).lora, slot)
        return wanted

    def _free_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        idle = [each for each in self._residents.values() if each.is_ready and not each.num_users]
        if not idle:
            return None
        oldest = min(idle, key=lambda each: each.used)
        del self._residents[oldest.lora.digest]
        return oldest.slot

    def _load(self, lora: LoRA, slot: int) -> None:
        self._residents[lora.digest] = _Resident(lora, slot)
        load = LoadLoRA(move_id=next(self._move_ids), lora=lora, slot=slot)
        self._side_work.expect(load.move_id, lambda done: self._end_load(lora, done))
        self._side_work.begin(load)

    def _end_load(self, lora: LoRA, done: Done) -> None:
        resident = self._residents[lora.digest]
        if done.ok:
            resident.is_ready = True
            resident.is_in_turn = any(digest not in self._residents for digest in self._waiting)
            self._let_in(resident, self._turn if resident.is_in_turn else None)
        else:
            del self._residents[lora.digest]
            self._free.append(resident.slot)
            waiting = self._waiting.pop(lora.digest, None)
            self._failed |= dict.fromkeys(waiting.states if waiting is not None else (), done.message)
        self._hand_out()

    def _let_in(self, resident: _Resident, most: int | None = None) -> None:
        """Let the first requests run that wait for an adapter which is there, or all of them (None)."""
        waiting = self._waiting.get(resident.lora.digest)
        if waiting is None:
            return
        chosen = [*itertools.islice(waiting.states, most)]
        for state in chosen:
            waiting.states.remove(state)
        if not waiting.states:
            del self._waiting[resident.lora.digest]
        for state in chosen:
            self._use(resident, state)
        self._release(chosen)

    def _send_back(self, resident: _Resident, kinds: Sequence[ServiceClass]) -> None:
        """Have the requests of a closing adapter wait for it that are of these kinds and have not begun."""
        for state in self._withdraw(resident.lora.digest, kinds):
            state.lora_slot = 0
            resident.num_users -= 1
            self._waiting.setdefault(resident.lora.digest, _Waiting(resident.lora)).states.add(state)

    # -- what others ask ---------------------------------------------------------------------------------------------

    @property
    def is_loading(self) -> bool:
        """An adapter is being read."""
        return any(not resident.is_ready for resident in self._residents.values())

    def in_memory(self) -> list[str]:
        """Return the names of the adapters that are in memory, in the order in which they came."""
        return [resident.lora.name for resident in self._residents.values() if resident.is_ready]

    def check(self, states: Iterable[RequestState]) -> None:
        """Verify that each slot is free or one adapter's, and that users are counted.

        Raises:
            AssertionError: With what does not fit.
        """
        slots = [*self._free, *(resident.slot for resident in self._residents.values())]
        assert sorted(slots) == list(range(1, self._num_slots + 1)), slots
        states = list(states)
        for digest, resident in self._residents.items():
            users = [s for s in states if s.lora is not None and s.lora.digest == digest and s.lora_slot]
            assert len(users) == resident.num_users, (resident, users)
            assert all(state.lora_slot == resident.slot for state in users), resident
        for state in states:
            assert not state.lora_slot or (state.lora is not None and state.lora.digest in self._residents), state
        num_waiting = len(self._failed) + sum(len(each.states) for each in self._waiting.values())
        assert num_waiting == sum(state.lora is not None and not state.lora_slot for state in states), self._waiting
