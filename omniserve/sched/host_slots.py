"""HostSlots: which requests hold a slot of the host tier, and the epochs of the slots."""

from __future__ import annotations

from collections.abc import Iterable

from omniserve.sched.state import RequestState


class HostSlots:
    """The slots of the host tier. A slot's epoch rises whenever the slot changes hands."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._epochs = [0] * num_slots
        self._holders: dict[int, RequestState] = {}
        self._changed: list[RequestState] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._holders)

    def take(self, state: RequestState) -> None:
        """Give a request a slot with a new epoch."""
        state.slot = self._free.pop()
        self._epochs[state.slot] += 1
        state.epoch = self._epochs[state.slot]
        self._holders[state.slot] = state
        self._changed.append(state)

    def release(self, state: RequestState) -> None:
        """Take a request's slot back; none of its tasks may be running."""
        del self._holders[state.slot]
        self._free.append(state.slot)
        state.slot = state.epoch = -1
        self._changed.append(state)

    def holder(self, slot: int, epoch: int) -> RequestState | None:
        """Return the request that holds a slot in this epoch; None: it is another one, or the slot is free."""
        state = self._holders.get(slot)
        return state if state is not None and state.epoch == epoch else None

    def holders(self) -> Iterable[RequestState]:
        """Return the requests that hold a slot."""
        return self._holders.values()

    def take_changed(self) -> list[RequestState]:
        """Return the requests that took or gave back a slot, in order, and forget them."""
        changed, self._changed = self._changed, []
        return changed
