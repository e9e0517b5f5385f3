"""Tests of the results that a seat is planned for before they are there."""

from __future__ import annotations

import math

from omniserve.core.request import SLO, Request, ServiceClass
from omniserve.core.work import AttentionResult
from omniserve.sched.away_tokens import AssumedJoin
from omniserve.sched.fairness import ClassAccounts
from omniserve.sched.late_joins import ResultOdds
from omniserve.sched.residents import HostResidents
from omniserve.sched.state import Phase, RequestState
from tests.sched.limits import make_limits


def test_odds_of_an_age_follow_what_came_and_leave_other_ages_alone():
    odds = ResultOdds()
    assert odds.are_good(1, has_device_rows=True), "a seat is planned until results were seen to be late"
    for _ in range(10):
        odds.note(1, has_device_rows=True, in_time=False)
    assert not odds.are_good(1, has_device_rows=True)
    assert odds.are_good(2, has_device_rows=True) and odds.are_good(1, has_device_rows=False)
    for _ in range(10):
        odds.note(1, has_device_rows=True, in_time=True)
    assert odds.are_good(1, has_device_rows=True)
    assert odds.are_good(10_000, has_device_rows=True)


def make_residents(num_slots: int, *, num_layers: int, late_layers: int) -> HostResidents:
    return HostResidents(make_limits(num_host_slots=num_slots, num_layers=num_layers, late_layers=late_layers))


_ACCOUNT = ClassAccounts().of("", 1.0)


def resident(residents: HostResidents, name: str) -> RequestState:
    request = Request(prompt_token_ids=[1, 2], service_class="BE")
    state = RequestState(
        request_id=name, request=request, slo=SLO(), kind=ServiceClass.BE, priority_key=(1, math.inf, ord(name)),
        account=_ACCOUNT, arrival_s=0.0, token_ids=[1, 2, 3], num_computed_tokens=2, phase=Phase.HOST,
    )  # fmt: skip
    residents.take_slot(state)
    residents.queue.add(state)
    return state


def enter(residents: HostResidents, *states: RequestState) -> None:
    residents.tokens.count_step([], has_device_rows=True)
    for state in states:
        residents.tokens.enter(state, 2)


def done(state: RequestState, layer: int) -> AttentionResult:
    return AttentionResult(slot=state.slot, epoch=state.epoch, layer=layer, position=2)


def test_results_that_wait_have_the_first_seats_and_expected_ones_the_others():
    residents = make_residents(4, num_layers=2, late_layers=2)
    a, b, c = (resident(residents, name) for name in "abc")
    enter(residents, a, b, c)
    residents.tokens.on_event(done(c, 0))
    expected = residents.expected(has_device_rows=True)
    joins = residents.plan_joins(10, 2, expected)
    assert [(join.request_id, join.is_ready) for join in joins] == [("c", True), ("a", False)]
    assert residents.num_joinable(residents.expected(has_device_rows=True)) == [3, 0]
    residents.tokens.count_step(joins, has_device_rows=True)
    assert not any([residents.tokens.advance(state, has_device_rows=True) for state in (c, a)])
    assert residents.num_joinable(residents.expected(has_device_rows=True)) == [1, 2]


def test_a_token_that_misses_its_layer_stays_there_and_takes_a_step_more():
    residents = make_residents(1, num_layers=1, late_layers=1)
    a = resident(residents, "a")
    enter(residents, a)
    for joins_in in (2, 3):
        joins = residents.plan_joins(1, 1, residents.expected(has_device_rows=True))
        assert [join.is_ready for join in joins] == [False]
        residents.tokens.count_step(joins, has_device_rows=True)
        if joins_in == 2:
            residents.tokens.miss(a, has_device_rows=True)
            assert a.away is not None and a.away.layer == 0
    assert residents.tokens.advance(a, has_device_rows=True)
    assert a.away is None and residents.tokens.num_token_steps == 2


def test_a_result_that_a_late_join_has_used_is_known_when_its_event_comes():
    """The token may have passed all layers by then, or its request may have left the slot to another one."""
    residents = make_residents(1, num_layers=2, late_layers=2)
    a = resident(residents, "a")
    enter(residents, a)
    events = [done(a, 0), done(a, 1)]
    assert not residents.tokens.take_used(events[0]), "it is awaited"
    assert not residents.tokens.advance(a, has_device_rows=True)
    assert residents.tokens.advance(a, has_device_rows=True) and a.away is None
    assert residents.tokens.take_used(events[0]) and not residents.tokens.take_used(events[0]), "a second one is stale"
    residents.queue.remove(a)
    residents.release_slot(a)
    resident(residents, "b")
    assert residents.tokens.take_used(events[1]) and not residents.tokens.take_used(events[1])


