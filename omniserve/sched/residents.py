"""HostResidents: which requests decode on the host tier, and where each one's token is.

A token enters at layer 0, is away while host threads attend, and joins a later step at the layer it left; it advances
one layer a step. Paper: omniserve 3.2.2, 3.3.6.
"""

from __future__ import annotations

from collections.abc import Callable

from omniserve.core.plan import HostEvent, HostEventKind, PiggybackEntry, PiggybackJoin
from omniserve.sched.state import AwayToken, RequestQueue, RequestState


class HostResidents:
    """Slots of the host tier and the tokens that are away."""

    def __init__(self, *, num_slots: int, num_layers: int) -> None:
        self.num_layers = num_layers
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._epochs = [0] * num_slots
        self._by_slot: dict[int, RequestState] = {}
        self._ready: list[RequestQueue] = [RequestQueue() for _ in range(num_layers)]
        self._changed: list[RequestState] = []
        self.queue = RequestQueue()
        """Requests with their KV on the host (not those that move)."""

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_slots_used(self) -> int:
        return len(self._by_slot)

    def take_slot(self, state: RequestState) -> None:
        """Give a request a slot with a new epoch."""
        state.slot = self._free_slots.pop()
        self._epochs[state.slot] += 1
        state.epoch = self._epochs[state.slot]
        self._by_slot[state.slot] = state
        self._changed.append(state)

    def release_slot(self, state: RequestState) -> None:
        """Take a request's slot back; none of its tasks may be running."""
        del self._by_slot[state.slot]
        self._free_slots.append(state.slot)
        if state.away is not None and state.away.ready:
            self._ready[state.away.layer].remove(state)
        state.slot = state.epoch = -1
        state.away = None
        self._changed.append(state)

    def take_changed(self) -> list[RequestState]:
        """Return the requests that took or gave back a slot, in order, and forget them."""
        changed, self._changed = self._changed, []
        return changed

    def on_event(self, event: HostEvent) -> RequestState | None:
        """Book an attention event; return its request, or None if the event is stale or a duplicate."""
        state = self._by_slot.get(event.slot)
        if state is None or state.epoch != event.epoch or state.away is None or state.away.ready:
            return None
        if (state.away.layer, state.away.position) != (event.layer, event.position):
            return None
        if event.kind is HostEventKind.ATTENTION_DONE:
            state.away.ready = True
            self._ready[event.layer].add(state)
        return state

    @property
    def is_busy(self) -> bool:
        """True while the host tier attends for a request."""
        return any(state.away is not None and not state.away.ready for state in self._by_slot.values())

    @property
    def num_ready(self) -> list[int]:
        """Results that wait to join, by layer."""
        return [len(queue) for queue in self._ready]

    @property
    def num_at_token_boundary(self) -> int:
        """Residents of which the next token may enter."""
        return sum(state.away is None for state in self.queue)

    def plan_joins(self, max_rows: int, seats: int) -> list[PiggybackJoin]:
        """Pick waiting results for this step, lowest layer first (3.3.6), oldest request first inside a layer."""
        joins: list[PiggybackJoin] = []
        for queue in self._ready:
            for seat, state in enumerate(queue):
                if seat == seats:
                    break
                if len(joins) >= max_rows:
                    return joins
                joins.append(self.join_of(state))
        return joins

    def join_of(self, state: RequestState) -> PiggybackJoin:
        """Return the join of a token that has its result."""
        assert state.away is not None and state.away.ready
        return PiggybackJoin(
            request_id=state.request_id,
            position=state.away.position,
            slot=state.slot,
            epoch=state.epoch,
            layer=state.away.layer,
            state_slot=state.state_slot,
        )

    def plan_entries(
        self, allocate: Callable[[RequestState], tuple[int, ...] | None], max_entries: int
    ) -> list[PiggybackEntry]:
        """Start the next token of residents that stand at a token boundary, oldest first.

        ``allocate`` returns a request's host blocks for its newest token, or None if the request cannot go on now.
        """
        entries: list[PiggybackEntry] = []
        for state in self.queue:
            if len(entries) >= max_entries:
                break
            if state.away is not None:
                continue
            blocks = allocate(state)
            if blocks is None:
                continue
            entries.append(
                PiggybackEntry(
                    request_id=state.request_id,
                    token_id=state.token_ids[-1],
                    position=state.num_tokens - 1,
                    slot=state.slot,
                    epoch=state.epoch,
                    block_ids=blocks,
                    state_slot=state.state_slot,
                )
            )
        return entries

    def enter(self, state: RequestState, position: int) -> None:
        """Book that a token went away at layer 0."""
        state.away = AwayToken(position=position, layer=0)

    def arrive(self, state: RequestState) -> None:
        """Book that a pipelined token passed all its layers in one step, or was lost on the way."""
        if state.away is not None:
            self._ready[state.away.layer].remove(state)
            state.away = None

    def advance(self, state: RequestState) -> bool:
        """Book that a token joined at its layer; return True if that was the last one."""
        away = state.away
        assert away is not None and away.ready
        self._ready[away.layer].remove(state)
        if away.layer == self.num_layers - 1:
            state.away = None
            return True
        away.layer += 1
        away.ready = False
        return False
