"""Tests of the blocks that are checkpointed in a step, and that a request goes on meanwhile."""

from __future__ import annotations

import math
import random

import pytest

from omniserve.core.plan import StepPlan
from omniserve.core.request import SLO, Request, SamplingParams, ServiceClass
from omniserve.core.work import Done, KVMove, MoveDirection
from omniserve.kv import KV_MANAGERS, Tier
from omniserve.sched.batch import Batch
from omniserve.sched.checkpoints import Checkpoints
from omniserve.sched.fairness import ClassAccounts
from omniserve.sched.request_table import RequestTable
from omniserve.sched.side_work import SideWorkQueue
from omniserve.sched.state import Phase, RequestState
from tests.events import WORK_DONE, kind_of
from tests.sched.fake_device import FakeDevice
from tests.sched.limits import BLOCK, make_limits


class CheckpointBench:
    """Requests on the device of a fake machine; ``step`` computes all their tokens, copies beside them."""

    def __init__(self, *, max_blocks: int = 100, host_blocks: int = 32, kv: str = "tiered") -> None:
        self.kv = KV_MANAGERS.get(kv)(num_device_blocks=32, num_host_blocks=host_blocks, block_size=BLOCK)
        self.side_work = SideWorkQueue()
        self.checkpoints = Checkpoints(self.kv, self.side_work, max_blocks_per_step=max_blocks)
        self.device = FakeDevice(block_size=BLOCK, num_layers=1, max_tokens=1000, rng=random.Random(0))
        self.states: list[RequestState] = []
        limits = make_limits(num_layers=1, max_num_batched_tokens=1000)
        self.requests = RequestTable(limits=limits, kv=self.kv, offloads=False)

    def add(self, num_tokens: int) -> RequestState:
        number = len(self.states)
        request = Request(
            prompt_token_ids=[100 * number + position for position in range(num_tokens)],
            sampling=SamplingParams(max_tokens=100),
            service_class="BE",
        )
        state = RequestState(
            request_id=f"be{number}",
            request=request,
            slo=SLO(),
            kind=ServiceClass.BE,
            priority_key=(1, math.inf, number),
            account=ClassAccounts().of("", 1.0),
            arrival_s=0.0,
            token_ids=list(request.prompt_token_ids),
            phase=Phase.DEVICE,
        )
        self.states.append(state)
        return state

    def step(self, moves: list[KVMove]) -> None:
        batch = Batch(self.requests, 0.0)
        for state in self.states:
            if state.phase is Phase.DEVICE:
                assert batch.add(state) is None
        output = self.device.execute(StepPlan(step_id=0, chunks=batch.chunks, work=tuple(moves)))
        for chunk in batch.chunks:
            state = next(state for state in self.states if state.request_id == chunk.request_id)
            state.num_computed_tokens = state.num_tokens
            state.token_ids.append(output.tokens[state.request_id][0].token_id)

    def end(self, event: Done) -> None:
        """Finish a checkpoint's copy."""
        self.side_work.finish(event)

    def plan(self, *, reserve_blocks: int = 0) -> list[tuple[str, int]]:
        """Return who is copied and how many blocks; the copies begin with the next step that is computed."""
        self.checkpoints.begin(self.states, reserve_blocks=reserve_blocks)
        self.moves = list(self.side_work.take())
        return [(move.request_id, len(move.src_block_ids)) for move in self.moves]


def done(move: KVMove) -> Done:
    return Done(ok=True, move_id=move.move_id)


def test_a_request_goes_on_while_its_full_blocks_are_copied() -> None:
    bench = CheckpointBench()
    state = bench.add(10)
    assert bench.plan() == [], "nothing has been computed yet"
    bench.step([])
    copied: list[int] = []
    for _ in range(10):
        bench.plan()
        copied += [block for move in bench.moves for block in move.dst_block_ids]
        bench.step(bench.moves)
        for event in bench.device.poll(0.5):
            bench.end(event)
    assert state.num_computed_tokens == 20
    for event in bench.device.poll(1.0):
        bench.end(event)
    assert not bench.checkpoints.busy
    num_blocks = bench.kv.checkpoints.num_blocks("be0")
    assert num_blocks >= 3 and len(copied) == num_blocks == bench.checkpoints.num_blocks_copied
    slots = [block * BLOCK + offset for block in copied for offset in range(BLOCK)]
    assert [bench.device.kv["host", slot] for slot in slots] == state.token_ids[: num_blocks * BLOCK]


