"""Requests that no step had in time end; what has begun or ended is not kept for as long as it would have waited."""

from __future__ import annotations

import random

from omniserve.core.request import FinishReason
from tests.sched.benches import Bench


def test_a_request_that_no_step_has_had_in_time_ends():
    bench = Bench("omniserve", device_blocks=8, max_num_seqs=1)
    bench.add("be1", prompt=4, output=20)
    bench.add("be2", prompt=4, output=20, max_queue=0.05)
    bench.add("be3", prompt=4, output=20, max_queue=50.0)
    ended = []
    while not bench.finished:
        bench.step()
        ended += bench.scheduler.end_failed(bench.now_s)
    assert [(output.request_id, output.finish_reason) for output in ended] == [("be2", FinishReason.TIMEOUT)]
    bench.run_until(lambda: "be3" in bench.finished)
    assert not bench.scheduler.end_failed(1000.0), "one that has begun goes on"


def test_requests_that_have_ended_are_not_kept_until_their_patience_would_have_ended() -> None:
    bench = Bench("omniserve", max_num_seqs=4)
    bench.checks = False
    for number in range(500):
        bench.add(f"be{number}", output=1, max_queue=1e6)
        bench.step()
    assert len(bench.finished) > 490
    assert len(bench.scheduler._patience._until) < 100


def test_each_request_that_no_step_had_in_time_ends_once_and_no_other() -> None:
    rng = random.Random(0)
    bench = Bench("omniserve", device_blocks=16, max_num_seqs=2, max_num_batched_tokens=8)
    until_s: dict[str, float] = {}
    timed_out: dict[str, float] = {}
    for number in range(300):
        name, patience_s = f"be{number}", rng.choice([None, 0.05, 0.3, 100.0])
        bench.add(name, prompt=rng.randint(1, 8), output=rng.randint(1, 8), max_queue=patience_s)
        if patience_s is not None:
            until_s[name] = bench.now_s + patience_s
        for _ in range(rng.choice([0, 1, 3, 8])):
            begun = {each for each, state in bench.requests.states.items() if state.first_scheduled_s is not None}
            for output in bench.scheduler.end_failed(bench.now_s):
                assert output.finish_reason is FinishReason.TIMEOUT
                assert output.request_id not in (timed_out.keys() | begun)
                timed_out[output.request_id] = bench.now_s
            waiting = {each for each in bench.requests.states if each in until_s and each not in begun}
            assert all(until_s[each] > bench.now_s for each in waiting)
            bench.step()
    assert 10 < len(timed_out) < 250 and all(until_s[each] <= at_s for each, at_s in timed_out.items())
