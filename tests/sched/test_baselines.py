"""Tests of the policies that others are compared with, step by step."""

from __future__ import annotations

import pytest

from omniserve.core.work import KVMove
from omniserve.kv.base import Tier
from omniserve.sched import SCHEDULERS
from tests.sched.benches import Bench, names

HOST = {"host_blocks": 64}


def tokens(bench: Bench) -> dict[str, int]:
    """Run a step; return how many tokens of each request it computed on the device."""
    return {chunk.request_id: len(chunk.token_ids) for chunk in bench.step()[0].chunks}


# -- every policy: nobody waits for ever -------------------------------------------------------------------------------


@pytest.mark.parametrize("host_blocks", [0, 40])
@pytest.mark.parametrize("policy", SCHEDULERS.names())
def test_best_effort_work_ends_once_latency_sensitive_work_stops_coming(policy: str, host_blocks: int) -> None:
    bench = Bench(policy, device_blocks=16, host_blocks=host_blocks, max_num_batched_tokens=16, ls_reserve_blocks=2)
    for i in range(5):
        bench.add(f"be{i}", prompt=10, output=12)
    for i in range(60):
        bench.add(f"ls{i}", prompt=12, output=3)
        bench.step()
    for _ in range(600):
        bench.step()
    assert bench.finished == {f"be{i}" for i in range(5)} | {f"ls{i}" for i in range(60)}


@pytest.mark.parametrize("policy", SCHEDULERS.names())
def test_a_long_prompt_is_not_starved_by_small_best_effort_requests(policy: str) -> None:
    for long in ("ls-long", "be-long"):
        bench = Bench(policy, device_blocks=12, max_num_batched_tokens=16)
        for i in range(400):
            bench.add(f"be{i}", prompt=3, output=6)
            if i == 20:
                bench.add(long, prompt=40, output=3)
            bench.step()
            if long in bench.finished:
                break
        assert long in bench.finished, f"{long} waited for {i - 20} steps"


# -- priority ----------------------------------------------------------------------------------------------------------


def test_priority_admits_by_class_and_then_arrival() -> None:
    bench = Bench("priority", device_blocks=100, max_num_batched_tokens=12)
    for name in ("be0", "ls0", "be1", "ls1"):
        bench.add(name, prompt=6)
    assert names(bench.step()[0]) == ["ls0", "ls1"]
    assert tokens(bench) == {"ls0": 1, "ls1": 1, "be0": 6, "be1": 4}


def test_priority_takes_no_memory_from_running_requests_for_one_that_waits() -> None:
    bench = Bench("priority", device_blocks=8)
    bench.add("be", prompt=20, output=8)
    bench.step()
    bench.add("ls", prompt=16, output=4)
    bench.add("be-small", prompt=3)
    for plan, _ in bench.steps_until(lambda: "be" in bench.finished):
        assert names(plan) == ["be"], "nobody overtakes the LS prompt either"
    assert names(bench.step()[0]) == ["ls", "be-small"]
    assert bench.requests.counters["preemptions"] == 0


def test_priority_recomputes_the_last_of_the_lowest_class_when_a_running_request_lacks_memory() -> None:
    bench = Bench("priority", device_blocks=6)
    bench.add("be0", prompt=7)
    bench.add("be1", prompt=7)
    bench.step()
    bench.add("ls", prompt=8)
    bench.step()
    # The LS request, which came last, needs a third block first.
    assert names(bench.step()[0]) == ["ls", "be0"]
    assert bench.requests.counters["preemptions"] == 1 and "be1" in bench.requests.states


def test_priority_admits_nobody_in_a_step_that_preempted() -> None:
    bench = Bench("priority", device_blocks=6)
    for name in ("be0", "be1"):
        bench.add(name, prompt=11)
    bench.step()
    bench.add("ls", prompt=4)
    bench.step()
    assert names(bench.step()[0]) == ["be0"]
    assert bench.requests.counters["preemptions"] == 1
    assert names(bench.step()[0]) == ["be0", "ls"]


# -- online-only -------------------------------------------------------------------------------------------------------


