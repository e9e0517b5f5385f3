"""Tests of ``omniserve`` with a forecast: bounds, admission, classes, offload and swap-in, on a virtual clock."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniserve.core.errors import RequestRejected
from omniserve.core.plan import Bound
from omniserve.core.request import SLO, ClassSpec, ServiceClass
from omniserve.kv import Tier
from omniserve.sched.step_cost import largest
from omniserve.sched.ttft import steps_until_room
from tests.sched.benches import Clock
from tests.sched.predictor import LinearPredictor

LS, BE = ServiceClass.LS, ServiceClass.BE


@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=60), st.floats(0.0, 200.0))
def test_the_largest_count_within_a_bound(increments: list[float], bound: float) -> None:
    seconds = [sum(increments[: i + 1]) for i in range(len(increments))]
    found = largest(lambda n: seconds[n - 1], len(seconds), bound)
    best = sum(s <= bound for s in seconds)
    assert found <= best
    if found < best:  # only if what was found fills the bound to 98 %
        assert found and seconds[found - 1] >= 0.98 * bound


@pytest.mark.parametrize("kv", ["paged", "tiered", "incremental", "bidirectional"])
def test_best_effort_work_fills_the_step_up_to_the_shortest_tpot(kv: str) -> None:
    bench = Clock(kv=kv)
    bench.add("ls1", output=50, tpot=0.040)
    bench.add("ls2", output=50, tpot=0.100)
    bench.step()
    bench.add("be", prompt=300)
    plan = bench.step()
    assert plan.decision is not None and plan.decision.bound_by == "tpot of ls1"
    assert plan.decision.bound_s == pytest.approx(0.036)
    # 5 ms and 1 ms a row, a few for attention: about 30 rows of the prompt fit.
    assert 24 <= bench.tokens(plan)["BE"] <= 31
    assert 0.95 * 0.036 <= (plan.decision.predicted_s or 0) <= 0.036


def test_a_long_ls_prompt_is_cut_under_the_tpot_of_those_that_decode() -> None:
    bench = Clock(slack="step")
    bench.add("ls1", output=50, tpot=0.040)
    bench.step()
    bench.add("ls2", prompt=200, output=2)
    sizes = [bench.tokens(plan)["LS"] - 1 for plan in bench.run_until(lambda: "ls2" in bench.first_s)]
    assert sum(sizes) == 200 and max(sizes) <= 33 and len(sizes) >= 6
    gaps = [b - a for a, b in zip(bench.token_s["ls1"], bench.token_s["ls1"][1:], strict=False)]
    assert max(gaps) <= 0.040


def test_an_ls_prompt_goes_on_although_decoding_alone_is_over_the_bound() -> None:
    bench = Clock(predict={"base": 50.0})
    bench.add("ls1", output=50, tpot=0.040)
    bench.step()
    bench.add("ls2", prompt=100, output=2)
    assert bench.tokens(bench.step())["LS"] == 1 + 16


def test_best_effort_work_leaves_a_prompt_the_time_to_its_first_token() -> None:
    bench = Clock(max_num_batched_tokens=512)
    bench.add("be", prompt=900)
    bench.add("ls", prompt=100, ttft=0.5, waited=0.18)
    plan = bench.step()
    assert plan.decision is not None and plan.decision.bound_by == "ttft of ls"
    assert bench.tokens(plan)["LS"] == 100 and bench.tokens(plan)["BE"] > 30
    assert bench.first_s["ls"] <= 0.32


def test_without_ls_work_a_step_leaves_room_for_a_newcomer() -> None:
    bench = Clock(classes=(ClassSpec(name="LS", kind=LS, slo=SLO(ttft_s=0.4)), ClassSpec(name="BE", kind=BE)))
    bench.add("be", prompt=900)
    plan = bench.step()
    assert plan.decision is not None and plan.decision.bound_by == "ttft of a new request"
    assert plan.decision.bound_s == pytest.approx(0.16)  # half of 80 %: nobody has come yet
    bench.add("ls", prompt=100, output=1, ttft=0.4, waited=bench.now_s)
    bench.run_until(lambda: "ls" in bench.finished)
    assert bench.first_s["ls"] <= 0.4
    plan = bench.step()
    assert plan.decision is not None
    assert plan.decision.bound_s == pytest.approx(0.32 - 0.155, abs=0.005)  # now prompts of 100 tokens are known
    assert bench.forecast is not None and isinstance(bench.forecast.predictor, LinearPredictor)
    bench.forecast.predictor.slowdown = 1.5  # the machine's pace
    plan = bench.step()
    assert plan.decision is not None
    assert plan.decision.bound_s == pytest.approx(0.32 - 1.5 * 0.155, abs=0.005)


def test_a_newcomer_is_like_those_of_the_last_minute() -> None:
    bench = Clock()

    def bound_after(*, num: int, ttft: float) -> float:
        """Return how long a step without LS work may be after so many LS requests of an objective."""
        for _ in range(num):
            name = f"ls{len(bench.finished)}"
            bench.add(name, prompt=20, output=1, ttft=ttft)
            bench.run_until(lambda name=name: name in bench.finished)  # type: ignore[misc]
        name = f"be{len(bench.finished)}"
        bench.add(name, prompt=100, output=1)
        decision = bench.step().decision
        assert decision is not None and decision.bound_by == "ttft of a new request"
        bench.run_until(lambda: name in bench.finished)
        return decision.bound_s

    tight = bound_after(num=20, ttft=0.4)
    assert tight < 0.4
    assert bound_after(num=20, ttft=4.0) == pytest.approx(tight), "they came a moment ago"
    bench.now_s += 61
    assert bound_after(num=1, ttft=4.0) > 2, "the tight ones are forgotten"
    assert bound_after(num=1, ttft=0.4) == pytest.approx(tight)
    bench.now_s += 61
    assert bound_after(num=7, ttft=4.0) == pytest.approx(tight), "the last eight count however long ago they came"
    assert bound_after(num=1, ttft=4.0) > 2


def test_an_idle_machine_works_whatever_the_bound() -> None:
    tight = (ClassSpec(name="LS", kind=LS, slo=SLO(ttft_s=0.001)), ClassSpec(name="BE", kind=BE))
    bench = Clock(classes=tight, host_blocks=100)
    bench.add("be", prompt=100, output=5)
    for _ in range(40):
        bench.step()
    assert "be" not in bench.requests.states


@pytest.mark.parametrize(("order", "decodes"), [("decode", True), ("prefill", False)])
def test_more_prompts_than_time_do_not_keep_decodes_out(order: str, decodes: bool) -> None:
    bench = Clock(be_order=order)
    bench.add("ls", output=500, tpot=0.03)
    bench.add("be0", prompt=8, output=500)
    for _ in range(5):
        bench.step()
    for i in range(1, 40):
        bench.add(f"be{i}", prompt=200)
    before = len(bench.token_s["be0"])
    for _ in range(20):
        bench.step()
    assert (len(bench.token_s["be0"]) - before == 20) is decodes


def test_best_effort_requests_all_finish_while_ls_leaves_slack() -> None:
    bench = Clock(device_blocks=60, host_blocks=200, max_piggyback_seats=4)
    for i in range(12):
        bench.add(f"be{i}", prompt=30, output=20)
    for i in range(400):
        if i % 10 == 0:
            bench.add(f"ls{i}", prompt=10, output=8, tpot=0.030, ttft=0.5)
        bench.step()
    assert not any(name.startswith("be") for name in bench.requests.states)
    assert bench.scheduler.stats().host_output_tokens > 0


def test_a_prompt_that_would_miss_its_ttft_is_rejected_at_once_and_told_when_to_come_again() -> None:
    bench = Clock()
    for i in range(5):
        assert bench.add(f"ls{i}", prompt=100, ttft=2.0) is not None
    with pytest.raises(RequestRejected) as caught:
        bench.add("ls9", prompt=100, ttft=0.5)
    error = caught.value
    assert error.predicted_ttft_s == pytest.approx(0.92, abs=0.03) and error.required_ttft_s == 0.5
    assert error.retry_after_s == pytest.approx(error.predicted_ttft_s - 0.8 * 0.5)
    assert "ls9" not in bench.requests.states and bench.scheduler.stats().rejected == {"LS": 1, "BE": 0}
    until_s = bench.now_s + error.retry_after_s
    bench.run_until(lambda: bench.now_s >= until_s)
    bench.add("ls9", prompt=100, ttft=0.5)


@pytest.mark.parametrize("slower", [1.0, 1.3])
def test_the_admission_margin_learns_what_predictions_are_worth(slower: float) -> None:
    bench, rng = Clock(slower=slower), random.Random(1)
    required_s, arrives_s, sent_s, number = 0.5, 0.0, {}, 0
    while number < 1000:
        while arrives_s <= bench.now_s:
            name, number = f"ls{number}", number + 1
            try:
                bench.add(name, prompt=rng.randint(20, 120), output=5, ttft=required_s, waited=bench.now_s - arrives_s)
            except RequestRejected:
                pass
            else:
                sent_s[name] = arrives_s
            arrives_s += rng.expovariate(25.0)  # about twice what can be done
        if bench.scheduler.has_unfinished:
            bench.step()
        else:
            bench.now_s = arrives_s
    met = [bench.first_s[name] - at_s <= required_s for name, at_s in sent_s.items() if name in bench.first_s]
    assert len(met) < 700 and sum(met) / len(met) >= 0.94


def test_a_prompt_that_can_never_be_in_time_is_told_so() -> None:
    with pytest.raises(RequestRejected, match="500 prompt tokens alone take") as caught:
        Clock().add("ls", prompt=500, ttft=0.1)
    assert caught.value.retry_after_s is None


def test_waiting_for_the_engine_counts_against_the_objective() -> None:
    for waited, is_admitted in ((0.0, True), (0.2, False)):
        bench = Clock()
        bench.add("ls1", prompt=50, ttft=5.0)
        if is_admitted:
            bench.add("ls2", prompt=50, ttft=0.3, waited=waited)
        else:
            with pytest.raises(RequestRejected):
                bench.add("ls2", prompt=50, ttft=0.3, waited=waited)


@pytest.mark.parametrize("tpot", [None, 0.3])
def test_rows_that_score_the_prompt_count_for_its_first_token(tpot: float | None) -> None:
    plain, scoring, behind = (Clock(predict={"sample": 2.0}, max_num_batched_tokens=128) for _ in range(3))
    for bench in (plain, scoring, behind):
        if tpot is not None:
            bench.add("ls0", output=300, tpot=tpot)
            bench.step()
    assert (fast := plain.add("ls", prompt=100, ttft=5.0)) is not None
    assert (slow := scoring.add("ls", prompt=100, ttft=5.0, scores_prompt=True)) is not None
    assert slow - fast > 0.19, "99 rows of 2 ms"
    began_s = scoring.now_s
    scoring.run_until(lambda: "ls" in scoring.first_s)
    assert scoring.first_s["ls"] - began_s == pytest.approx(slow, rel=0.1)
    behind.add("ls", prompt=100, ttft=5.0, scores_prompt=True)
    later = behind.add("ls2", prompt=10, ttft=5.0)
    assert later is not None and later > slow
    with pytest.raises(RequestRejected):
        Clock(predict={"sample": 2.0}).add("ls", prompt=100, ttft=0.25, scores_prompt=True)
    Clock(predict={"sample": 2.0}).add("ls", prompt=100, ttft=0.25)


def test_nobody_is_rejected_without_admission_control_and_best_effort_never_is() -> None:
    bench = Clock(admission=False)
    for i in range(20):
        bench.add(f"ls{i}", prompt=100, ttft=0.2)
    Clock().add("be", prompt=900, ttft=0.001)


@pytest.mark.parametrize("tpot", [None, 0.04])
def test_predicted_ttft_is_what_happens(tpot: float | None) -> None:
    for count in range(1, 6):
        bench = Clock(max_num_batched_tokens=128)
        if tpot is not None:
            bench.add("ls0", output=300, tpot=tpot)
            bench.step()
        arrived_s = bench.now_s
        predicted = [bench.add(f"ls{i}", prompt=70 * i, output=1, ttft=10.0) for i in range(1, count + 1)]
        bench.run_until(lambda bench=bench, last=f"ls{count}": last in bench.first_s)
        # Of the last one: those before it share their steps with prompts that the prediction could not know of.
        assert bench.first_s[f"ls{count}"] - arrived_s == pytest.approx(predicted[-1], rel=0.15)


def test_memory_that_ls_requests_hold_is_waited_for_in_the_prediction() -> None:
    bench = Clock(device_blocks=20)
    bench.add("ls1", prompt=40, output=30)
    bench.step()
    with pytest.raises(RequestRejected):
        bench.add("ls2", prompt=60, ttft=0.2)
    bench.add("ls3", prompt=60, ttft=0.5)


def test_those_who_wait_for_memory_wait_for_one_another() -> None:
    # Each ends after 10 and then 20 steps; memory is for two at a time.
    assert steps_until_room([(10, 4), (20, 4)], [], num_needed=4, num_free=4) == 0
    assert steps_until_room([(10, 4), (20, 4)], [], num_needed=4, num_free=3) == 10
    assert steps_until_room([(10, 4), (20, 4)], [(30, 4)], num_needed=4, num_free=0) == 20
    assert steps_until_room([(10, 4), (20, 4)], [(30, 4), (30, 4)], num_needed=4, num_free=0) == 40
    assert steps_until_room([(10, 4), (20, 4)], [(30, 4)], num_needed=5, num_free=0) == 40


def test_who_finds_memory_and_nobody_waiting_begins_at_once() -> None:
    bench = Clock(device_blocks=40)
    for i in range(3):  # together they come to need three times the memory
        predicted_s = bench.add(f"ls{i}", prompt=20, output=120, ttft=0.5)
        assert predicted_s is not None and predicted_s < 0.1
    bench.step()
    assert {"ls0", "ls1", "ls2"} <= bench.first_s.keys()


def test_outputs_that_end_before_their_time_are_not_waited_for() -> None:
    bench = Clock(device_blocks=40)
    for i in range(60):  # the server aborts at a stop string
        bench.add(f"ls{i}", prompt=8, output=100)
        for _ in range(4):
            bench.step()
        bench.scheduler.abort(f"ls{i}", bench.now_s)
        bench.add(f"ls-left-{i}", prompt=8, output=100)
        bench.scheduler.abort(f"ls-left-{i}", bench.now_s)  # before its first token: that says nothing
    for i in range(60, 64):
        bench.add(f"ls{i}", prompt=36, output=100)
    bench.step()
    assert bench.kv.num_free(Tier.DEVICE) < 9
    predicted_s = bench.add("ls99", prompt=36, output=100, ttft=1.0)
    assert predicted_s is not None and 0.1 < predicted_s < 0.3, "some steps, not a hundred"


@pytest.mark.parametrize("has_best_effort", [False, True])
def test_where_memory_is_short_those_that_are_admitted_keep_their_ttft(has_best_effort: bool) -> None:
    # Memory holds four requests at a time, of 31 steps each: a fifth of what comes.
    bench, rng = Clock(device_blocks=64, policy="omniserve"), random.Random(3)
    required_s, arrives_s, sent_s, number = 0.5, 0.0, {}, 0
    while number < 600:
        while arrives_s <= bench.now_s:
            name, number = f"ls{number}", number + 1
            try:
                bench.add(name, prompt=30, output=30, ttft=required_s, tpot=0.1, waited=bench.now_s - arrives_s)
            except RequestRejected:
                pass
            else:
                sent_s[name] = arrives_s
            arrives_s += rng.expovariate(80.0)
        if has_best_effort and bench.scheduler.stats().waiting["BE"] < 2:
            bench.add(f"be{number}", prompt=100, output=20)
        bench.step()
    kept = [  # of those that had their first token, and those that should have had it
        bench.first_s.get(name, bench.now_s) - arrived_s <= required_s
        for name, arrived_s in sent_s.items()
        if name in bench.first_s or bench.now_s - arrived_s > required_s
    ]
    assert len(kept) > 40 and sum(kept) >= 0.9 * len(kept), (len(sent_s), len(kept), sum(kept))


def test_a_request_ahead_of_its_schedule_lends_its_lead() -> None:
    chunks = {}
    for slack in ("step", "deadline"):
        bench = Clock(slack=slack)
        bench.add("ls", output=50, tpot=0.040)
        for _ in range(6):
            bench.step()  # 6 ms each: about 0.17 s ahead
        bench.add("be", prompt=400)
        chunks[slack] = bench.tokens(bench.step())["BE"]
        bench.run_until(lambda bench=bench: len(bench.token_s["ls"]) == 50)
        times = bench.token_s["ls"]
        assert (times[-1] - times[0]) / 49 <= 0.040
    assert chunks["deadline"] > 2 * chunks["step"]


def test_best_effort_work_lets_decodes_run_ahead_so_that_a_prompt_fits_into_one_step() -> None:
    bench = Clock()
    bench.add("be", prompt=900)
    bench.add("ls1", output=60, tpot=0.040)
    for _ in range(30):
        bench.step()
    assert 24 <= len(bench.token_s["ls1"]) <= 30
    bench.add("ls2", prompt=50, output=2)
    assert bench.tokens(bench.step())["LS"] == 51
    bench.run_until(lambda: len(bench.token_s["ls1"]) == 60)
    times = bench.token_s["ls1"]
    assert (times[-1] - times[0]) / 59 <= 0.040


def test_classes_are_a_list_of_priorities() -> None:
    classes = (
        ClassSpec(name="GOLD", kind=LS), ClassSpec(name="LS", kind=LS), ClassSpec(name="BE", kind=BE),
        ClassSpec(name="DUST", kind=BE),
    )  # fmt: skip
    bench = Clock(classes=classes, max_num_batched_tokens=10, device_blocks=30)
    for name in ("dust1", "be1", "ls1", "gold1"):
        bench.add(name, prompt=20, output=4)
    order: list[str] = []
    for _ in range(60):
        for chunk in bench.step().chunks:
            if chunk.request_id not in order:
                order.append(chunk.request_id)
    assert order == ["gold1", "ls1", "be1", "dust1"]
    assert bench.scheduler.stats().output_tokens == {"GOLD": 4, "LS": 4, "BE": 4, "DUST": 4}


def test_decodes_that_the_bound_keeps_out_go_to_a_host_tier_with_cores_of_its_own() -> None:
    for shared, asked_for, moves in ((1.0, True, True), (2.0, True, False), (1.0, False, False)):
        bench = Clock(
            host_blocks=400, predict={"base": 1.0, "key": 0.2, "shared": shared}, swap_in_delay_s=0.05,
            offload_for_time=asked_for,
        )  # fmt: skip
        for i in range(6):
            bench.add(f"be{i}", prompt=60, output=300)
        for _ in range(10):
            bench.step()
        bench.add("ls", prompt=8, output=500, tpot=0.030)
        for _ in range(40):
            plan = bench.step()
        assert bool(bench.moves) is moves
        if not moves:
            assert plan.decision is not None
            assert any(out.work == "BE decode" and out.bound is Bound.TIME for out in plan.decision.left_out)


def test_a_square_wave_of_ls_load_moves_nobody_more_than_once_a_period() -> None:
    period_s = 5.0
    bench = Clock(
        device_blocks=160,
        host_blocks=800,
        num_host_slots=16,
        ls_reserve_blocks=4,
        max_num_batched_tokens=256,
        admission=False,
    )
    for i in range(8):
        bench.add(f"be{i}", prompt=40, output=900)
    wave = 0
    while bench.now_s < 5 * period_s:
        phase = bench.now_s % period_s
        running = sum(name.startswith("ls") for name in bench.requests.states)
        if phase < period_s / 2 and running < 6:
            wave += 1
            bench.add(f"ls{wave}", prompt=80, output=40, tpot=0.1)
        bench.step()
    moves = Counter((name, int(at_s // period_s)) for at_s, name in bench.moves)
    assert len({name for name, _ in moves}) >= 4, "the wave never took memory from anybody"
    assert max(moves.values()) == 1, moves
