"""``neo-paper``: decodes of LS and BE requests attend on the host tier, under the objectives of LS requests."""

from __future__ import annotations

from typing import Any

import pytest

from omniserve.core.errors import RequestRejected
from omniserve.core.plan import StepPlan
from omniserve.core.work import KVMove, MoveDirection, TierDown
from omniserve.sched import SCHEDULERS
from omniserve.sched.state import Phase
from omniserve.sched.step_cost import LS_HEADROOM
from tests.sched.benches import Bench, Clock, names
from tests.sched.fake_device import expected_tokens

POLICY = "neo-paper"


def on_host(plan: StepPlan) -> list[str]:
    return [row.request_id for row in plan.pipelined]


def clock(**settings: Any) -> Clock:
    """Return a bench whose host attends for nothing, or for what ``predict`` says."""
    return Clock(policy=POLICY, host_blocks=400, num_host_slots=64, **settings)


def with_residents(bench: Clock, *requests: str, output: int = 500, **objectives: Any) -> Clock:
    """Add requests, and run until all of them decode on the host tier."""
    for name in requests:
        bench.add(name, prompt=7, output=output, **objectives if name.startswith("ls") else {})
    states = bench.requests.states
    bench.run_until(lambda: all(states[name].phase is Phase.HOST for name in requests))
    return bench


# -- where requests decode ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ls", "be"])
def test_a_request_decodes_on_the_host_from_its_second_token_on(kind: str) -> None:
    bench = Bench(POLICY, device_blocks=40, host_blocks=40)
    bench.add(kind, prompt=10, output=6)
    plans, tokens, num_host_tokens = [], list[int](), 0
    for plan, outputs in bench.steps_until(lambda: kind in bench.finished):
        plans.append(plan)
        tokens += [token for output in outputs for token in output.new_token_ids]
        num_host_tokens = max([num_host_tokens, *(output.num_host_tokens for output in outputs)])
    assert [names(plan) for plan in plans] == [[kind], *([[]] * (len(plans) - 1))]
    assert [move.direction for plan in plans for move in plan.side_work(KVMove)] == [MoveDirection.TO_HOST]
    assert [len(on_host(plan)) for plan in plans] == [0, 0, 1, 1, 1, 1, 1], (
        "a step for the prompt, and one for the move"
    )
    assert tokens == expected_tokens((7,) * 10, 6) and num_host_tokens == 5


def test_only_this_policy_sends_ls_requests_to_the_host() -> None:
    assert [name for name in SCHEDULERS.names() if SCHEDULERS.get(name).offloads_ls] == [POLICY]
    bench = Bench("neo", device_blocks=40, host_blocks=40)
    bench.add("ls", prompt=10, output=6)
    bench.step()
    bench.step()
    with pytest.raises(AssertionError, match="set its offloads_ls to True"):
        bench.requests.moves.start(bench.requests.states["ls"], MoveDirection.TO_HOST)


def test_all_ls_residents_are_in_each_step_and_be_ones_as_seats_are_left() -> None:
    bench = Bench(POLICY, device_blocks=60, host_blocks=60, max_num_seqs=3, max_piggyback_seats=1)
    for name in ("be0", "be1", "ls0", "ls1"):
        bench.add(name, prompt=7, output=40)
    residents = bench.requests.residents.queue
    bench.run_until(lambda: len(residents) == 4)
    assert on_host(bench.step()[0]) == ["ls0", "ls1", "be0"]


def test_no_request_comes_back_however_light_the_load_is() -> None:
    bench = with_residents(clock(), "ls", "be")
    plans = [bench.step() for _ in range(600)]
    assert bench.finished == {"ls", "be"}
    assert not any(plan.side_work(KVMove) for plan in plans)


def test_what_the_host_has_no_room_for_decodes_on_the_device() -> None:
    bench = Bench(POLICY, device_blocks=40, host_blocks=40, num_host_slots=1)
    for name in ("ls0", "ls1"):
        bench.add(name, prompt=7, output=12)
    bench.run_until(lambda: bench.requests.states["ls0"].phase is Phase.HOST)
    plan, _ = bench.step()
    assert (names(plan), on_host(plan)) == (["ls1"], ["ls0"])
    bench.run_until(lambda: len(bench.finished) == 2)


# -- a host tier that fails --------------------------------------------------------------------------------------------


def test_ls_requests_of_a_host_tier_that_fails_are_recomputed_on_the_device() -> None:
    bench = Bench(POLICY, device_blocks=60, host_blocks=60)
    tokens: dict[str, list[int]] = {"ls": [], "be": []}
    for name in tokens:
        bench.add(name, prompt=9, output=20)
    for number, (plan, outputs) in enumerate(bench.steps_until(lambda: len(bench.finished) == 2)):
        for output in outputs:
            tokens[output.request_id] += output.new_token_ids
        if number == 6:
            assert on_host(plan) == ["ls", "be"]
            bench.device.is_down = True
            bench.scheduler.notify([TierDown()])
            assert {state.phase for state in bench.requests.states.values()} == {Phase.WAITING}
        if number == 7:
            assert names(plan) == ["ls", "be"] and not plan.pipelined
    assert tokens == dict.fromkeys(tokens, expected_tokens((7,) * 9, 20))
    assert bench.requests.counters["preemptions"] == 2