def test_so_is_one_that_a_settled_join_has_used_and_one_whose_event_came_first_is_not():
    residents = make_residents(2, num_layers=2, late_layers=2)
    a, b = (resident(residents, name) for name in "ab")
    enter(residents, a, b)
    joins = [residents.tokens.assume(state, has_device_rows=True) for state in (a, b)]
    residents.tokens.on_event(done(b, 0))
    for join in joins:
        residents.tokens.settle(join, joined=True)
    assert residents.tokens.take_used(done(a, 0)) and not residents.tokens.take_used(done(b, 0))


def test_without_late_joins_nothing_is_expected():
    residents = make_residents(1, num_layers=1, late_layers=0)
    enter(residents, resident(residents, "a"))
    assert residents.num_joinable(residents.expected(has_device_rows=True)) == [0]
    assert residents.plan_joins(1, 1, residents.expected(has_device_rows=True)) == []


def test_rows_that_get_no_seat_show_whether_one_would_have_been_of_use():
    residents = make_residents(1, num_layers=1, late_layers=1)
    a = resident(residents, "a")
    for _ in range(10):  # results always come at the third step
        enter(residents, a)
        for _ in range(3):
            residents.tokens.count_step(residents.plan_joins(1, 1), has_device_rows=True)
        residents.tokens.on_event(done(a, 0))
        joins = residents.plan_joins(1, 1)
        residents.tokens.count_step(joins, has_device_rows=True)
        assert residents.tokens.advance(a, has_device_rows=True)
    enter(residents, a)
    assert not residents.expected(has_device_rows=True)[0], "none has come after one step"


def assumed(residents: HostResidents, *states: RequestState) -> list[AssumedJoin]:
    """Let tokens be assumed to join a step in flight."""
    joins = [residents.join_of(state) for state in states]
    residents.tokens.count_step(joins, has_device_rows=True)
    return [residents.tokens.assume(state, has_device_rows=True) for state in states]


def one_assumed(*, num_layers: int = 2) -> tuple[HostResidents, RequestState, AssumedJoin]:
    """Return a resident that is assumed to join a step in flight at layer 0; no join is late at the last one."""
    residents = make_residents(1, num_layers=num_layers, late_layers=num_layers - 1)
    a = resident(residents, "a")
    enter(residents, a)
    (join,) = assumed(residents, a)
    return residents, a, join


def test_a_token_that_was_assumed_to_join_goes_back_if_it_did_not() -> None:
    residents = make_residents(2, num_layers=3, late_layers=2)
    a, b = (resident(residents, name) for name in "ab")
    enter(residents, a, b)
    of_a, of_b = assumed(residents, a, b)
    next_of_a, next_of_b = assumed(residents, a, b)  # the next step is planned before it is known
    assert a.away is not None and a.away.layer == 2
    residents.tokens.settle(of_a, joined=False)
    residents.tokens.settle(of_b, joined=True)
    assert (a.away.layer, a.away.ready, a.away.sent) == (0, False, 1)
    assert residents.expected(has_device_rows=True) == [[a], [], []]
    residents.tokens.settle(next_of_a, joined=False)
    residents.tokens.settle(next_of_b, joined=True)
    assert a.away.layer == 0 and b.away is not None and b.away.layer == 2 and b.away.before is None


def test_a_result_that_comes_too_late_for_the_step_it_was_assumed_in_joins_the_next_one() -> None:
    residents, a, join = one_assumed()
    assert residents.tokens.on_event(done(a, 0)) is a, "it is known, and changes nothing yet"
    assert residents.num_ready == [0, 0]
    residents.tokens.settle(join, joined=False)
    assert residents.num_ready == [1, 0]
    assert [each.is_ready for each in residents.plan_joins(1, 1)] == [True]


def test_the_event_of_a_result_that_joined_late_is_no_news() -> None:
    residents, a, join = one_assumed()
    residents.tokens.settle(join, joined=True)
    assert residents.tokens.on_event(done(a, 0)) is a and residents.num_ready == [0, 0]
    assert residents.tokens.on_event(done(a, 1)) is a and residents.num_ready == [0, 1]
    assert residents.tokens.on_event(done(a, 1)) is None


def test_a_next_result_tells_that_a_token_has_joined() -> None:
    residents, a, join = one_assumed(num_layers=3)
    residents.tokens.on_event(done(a, 1))
    assert residents.num_ready == [0, 1, 0]
    residents.tokens.count_step([residents.join_of(a)], has_device_rows=True)
    residents.tokens.advance(a, has_device_rows=True)
    residents.tokens.settle(join, joined=True)
    assert a.away is not None and a.away.layer == 2


