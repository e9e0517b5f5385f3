"""Tests of ``conserve`` and ``bros``: with a forecast on a virtual clock (Clock), and without one (Bench)."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter

import pytest

from omniserve.core.plan import DeviceChunk, StepOutput, StepPlan
from omniserve.core.request import SLO, Request
from omniserve.core.work import KVMove, MoveDirection
from omniserve.kv import Tier
from omniserve.sched import SCHEDULERS, bros
from tests.sched.benches import Bench, Clock, names


def predicted_s(plan: StepPlan) -> float:
    assert plan.decision is not None and plan.decision.predicted_s is not None
    return plan.decision.predicted_s


both = pytest.mark.parametrize("policy", ["conserve", "bros"])


def with_checkpoints(
    policy: str, *, device_blocks: int, prompt: int, output: int, num_be: int = 1, **limits: int
) -> Bench:
    """A bench whose BE requests have run for a while, so that they can be parked when LS ones come."""
    bench = Bench(policy, device_blocks=device_blocks, host_blocks=40, checkpoint_blocks=8, **limits)
    for i in range(num_be):
        bench.add(f"be{i}", prompt=prompt, output=output)
    for _ in range(3):
        bench.step()
    return bench


# -- conserve ----------------------------------------------------------------------------------------------------------


def test_conserve_takes_ls_prompts_without_a_bound() -> None:
    bench = Clock(policy="conserve")
    bench.add("ls1", tpot=0.040)
    bench.step()
    bench.add("ls2", prompt=200)
    bench.add("be", prompt=50)
    plan = bench.step()
    assert bench.tokens(plan) == {"LS": 201}
    assert predicted_s(plan) > 0.2


def test_conserve_adds_best_effort_tokens_up_to_the_shortest_tpot() -> None:
    bench = Clock(policy="conserve")
    bench.add("be1", prompt=8)
    bench.step()
    bench.add("ls1", tpot=0.100)
    bench.add("ls2", tpot=0.040)
    bench.step()
    bench.add("be2", prompt=300)
    bench.add("be3", prompt=300)
    plan = bench.step()
    assert names(plan) == ["ls1", "ls2", "be1", "be2"], "decodes before prompts, and no crumbs"
    assert plan.decision is not None and plan.decision.bound_by == "tpot of ls2"
    assert 0.95 * 0.040 <= predicted_s(plan) <= 0.040
    assert 25 <= bench.tokens(plan)["BE"] <= 34  # 5 ms and 1 ms a row


def test_conserve_passes_over_a_decode_that_does_not_fit() -> None:
    bench = Clock(policy="conserve", predict={"key": 1.0})
    bench.add("be1", prompt=60)
    bench.add("be2", prompt=4)
    bench.run_until(lambda: "be2" in bench.first_s)
    bench.add("ls", tpot=0.040, output=5)
    bench.step()
    assert names(bench.step()) == ["ls", "be2"], "60 keys of 1 ms each are too many"
    bench.run_until(lambda: "ls" in bench.finished)
    assert names(bench.step())[0] == "be1"


@both
def test_who_was_parked_comes_back_before_anybody_new_enters(policy: str) -> None:
    bench = with_checkpoints(policy, device_blocks=8, prompt=19, output=40)
    bench.add("ls", prompt=11, output=10)
    bench.step()
    assert len(bench.requests.residents.queue) + len(bench.requests.moves.under_way) == 1
    bench.add("be-new", prompt=3, output=3)
    order = [name for _ in range(20) for name in names(bench.step()[0]) if name.startswith("be")]
    assert order[0] == "be0" and "be-new" in order
    assert bench.requests.counters["preemptions"] == 0


@both
def test_a_parked_request_stays_away_while_an_ls_prompt_waits_for_memory(policy: str) -> None:
    bench = with_checkpoints(policy, device_blocks=30, prompt=7, output=40)
    bench.add("ls-first", prompt=110, output=2)
    bench.step()
    bench.add("ls-long", prompt=38, output=20)
    bench.add("ls-large", prompt=95, output=3)
    bench.run_until(lambda: "ls-first" in bench.finished)
    for _ in range(10):
        assert names(bench.step()[0]) == ["ls-long"]
    assert bench.kv.num_free(Tier.DEVICE) > 10 and len(bench.requests.residents.queue) == 1
    bench.run_until(lambda: "ls-large" in bench.finished)
    for _ in range(5):
        bench.step()
    assert len(bench.requests.device["BE"]) == 1 and bench.requests.counters["preemptions"] == 0


@both
def test_a_parked_request_as_large_as_the_device_comes_back(policy: str) -> None:
    bench = with_checkpoints(policy, device_blocks=8, prompt=27, output=5, ls_reserve_blocks=2)
    bench.add("ls", prompt=15, output=3)
    for _ in range(12):
        bench.step()
    assert bench.finished == {"be0", "ls"} and bench.requests.counters["preemptions"] == 0


@both
def test_a_parked_request_comes_back_only_into_memory_that_nobody_is_about_to_need(policy: str) -> None:
    bench = with_checkpoints(policy, device_blocks=9, prompt=7, output=60)
    bench.add("ls-long", prompt=14, output=20)
    bench.add("ls-short", prompt=5, output=6)
    num_moves = 0
    for plan, _ in bench.steps_until(lambda: "ls-long" in bench.finished):
        num_moves += sum(
            move.direction is MoveDirection.TO_HOST and not move.is_checkpoint for move in plan.side_work(KVMove)
        )
    assert num_moves == 1


def test_conserve_leaves_out_best_effort_work_if_ls_work_alone_is_too_long() -> None:
    bench = Clock(policy="conserve", predict={"base": 50.0})
    bench.add("be", prompt=8)
    bench.step()
    bench.add("ls", tpot=0.040, output=5)
    assert [names(bench.step()) for _ in range(5)] == [["ls"]] * 5
    assert names(bench.step()) == ["be"]


@pytest.mark.parametrize("key_ms", [1e-5, 0.05, 1.0])
def test_conserve_without_ls_work_runs_steps_of_the_best_throughput(key_ms: float) -> None:
    bench = Clock(policy="conserve", max_num_batched_tokens=256, predict={"base": 20.0, "row": 0.5, "key": key_ms})
    bench.add("be", prompt=900, output=1)

    def rate(size: int) -> float:
        step = bench.forecast.step()
        step.add_chunk(0, size, samples=False)
        return size / step.seconds()

    best = max(range(1, 257), key=rate)
    size = bench.tokens(bench.step())["BE"]
    assert rate(size) >= 0.95 * rate(best)
    assert (size == 256) == (key_ms == 1e-5), "long steps are best while attention costs little"


def test_conserve_in_offline_mode_grows_with_the_work_there_is() -> None:
    bench = Clock(policy="conserve", max_num_batched_tokens=64, predict={"base": 20.0, "row": 0.5, "key": 0.001})
    for i in range(10):
        bench.add(f"be{i}", prompt=5, output=20)
    assert bench.tokens(bench.step())["BE"] == 50
    assert bench.tokens(bench.step())["BE"] == 10


@pytest.mark.parametrize(("kv", "host_blocks"), [("paged", 0), ("tiered", 0), ("incremental", 0), ("incremental", 40)])
def test_conserve_without_a_forecast_is_sarathi(kv: str, host_blocks: int) -> None:
    plans: dict[str, list[tuple[DeviceChunk, ...]]] = {}
    for policy in ("sarathi", "conserve"):
        bench, rng = Bench(policy, kv=kv, device_blocks=20, host_blocks=host_blocks, checkpoint_blocks=4,
                           max_num_batched_tokens=16), random.Random(3)  # fmt: skip
        plans[policy] = []
        for i in range(150):
            if rng.random() < 0.4:
                bench.add(rng.choice(["ls", "be"]) + str(i), prompt=rng.randint(1, 20), output=rng.randint(1, 20))
            chunks = bench.step()[0].chunks
            plans[policy].append(tuple(dataclasses.replace(chunk, is_preemptible=False) for chunk in chunks))
        assert bench.requests.counters["preemptions"] > 3
    assert plans["sarathi"] == plans["conserve"]


@both
def test_best_effort_requests_with_checkpoints_leave_the_device_at_once_and_come_back_as_they_were(policy: str) -> None:
    bench = with_checkpoints(policy, device_blocks=12, prompt=11, output=12, num_be=3, max_num_batched_tokens=64)
    bench.step()
    assert bench.kv.checkpoints.num_blocks("be2") == 3 and bench.kv.num_free(Tier.DEVICE) == 0
    bench.add("ls", prompt=11, output=6)
    plan, _ = bench.step(host_chance=0.0)
    assert "ls" in names(plan), "it does not wait for a copy"
    outgoing = [move for move in plan.side_work(KVMove) if not move.is_checkpoint]
    assert [move.direction for move in outgoing] == [MoveDirection.TO_HOST]
    assert len(outgoing[0].src_block_ids) == 1, "all but the last block was there already"
    returns: Counter[str] = Counter()
    for plan, _ in bench.steps_until(lambda: len(bench.finished) == 4):
        assert not plan.entries
        returns.update(move.request_id for move in plan.side_work(KVMove) if move.direction is MoveDirection.TO_DEVICE)
    assert returns[outgoing[0].request_id] == 1
    assert bench.requests.counters["preemptions"] == 0, "nothing was computed twice"


@both
def test_an_ls_prompt_waits_one_step_for_the_host_and_no_longer(policy: str) -> None:
    bench = with_checkpoints(policy, device_blocks=8, prompt=11, output=12, num_be=2)
    bench.step()
    bench.add("ls", prompt=31, output=2)
    assert "ls" not in names(bench.step(host_chance=0.0)[0]), "the last blocks of both are still to be copied"
    assert names(bench.step(host_chance=0.0)[0]) == ["ls"]
    assert bench.kv.num_free(Tier.DEVICE) == 0


# -- bros --------------------------------------------------------------------------------------------------------------


def test_bros_serves_ls_requests_by_the_time_left_to_their_deadlines() -> None:
    bench = Clock(policy="bros", max_num_batched_tokens=64)
    for name, ttft in (("ls1", None), ("ls2", 5.0), ("ls3", 1.0)):
        bench.add(name, prompt=10, ttft=ttft)
    # Who waits is polled in the order of arrival, who runs is sorted.
    assert names(bench.step()) == ["ls1", "ls2", "ls3"]
    bench = Clock(policy="bros")
    for name, tpot in (("ls1", None), ("ls2", 0.2), ("ls3", 0.1)):
        bench.add(name, tpot=tpot)
    bench.step()
    assert names(bench.step()) == ["ls3", "ls2", "ls1"]


def test_bros_polls_the_waiting_queue_between_those_that_run() -> None:
    bench = Clock(policy="bros", max_num_batched_tokens=16)
    bench.add("ls1", tpot=0.200)
    bench.add("ls2", tpot=1.0)
    bench.step()
    bench.add("ls3", prompt=4, ttft=0.5)
    assert names(bench.step()) == ["ls1", "ls3", "ls2"]


def test_bros_packs_best_effort_requests_into_the_residual_time_of_the_most_urgent() -> None:
    bench = Clock(policy="bros", max_num_batched_tokens=64)
    for i in range(8):
        bench.add(f"be{i}", prompt=6)
    bench.step()
    bench.add("ls1", tpot=0.012, output=40)
    bench.add("ls2", output=40)
    bench.step()
    for _ in range(10):
        plan = bench.step()
        assert plan.decision is not None and plan.decision.bound_by == "residual time of ls1"
        assert predicted_s(plan) <= 0.012
        assert bench.tokens(plan)["LS"] == 2 and 2 <= bench.tokens(plan)["BE"] < 8


def test_bros_takes_a_prompt_whole_or_not_at_all() -> None:
    bench = Clock(policy="bros", max_num_batched_tokens=64)
    bench.add("ls1", tpot=0.040, output=6)
    bench.step()
    bench.add("be1", prompt=50)
    bench.add("be2", prompt=10)
    seen = [bench.tokens(bench.step()) for _ in range(6)]
    assert seen[:5] == [{"LS": 1}] * 5, "it does not fit, it is not cut, and nobody overtakes it"
    assert seen[5] == {"BE": 60}


def test_bros_doubles_its_batch_and_falls_back_when_time_keeps_somebody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bros, "BASE_BATCH_SIZE", 2)
    bench = Clock(policy="bros", max_num_seqs=20, max_num_batched_tokens=64)
    for i in range(20):
        bench.add(f"be{i}", prompt=1)
    assert [bench.tokens(bench.step())["BE"] for _ in range(6)] == [2, 4, 8, 16, 20, 20]
    bench.add("ls1", tpot=0.030)
    bench.step()
    bench.add("ls2", prompt=60, ttft=10.0)
    plan = bench.step()
    assert bench.tokens(plan)["LS"] == 1, "60 tokens do not fit into the rest of a TPOT"
    assert len(names(bench.step())) == 2


def test_bros_recovers_from_an_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of B_base requests, 196 tokens a second, are too few for the 500 that come; steps of 12 bring 1,070."""
    monkeypatch.setattr(bros, "BASE_BATCH_SIZE", 2)
    bench = Clock(policy="bros", max_num_batched_tokens=64, predict={"base": 10.0, "row": 0.1, "key": 0.0})
    due_s, count = 0.0, 0
    while bench.now_s < 4.0:
        while due_s <= bench.now_s:
            late = 0.5 < due_s < 0.6
            bench.add(f"ls{count}", prompt=1, output=20, ttft=0.001 if late else 0.1, tpot=0.02)
            due_s, count = due_s + 0.04, count + 1
        bench.step()
    assert len(bench.requests.waiting["LS"]) == 0
    assert len(bench.requests.states) < 16
    times = bench.token_s[f"ls{count - 20}"]
    assert max(b - a for a, b in itertools.pairwise(times)) <= 0.02


