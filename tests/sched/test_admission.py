"""Admission control: refusals are for load, an idle engine admits, and what is learned decays (docs/admission.md)."""

from __future__ import annotations

import itertools
import random

import pytest

from omniserve.core.errors import RequestRejected
from omniserve.core.request import SLO, ClassSpec
from omniserve.sched.admission import FIRST_MARGIN, SLO_SCALE, AdmissionMargin, scaled_slo
from tests.quick import slow_except
from tests.sched.benches import Clock
from tests.sched.phases import CLASSES, DEFAULT_TTFT_S, History, PhasedMachine

LONG = 600  # tokens of a prompt that takes five times the default objective alone


def drain(machine: PhasedMachine) -> None:
    while machine.scheduler.has_unfinished:
        machine.step()


def add_long(bench: Clock | PhasedMachine, name: str = "ls-long", **settings: object) -> float | None:
    return bench.add(name, prompt=LONG, output=2, ttft=DEFAULT_TTFT_S, by_default=True, **settings)


# -- sizes --


def test_a_prompt_that_takes_longer_than_the_classs_objective_is_served_and_its_objective_scaled() -> None:
    bench = Clock()
    predicted_s = add_long(bench)
    slo = scaled_slo(bench.requests.states["ls-long"])
    assert (
        predicted_s is not None and slo is not None and slo.ttft_s == pytest.approx(SLO_SCALE * predicted_s, rel=0.05)
    )
    bench.run_until(lambda: "ls-long" in bench.first_s)
    assert bench.first_s["ls-long"] <= slo.ttft_s


def test_objectives_that_can_be_kept_or_are_the_requests_own_are_not_scaled() -> None:
    bench = Clock()
    bench.add("ls", prompt=60, ttft=DEFAULT_TTFT_S, by_default=True)
    bench.add("ls-own", prompt=60, ttft=5.0)
    assert [scaled_slo(bench.requests.states[name]) for name in ("ls", "ls-own")] == [None, None]


def test_best_effort_work_gets_no_time_of_a_request_that_is_late_in_any_case() -> None:
    bench = Clock(max_num_batched_tokens=64)
    bench.add("be", prompt=10, output=900)
    bench.step()
    add_long(bench)
    while "ls-long" not in bench.first_s:
        plan = bench.step()
        assert all(chunk.request_id == "ls-long" for chunk in plan.chunks)


def test_a_long_prompt_holds_up_no_short_one_and_is_not_held_up_for_ever() -> None:
    bench = Clock(classes=CLASSES)
    add_long(bench)
    bench.step()
    sent_s, number = {}, 0
    while "ls-long" not in bench.first_s:  # short ones that take half of all time
        if number * 0.05 <= bench.now_s:
            name, number = f"ls{number}", number + 1
            sent_s[name] = bench.now_s
            bench.add(name, prompt=20, output=1, ttft=DEFAULT_TTFT_S, by_default=True)
        bench.step()
    assert max(bench.first_s[name] - at_s for name, at_s in sent_s.items() if name in bench.first_s) <= DEFAULT_TTFT_S
    slo = scaled_slo(bench.requests.states["ls-long"])
    assert len(sent_s) > 10 and slo is not None and slo.ttft_s is not None and bench.first_s["ls-long"] <= slo.ttft_s


def test_a_tpot_that_no_decode_can_keep_is_scaled_too_so_that_prompts_go_on() -> None:
    bench = Clock(predict={"base": 200.0})
    bench.add("ls", prompt=4, output=300, ttft=2.0, tpot=0.1, by_default=True)
    slo = scaled_slo(bench.requests.states["ls"])
    assert slo is not None and slo.tpot_s == pytest.approx(SLO_SCALE * 0.201, rel=0.02)
    bench.run_until(lambda: "ls" in bench.first_s)
    bench.add("ls2", prompt=100, output=1, ttft=2.0, tpot=0.1, by_default=True)
    bench.run_until(lambda: "ls2" in bench.first_s, most=3)


