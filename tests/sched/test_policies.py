"""Tests of each policy, step by step."""

from __future__ import annotations

import pytest

from omniserve.core.work import AttentionResult, KVMove, MoveDirection
from omniserve.sched.seats import seat_bucket
from tests.sched.benches import Bench, names


@pytest.mark.parametrize("policy", ["sarathi", "omniserve"])
def test_ls_comes_before_be_and_decode_before_prefill(policy: str) -> None:
    bench = Bench(policy, device_blocks=100, max_num_batched_tokens=8)
    bench.add("be-old", prompt=3)
    bench.add("ls-old", prompt=3)
    bench.step()
    bench.add("be-new", prompt=20)
    bench.add("ls-new", prompt=20)
    plan, _ = bench.step()
    assert names(plan) == ["ls-old", "ls-new"]
    assert [len(chunk.token_ids) for chunk in plan.chunks] == [1, 7]


@pytest.mark.parametrize("policy", ["sarathi", "omniserve"])
def test_an_ls_request_gets_a_token_every_step_under_any_be_load(policy: str) -> None:
    bench = Bench(policy, device_blocks=12, host_blocks=24, max_num_batched_tokens=16, ls_reserve_blocks=2)
    bench.add("ls", prompt=4, output=25)
    for i in range(12):
        bench.add(f"be{i}", prompt=5 + i % 7, output=20)
    emitted = [any(o.request_id == "ls" for o in bench.step(host_chance=0.2)[1]) for _ in range(25)]
    assert all(emitted)


@pytest.mark.parametrize("policy", ["sarathi", "omniserve"])
def test_an_ls_prompt_gets_memory_that_be_holds(policy: str) -> None:
    bench = Bench(policy, device_blocks=8)
    bench.add("be0", prompt=12)
    bench.add("be1", prompt=12)
    bench.step()
    bench.add("ls", prompt=16)
    plan, _ = bench.step()
    assert names(plan)[0] == "ls"
    assert bench.requests.counters["preemptions"] >= 1


def test_an_ls_prompt_waits_for_a_swap_out_only_as_long_as_it_is_patient() -> None:
    bench = Bench("omniserve", device_blocks=8, host_blocks=64)
    bench.add("be0", prompt=12)
    bench.add("be1", prompt=12)
    bench.step()
    bench.add("ls", prompt=16)
    plan, _ = bench.step(host_chance=0.0)
    assert "ls" not in names(plan) and plan.side_work(KVMove)
    for _ in range(4):
        plan, _ = bench.step(host_chance=0.0)
    assert "ls" in names(plan), "the copies never end, so BE had to be recomputed"


def test_fcfs_serves_in_arrival_order_whatever_the_class() -> None:
    bench = Bench("fcfs", device_blocks=100, max_num_batched_tokens=8)
    bench.add("be", prompt=20)
    bench.add("ls", prompt=4)
    assert names(bench.step()[0]) == ["be"]
    assert names(bench.step()[0]) == ["be"]
    assert names(bench.step()[0]) == ["be", "ls"]


def test_be_leaves_the_ls_reserve_free() -> None:
    bench = Bench("omniserve", device_blocks=10, ls_reserve_blocks=4)
    bench.add("be0", prompt=12)
    bench.add("be1", prompt=12)
    bench.add("be2", prompt=12)
    plan, _ = bench.step()
    assert names(plan) == ["be0", "be1"]
    assert bench.kv.usage().device_used <= 6


def test_be_decodes_that_find_no_memory_go_to_the_host_and_finish_there() -> None:
    bench = Bench("omniserve", device_blocks=8, host_blocks=64)
    for i in range(4):
        bench.add(f"be{i}", prompt=7, output=12)
    host_tokens: dict[str, int] = {}
    for _ in range(200):
        _, outputs = bench.step()
        host_tokens.update({o.request_id: o.num_host_tokens for o in outputs if o.finished})
        if not bench.scheduler.has_unfinished:
            break
    assert len(host_tokens) == 4 and sum(host_tokens.values()) > 0
    assert bench.requests.counters["preemptions"] == 0


def test_kv_comes_back_only_after_memory_was_light_for_a_while() -> None:
    bench = Bench("omniserve", device_blocks=16, host_blocks=64, swap_in_delay_s=0.1, min_residence_s=0.0)
    bench.add("ls", prompt=40, output=1)
    for i in range(2):
        bench.add(f"be{i}", prompt=12, output=300)
    for _ in range(5):
        bench.step()
    bench.add("ls-big", prompt=50, output=3)
    returned_after = None
    steps_of_light = 0
    for _ in range(60):
        plan, _ = bench.step()
        if bench.scheduler.stats().host_requests and "ls-big" not in bench.requests.states:
            steps_of_light += 1
        if any(move.direction is MoveDirection.TO_DEVICE for move in plan.side_work(KVMove)):
            returned_after = steps_of_light
            break
    assert bench.scheduler.stats().swaps_out >= 1
    assert returned_after is not None and returned_after >= 10


