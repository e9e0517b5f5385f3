"""AwayTokens: where the tokens are that decode on the host tier, and how each step changes that.

A token enters at layer 0, is away while host threads attend, and joins a later step at the layer it left; it advances
at most one layer a step. Paper: omniserve 3.2.2, 3.2.3, 3.3.6.

Results are matched by (slot, epoch, layer, position); what does not match is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omniserve.core.plan import PiggybackJoin
from omniserve.core.work import AttentionResult
from omniserve.sched.host_rows import AwayToken
from omniserve.sched.host_slots import HostSlots
from omniserve.sched.late_joins import ResultOdds
from omniserve.sched.request_queue import RequestQueue
from omniserve.sched.state import Phase, RequestState


@dataclass(frozen=True, slots=True)
class AssumedJoin:
    """A token that is assumed to join a step in flight."""

    state: RequestState
    away: AwayToken
    """The token as it is if it has joined; behind the last layer it is at one that the model does not have."""
    age: int | None
    """Steps since its row was sent; None: its result was there when the step was planned."""
    has_device_rows: bool
    """The step has device rows."""


class AwayTokens:
    """The tokens that are away, and the results that wait to join.

    In the first ``late_layers`` layers a step looks for results as it reaches them, so rows whose result is only
    expected may be planned there, too.
    """

    def __init__(self, slots: HostSlots, residents: RequestQueue, *, num_layers: int, late_layers: int) -> None:
        self._slots, self._residents = slots, residents
        self._num_layers, self._late_layers = num_layers, late_layers
        self._odds = ResultOdds()
        self._num_steps = 0
        self.num_stages = 1
        """Stages with a step in flight each. A step is counted as it is launched, and comes to stage s as about s later
        ones have been launched."""
        self.num_token_steps = 0
        """Counter: steps that the tokens which passed all layers took for it, from their entry on."""
        self._used: list[set[tuple[int, int, int]]] = [set() for _ in range(slots.num_free)]
        """Results of each slot's newest token that late joins have used before their events came: (epoch, layer,
        position). Of most of them no event comes any more."""
        self._used_before: list[set[tuple[int, int, int]]] = [set() for _ in range(slots.num_free)]
        """Results of the token that each slot had before that, be it another request's. Later no event comes of them: a
        token takes a step for each layer."""
        self.ready: list[RequestQueue] = [RequestQueue() for _ in range(num_layers)]
        """Requests with a result that waits to join, by layer."""

    def forget(self, state: RequestState) -> None:
        """Forget a request's token: the request gives its slot back."""
        if state.away is not None and state.away.ready:
            self.ready[state.away.layer].remove(state)
        state.away = None

    def withdraw(self, state: RequestState) -> bool:
        """Have no step take the token of a request that has ended; return whether the host tier may still use it."""
        away = state.away
        if away is None:
            return False
        may_be_used = not away.ready or away.may_be_expected
        if may_be_used and away.ready:
            self.ready[away.layer].remove(state)
            away.ready = False
        return may_be_used

    def expected(self, *, has_device_rows: bool) -> list[list[RequestState]]:
        """Return, by layer, the residents whose result is not there but is expected in time; the first sent first."""
        expected: list[list[RequestState]] = [[] for _ in range(self._num_layers)]
        if not self._late_layers:
            return expected
        for state in self._residents:
            away = state.away
            if away is None or away.ready or away.layer >= self._late_layers:
                continue
            if self._odds.are_good(self._num_steps + 1 - away.sent, has_device_rows=has_device_rows):
                expected[away.layer].append(state)
        for states in expected:
            states.sort(key=_sent)
        return expected

    def on_event(self, event: AttentionResult) -> RequestState | None:
        """Book an attention event; return its request, or None if the event is stale or a duplicate."""
        state = self._slots.holder(event.slot, event.epoch)
        if state is None or state.away is None:
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
        for used in (self._used[event.slot], self._used_before[event.slot]):
            if key in used:
                used.remove(key)
                return event.ok
        return False

    def _set_ready(self, state: RequestState, away: AwayToken) -> None:
        away.ready = True
        self.ready[away.layer].add(state)
        if away.was_passed_over:
            # It came in the course of a step with device rows: a seat would have been of use, if not surely so.
            self._note_passed_over(away, self._num_steps, in_time=True)

    def _note_passed_over(self, away: AwayToken, num_steps: int, *, in_time: bool) -> None:
        """Take note of whether a seat would have been of use in the newest step that has come to the layer by now."""
        age = num_steps - away.layer * self.num_stages // self._num_layers - away.sent
        if age > 0:
            self._odds.note(age, has_device_rows=True, in_time=in_time)

    def is_last(self, event: AttentionResult, state: RequestState) -> bool:
        """Return whether an event of a cancelled slot is the last one, behind which nothing uses the slot any more."""
        away = state.away
        if not event.ok or away is None:
            return True
        return away.before is None and not away.may_be_expected and away.layer == event.layer

    def count_step(self, joins: Sequence[PiggybackJoin], *, has_device_rows: bool) -> None:
        """Count a step that computes something, and its joins; what is booked from here on belongs to it."""
        self._num_steps += 1
        if not (self._late_layers and has_device_rows):
            return
        joining = {join.request_id for join in joins}
        for state in self._residents:
            away = state.away
            if away is None or away.ready or away.layer >= self._late_layers or state.request_id in joining:
                continue
            if away.was_passed_over:
                self._note_passed_over(away, self._num_steps - 1, in_time=False)
            away.was_passed_over = True

    def enter(self, state: RequestState, position: int, draft_ids: tuple[int, ...] = ()) -> None:
        """Book that a token went away at layer 0, with these drafts."""
        now, slot = self._num_steps, state.slot
        self._used_before[slot], self._used[slot] = self._used[slot], set()
        state.away = AwayToken(position=position, layer=0, entered=now, sent=now, draft_ids=draft_ids)

    def arrive(self, state: RequestState) -> None:
        """Book that a pipelined token passed all its layers in one step, or was lost on the way."""
        if state.away is not None:
            self.ready[state.away.layer].remove(state)
            state.away = None

    def advance(self, state: RequestState, draft_ids: tuple[int, ...] = (), *, has_device_rows: bool) -> bool:
        """Book that a token joined at its layer, with these drafts; return True if that was the last one."""
        away = state.away
        assert away is not None
        if away.ready:
            self.ready[away.layer].remove(state)
        else:
            self._used[state.slot].add((state.epoch, away.layer, away.position))
            self._odds.note(self._num_steps - away.sent, has_device_rows=has_device_rows, in_time=True)
        if away.layer == self._num_layers - 1:
            self._pass(state, away, self._num_steps)
            return True
        if away.before is None:
            away.layer, away.sent, away.draft_ids = away.layer + 1, self._num_steps, draft_ids
            away.ready = away.was_passed_over = away.may_be_expected = False
        else:
            self._note_used(state, away.before)
            state.away = self._at_next_layer(away, draft_ids)  # an assumed join refers to this one
        return False

    def _pass(self, state: RequestState, away: AwayToken, step: int) -> None:
        """Book that a token has passed all layers, the last one in a step."""
        self.num_token_steps += step - away.entered
        self._note_used(state, away.before)
        state.away = None

    def _note_used(self, state: RequestState, away: AwayToken | None) -> None:
        """Book that a token has joined where it was assumed to join: at ``away``, and before."""
        while away is not None:
            if not away.ready:
                self._used[state.slot].add((state.epoch, away.layer, away.position))
            away = away.before

    def assume(self, state: RequestState, draft_ids: tuple[int, ...] = (), *, has_device_rows: bool) -> AssumedJoin:
        """Book that a token joins a step in flight at its layer, with these drafts.

        Whether it does is told by ``settle``. Until then a later step may be planned as if it did: if it did not, the
        token misses that step, too. A token that may have passed the last layer is in no later step until then.
        """
        before = state.away
        assert before is not None
        if before.ready:
            self.ready[before.layer].remove(state)
        state.away = away = self._at_next_layer(before, draft_ids)
        away.before = before
        age = None if before.ready else self._num_steps - before.sent
        return AssumedJoin(state, away, age, has_device_rows)

    def settle(self, join: AssumedJoin, *, joined: bool) -> bool:
        """Book whether a token has joined a step that it was assumed to join; in the order of the steps.

        Returns:
            True if it has passed the last layer.
        """
        state, away = join.state, join.away
        now, before = state.away, away.before
        if state.phase is not Phase.HOST or now is None or before is None or not _leads_to(now, away):
            return False  # it has left the tier, has not joined a step before, or had its next result before this
        if join.age is not None:
            self._odds.note(join.age, has_device_rows=join.has_device_rows, in_time=joined)
        if joined and away.layer == self._num_layers:
            self._pass(state, away, away.sent)
            return True
        away.before = None
        if joined:
            self._note_used(state, before)
            return False
        assert not now.ready, f"{state.request_id} has a result of a layer that it has not come to"
        state.away = before
        before.may_be_expected = True
        if before.ready:
            self.ready[before.layer].add(state)
        return False

    def is_at(self, join: PiggybackJoin) -> bool:
        """Return whether a token stands where a join has it."""
        state = self._slots.holder(join.slot, join.epoch)
        if state is None or state.away is None:
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


def _leads_to(now: AwayToken, away: AwayToken) -> bool:
    """Return whether ``away`` is where a token is now, or one of the places where it is assumed to have joined."""
    place: AwayToken | None = now
    while place is not None and place is not away:
        place = place.before
    return place is away


def _sent(state: RequestState) -> int:
    assert state.away is not None
    return state.away.sent