def test_only_a_request_with_an_objective_of_its_own_is_refused_for_its_size_and_not_told_to_come_again() -> None:
    bench = Clock()
    with pytest.raises(RequestRejected, match="alone take") as caught:
        bench.add("ls-own", prompt=LONG, ttft=DEFAULT_TTFT_S)
    assert caught.value.retry_after_s is None
    add_long(bench)


def test_refusals_for_size_are_tried_again_and_again_more_rarely_while_they_prove_right() -> None:
    machine, admitted_s = PhasedMachine(), []
    while machine.now_s < 100:
        try:
            machine.add(f"ls{machine.now_s}", prompt=LONG, output=1, ttft=1.0)
        except RequestRejected:
            machine.now_s += 0.5
        else:
            admitted_s.append(machine.now_s)
            drain(machine)
    gaps = [later - earlier for earlier, later in itertools.pairwise(admitted_s)]
    assert 1.5 <= admitted_s[0] <= 2.5 and gaps == sorted(gaps) and gaps[0] > 3 and 4 <= len(admitted_s) <= 7


def test_a_profile_that_says_too_much_is_found_out_by_the_first_probe() -> None:
    machine, refused = PhasedMachine(profile_error=4.0), 0
    needed_s = 1.3 * machine.alone_s(LONG)
    for number in range(40):
        try:
            machine.add(f"ls{number}", prompt=LONG, output=1, ttft=needed_s)
        except RequestRejected:
            refused += 1
        drain(machine)
        machine.now_s += 0.5
    assert refused <= 12, "every second probe at least is in time, and lets in the next"


# -- load --


def test_who_is_refused_for_load_is_admitted_when_told() -> None:
    bench = Clock()
    for number in range(12):
        bench.add(f"ls{number}", prompt=60, output=1, ttft=5.0)
    with pytest.raises(RequestRejected, match="requests before it") as caught:
        bench.add("ls-late", prompt=60, ttft=DEFAULT_TTFT_S, by_default=True)
    retry_s = caught.value.retry_after_s
    assert retry_s is not None and retry_s > 0.1
    bench.run_until(lambda: bench.now_s >= retry_s)
    bench.add("ls-late", prompt=60, ttft=DEFAULT_TTFT_S, by_default=True)


def test_what_is_refused_and_runs_as_best_effort_makes_no_admitted_request_late() -> None:
    """``slo.otherwise: "flex"``: a server adds what was refused as best effort."""
    without, beside = (_admitted_and_late(serves_refused=serves) for serves in (False, True))
    assert without == beside and 20 < len(without[0]) < 100


def _admitted_and_late(*, serves_refused: bool) -> tuple[set[str], set[str]]:
    bench, rng = Clock(classes=CLASSES, max_num_batched_tokens=128, device_blocks=2000), random.Random(3)
    due_s: dict[str, float] = {}
    for number in range(120):
        prompt, output = rng.choice([20, 60, 100]), rng.randint(1, 10)
        try:
            bench.add(f"ls{number}", prompt=prompt, output=output, ttft=DEFAULT_TTFT_S, by_default=True)
        except RequestRejected:
            if serves_refused:
                bench.add(f"be{number}", prompt=prompt, output=output)
        else:
            due_s[f"ls{number}"] = bench.now_s + DEFAULT_TTFT_S
        for _ in range(rng.choice([0, 0, 0, 1])):
            bench.step()
    bench.run_until(lambda: not bench.scheduler.has_unfinished, most=5000)
    return set(due_s), {name for name, at_s in due_s.items() if bench.first_s[name] > at_s}