def test_bros_goes_on_when_nobody_can_be_in_time() -> None:
    """Algorithm 1, as printed, would let in no request any more, best-effort ones included."""
    bench = Clock(policy="bros", predict={"base": 50.0})
    for i in range(6):
        bench.add(f"ls{i}", tpot=0.010, ttft=0.001, output=5)
    bench.add("be", output=5)
    plans = [bench.step() for _ in range(5)]
    assert [bench.tokens(plan) for plan in plans] == [{"LS": 24}] + [{"LS": 6}] * 4, "together, and without BE"
    for _ in range(5):
        bench.step()
    assert not bench.scheduler.has_unfinished


def test_bros_lets_in_all_that_are_late_before_the_others() -> None:
    bench = Clock(policy="bros")
    for i in range(10):
        bench.add(f"ls{i}", tpot=0.001)
    bench.add("ls10", tpot=0.012)
    bench.step()
    assert names(bench.step()) == [f"ls{i}" for i in range(10)], "15 ms: the last one would be late anyhow"
    assert names(bench.step())[0] == "ls10"


def test_bros_stops_nobody_for_a_prompt_that_finds_no_memory_and_gives_its_memory_to_nobody() -> None:
    bench = Clock(policy="bros", device_blocks=8)
    bench.add("be1", prompt=1, output=50)
    bench.add("ls1", prompt=12, output=6, tpot=0.5)
    bench.step()
    bench.add("ls2", prompt=28, ttft=0.001, output=2)
    bench.add("be2", prompt=1, output=2)
    for _ in range(5):
        assert names(bench.step()) == ["ls1", "be1"]
    assert names(bench.step())[0] == "ls2"