def test_a_request_that_has_left_the_host_tier_does_not_come_back() -> None:
    residents, a, join = one_assumed()
    residents.tokens.on_event(done(a, 0))
    a.phase = Phase.DRAINING
    residents.tokens.settle(join, joined=False)
    assert residents.num_ready == [0, 0]
    assert not residents.tokens.is_last(done(a, 0), a), "the step may have sent its row on"
    failed = AttentionResult(ok=False, slot=a.slot, epoch=a.epoch, layer=1, position=2)
    assert residents.tokens.is_last(failed, a)


def test_what_missed_a_step_is_waited_for_when_its_request_ends() -> None:
    residents, a, join = one_assumed()
    residents.tokens.settle(join, joined=False)
    residents.tokens.on_event(done(a, 0))
    assert a.away is not None and a.away.ready and not residents.tokens.is_last(done(a, 0), a)
    assert residents.withdraw(a), "its slot may be in use"
    assert residents.num_ready == [0, 0], "and it joins no step any more"
    residents.release_slot(a)
    assert residents.slots.num_free == 1


def test_no_result_is_expected_at_the_last_layer_of_a_device_that_looks_itself() -> None:
    residents, _, join = one_assumed()
    residents.tokens.settle(join, joined=True)
    assert residents.expected(has_device_rows=True) == [[], []]


def late(state: RequestState) -> RequestState:
    assert state.away is not None and not state.away.ready
    return state


def test_a_token_may_be_in_as_many_steps_in_flight_as_there_are_and_goes_back_to_where_it_missed_one() -> None:
    residents = make_residents(1, num_layers=6, late_layers=6)
    a = resident(residents, "a")
    enter(residents, a)
    first, second, third = (assumed(residents, a)[0] for _ in range(3))
    assert late(a).away.layer == 3  # type: ignore[union-attr]
    residents.tokens.settle(first, joined=True)
    (fourth,) = assumed(residents, a)
    residents.tokens.settle(second, joined=False)
    assert late(a).away.layer == 1 and residents.expected(has_device_rows=True)[1] == [a]  # type: ignore[union-attr]
    (fifth,) = assumed(residents, a)
    for missed in (third, fourth):
        residents.tokens.settle(missed, joined=False)
    assert late(a).away.layer == 2, "steps that were launched before say nothing of it"  # type: ignore[union-attr]
    residents.tokens.settle(fifth, joined=True)
    assert a.away is not None and (a.away.layer, a.away.before) == (2, None)
    assert [residents.tokens.take_used(done(a, layer)) for layer in (0, 1, 2)] == [True, True, False]


def test_a_token_that_may_have_passed_the_last_layer_is_in_no_step_until_that_is_known() -> None:
    residents = make_residents(2, num_layers=1, late_layers=1)
    a, b = (resident(residents, name) for name in "ab")
    enter(residents, a, b)
    of_a, of_b = assumed(residents, a, b)
    assert residents.expected(has_device_rows=True) == [[]] and residents.num_at_token_boundary == 0
    residents.tokens.on_event(done(b, 0))
    residents.tokens.count_step([], has_device_rows=True)
    assert residents.num_ready == [0], "a result that has come is for the step that may have missed it"
    assert residents.tokens.settle(of_a, joined=True) and a.away is None
    assert residents.tokens.num_token_steps == 1, "steps that were launched meanwhile do not count"
    assert not residents.tokens.settle(of_b, joined=False) and residents.num_ready == [1]
    assert residents.tokens.take_used(done(a, 0))


def test_in_stages_a_seat_is_of_use_if_the_result_comes_before_the_step_is_there() -> None:
    """A step comes to the last of three stages when two others have been launched behind it."""
    residents = make_residents(1, num_layers=3, late_layers=3)
    residents.tokens.num_stages = 3
    a = resident(residents, "a")
    enter(residents, a)
    for layer in (0, 1):
        residents.tokens.count_step([residents.join_of(a)], has_device_rows=True)
        residents.tokens.advance(a, has_device_rows=True)
        assert late(a).away.layer == layer + 1  # type: ignore[union-attr]
    for _ in range(8):
        residents.tokens._odds.note(1, has_device_rows=True, in_time=False)
    assert not residents.expected(has_device_rows=True)[2], "results have come late"
    for _ in range(10):  # each comes when three steps are launched behind the one that has sent its row
        assert a.away is not None
        a.away.ready, a.away.was_passed_over, a.away.sent = False, False, residents.tokens._num_steps
        for _ in range(3):
            residents.tokens.count_step([], has_device_rows=True)
        residents.tokens.on_event(done(a, 2))
        residents.tokens.ready[2].remove(a)
    a.away.ready, a.away.sent = False, residents.tokens._num_steps
    assert residents.expected(has_device_rows=True)[2] == [a], "the next step would have found them"
