"""Results of the host tier that no token awaits are dropped, and they alone are logged as dropped."""

from __future__ import annotations

import dataclasses

import pytest

from omniserve.core.plan import StepPlan
from omniserve.core.work import AttentionResult
from tests.sched.benches import Bench
from tests.sched.test_late_joins import assumed, done, enter, make_residents, resident


def test_a_result_is_taken_only_at_the_layer_and_the_position_at_which_it_is_awaited() -> None:
    residents = make_residents(1, num_layers=3, late_layers=3)
    tokens, a = residents.tokens, resident(residents, "a")
    enter(residents, a)
    for layer in range(3):
        awaited = done(a, layer)
        for change in ({"layer": layer + 1}, {"position": 3}, {"ok": False, "layer": layer - 1}):
            assert tokens.on_event(dataclasses.replace(awaited, **change)) is None
        if layer > 0:
            assert tokens.on_event(done(a, layer - 1)) is a, "it has joined already"
        assert residents.num_ready == [0, 0, 0]
        assert tokens.on_event(awaited) is a
        assert residents.num_ready == [int(layer == other) for other in range(3)]
        assert tokens.on_event(awaited) is None
        assert tokens.advance(a, has_device_rows=True) == (layer == 2)


def test_a_result_of_a_layer_behind_an_assumed_join_is_not_taken() -> None:
    residents = make_residents(1, num_layers=3, late_layers=3)
    a = resident(residents, "a")
    enter(residents, a)
    assumed(residents, a)
    assert residents.tokens.on_event(done(a, 2)) is None
    assert a.away is not None and a.away.before is not None and not a.away.ready and not a.away.before.ready


def test_only_a_result_that_no_token_awaits_is_logged_as_dropped(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench("omniserve", device_blocks=8, host_blocks=64, late_layers=2)
    device, used = bench.device, []
    settle = device._settle_late_joins

    def settled(plan: StepPlan) -> set[str]:
        before = [*device.running]
        missed = settle(plan)
        used.extend(event for event in before if event not in device.running)
        return missed

    device._settle_late_joins = settled
    for number in range(4):
        bench.add(f"be{number}", prompt=7, output=30)
    num_told = 0
    while len(bench.finished) < 4:
        bench.step(host_chance=0.5)
        num_told += len(used)
        bench.scheduler.notify(used)  # a host tier tells of results that have joined already
        used.clear()
    assert num_told > 0 and device.num_joins > num_told
    assert not caplog.records
    stale = AttentionResult(slot=0, epoch=0, layer=1, position=9)
    bench.scheduler.notify([stale])
    assert [record.getMessage() for record in caplog.records] == [f"dropped a stale host result: {stale}"]


def test_used_results_are_forgotten_as_a_request_decodes_on_the_host() -> None:
    bench = Bench("omniserve", device_blocks=8, host_blocks=200, late_layers=2)
    bench.checks = False
    for number in range(2):
        bench.add(f"be{number}", prompt=7, output=300)
    tokens = bench.requests.residents.tokens
    while len(bench.finished) < 2:
        bench.step(host_chance=0.3)
        assert all(len(used) <= 2 for used in (*tokens._used, *tokens._used_before)), "more than a token's layers"
    assert bench.device.num_late_joins > 50
