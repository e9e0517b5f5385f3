"""Requests that were preempted: what is recomputed of them, what is copied, and what comes in between."""

from __future__ import annotations

import pytest

from omniserve.core.plan import StepPlan
from omniserve.core.request import FinishReason
from omniserve.core.work import Done, KVMove, MoveDirection, TierDown
from omniserve.kv import Tier
from omniserve.sched import SCHEDULERS
from omniserve.sched.state import Phase
from tests.kv.free_blocks import free_block_ids
from tests.sched.benches import Bench, names
from tests.sched.fake_device import expected_tokens
from tests.sched.limits import BLOCK


def make(policy: str = "sarathi", *, kv: str = "incremental", host_blocks: int = 32, **limits: int) -> Bench:
    return Bench(policy, kv=kv, host_blocks=host_blocks, checkpoint_blocks=8, **limits)


def tokens_of(name: str, plan: StepPlan) -> int:
    return sum(len(chunk.token_ids) for chunk in plan.chunks if chunk.request_id == name)


def restores(plan: StepPlan) -> list[KVMove]:
    return [move for move in plan.side_work(KVMove) if move.direction is MoveDirection.TO_DEVICE]


def preempt_be(bench: Bench, *, ls_prompt: int) -> None:
    """Let ``be`` (16 tokens and a few more) run for a while, and take its memory for an LS prompt."""
    bench.add("be", prompt=16, output=12)
    for _ in range(4):
        bench.step()
    bench.add("ls", prompt=ls_prompt, output=2)
    plan, _ = bench.step()
    assert names(plan) == ["ls"] and bench.requests.states["be"].phase is Phase.WAITING


def run_to_the_end(bench: Bench) -> tuple[list[StepPlan], dict[str, list[int]]]:
    plans, tokens = [], {}
    for _ in range(200):
        plan, outputs = bench.step()
        plans.append(plan)
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        if not bench.scheduler.has_unfinished:
            return plans, tokens
    raise AssertionError(bench.scheduler.stats())


@pytest.mark.parametrize(("kv", "num_recomputed"), [("tiered", 19), ("incremental", 3)])
def test_only_what_is_behind_the_checkpoint_is_recomputed(kv: str, num_recomputed: int) -> None:
    bench = make(kv=kv)
    preempt_be(bench, ls_prompt=8 * BLOCK - 2)
    assert bench.requests.states["be"].num_output_tokens == 4, "19 tokens had been computed"
    plans, tokens = run_to_the_end(bench)
    assert sum(tokens_of("be", plan) for plan in plans) == 12 - 4 + num_recomputed
    copied = [len(move.src_block_ids) for plan in plans for move in restores(plan)]
    assert copied == ([4] if kv == "incremental" else [])
    assert tokens["be"] == expected_tokens((7,) * 16, 12)[4:]


def test_eviction_starts_no_copy_and_takes_no_more_blocks_than_are_needed() -> None:
    bench = make()
    bench.add("be", prompt=16, output=12)
    for _ in range(4):
        bench.step()
    bench.add("ls", prompt=4 * BLOCK, output=2)
    plan, _ = bench.step()
    assert names(plan) == ["ls"] and not plan.side_work(KVMove)
    assert bench.kv.evictions.num_kept_tokens("be", Tier.DEVICE) == 4 * BLOCK
    plans, _ = run_to_the_end(bench)
    copied = [len(move.src_block_ids) for plan in plans for move in restores(plan)]
    assert copied == [1], "the LS request grew by a block since, so the last of the four full ones was lost"
    assert bench.scheduler.stats().resumed_tokens == 4 * BLOCK


def test_who_is_resumed_at_once_recomputes_nothing() -> None:
    bench = make("fcfs", host_blocks=0)
    bench.add("be", prompt=10, output=12)
    for _ in range(3):
        bench.step()
    bench.requests.preempt(bench.requests.states["be"])
    plan, outputs = bench.step()
    assert tokens_of("be", plan) == 1 and len(outputs) == 1


@pytest.mark.parametrize("policy", SCHEDULERS.names())
def test_a_restored_request_has_its_tokens_under_every_policy(policy: str) -> None:
    bench = make(policy)
    bench.add("be", prompt=16, output=12)
    for _ in range(4):
        bench.step()
    state = bench.requests.states["be"]
    num_computed, num_output = state.num_computed_tokens, state.num_output_tokens
    bench.requests.preempt(state)
    bench.kv.allocate("other", 8 * BLOCK)
    bench.kv.free("other")
    plan, _ = bench.step()
    assert state.phase is Phase.MOVING and len(restores(plan)) == 1
    _, tokens = run_to_the_end(bench)
    assert tokens["be"] == expected_tokens((7,) * 16, 12)[num_output:]
    assert bench.scheduler.stats().resumed_tokens == 16
    assert bench.scheduler.stats().preempted_tokens == num_computed > 16


def test_other_requests_are_served_while_one_is_restored() -> None:
    bench = make(device_blocks=16)
    bench.add("be", prompt=16, output=30)
    for _ in range(4):
        bench.step()
    bench.requests.preempt(bench.requests.states["be"])
    bench.kv.allocate("other", 16 * BLOCK)
    bench.kv.free("other")
    bench.add("be-young", prompt=4, output=30)
    for number in range(5):
        plan, _ = bench.step(host_chance=0.0)
        assert names(plan) == ["be-young"] and len(restores(plan)) == (number == 0)
    bench.step()
    assert names(bench.step()[0]) == ["be", "be-young"]


