"""Deadlines for whole outputs: what is admitted is in time, best-effort work goes by them, and none waits too long."""

from __future__ import annotations

import random

import pytest

from omniserve.core.errors import RequestRejected
from tests.rotation import rotating
from tests.sched.benches import Bench, Clock, names


def end_s(bench: Clock, name: str) -> float:
    """Return when a request had its last token."""
    assert name in bench.finished
    return bench.token_s[name][-1]


def finish(bench: Clock, *names: str) -> None:
    bench.run_until(lambda: bench.finished.issuperset(names), most=5000)


# -- best effort --


@pytest.mark.parametrize("policy", ["omniserve", "omniserve-paper", "sarathi", "conserve"])
def test_earliest_deadline_goes_first_and_before_requests_without_one(policy):
    bench = Bench(policy, device_blocks=200, max_num_batched_tokens=32)
    for name, deadline in (("be1", None), ("be2", 900.0), ("be3", 300.0), ("be4", None), ("be5", 600.0)):
        bench.add(name, prompt=30, output=2, deadline=deadline)
    first: list[str] = []
    while len(first) < 5:
        plan, _ = bench.step()
        first += [name for name in names(plan) if name not in first]
    assert first[:3] == ["be3", "be5", "be2"]


def test_best_effort_work_gives_a_request_in_danger_the_time_it_needs():
    """Long prompts would fill every step; the deadline leaves them what it has to spare."""
    bench = Clock(max_num_batched_tokens=256, device_blocks=2000)
    for number in range(20):
        bench.add(f"be{number}", prompt=900, output=4)
    bench.run_until(lambda: bench.now_s > 1)
    begun_s = bench.now_s
    bench.add("be-due", prompt=40, output=60, deadline=1.2)
    finish(bench, "be-due")
    assert end_s(bench, "be-due") - begun_s <= 1.2
    assert len(bench.finished) < 20


def test_a_request_without_memory_takes_that_of_requests_without_a_deadline():
    bench = Clock(device_blocks=40)
    bench.add("be1", prompt=60, output=80)
    bench.add("be2", prompt=60, output=80)
    bench.run_until(lambda: len(bench.first_s) == 2)
    bench.add("be-due", prompt=60, output=10, deadline=1.0)
    begun_s = bench.now_s
    finish(bench, "be-due")
    assert end_s(bench, "be-due") - begun_s <= 1.0
    finish(bench, "be1", "be2")


def test_what_cannot_be_in_time_alone_is_refused_for_good():
    bench = Clock()
    with pytest.raises(RequestRejected, match="alone it takes about 0") as caught:
        bench.add("be", prompt=10, output=100, deadline=0.5)
    error = caught.value
    assert error.retry_after_s is None and error.required_s == 0.5 and error.predicted_s == pytest.approx(0.7, rel=0.1)
    bench.add("be", prompt=10, output=100, deadline=1.0)


def test_what_is_refused_for_others_is_admitted_when_told():
    bench = Clock(max_num_seqs=2)
    for number in range(2):
        bench.add(f"be{number}", prompt=10, output=100, deadline=1.2)
    with pytest.raises(RequestRejected, match="with the requests before it") as caught:
        bench.add("be-late", prompt=10, output=100, deadline=1.3)
    retry_s = caught.value.retry_after_s
    assert retry_s is not None and retry_s > 0.1
    bench.run_until(lambda: bench.now_s >= retry_s)
    bench.add("be-late", prompt=10, output=100, deadline=1.3)
    finish(bench, "be-late")


def test_an_earlier_deadline_is_refused_if_an_admitted_one_would_be_missed():
    bench = Clock(max_num_batched_tokens=64, device_blocks=2000)
    bench.add("be1", prompt=200, output=2, deadline=0.8)
    with pytest.raises(RequestRejected, match="another one would miss its deadline"):
        bench.add("be2", prompt=160, output=2, deadline=0.7)
    finish(bench, "be1")
    assert end_s(bench, "be1") <= 0.8