def test_a_coarse_profile_refuses_nothing_that_it_was_never_compared_with() -> None:
    machine = PhasedMachine(is_coarse=True, profile_error=10.0)
    for number, prompt in enumerate((4, 20, 60, 150, LONG) * 2):  # at once, on the first start
        machine.add(f"ls{number}", prompt=prompt, output=2, ttft=DEFAULT_TTFT_S, by_default=True)
    machine.add("ls-own", prompt=60, output=2, ttft=0.2)
    drain(machine)
    for _ in range(60):  # then it learns, and refuses for load as any other does
        machine.now_s += 0.01
        for number in range(4):
            try:
                machine.add(f"ls{machine.now_s}-{number}", prompt=60, output=2, ttft=DEFAULT_TTFT_S, by_default=True)
            except RequestRejected:
                return
        machine.step()
    pytest.fail("nothing was refused of ten times what can be done")


@pytest.mark.parametrize("settings", [{"device_blocks": 18}, {"max_num_seqs": 4}], ids=["memory", "places"])
def test_a_coarse_profile_refuses_for_load_although_steps_are_never_as_large_as_the_queue(
    settings: dict[str, int],
) -> None:
    machine = PhasedMachine(is_coarse=True, **settings)
    admitted = refused = 0
    while machine.now_s < 8.0:
        for number in range(4):
            try:
                machine.add(f"ls{machine.now_s}-{number}", prompt=16, output=4, ttft=DEFAULT_TTFT_S, by_default=True)
                admitted += 1
            except RequestRejected:
                refused += 1
        machine.step()
    assert refused > admitted
    in_time = sum(
        first_s - float(name[2:].split("-")[0]) <= DEFAULT_TTFT_S for name, first_s in machine.first_s.items()
    )
    assert in_time > 0.7 * admitted, (in_time, admitted, refused)


def test_what_slowed_steps_loses_its_say_within_two_seconds_without_steps() -> None:
    machine = PhasedMachine()
    machine.slower = 16.0
    for number in range(4):
        machine.add(f"ls{number}", prompt=20, output=8, ttft=10.0)
        drain(machine)
    assert machine.learning.pace > 8
    machine.slower, machine.now_s = 1.0, machine.now_s + 2.0
    machine.add("ls-first", prompt=4, output=1, ttft=2.0)
    assert machine.learning.pace < 1.05
    predicted_s = machine.add("ls-next", prompt=150, output=1, ttft=2 * machine.alone_s(154))
    assert predicted_s is not None and predicted_s < 1.7 * machine.alone_s(154), "it is behind another one, and let in"


def test_the_margin_returns_to_what_it_was() -> None:
    margin = AdmissionMargin()
    margin.at(0.0)
    for _ in range(20):
        margin.learn(predicted_s=0.4, actual_s=1.0, required_s=0.5)
    assert margin.share == 0.5
    margin.at(60.0)
    assert margin.share == pytest.approx((FIRST_MARGIN + 0.5) / 2)
    margin.at(600.0)
    assert margin.share == pytest.approx(FIRST_MARGIN, abs=1e-3)


# -- classes and places --


def gold_bench() -> Clock:
    classes = (
        ClassSpec(name="GOLD", kind="LS"), ClassSpec(name="LS", kind="LS"), ClassSpec(name="BE", kind="BE"),
    )  # fmt: skip
    return Clock(classes=classes, max_num_seqs=2)


def test_a_higher_class_goes_first_where_all_places_are_taken() -> None:
    bench = gold_bench()
    for name in ("ls1", "ls2"):
        bench.add(name, prompt=40, output=300, ttft=5.0)
    bench.run_until(lambda: {"ls1", "ls2"} <= bench.first_s.keys())
    predicted_s, sent_s = bench.add("gold", prompt=20, output=5, ttft=0.3), bench.now_s
    bench.run_until(lambda: "gold" in bench.first_s, most=5)
    assert predicted_s is not None and bench.first_s["gold"] - sent_s == pytest.approx(predicted_s, rel=0.5)
    bench.run_until(lambda: {"ls1", "ls2", "gold"} <= bench.finished)