def test_the_first_in_line_is_restored_before_its_turn() -> None:
    bench = make("omniserve", device_blocks=40, max_num_batched_tokens=4, be_order="prefill")
    bench.add("be-old", prompt=60, output=4)
    bench.add("be", prompt=16, output=12)
    bench.run_until(lambda: bench.requests.states["be"].num_output_tokens >= 2)
    old, be = (bench.requests.states[name] for name in ("be-old", "be"))
    for state in (be, old):
        bench.requests.preempt(state)
    bench.kv._copies.checkpoints.drop("be-old")  # type: ignore[attr-defined]
    bench.kv.allocate("other", 40 * BLOCK)
    bench.kv.free("other")
    bench.step()
    assert old.phase is Phase.DEVICE and be.phase is Phase.MOVING, "the step is full of the older one's prompt"
    bench.step()
    assert old.num_uncomputed_tokens > 40 and be.phase is Phase.DEVICE


@pytest.mark.parametrize("fails", [False, True])
def test_who_is_aborted_while_it_is_restored_leaves_nothing(fails: bool) -> None:
    bench = make()
    preempt_be(bench, ls_prompt=8 * BLOCK - 2)
    plan, _ = bench.run_until(lambda: bench.requests.states["be"].phase is Phase.MOVING)[-1]
    output = bench.scheduler.abort("be", bench.now_s)
    assert output is not None and output.finish_reason is FinishReason.ABORT
    assert bench.kv.usage().device_used > 0, "the copy still writes there"
    (move,) = restores(plan)
    bench.scheduler.notify([Done(move_id=move.move_id, ok=not fails)])
    usage = bench.kv.usage()
    assert usage.device_used == usage.host_used == 0 and not bench.scheduler.has_unfinished


def test_after_a_failed_restore_a_request_is_recomputed() -> None:
    bench = make()
    preempt_be(bench, ls_prompt=8 * BLOCK - 2)
    state = bench.requests.states["be"]
    bench.run_until(lambda: state.phase is Phase.MOVING)
    before = bench.scheduler.stats()
    bench.device.failure_rate = 1.0
    plan, _ = bench.step()
    assert tokens_of("be", plan) == state.num_tokens - 1 and not restores(plan)
    after = bench.scheduler.stats()
    assert after.preempted_tokens == before.preempted_tokens > 0, "it gave way once"
    assert bench.requests.counters["preemptions"] == 1 and after.resumed_tokens == 0
    bench.device.failure_rate = 0.0
    _, tokens = run_to_the_end(bench)
    assert tokens["be"] == expected_tokens((7,) * 16, 12)[5:]


def test_without_a_living_host_tier_what_the_device_lost_is_recomputed() -> None:
    bench = make()
    preempt_be(bench, ls_prompt=8 * BLOCK - 2)
    bench.device.is_down = True
    bench.scheduler.notify([TierDown()])
    plans, tokens = run_to_the_end(bench)
    assert not any(plan.side_work(KVMove) for plan in plans)
    assert sum(tokens_of("be", plan) for plan in plans) == 12 - 4 + 19
    assert tokens["be"] == expected_tokens((7,) * 16, 12)[4:]


def test_a_policy_that_moves_nothing_makes_checkpoints_only_where_they_can_be_restored() -> None:
    for kv, num_copied in (("incremental", 4), ("tiered", 0)):
        bench = make("fcfs", kv=kv)
        bench.add("be", prompt=16, output=4)
        for _ in range(3):
            bench.step()
        assert bench.scheduler.stats().checkpoints == num_copied


def holds_nothing(bench: Bench) -> bool:
    usage = bench.kv.usage()
    totals = {Tier.DEVICE: usage.device_total, Tier.HOST: usage.host_total}
    return all(len(free_block_ids(bench.kv, tier)) == total for tier, total in totals.items())


def test_who_is_aborted_while_it_waits_to_be_resumed_leaves_nothing() -> None:
    bench = make()
    preempt_be(bench, ls_prompt=5 * BLOCK)
    assert bench.scheduler.abort("be", bench.now_s) is not None
    run_to_the_end(bench)
    assert holds_nothing(bench)


def test_who_is_aborted_on_its_way_to_the_host_leaves_nothing_when_its_move_is_abandoned() -> None:
    bench = make("omniserve")
    bench.add("be", prompt=16, output=12)
    for _ in range(4):
        bench.step()
    move = bench.requests.moves.start(bench.requests.states["be"], MoveDirection.TO_HOST)
    assert move is not None and bench.kv.checkpoints.num_blocks("be") == 0, "its checkpoint is the front of the target"
    bench.scheduler.abort("be", bench.now_s)
    bench.requests.moves.abandon(move.move_id)
    bench.scheduler.notify([Done(ok=True, move_id=move.move_id)])
    assert holds_nothing(bench) and not bench.scheduler.has_unfinished


def test_a_manager_that_keeps_nothing_frees_what_is_preempted() -> None:
    bench = Bench("sarathi", kv="paged", device_blocks=4)
    bench.add("be", prompt=8)
    bench.step()
    state = bench.requests.states["be"]
    bench.requests.preempt(state)
    assert bench.kv.usage().device_used == 0 and bench.requests.kept.num_tokens(state, Tier.DEVICE) == 0
    assert not bench.requests.kept.needs_restore(state)