def test_online_only_serves_ls_requests_just_as_if_they_were_alone() -> None:
    steps = {}
    for has_be in (False, True):
        bench = Bench("online-only", device_blocks=20, max_num_batched_tokens=16)
        seen = []
        for i in range(120):
            if has_be and i % 3 == 0 and i < 60:
                bench.add(f"be{i}", prompt=9, output=9)
            if i % 10 == 5 and i < 100:
                bench.add(f"ls{i}a", prompt=30, output=4)
                bench.add(f"ls{i}b", prompt=5, output=4)
            has_ls = any(name.startswith("ls") for name in bench.requests.states)
            plan, _ = bench.step()
            if has_ls:
                assert all(name.startswith("ls") for name in names(plan))
                seen.append((i, [(c.request_id, c.start, len(c.token_ids)) for c in plan.chunks]))
        steps[has_be] = seen
    assert steps[True] == steps[False] and len(steps[True]) > 40


def test_online_only_keeps_what_best_effort_requests_hold_until_an_ls_one_needs_it() -> None:
    bench = Bench("online-only", device_blocks=8)
    bench.add("be", prompt=8)
    bench.step()
    bench.add("ls0", prompt=8, output=2)
    for _ in range(2):
        assert names(bench.step()[0]) == ["ls0"]
    assert tokens(bench) == {"be": 1}, "it goes on where it was"
    bench.add("ls1", prompt=24, output=1)
    assert names(bench.step()[0]) == ["ls1"]
    assert bench.requests.counters["preemptions"] == 1


# -- non-preemptive ----------------------------------------------------------------------------------------------------


def test_non_preemptive_gives_a_running_best_effort_request_a_token_every_step() -> None:
    bench = Bench("non-preemptive", device_blocks=14, max_num_batched_tokens=16)
    bench.add("be0", prompt=12, output=20)
    bench.add("be1", prompt=4, output=20)
    bench.step()
    for i in range(19):
        bench.add(f"ls{i}", prompt=10, output=5)
        assert {"be0", "be1"} <= set(names(bench.step()[0]))
    assert {"be0", "be1"} <= bench.finished
    assert bench.requests.counters["preemptions"] > 0, "memory was never short"


def test_non_preemptive_makes_an_ls_prompt_wait_for_the_memory_of_best_effort_requests() -> None:
    bench = Bench("non-preemptive", device_blocks=8)
    bench.add("be", prompt=20, output=8)
    bench.step()
    bench.add("be-next", prompt=16)
    bench.add("ls", prompt=16)
    for plan, _ in bench.steps_until(lambda: "be" in bench.finished):
        assert names(plan) == ["be"]
    assert names(bench.step()[0]) == ["ls", "be-next"], "the LS prompt is first in line"


# -- round-robin -------------------------------------------------------------------------------------------------------


def test_round_robin_serves_the_kinds_in_turn() -> None:
    bench = Bench("round-robin", device_blocks=100)
    for name in ("be0", "ls0", "be1", "ls1"):
        bench.add(name, prompt=6)
    assert [names(bench.step()[0]) for _ in range(4)] == [["ls0", "ls1"], ["be0", "be1"]] * 2


def test_round_robin_leaves_no_turn_unused() -> None:
    bench = Bench("round-robin", device_blocks=100)
    bench.add("be", prompt=6)
    assert [names(bench.step()[0]) for _ in range(2)] == [["be"]] * 2
    bench.add("ls", prompt=6, output=2)
    assert [names(bench.step()[0]) for _ in range(5)] == [["ls"], ["be"], ["ls"], ["be"], ["be"]]


# -- llumnix -----------------------------------------------------------------------------------------------------------


def test_llumnix_best_effort_requests_neither_enter_the_reserve_nor_grow_into_it() -> None:
    bench = Bench("llumnix", device_blocks=10, ls_reserve_blocks=4, **HOST)
    for i in range(4):
        bench.add(f"be{i}", prompt=7, output=30)
    num_shared = 0
    for _ in bench.steps_until(lambda: len(bench.finished) == 4):
        # One that has the device to itself may have all of it.
        assert bench.kv.usage().device_used <= 6 or len(bench.requests.device["BE"]) <= 1
        num_shared += len(bench.requests.device["BE"]) > 1
    assert num_shared > 3