def test_a_prediction_knows_that_a_prompt_of_a_lower_class_gives_its_place() -> None:
    bench = gold_bench()
    bench.add("gold", prompt=4, output=200, tpot=0.1)
    bench.run_until(lambda: "gold" in bench.first_s)
    bench.add("ls", prompt=1000, output=5, ttft=50.0)
    bench.step()
    predicted_s, sent_s = bench.add("gold2", prompt=20, output=5, ttft=0.3), bench.now_s
    bench.run_until(lambda: "gold2" in bench.first_s, most=5)
    assert predicted_s is not None and bench.first_s["gold2"] - sent_s == pytest.approx(predicted_s, rel=0.1)
    bench.run_until(lambda: {"ls", "gold", "gold2"} <= bench.finished)


def test_a_prediction_knows_that_places_are_taken() -> None:
    bench = gold_bench()
    for name in ("ls1", "ls2"):
        bench.add(name, prompt=20, output=200, ttft=5.0)
    bench.run_until(lambda: {"ls1", "ls2"} <= bench.first_s.keys())
    with pytest.raises(RequestRejected) as caught:
        bench.add("ls3", prompt=20, output=5, ttft=0.3)
    assert caught.value.predicted_ttft_s is not None and caught.value.predicted_ttft_s > 1.0


