"""Steps that are planned and launched while the one before them runs: nothing is lost, nothing is computed wrongly."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from omniserve.core.request import SLO, Request, SamplingParams
from tests.sched.benches import Clock
from tests.sched.fake_device import expected_tokens


@pytest.mark.parametrize("policy", ["omniserve", "bros"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_step_that_is_planned_ahead_keeps_the_objectives_it_will_meet(policy: str, overlaps: bool) -> None:
    clock = Clock(policy=policy, overlaps=overlaps)
    clock.add("ls", output=40, tpot=0.040)
    clock.step()
    for number in range(20):
        clock.add(f"be{number}", prompt=20, output=3)
    plans = clock.run_until(lambda: "ls" in clock.finished)
    times = clock.token_s["ls"]
    assert len(times) == 40
    late = [i for i, time_s in enumerate(times) if time_s > times[0] + i * 0.040 + 1e-9]
    assert not late, "tokens that missed their deadlines"
    if policy == "bros":  # each of its steps is within the residual time; deadlines may be lent and given back
        assert max(b - a for a, b in itertools.pairwise(times)) <= 0.040 + 1e-9
    assert sum(clock.tokens(plan)["BE"] for plan in plans) > 200, "nothing was fitted in"


def test_admission_counts_the_step_in_flight() -> None:
    clock = Clock(overlaps=True, admission=False)
    clock.add("be", prompt=100, output=1)
    alone_s = clock.scheduler.add("ls", request_of(20), SLO(ttft_s=10.0), clock.now_s)
    clock.scheduler.abort("ls", clock.now_s)
    clock.step()
    left_s = clock.scheduler.policy.busy_until_s - clock.now_s
    assert left_s > 0.05, "a step of 100 tokens is in flight"
    predicted_s = clock.scheduler.add("ls", request_of(20), SLO(ttft_s=10.0), clock.now_s)
    assert predicted_s is not None and alone_s is not None
    assert predicted_s >= left_s + 0.025, "5 ms and 20 rows of 1 ms"


def test_who_ends_has_no_pending_tokens_in_its_output() -> None:
    bench = Clock(overlaps=True)
    stop = expected_tokens((7,) * 4, 3)[2]
    bench.scheduler.add("ls", request_of(4, stop_token_ids=(stop,)), SLO(), 0.0)
    ended: list[int] = []
    bench.scheduler.policy.on_end = lambda state: ended.append(state.num_output_tokens)  # type: ignore[method-assign]
    bench.run_until(lambda: ended)
    assert ended == [expected_tokens((7,) * 4, 3).index(stop) + 1]


def request_of(num_tokens: int, **sampling: Any) -> Request:
    return Request(
        prompt_token_ids=[7] * num_tokens, sampling=SamplingParams(max_tokens=10, **sampling), service_class="LS"
    )