def test_the_youngest_come_first_and_a_step_copies_so_many_blocks() -> None:
    bench = CheckpointBench(max_blocks=5)
    for num_tokens in (8, 13, 8):
        bench.add(num_tokens)
    bench.step([])
    assert bench.plan() == [("be2", 2), ("be1", 3)]
    for move in bench.moves:
        bench.end(done(move))
    assert bench.plan() == [("be0", 2)]


def test_blocks_still_under_way_count_against_the_next_step() -> None:
    bench = CheckpointBench(max_blocks=3)
    bench.add(20)
    bench.add(8)
    bench.step([])
    assert bench.plan() == [("be1", 2), ("be0", 1)]
    first, second = bench.moves
    assert bench.plan() == []
    bench.end(done(second))
    assert bench.plan() == [("be0", 1)]
    bench.end(done(first))
    assert bench.plan() == [], "one copy of a request at a time"


def test_the_reserve_of_the_host_pool_is_left_free() -> None:
    bench = CheckpointBench(host_blocks=6)
    bench.add(40)
    bench.step([])
    assert bench.plan(reserve_blocks=4) == [("be0", 2)]
    assert bench.kv.num_free(Tier.HOST) == 4


def test_who_is_not_on_the_device_is_passed_over() -> None:
    bench = CheckpointBench()
    moving, waiting, _ = bench.add(8), bench.add(8), bench.add(8)
    bench.step([])
    assert bench.kv.moves.start("be0", MoveDirection.TO_HOST) is not None
    moving.phase = Phase.MOVING
    bench.kv.free("be1")
    waiting.phase = Phase.WAITING
    assert bench.plan() == [("be2", 2)]


def test_a_copy_of_a_request_that_has_ended_keeps_the_machine_busy_and_counts_for_nothing() -> None:
    bench = CheckpointBench()
    bench.add(8)
    bench.step([])
    bench.plan()
    bench.kv.free("be0")
    assert bench.checkpoints.busy and bench.kv.usage().host_used == 2
    bench.end(done(bench.moves[0]))
    assert not bench.checkpoints.busy and bench.kv.usage().host_used == 0
    assert bench.checkpoints.num_blocks_copied == 0


def test_a_failed_copy_is_planned_again() -> None:
    bench = CheckpointBench()
    bench.add(8)
    bench.step([])
    assert bench.plan() == [("be0", 2)]
    bench.end(Done(ok=False, move_id=bench.moves[0].move_id))
    assert bench.checkpoints.num_blocks_copied == 0
    assert bench.plan() == [("be0", 2)]


def test_the_fake_device_tears_a_copy_of_a_block_that_is_still_written() -> None:
    bench = CheckpointBench()
    state = bench.add(6)
    bench.step([])
    move = bench.kv.checkpoints.start("be0", 8, max_blocks=2)
    assert move is not None
    state.token_ids.append(999)
    bench.step([move])
    (event,) = bench.device.poll(1.0)
    assert kind_of(event) == WORK_DONE
    held = [("host", block * BLOCK + offset) in bench.device.kv for block in move.dst_block_ids for offset in range(4)]
    assert held == [True] * 6 + [False] * 2


def test_with_a_bound_of_no_blocks_nothing_is_copied() -> None:
    bench = CheckpointBench(max_blocks=0)
    state = bench.add(16)
    bench.step([])
    assert bench.plan() == [] and not bench.checkpoints.are_made and bench.checkpoints.num_blocks(state) == 0


@pytest.mark.parametrize(("kv", "copied"), [("tiered", [4, 2, 0]), ("incremental", [2, 2, 2])])
def test_where_checkpoints_are_restored_the_oldest_gives_way_if_host_memory_is_short(
    kv: str, copied: list[int]
) -> None:
    bench = CheckpointBench(host_blocks=6, kv=kv)
    for num_tokens in (16, 8, 8):
        bench.add(num_tokens)
        bench.step([])
        bench.plan()
        for move in bench.moves:
            bench.end(done(move))
    assert [bench.kv.checkpoints.num_blocks(state.request_id) for state in bench.states] == copied
    assert bench.plan() == [], "nobody takes anything back from a younger one"
    bench.kv.check_integrity()