def test_bros_keeps_the_others_in_time_when_one_is_late() -> None:
    bench = Clock(policy="bros", max_num_batched_tokens=64)
    bench.add("ls1", tpot=0.030, output=60)
    bench.add("ls2", tpot=0.001, output=60)  # never in time
    bench.step()
    bench.run_until(lambda: "ls1" in bench.finished)
    gaps = [b - a for a, b in zip(bench.token_s["ls1"], bench.token_s["ls1"][1:], strict=False)]
    assert max(gaps) <= 0.030


def test_bros_replaces_an_ls_request_that_can_wait_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bros, "BASE_BATCH_SIZE", 2)
    for tpot, expected in ((0.200, ["ls1", "be"]), (0.050, ["ls1", "ls2"]), (None, ["ls1", "ls2"])):
        bench = Clock(policy="bros", max_num_seqs=2)
        bench.add("be", output=300)
        bench.step()
        bench.add("ls1", tpot=0.030)
        bench.add("ls2", tpot=tpot)
        bench.step()
        bench.scheduler.policy._average_s = 0.045  # type: ignore[attr-defined]
        assert names(bench.step()) == expected, tpot
        for _ in range(60):
            bench.step()
        if tpot is not None:
            gaps = [b - a for a, b in zip(bench.token_s["ls2"], bench.token_s["ls2"][1:], strict=False)]
            assert max(gaps) <= tpot, "it was in time all the same"


