"""``omniserve-paper``: what the paper says, where ``omniserve`` does otherwise."""

from __future__ import annotations

import pytest

from omniserve.core.errors import RequestRejected
from omniserve.core.work import KVMove, MoveDirection
from tests.sched.benches import Clock

POLICY = "omniserve-paper"


def test_best_effort_prompts_come_before_decodes_and_fill_the_step_up_to_the_objective_itself() -> None:
    bench = Clock(policy=POLICY)
    bench.add("be-old", prompt=4, output=500)
    bench.run_until(lambda: bench.token_s["be-old"])
    bench.add("ls", prompt=4, output=500, tpot=0.040)
    bench.run_until(lambda: bench.token_s["ls"])
    bench.add("be-new", prompt=900)
    for _ in range(10):
        plan = bench.step()
        assert plan.decision is not None and plan.decision.bound_by == "tpot of ls"
        assert plan.decision.bound_s == 0.040, "none of it is kept back, or lent by tokens that came early"
        assert 0.95 * 0.040 <= (plan.decision.predicted_s or 0.0) <= 0.040
        assert [chunk.request_id for chunk in plan.chunks][:2] == ["ls", "be-new"]
        assert bench.tokens(plan)["BE"] > 10


def test_no_time_is_kept_for_a_request_that_may_come() -> None:
    bench = Clock(policy=POLICY, max_num_batched_tokens=256)
    bench.add("ls", prompt=4, output=1, ttft=0.02)
    bench.run_until(lambda: "ls" in bench.finished)
    bench.add("be", prompt=900)
    assert bench.tokens(bench.step())["BE"] == 256


def test_a_first_token_is_predicted_by_one_step_with_all_prompts() -> None:
    bench = Clock(policy=POLICY, predict={"key": 0.0, "sample": 0.0})
    for i in range(3):  # 5 ms and 1 ms a row
        assert bench.add(f"ls{i}", prompt=100, ttft=2.0) == pytest.approx(0.005 + 0.1 * (i + 1))
    with pytest.raises(RequestRejected) as caught:
        bench.add("ls9", prompt=100, ttft=0.4)
    assert caught.value.predicted_ttft_s == pytest.approx(0.405)
    without = Clock(policy=POLICY, predict={"key": 0.0, "sample": 0.0}, admission=False)
    assert without.add("ls", prompt=100, ttft=0.01) == pytest.approx(0.105)


@pytest.mark.parametrize(("shared", "moves"), [(1.0, 5), (2.0, 0)])
def test_all_decodes_without_time_go_to_a_host_tier_with_cores_of_its_own_at_once(shared: float, moves: int) -> None:
    bench = Clock(
        policy=POLICY, host_blocks=400, predict={"base": 1.0, "key": 0.2, "sample": 0.0, "shared": shared},
    )  # fmt: skip
    for i in range(6):
        bench.add(f"be{i}", prompt=60, output=300)
    bench.run_until(lambda: all(bench.token_s[f"be{i}"] for i in range(6)))
    bench.add("ls", prompt=4, output=500, tpot=0.030)
    plan = bench.step()  # the prompt takes 6 ms, a decode 1 ms and 12 to 14 for its keys: one fits
    assert [move.direction for move in plan.side_work(KVMove)] == moves * [MoveDirection.TO_HOST]


def test_rows_of_all_layers_are_admitted_from_the_lowest_up_in_as_many_seats_as_the_fullest_needs() -> None:
    bench = Clock(
        policy=POLICY, device_blocks=12, host_blocks=400, num_layers=3, num_host_slots=8, max_piggyback_seats=2,
        predict={"key": 0.0, "sample": 0.0, "base": 1.0}, swap_in_delay_s=1e9,
    )  # fmt: skip
    for i in range(8):
        bench.add(f"be{i}", prompt=8, output=200)
    joins = [plan for plan in bench.run_until(lambda: bench.scheduler.stats().host_output_tokens > 60) if plan.joins]
    assert any(len({join.layer for join in plan.joins}) == 3 for plan in joins)
    for plan in joins:
        per_layer = [sum(join.layer == layer for join in plan.joins) for layer in range(3)]
        assert plan.num_piggyback_seats >= max(*per_layer, len(plan.entries))
        assert [join.layer for join in plan.joins] == sorted(join.layer for join in plan.joins)