@pytest.mark.parametrize("max_num_seqs", [4, 16])
def test_a_prediction_knows_of_requests_that_other_stages_compute(max_num_seqs: int) -> None:
    bench = Clock(max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
    for number in range(3):
        bench.add(f"ls{number}", prompt=20, output=100, tpot=0.05)
    bench.run_until(lambda: len(bench.first_s) == 3)
    bench.add("ls-prompt", prompt=500, ttft=50.0)
    bench.step()
    scheduler, hidden = bench.scheduler, bench.requests.hidden
    predicted = scheduler.load(bench.now_s, 0).ttft_s
    hidden.update(bench.requests.states.values())
    assert scheduler.load(bench.now_s, 0).ttft_s == predicted
    hidden.clear()


# -- random histories --


def check_history(seed: int, *, is_coarse: bool) -> tuple[int, int, int, int]:
    """Run a history with and without admission control; return how many were served and in time with it, and without.

    A history in which the machine becomes fast again may end before the latency model knows it: what was refused
    until then cost something, and what it bought is not in the history. The sum over several histories shows it.
    """
    history = History.draw(random.Random(seed))
    machine, other = (PhasedMachine(is_coarse=is_coarse, admission=on) for on in (True, False))
    served, attained, refusals = machine.run(history)
    served_by_all, attained_by_all, none_refused = other.run(history)
    assert not none_refused
    # A refusal gives up a request that would come late, for others that then come in time. Where all come late in any
    # case, as the machine became slow, that brings nothing: a pause would have served them.
    reached, reached_by_all = served + attained, served_by_all + attained_by_all
    assert reached >= 0.4 * reached_by_all - 3, (seed, served, attained, served_by_all, attained_by_all)
    assert attained >= 0.9 * attained_by_all - 2, (seed, attained, attained_by_all)
    for arrival, error, is_idle in refusals:
        is_for_size = error.retry_after_s is None
        assert is_for_size or not is_idle, f"{arrival} was refused by an idle engine: {error}"
        assert not (is_for_size and arrival.by_default), f"{arrival} was refused for its size: {error}"
    machine.slower = 1.0
    drain(machine)
    machine.now_s += 2.0
    for prompt in (4, 60, 150, LONG):
        machine.add(f"ls-{prompt}", prompt=prompt, output=1, ttft=1.5 * machine.alone_s(prompt))
        drain(machine)
        machine.add(f"ls-default-{prompt}", prompt=prompt, output=1, ttft=DEFAULT_TTFT_S, by_default=True)
        drain(machine)
    return served, attained, served_by_all, attained_by_all


@pytest.mark.parametrize("is_coarse", [False, True])
@pytest.mark.parametrize("seeds", slow_except([range(2)], [range(2), *(range(n, n + 6) for n in range(2, 60, 6))]))
def test_admission_brings_more_than_it_costs_and_no_refusal_repeats_itself(seeds: range, is_coarse: bool) -> None:
    """Slow and fast phases, loads and pauses at random, beside the same histories without admission control."""
    results = [check_history(seed, is_coarse=is_coarse) for seed in seeds]
    served, attained, served_by_all, attained_by_all = (sum(each) for each in zip(*results, strict=True))
    assert attained >= attained_by_all and served + attained >= 0.9 * (served_by_all + attained_by_all)


@pytest.mark.parametrize("name", ["omniserve", "omniserve-paper"])
def test_every_policy_with_admission_serves_long_prompts_and_refuses_for_load_only(name: str) -> None:
    bench = Clock(policy=name, classes=CLASSES)
    add_long(bench)
    bench.run_until(lambda: "ls-long" in bench.finished)
    with pytest.raises(RequestRejected, match="alone take"):
        bench.add("ls-own", prompt=LONG, ttft=DEFAULT_TTFT_S)


# -- how many more would be admitted --


def test_admittable_requests_fall_under_load_and_are_none_where_the_next_is_refused() -> None:
    bench = Clock(classes=CLASSES, max_num_batched_tokens=128, device_blocks=2000)
    bench.add("ls", prompt=60, output=20, ttft=DEFAULT_TTFT_S, by_default=True)
    bench.run_until(lambda: "ls" in bench.finished)

    def rate() -> float:
        return bench.scheduler.admittable_per_s(bench.now_s)["LS"]

    at_first = rate()
    rates, admitted = [at_first], 0
    with pytest.raises(RequestRejected):
        while True:
            bench.add(f"ls{admitted}", prompt=60, output=20, ttft=DEFAULT_TTFT_S, by_default=True)
            admitted += 1
            rates.append(rate())
    assert rates == sorted(rates, reverse=True) and rates[-1] == 0 < rates[-2]
    # What was said at first is how many came at once, over the time that admission lets their first tokens take.
    assert at_first == pytest.approx(admitted / ((1 - FIRST_MARGIN) * DEFAULT_TTFT_S), rel=0.01)
    bench.run_until(lambda: not bench.scheduler.has_unfinished)
    assert rate() == pytest.approx(at_first, rel=0.2)


def test_admittable_requests_are_told_of_each_class_with_an_objective_and_by_who_refuses_alone() -> None:
    classes = (
        ClassSpec(name="GOLD", kind="LS", slo=SLO(ttft_s=0.2)),
        CLASSES[0],
        ClassSpec(name="FREE", kind="LS"),
        CLASSES[1],
    )
    bench = Clock(classes=classes, max_num_batched_tokens=128, device_blocks=2000)
    for number in range(4):
        bench.add(f"ls{number}", prompt=60, output=20, ttft=DEFAULT_TTFT_S, by_default=True)
    rates = bench.scheduler.admittable_per_s(0.0)
    assert list(rates) == ["GOLD", "LS"] and rates["GOLD"] > 0, "those of a lower class do not hold it up"
    for settings in ({"admission": False}, {"policy": "sarathi"}, {"policy": "omniserve-paper"}):
        assert Clock(classes=classes, **settings).scheduler.admittable_per_s(0.0) == {}


@pytest.mark.parametrize("seed", range(3))
def test_admittable_requests_are_none_just_where_the_next_is_refused(seed: int) -> None:
    bench, rng, refused = Clock(classes=CLASSES, max_num_batched_tokens=128, device_blocks=2000), random.Random(seed), 0
    for number in range(100):
        can = bench.scheduler.admittable_per_s(bench.now_s)["LS"] > 0
        try:
            bench.add(f"ls{number}", prompt=60, output=20, ttft=DEFAULT_TTFT_S, by_default=True)
        except RequestRejected:
            refused += 1
            assert not can
        else:
            assert can
        for _ in range(rng.choice([0, 0, 0, 1, 4])):
            bench.step()
    assert 5 < refused < 95