def test_bros_replaces_nobody_by_what_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bros, "BASE_BATCH_SIZE", 2)
    bench = Clock(policy="bros", max_num_seqs=2, max_num_batched_tokens=16)
    bench.add("be", prompt=30)
    bench.step()
    bench.add("ls1", tpot=0.012, output=5)
    bench.add("ls2", tpot=0.300, output=9)
    for plan in bench.steps_until(lambda: "ls1" in bench.finished):
        assert names(plan) == ["ls1", "ls2"], "14 tokens of the prompt are left"
    assert "be" in names(bench.step())


def test_bros_replaces_nobody_by_a_request_that_finds_no_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bros, "BASE_BATCH_SIZE", 2)
    bench = Clock(policy="bros", max_num_seqs=2)
    for name in ("ls1", "ls2"):
        bench.add(name, tpot=0.300, output=5)
    bench.add("be", prompt=1)
    for _ in range(5):
        assert names(bench.step()) == ["ls1", "ls2"]
    assert names(bench.step()) == ["be"]


def test_bros_replaces_nobody_by_a_prompt_that_does_not_fit_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bros, "BASE_BATCH_SIZE", 2)
    bench = Clock(policy="bros", max_num_seqs=2, max_num_batched_tokens=16)
    bench.add("be", prompt=60)
    bench.step()
    for name in ("ls1", "ls2"):
        bench.add(name, tpot=0.300, output=5)
    for _ in range(5):
        assert names(bench.step()) == ["ls1", "ls2"]
    assert names(bench.step()) == ["be"]


