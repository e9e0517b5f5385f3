"""Which results a seat is planned for before they are there."""

from __future__ import annotations

from omniserve.core.plan import HostEvent, HostEventKind
from omniserve.core.request import SLO, Request, ServiceClass
from omniserve.sched.late_joins import ResultOdds
from omniserve.sched.residents import HostResidents
from omniserve.sched.state import RequestState


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


def resident(residents: HostResidents, name: str) -> RequestState:
    request = Request(prompt_token_ids=[1, 2], service_class="BE")
    state = RequestState(
        request_id=name, request=request, slo=SLO(), kind=ServiceClass.BE, priority_key=(1, ord(name)), arrival_s=0.0,
        token_ids=[1, 2, 3], num_computed_tokens=2,
    )  # fmt: skip
    residents.take_slot(state)
    residents.queue.add(state)
    return state


def enter(residents: HostResidents, *states: RequestState) -> None:
    residents.count_step([], has_device_rows=True)
    for state in states:
        residents.enter(state, 2)


def done(state: RequestState, layer: int) -> HostEvent:
    return HostEvent(
        kind=HostEventKind.ATTENTION_DONE, slot=state.slot, epoch=state.epoch, layer=layer, position=2
    )  # fmt: skip


def test_results_that_wait_have_the_first_seats_and_expected_ones_the_others():
    residents = HostResidents(num_slots=4, num_layers=2, late_joins=True)
    a, b, c = (resident(residents, name) for name in "abc")
    enter(residents, a, b, c)
    residents.on_event(done(c, 0))
    expected = residents.expected(has_device_rows=True)
    joins = residents.plan_joins(10, 2, expected)
    assert [(join.request_id, join.is_ready) for join in joins] == [("c", True), ("a", False)]
    assert residents.num_joinable(residents.expected(has_device_rows=True)) == [3, 0]
    residents.count_step(joins, has_device_rows=True)
    assert not residents.advance(c, has_device_rows=True) and not residents.advance(a, has_device_rows=True)
    assert residents.num_joinable(residents.expected(has_device_rows=True)) == [1, 2]


def test_a_token_that_misses_its_layer_stays_there_and_takes_a_step_more():
    residents = HostResidents(num_slots=1, num_layers=1, late_joins=True)
    a = resident(residents, "a")
    enter(residents, a)
    for joins_in in (2, 3):
        joins = residents.plan_joins(1, 1, residents.expected(has_device_rows=True))
        assert [join.is_ready for join in joins] == [False]
        residents.count_step(joins, has_device_rows=True)
        if joins_in == 2:
            residents.miss(a, has_device_rows=True)
            assert a.away is not None and a.away.layer == 0
    assert residents.advance(a, has_device_rows=True)
    assert a.away is None and residents.num_token_steps == 2


def test_without_late_joins_nothing_is_expected():
    residents = HostResidents(num_slots=1, num_layers=1, late_joins=False)
    enter(residents, resident(residents, "a"))
    assert residents.num_joinable(residents.expected(has_device_rows=True)) == [0]
    assert residents.plan_joins(1, 1, residents.expected(has_device_rows=True)) == []


def test_rows_that_get_no_seat_show_whether_one_would_have_been_of_use():
    residents = HostResidents(num_slots=1, num_layers=1, late_joins=True)
    a = resident(residents, "a")
    for _ in range(10):  # results always come at the third step
        enter(residents, a)
        for _ in range(3):
            residents.count_step(residents.plan_joins(1, 1), has_device_rows=True)
        residents.on_event(done(a, 0))
        joins = residents.plan_joins(1, 1)
        residents.count_step(joins, has_device_rows=True)
        assert residents.advance(a, has_device_rows=True)
    enter(residents, a)
    assert not residents.expected(has_device_rows=True)[0], "none has come after one step"