def test_an_ls_row_whose_attention_fails_is_recomputed_and_goes_to_the_host_again() -> None:
    bench = Bench(POLICY, device_blocks=60, host_blocks=60)
    tokens: list[int] = []
    bench.add("ls", prompt=9, output=20)
    for number, (_, outputs) in enumerate(bench.steps_until(lambda: "ls" in bench.finished)):
        tokens += [token for output in outputs for token in output.new_token_ids]
        bench.device.failure_rate = 1.0 if number == 5 else 0.0
    assert tokens == expected_tokens((7,) * 9, 20)
    stats = bench.scheduler.stats()
    assert (stats.preemptions, stats.swaps_out) == (1, 2)
    assert stats.ls_host_output_tokens == stats.host_output_tokens > 0


# -- latency control ---------------------------------------------------------------------------------------------------


def test_be_work_keeps_the_tpot_less_what_the_move_costs() -> None:
    bench = with_residents(
        clock(predict={"base": 5.0, "key": 0.0, "sample": 0.0}), "ls", *(f"be{i}" for i in range(30))
    )
    assert len(on_host(bench.step())) == 31
    bench.add("ls-tight", prompt=4, output=500, tpot=0.020)
    bench.run_until(lambda: bench.requests.states["ls-tight"].phase is Phase.HOST)
    plan = bench.step()
    assert plan.decision is not None and plan.decision.bound_s == pytest.approx((1 - LS_HEADROOM) * 0.020)
    assert on_host(plan)[:2] == ["ls", "ls-tight"]
    assert len(on_host(plan)) == 14, "5 ms, and 1 ms a row: 19.4 ms"
    bench.add("be-prompt", prompt=100, output=2)
    plan = bench.step()
    assert plan.decision is not None and (plan.decision.predicted_s or 0.0) <= (plan.decision.bound_s or 0.0)
    assert set(on_host(plan)) >= {"ls", "ls-tight"}


def test_ls_rows_of_the_host_leave_ls_prompts_less_of_a_step() -> None:
    sizes = []
    for num_residents in (1, 10):
        residents = [f"ls{i}" for i in range(num_residents)]
        predict = {"base": 5.0, "key": 0.0, "sample": 0.0}
        bench = with_residents(clock(max_num_batched_tokens=512, predict=predict), *residents, tpot=0.1)
        bench.add("ls-new", prompt=400, tpot=0.1)
        plan = bench.step()
        assert set(on_host(plan)) == set(residents)
        sizes.append(bench.tokens(plan)["LS"])
    assert 89 <= sizes[0] <= 91 and 80 <= sizes[1] <= 82, "97 ms: 5 ms, and 1 ms for each row of either tier"


def test_admission_knows_how_slow_the_host_is() -> None:
    fast, slow = (
        with_residents(clock(predict={"wait": wait}), *(f"ls{i}" for i in range(20)), output=400)
        for wait in (0.0, 10.0)
    )
    predicted = [bench.add("ls-new", prompt=4, output=4) for bench in (fast, slow)]
    assert predicted[0] is not None and predicted[1] is not None
    assert predicted[1] - predicted[0] == pytest.approx(20 * 0.010, rel=0.1)
    fast.add("ls-hurried", prompt=4, ttft=0.15)
    with pytest.raises(RequestRejected):
        slow.add("ls-hurried", prompt=4, ttft=0.15)
    off = with_residents(clock(predict={"wait": 10.0}, admission=False), *(f"ls{i}" for i in range(20)), output=400)
    off.add("ls-hurried", prompt=4, ttft=0.15)


# -- the two sub-batches -----------------------------------------------------------------------------------------------


def test_half_of_the_rows_are_beside_prompts_and_none_without_them() -> None:
    for predict in ({}, None):
        bench = clock(predict=predict) if predict is not None else Bench(POLICY, device_blocks=99, host_blocks=99)
        for name in ("ls0", "ls1", "be0", "be1"):
            bench.add(name, prompt=7, output=90)
        residents = bench.requests.residents.queue
        bench.run_until(lambda residents=residents: len(residents) == 4)
        alone = bench.step()
        bench.add("ls-new", prompt=7, output=90)
        beside = bench.step()
        alone, beside = (step if isinstance(step, StepPlan) else step[0] for step in (alone, beside))
        assert len(on_host(alone)) == len(on_host(beside)) == 4
        assert not alone.hybrid and beside.hybrid == {"ls1", "be1"}


def test_rows_beside_prompts_that_would_make_the_step_longer_are_in_the_second_sub_batch() -> None:
    """A prompt that finds no memory is in no step, so that there is no first sub-batch."""
    bench = Bench(POLICY, device_blocks=4, host_blocks=99)
    bench.add("ls0", prompt=7, output=90)
    bench.run_until(lambda: bench.requests.states["ls0"].phase is Phase.HOST)
    bench.kv.allocate("other", 16)
    bench.add("ls-new", prompt=7)
    plan, _ = bench.step()
    assert on_host(plan) == ["ls0"] and not plan.chunks and not plan.hybrid
    bench.kv.free("other")
    assert names(bench.step()[0]) == ["ls-new"]