def test_nothing_is_refused_without_admission_control():
    bench = Clock(admission=False)
    bench.add("be", prompt=10, output=100, deadline=0.1)
    bench.add("ls", prompt=10, output=100, deadline=0.1)
    finish(bench, "be", "ls")  # late, and complete


@pytest.mark.parametrize("seed", rotating(range(40), 2))
def test_whatever_is_admitted_is_in_time_if_predictions_are_true(seed):
    """Random deadlines beside best-effort work without any, small memory, and LS requests that decode meanwhile."""
    rng = random.Random(seed)
    bench = Clock(
        device_blocks=rng.choice([60, 150, 1000]),
        max_num_seqs=rng.choice([4, 64]),
        max_num_batched_tokens=rng.choice([48, 128, 512]),
        host_blocks=rng.choice([0, 0, 100]),
    )
    for number in range(rng.randint(0, 2)):
        bench.add(f"ls{number}", prompt=10, output=150, ttft=30.0, tpot=rng.choice([0.04, 0.1]))
    due_s: dict[str, float] = {}
    num_refused = 0
    for number in range(40):
        name, prompt, output = f"be{number}", rng.choice([4, 20, 60, 120]), rng.randint(1, 40)
        deadline = rng.choice([None, None, rng.uniform(0.1, 1.0), rng.uniform(0.5, 6.0)])
        try:
            bench.add(name, prompt=prompt, output=output, deadline=deadline)
        except RequestRejected:
            num_refused += 1
        else:
            if deadline is not None:
                due_s[name] = bench.now_s + deadline
        for _ in range(rng.choice([0, 0, 1, 5, 20])):
            bench.step()
    bench.run_until(lambda: not bench.scheduler.has_unfinished, most=20000)
    late = {name: end_s(bench, name) - at_s for name, at_s in due_s.items() if end_s(bench, name) > at_s}
    assert not late, (late, len(due_s), num_refused)
    assert len(due_s) > 5


# -- latency-sensitive --


def test_a_deadline_of_a_latency_sensitive_request_bounds_the_steps_beside_it():
    bench = Clock(max_num_batched_tokens=512, device_blocks=2000)
    for number in range(20):
        bench.add(f"be{number}", prompt=900, output=50)
    bench.run_until(lambda: bench.now_s > 1)
    begun_s = bench.now_s
    bench.add("ls", prompt=50, output=100, deadline=3.0)
    assert bench.requests.states["ls"].told_slo is not None
    finish(bench, "ls")
    assert end_s(bench, "ls") - begun_s <= 3.0
    bench.add("ls-free", prompt=50, output=100)
    begun_s = bench.now_s
    finish(bench, "ls-free")
    assert end_s(bench, "ls-free") - begun_s > 6.0, "without a deadline, steps are as long as they may be"


def test_a_latency_sensitive_request_that_cannot_be_in_time_is_refused():
    bench = Clock()
    with pytest.raises(RequestRejected, match="alone it takes") as caught:
        bench.add("ls", prompt=10, output=100, deadline=0.5)
    assert caught.value.retry_after_s is None
    bench.add("ls-long", prompt=400, output=100)
    with pytest.raises(RequestRejected, match="with the requests before it"):
        bench.add("ls", prompt=10, output=20, deadline=0.4)


def test_objectives_of_a_class_are_told_and_learned_from_as_they_are():
    bench = Clock()
    bench.add("ls", prompt=10, output=20, ttft=5.0, tpot=1.0, deadline=1.0)
    state = bench.requests.states["ls"]
    assert state.told_slo is not None and (state.told_slo.ttft_s, state.told_slo.tpot_s) == (5.0, 1.0)
    assert state.slo.ttft_s is not None and state.slo.tpot_s is not None
    assert state.slo.ttft_s + 19 * state.slo.tpot_s <= 1.0


def test_a_request_for_an_embedding_may_have_a_deadline_if_steps_overlap() -> None:
    bench = Clock(overlaps=True)
    bench.add("be", prompt=20, output=10, deadline=50.0)
    bench.step()
    bench.add("be-pooled", prompt=6, output=0, pooling="mean", deadline=50.0)
    bench.run_until(lambda: {"be", "be-pooled"} <= bench.finished)