def test_llumnix_ls_requests_take_the_reserve_first_and_then_the_memory_of_best_effort_requests() -> None:
    bench = Bench("llumnix", device_blocks=10, ls_reserve_blocks=4)
    bench.add("be0", prompt=11)
    bench.add("be1", prompt=11)
    bench.step()
    bench.add("ls0", prompt=15)
    assert names(bench.step()[0]) == ["ls0", "be0", "be1"]
    assert bench.requests.counters["preemptions"] == 0
    bench.add("ls1", prompt=11)
    assert "ls1" in names(bench.step()[0])
    assert bench.requests.counters["preemptions"] == 1 and "be1" in [s.request_id for s in bench.requests.waiting["BE"]]


def test_llumnix_best_effort_requests_that_overflow_end_on_the_host_tier() -> None:
    bench = Bench("llumnix", device_blocks=8, host_blocks=64, swap_in_delay_s=0.0, min_residence_s=0.0)
    for i in range(5):
        bench.add(f"be{i}", prompt=7, output=20)
    moved: set[str] = set()
    on_device_after: set[str] = set()
    for plan, _ in bench.steps_until(lambda: len(bench.finished) == 5):
        on_device_after |= moved & set(names(plan))
        moved |= {move.request_id for move in plan.side_work(KVMove)}
    assert moved and not on_device_after, "who moved stays"
    assert bench.requests.counters["preemptions"] == 0
    assert bench.scheduler.stats().host_output_tokens > 0


def test_llumnix_best_effort_requests_hold_no_more_than_the_headroom_leaves() -> None:
    bench = Bench("llumnix", device_blocks=40, host_blocks=100, headroom_fraction=0.8)
    for i in range(8):
        bench.add(f"be{i}", prompt=9, output=12)
    shared = beside_ls = 0
    for number, _ in enumerate(bench.steps_until(lambda: {f"be{i}" for i in range(8)} <= bench.finished)):
        if number % 10 == 0:
            bench.add(f"ls{number}", prompt=30, output=10)
        on_device = [s.request_id for s in bench.requests.device["BE"]]
        moving = [state.request_id for state, _ in bench.requests.moves.under_way.values()]
        held = sum(bench.kv.num_held(request_id, Tier.DEVICE) for request_id in (*on_device, *moving))
        assert held <= 8 or len(on_device) <= 1
        shared += len(on_device) > 1
        beside_ls += bool(on_device) and len(bench.requests.device["LS"]) > 0
    assert shared > 3 and beside_ls > 3
    assert bench.scheduler.stats().host_output_tokens > 0 and bench.requests.counters["preemptions"] == 0


def test_llumnix_the_headroom_is_used_up_by_ls_requests_and_what_it_leaves_is_not() -> None:
    """A reserve is to stay free, so LS requests that hold much of the memory keep BE ones out; a headroom is not."""
    admitted = {}
    for name, options in {"reserve": {"ls_reserve_blocks": 10}, "headroom": {"headroom_fraction": 0.5}}.items():
        bench = Bench("llumnix", device_blocks=20, **options)
        bench.add("ls", prompt=35)  # nine blocks
        bench.step()
        for i in range(4):
            bench.add(f"be{i}", prompt=11)  # three blocks
        admitted[name] = names(bench.step()[0])
    assert admitted == {"reserve": ["ls"], "headroom": ["ls", "be0", "be1", "be2"]}


def test_llumnix_a_best_effort_request_that_is_larger_than_its_share_runs_when_it_has_no_other_beside_it() -> None:
    bench = Bench("llumnix", device_blocks=40, host_blocks=100, headroom_fraction=0.8)
    bench.add("ls", output=80)
    bench.add("be0", prompt=9, output=100)
    bench.add("be1", prompt=60, output=5)
    bench.run_until(lambda: "be1" in bench.finished)
    assert bench.finished == {"be1"} and bench.requests.counters["preemptions"] == 0


def test_llumnix_decodes_make_room_for_a_best_effort_prompt_on_the_host_the_youngest_first() -> None:
    bench = Bench("llumnix", device_blocks=16, host_blocks=64, ls_reserve_blocks=2)
    for i in range(3):
        bench.add(f"be{i}", prompt=11, output=200)
    for _ in range(3):
        bench.step()
    assert sorted(bench.requests.states) == sorted(names(bench.step()[0])), "memory is not short"
    bench.add("be3", prompt=11, output=200)
    moved = [move.request_id for _ in range(4) for move in bench.step()[0].side_work(KVMove)]
    assert moved[0] == "be2" and "be3" in {s.request_id for s in bench.requests.device["BE"]}
