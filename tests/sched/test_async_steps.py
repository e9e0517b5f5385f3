"""Steps that are planned and launched while the one before them runs: nothing is lost, nothing is computed wrongly."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from omniserve.core.request import SLO, Request, SamplingParams
from omniserve.kv import KV_MANAGERS
from omniserve.sched import SCHEDULERS
from tests.sched import preemptible
from tests.sched.benches import Clock
from tests.sched.fake_device import expected_tokens
from tests.sched.test_histories import REACHED, run_history


@pytest.mark.parametrize("kv", KV_MANAGERS.names())
@pytest.mark.parametrize("scheduler", SCHEDULERS.names())
def test_overlapping_steps_lose_nothing(scheduler: str, kv: str) -> None:
    totals = [run_history(scheduler, 5000 + seed, kv=kv, overlaps=True) for seed in range(10 if kv == "tiered" else 5)]
    wanted = ["overtaken", "pending", "stopped"]
    if kv == "tiered":
        wanted += ["failed", "reused", "preemptions"]
    for key in wanted:
        assert sum(t[key] for t in totals) > 0, f"the histories never reached {key}"


@pytest.mark.parametrize("scheduler", REACHED)
def test_overlapping_steps_lose_nothing_with_a_forecast_and_a_failing_host(scheduler: str) -> None:
    totals = [
        run_history(
            scheduler, 6000 + seed, kv=("tiered", "incremental", "bidirectional")[seed % 3], overlaps=True,
            failure_rate=0.1 * (seed % 2), tier_down=seed % 4 == 0, has_forecast=seed % 5 != 0,
        )
        for seed in range(10)
    ]  # fmt: skip
    for key in ("overtaken", "pending", "stopped", "swaps_out"):
        assert sum(t[key] for t in totals) > 0, f"the histories never reached {key}"


@pytest.mark.parametrize("kv", ["tiered", "bidirectional"])
@pytest.mark.parametrize("scheduler", ["omniserve", "omniserve-paper", "llumnix", "apex"])
def test_steps_that_assume_late_joins_lose_nothing(scheduler: str, kv: str) -> None:
    totals = [
        run_history(
            scheduler, 18_000 + seed, kv=kv, overlaps=True, is_crowded=True, num_layers=5, late_layers=4,
            failure_rate=0.05 * (seed % 3 == 0), tier_down=seed % 5 == 0, has_forecast=seed % 4 == 0,
        )
        for seed in range(15)
    ]  # fmt: skip
    for key in ("overtaken", "late_joins", "missed", "doomed"):
        assert sum(t[key] for t in totals) > 0, f"the histories never reached {key}"


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


@pytest.mark.parametrize("scheduler", [preemptible.NAME, "conserve"])
def test_steps_that_rows_may_leave_are_not_overtaken(scheduler: str) -> None:
    totals = [run_history(scheduler, 7000 + seed, halt_rate=0.4, overlaps=True) for seed in range(10)]
    for key in ("overtaken", "halts", "preemptions"):
        assert sum(t[key] for t in totals) > 0, f"the histories never reached {key}"
