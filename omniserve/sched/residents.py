"""HostResidents: which requests decode on the host tier, and where each one's token is.

A token enters at layer 0, is away while host threads attend, and joins a later step at the layer it left; it advances
at most one layer a step. Paper: omniserve 3.2.2, 3.2.3, 3.3.6.

Results are matched by (slot, epoch, layer, position). A slot's epoch rises whenever the slot changes hands; what does
not match is dropped. A request that ends while its token is away *drains*: its slot and blocks are freed when the host
tier says that no thread touches them any more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from omniserve.core.plan import PiggybackEntry, PiggybackJoin
from omniserve.core.work import AttentionResult
from omniserve.sched.late_joins import ResultOdds
from omniserve.sched.state import AwayToken, Phase, RequestQueue, RequestState


@dataclass(frozen=True, slots=True)
class AssumedJoin:
    """A token that is assumed to join a step in flight."""

    state: RequestState
    away: AwayToken
    """The token as it is if it has joined."""
    age: int | None
    """Steps since its row was sent; None: its result was there when the step was planned."""
    has_device_rows: bool
    """The step has device rows."""


class HostResidents:
    """Slots of the host tier and the tokens that are away.

    In the first ``late_layers`` layers a step looks for results as it reaches them, so rows whose result is only
    expected may be planned there, too. ``hidden`` as in ``RequestTable``.
    """

    def __init__(
        self, *, num_slots: int, num_layers: int, late_layers: int, hidden: Set[RequestState] = frozenset()
    ) -> None:
        self.num_layers = num_layers
        self._late_layers = late_layers
        self._odds = ResultOdds()
        self._num_steps = 0
        self.num_token_steps = 0
        """Counter: steps that the tokens which passed all layers took for it, from their entry on."""
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._epochs = [0] * num_slots
        self._by_slot: dict[int, RequestState] = {}
        self._used: list[set[tuple[int, int, int]]] = [set() for _ in range(num_slots)]
        """Results of each slot that late joins have used before their events came: (epoch, layer, position)."""
        self._ready: list[RequestQueue] = [RequestQueue() for _ in range(num_layers)]
        self._changed: list[RequestState] = []
        self.queue = RequestQueue(hidden)
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
        self._used[state.slot] = {key for key in self._used[state.slot] if key[0] >= state.epoch - 1}
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

    def withdraw(self, state: RequestState) -> bool:
        """Take a resident that has ended out of the queues; return whether the host tier may still use its slot."""
        self.queue.remove(state)
        away = state.away
        if away is None:
            return False
        may_be_used = not away.ready or away.may_be_expected
        if may_be_used and away.ready:
            self._ready[away.layer].remove(state)
            away.ready = False
        return may_be_used

    def take_changed(self) -> list[RequestState]:
        """Return the requests that took or gave back a slot, in order, and forget them."""
        changed, self._changed = self._changed, []
        return changed

    def on_event(self, event: AttentionResult) -> RequestState | None:
        """Book an attention event; return its request, or None if the event is stale or a duplicate."""
        state = self._by_slot.get(event.slot)
        if state is None or state.epoch != event.epoch or state.away is None:
            return None
        away: AwayToken | None = state.away
        while away is not None and away.layer > event.layer:
            away = away.before
        if away is None and state.away.position == event.position and event.ok:
            return state  # a late join has used the result, and the event was on its way
        if away is None or away.ready or (away.layer, away.position) != (event.layer, event.position):
            return None
        if event.ok:
            if away is state.away:
                self._set_ready(state, away)
            else:
                away.ready = True  # if it misses the step that it is assumed to join, it can join the next one
        return state

    def take_used(self, event: AttentionResult) -> bool:
        """Return whether a late join has used a result before its event came, perhaps its request's last one.

        Then the request may have gone on, or ended. Other stages tell of their events later than of their joins.
        """
        key = (event.epoch, event.layer, event.position)
        was_used = event.ok and key in self._used[event.slot]
        self._used[event.slot].discard(key)
        return was_used

    def _set_ready(self, state: RequestState, away: AwayToken) -> None:
        away.ready = True
        self._ready[away.layer].add(state)
        if away.was_passed_over:
            # It came in the course of a step with device rows: a seat would have been of use, if not surely so.
            self._odds.note(self._num_steps - away.sent, has_device_rows=True, in_time=True)

    def is_last(self, event: AttentionResult, state: RequestState) -> bool:
        """Return whether an event of a cancelled slot is the last one, behind which nothing uses the slot any more."""
        away = state.away
        if not event.ok or away is None:
            return True
        return away.before is None and not away.may_be_expected and away.layer == event.layer

    @property
    def is_busy(self) -> bool:
        """True while the host tier attends for a request."""
        return any(state.away is not None and not state.away.ready for state in self._by_slot.values())

    @property
    def num_ready(self) -> list[int]:
        """Results that wait to join, by layer."""
        return [len(queue) for queue in self._ready]

    def num_joinable(self, expected: Sequence[Sequence[RequestState]]) -> list[int]:
        """Return how many results wait to join or are ``expected``, by layer."""
        return [ready + len(states) for ready, states in zip(self.num_ready, expected, strict=True)]

    @property
    def num_at_token_boundary(self) -> int:
        """Residents of which the next token may enter."""
        return sum(state.away is None for state in self.queue)

    def expected(self, *, has_device_rows: bool) -> list[list[RequestState]]:
        """Return, by layer, the residents whose result is not there but is expected in time; the first sent first."""
        expected: list[list[RequestState]] = [[] for _ in range(self.num_layers)]
        if not self._late_layers:
            return expected
        for state in self.queue:
            away = state.away
            if away is None or away.ready or away.layer >= self._late_layers:
                continue
            if self._odds.are_good(self._num_steps + 1 - away.sent, has_device_rows=has_device_rows):
                expected[away.layer].append(state)
        for states in expected:
            states.sort(key=_sent)
        return expected

    def plan_joins(
        self, max_rows: int, seats: int, expected: Sequence[Sequence[RequestState]] | None = None
    ) -> list[PiggybackJoin]:
        """Pick results for this step, lowest layer first (3.3.6).

        Inside a layer those that wait come first, the oldest request first, then those that are ``expected``.
        """
        joins: list[PiggybackJoin] = []
        for layer, queue in enumerate(self._ready):
            states = itertools.chain(queue, expected[layer] if expected is not None else ())
            for state in itertools.islice(states, seats):
                if len(joins) >= max_rows:
                    return joins
                joins.append(self.join_of(state))
        return joins

    def join_of(self, state: RequestState) -> PiggybackJoin:
        """Return the join of a token that is away, without its drafts."""
        assert state.away is not None
        return PiggybackJoin(
            request_id=state.request_id,
            position=state.away.position,
            slot=state.slot,
            epoch=state.epoch,
            layer=state.away.layer,
            state_slot=state.state_slot,
            is_ready=state.away.ready,
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

    def count_step(self, joins: Sequence[PiggybackJoin], *, has_device_rows: bool) -> None:
        """Count a step that computes something, and its joins; what is booked from here on belongs to it."""
        self._num_steps += 1
        if not (self._late_layers and has_device_rows):
            return
        joining = {join.request_id for join in joins}
        for state in self.queue:
            away = state.away
            if away is None or away.ready or away.layer >= self._late_layers or state.request_id in joining:
                continue
            if away.was_passed_over:
                self._odds.note(self._num_steps - 1 - away.sent, has_device_rows=True, in_time=False)
            away.was_passed_over = True

    def enter(self, state: RequestState, position: int, draft_ids: tuple[int, ...] = ()) -> None:
        """Book that a token went away at layer 0, with these drafts."""
        now = self._num_steps
        state.away = AwayToken(position=position, layer=0, entered=now, sent=now, draft_ids=draft_ids)

    def arrive(self, state: RequestState) -> None:
        """Book that a pipelined token passed all its layers in one step, or was lost on the way."""
        if state.away is not None:
            self._ready[state.away.layer].remove(state)
            state.away = None

    def advance(self, state: RequestState, draft_ids: tuple[int, ...] = (), *, has_device_rows: bool) -> bool:
        """Book that a token joined at its layer, with these drafts; return True if that was the last one."""
        away = state.away
        assert away is not None
        if away.ready:
            self._ready[away.layer].remove(state)
        else:
            self._used[state.slot].add((state.epoch, away.layer, away.position))
            self._odds.note(self._num_steps - away.sent, has_device_rows=has_device_rows, in_time=True)
        if away.layer == self.num_layers - 1:
            self.num_token_steps += self._num_steps - away.entered
            state.away = None
            return True
        if away.before is None:
            away.layer, away.sent, away.draft_ids = away.layer + 1, self._num_steps, draft_ids
            away.ready = away.was_passed_over = away.may_be_expected = False
        else:
            state.away = self._at_next_layer(away, draft_ids)  # an assumed join refers to this one
        return False

    def assume(self, state: RequestState, draft_ids: tuple[int, ...] = (), *, has_device_rows: bool) -> AssumedJoin:
        """Book that a token joins a step in flight at its layer, which is not the last one, with these drafts.

        Whether it does is told by ``settle``. Until then a later step may be planned as if it did: if it did not, the
        token misses that step, too.
        """
        before = state.away
        assert before is not None and before.layer < self.num_layers - 1
        if before.ready:
            self._ready[before.layer].remove(state)
        state.away = away = self._at_next_layer(before, draft_ids)
        away.before = before
        age = None if before.ready else self._num_steps - before.sent
        return AssumedJoin(state, away, age, has_device_rows)

    def settle(self, join: AssumedJoin, *, joined: bool) -> None:
        """Book whether a token has joined a step that it was assumed to join; in the order of the steps."""
        state, away = join.state, join.away
        now, before = state.away, away.before
        if state.phase is not Phase.HOST or now is None or before is None or away not in (now, now.before):
            return  # it has left the tier, has not joined the step before, or had its next result before this
        if join.age is not None:
            self._odds.note(join.age, has_device_rows=join.has_device_rows, in_time=joined)
        away.before = None
        if joined:
            if not before.ready:
                self._used[state.slot].add((state.epoch, before.layer, before.position))
            return
        assert not now.ready, f"{state.request_id} has a result of a layer that it has not come to"
        state.away = before
        before.may_be_expected = True
        if before.ready:
            self._ready[before.layer].add(state)

    def is_at(self, join: PiggybackJoin) -> bool:
        """Return whether a token stands where a join has it."""
        state = self._by_slot.get(join.slot)
        if state is None or state.epoch != join.epoch or state.away is None:
            return False
        return (state.away.layer, state.away.position) == (join.layer, join.position)

    def _at_next_layer(self, away: AwayToken, draft_ids: tuple[int, ...]) -> AwayToken:
        return AwayToken(
            position=away.position,
            layer=away.layer + 1,
            entered=away.entered,
            sent=self._num_steps,
            draft_ids=draft_ids,
        )

    def miss(self, state: RequestState, *, has_device_rows: bool) -> None:
        """Book that a token did not join at its layer: it stays away."""
        away = state.away
        assert away is not None
        if not away.ready:
            self._odds.note(self._num_steps - away.sent, has_device_rows=has_device_rows, in_time=False)


def _sent(state: RequestState) -> int:
    assert state.away is not None
    return state.away.sent