@pytest.mark.parametrize("policy", ["omniserve", "neo", "apex", "conserve", "bros"])
def test_kv_comes_back_only_where_the_request_limit_has_room(policy: str) -> None:
    bench = Bench(
        policy, device_blocks=40, host_blocks=64, max_num_seqs=2, checkpoint_blocks=8, swap_in_delay_s=0.02,
        min_residence_s=0.0,
    )  # fmt: skip
    for i in range(2):
        bench.add(f"be{i}", prompt=7, output=60)
    for _ in range(3):
        bench.step()
    bench.add("ls-large", prompt=150, output=4)
    bench.step()
    bench.add("ls-small", prompt=7, output=40)
    for i in range(2, 4):
        bench.add(f"be{i}", prompt=7, output=60)
    num_full = 0
    for _ in range(200):
        bench.step()
        requests = bench.requests
        returning = sum(move.direction is MoveDirection.TO_DEVICE for _, move in requests.moves.under_way.values())
        num_holding = sum(map(len, requests.device.values())) + returning
        assert num_holding <= 2
        num_full += num_holding == 2 and len(requests.residents.queue) > 0
    assert num_full > 5, "nobody was kept from coming back"
    assert len(bench.finished) == 6


def test_piggyback_rows_are_admitted_lowest_layer_first() -> None:
    bench = Bench("omniserve", device_blocks=8, host_blocks=64, max_piggyback_rows=1)
    for i in range(4):
        bench.add(f"be{i}", prompt=7, output=40)
    num_choices = 0
    for _ in range(200):
        bench.scheduler.notify(bench.device.poll(0.5))
        away = [state.away for state in bench.requests.residents.queue]
        ready = [token.layer for token in away if token is not None and token.ready]
        plan, _ = bench.step(host_chance=0.0)
        assert len(plan.entries) + len(plan.joins) <= 1
        if plan.joins:
            assert plan.joins[0].layer == min(ready)
            num_choices += len(set(ready)) > 1
    assert num_choices > 0


def test_a_stale_result_is_dropped() -> None:
    bench = Bench("omniserve", device_blocks=8, host_blocks=64)
    for i in range(4):
        bench.add(f"be{i}", prompt=7, output=40)
    bench.run_until(lambda: bench.device.running)
    event = bench.device.running[0]
    stale = AttentionResult(slot=event.slot, epoch=event.epoch - 1, layer=event.layer, position=event.position)
    bench.scheduler.notify([stale])
    assert not any(state.away and state.away.ready for state in bench.requests.residents.queue)


def test_bucket_is_the_smallest_power_of_two_that_holds_the_rows() -> None:
    assert [seat_bucket(n, 32) for n in (0, 1, 2, 3, 9, 32)] == [0, 1, 2, 4, 16, 32]
    assert seat_bucket(20, 24) == 24


@pytest.mark.parametrize("policy", ["omniserve", "neo", "apex"])
@pytest.mark.parametrize("be_order", ["decode", "prefill"])
def test_a_best_effort_prompt_without_memory_sends_a_decode_to_the_host(policy: str, be_order: str) -> None:
    # Two decodes hold 9 of 13 blocks of 4 tokens, and find more when they need it; the third prompt needs 5 at once.
    bench = Bench(policy, device_blocks=13, host_blocks=64, be_order=be_order, min_residence_s=0.0)
    bench.add("be0", prompt=17, output=40)
    bench.add("be1", prompt=13, output=40)
    bench.run_until(lambda: all(state.decodes for state in bench.requests.states.values()))
    bench.add("be2", prompt=17, output=2)
    bench.run_until(lambda: bench.requests.states["be2"].num_computed_tokens > 0, most=4)
    assert bench.scheduler.stats().swaps_out == 1
    assert bench.requests.counters["preemptions"] == 0


def test_an_id_is_not_reused_while_a_copy_still_uses_its_blocks() -> None:
    """Regression: the new request went on with the old one's blocks, which were freed under it."""
    bench = Bench("omniserve", device_blocks=8, host_blocks=24)
    for i in range(4):
        bench.add(f"be{i}", prompt=6, output=20)
    while not bench.requests.moves.under_way:
        bench.step(host_chance=0.0)
    ((state, _),) = list(bench.requests.moves.under_way.values())[:1]
    bench.scheduler.abort(state.request_id, bench.now_s)
    with pytest.raises(ValueError, match="still uses; choose another"):
        bench.add(state.request_id)
    bench.step(host_chance=1.0)
    bench.add(state.request_id, output=8)
    bench.run_until(lambda: len(bench.finished) == 4)