def test_bros_counts_the_steps_that_a_long_prompt_still_takes() -> None:
    bench = Clock(policy="bros", max_num_batched_tokens=20)
    bench.add("ls1", prompt=4, ttft=1.0)
    bench.add("ls2", prompt=100, ttft=1.0)
    bench.scheduler.policy._average_s = 0.05  # type: ignore[attr-defined]
    residual_s = [bench.scheduler.policy._residual_s(s, 0.1) for s in bench.requests.waiting["LS"]]  # type: ignore[attr-defined]
    assert residual_s == pytest.approx([0.9, 0.9 - 4 * 0.05])


def test_bros_averages_what_steps_took() -> None:
    bench = Bench("bros", device_blocks=100)
    bench.add("be")
    bench.step(seconds=0.1)
    assert bench.scheduler.policy._average_s == pytest.approx(0.1)  # type: ignore[attr-defined]
    for _ in range(200):
        bench.step(seconds=0.02)
        if not bench.scheduler.has_unfinished:
            bench.add("be")
    assert bench.scheduler.policy._average_s == pytest.approx(0.02, rel=0.01)  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", SCHEDULERS.names())
def test_a_step_that_only_begins_copies_needs_no_plan_of_the_policy(policy: str) -> None:
    bench = Bench(policy, host_blocks=8)
    bench.add("be", prompt=4, output=3)
    bench.step()
    plan = bench.scheduler.schedule_moves(bench.now_s)
    assert plan.is_empty and bench.scheduler.update(plan, StepOutput(), bench.now_s) == []
    bench.run_until(lambda: "be" in bench.finished)


def test_best_effort_rows_leave_for_requests_that_are_late_together_though_none_is_alone() -> None:
    bench = Clock(policy="conserve", device_blocks=2000, max_num_batched_tokens=2000)
    bench.add("be", prompt=100, output=5)
    policy, step = bench.scheduler.policy, bench.scheduler.schedule(0.0)
    assert names(step) == ["be"] and step.decision is not None and step.decision.predicted_s is not None
    request, ends_s = Request(prompt_token_ids=[7] * 500), step.decision.predicted_s
    alone_s = bench.forecast.step().seconds_with(0, 500, samples=1)  # type: ignore[union-attr]
    slo = SLO(ttft_s=ends_s + 1.5 * alone_s)
    assert policy.to_preempt(request, slo, 0.0, 0.0) == frozenset()
    assert policy.to_preempt(request, SLO(), 0.0, 0.0) == {"be"}, "the first one would come late"
    bench.scheduler.schedule(0.0)
    assert policy.to_preempt(request, slo, 0.0, 0.0) == frozenset()
