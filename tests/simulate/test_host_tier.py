"""SimulatedHostTier: when tasks and copies are done."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from omniserve.core.plan import PiggybackEntry, PiggybackJoin, StepPlan
from omniserve.core.work import AttentionResult, KVMove, MoveDirection
from omniserve.latency.features import AlphaBeta
from omniserve.simulate import Copies, HostNode, SimulatedHostTier
from tests.events import ATTENTION_DONE, WORK_DONE, kind_of
from tests.simulate.machines import DIMS

NODE = HostNode(num_threads=2, key_s=1e-3, task_s=0.01, latency_s=0.002)


def tier(
    *nodes: HostNode,
    copies: Copies | None = None,
    num_blocks: int = 100,
    num_stages: int = 1,
    held: dict[str, int] | None = None,
) -> SimulatedHostTier:
    """Return a tier; requests hold a block if ``held`` does not say otherwise."""
    if copies is None:
        copies = Copies(to_host=AlphaBeta(0.5, 0.0), to_device=AlphaBeta(0.25, 0.0))
    return SimulatedHostTier(
        nodes or (NODE,), copies, DIMS.spec, block_size=16, num_blocks=num_blocks, num_stages=num_stages,
        held=lambda request_id: (held or {}).get(request_id, 1),
    )  # fmt: skip


def move(request_id: str, move_id: int, direction: MoveDirection = MoveDirection.TO_HOST) -> KVMove:
    return KVMove(
        request_id=request_id, move_id=move_id, direction=direction, src_block_ids=(0,), dst_block_ids=(0,)
    )  # fmt: skip


def arrived(host: SimulatedHostTier, *request_ids: str) -> None:
    """Bring requests to the host tier, and hear of it."""
    for number, request_id in enumerate(request_ids):
        host.start_move(move(request_id, number), -100.0)
    assert len(host.poll(-1.0)) == len(request_ids)


def entry(request_id: str, slot: int, position: int) -> PiggybackEntry:
    return PiggybackEntry(request_id=request_id, token_id=0, position=position, slot=slot, epoch=7, block_ids=(0,))


def sent(start_s: float, step_s: float) -> Callable[[int], float]:
    """Return when a step sends the rows of a layer: as it reaches it."""
    return lambda layer: start_s + layer * step_s / DIMS.num_layers


def test_tasks_are_served_in_order_and_say_whose_they_are() -> None:
    host = tier()
    arrived(host, "a", "b")
    host.submit(StepPlan(step_id=1, entries=(entry("a", 3, 99), entry("b", 4, 49))), sent(0.0, 1.0))
    # 100 keys and 50 keys on one piece each: all threads could do them in 110 and 60 ms, one thread takes twice that.
    assert host.next_event_s() == pytest.approx(0.222)
    assert host.poll(0.2219) == []
    (first,) = host.poll(0.2221)
    assert first == AttentionResult(slot=3, epoch=7, layer=0, position=99)
    assert host.next_event_s() == pytest.approx(0.11 + 0.12 + 0.002)
    assert [event.slot for event in host.poll(1.0)] == [4]
    assert host.next_event_s() is None


@pytest.mark.parametrize(("num_stages", "second_s"), [(1, 0.11 + 0.222), (2, 0.222)])
def test_stages_attend_side_by_side_each_with_its_part_of_the_threads(num_stages: int, second_s: float) -> None:
    host = tier(num_stages=num_stages)
    arrived(host, "a", "b")
    to_layer_1 = PiggybackJoin(request_id="b", position=99, slot=4, epoch=7, layer=0)
    host.submit(StepPlan(step_id=1, entries=(entry("a", 3, 99),), joins=(to_layer_1,)), lambda layer: 0.0)
    assert [event.slot for event in host.poll(0.2221)] == [3, 4][:num_stages]
    assert len(host.poll(second_s - 0.0001)) == 0
    assert [event.slot for event in host.poll(second_s + 0.0001)] == [4] * (num_stages == 1)
    assert host.busy_s == pytest.approx(0.22)


def test_the_threads_of_all_stages_copy_before_they_attend() -> None:
    host = tier(num_stages=2, copies=Copies(to_host=AlphaBeta(0.5, 0.0), to_device=AlphaBeta(), by_host_threads=True))
    arrived(host, "a", "b")
    host.start_move(move("c", 9), 0.0)
    to_layer_1 = PiggybackJoin(request_id="b", position=99, slot=4, epoch=7, layer=0)
    host.submit(StepPlan(step_id=1, entries=(entry("a", 3, 99),), joins=(to_layer_1,)), lambda layer: 0.0)
    assert [kind_of(event) for event in host.poll(0.7219)] == [WORK_DONE]
    assert [kind_of(event) for event in host.poll(0.7221)] == [ATTENTION_DONE, ATTENTION_DONE]


def test_a_long_task_is_shared_by_all_threads() -> None:
    host = tier()
    arrived(host, "a")
    host.submit(StepPlan(step_id=1, entries=(entry("a", 0, 999),)), sent(0.0, 1.0))
    assert host.next_event_s() == pytest.approx(1.0 + 0.01 + 0.002)


@pytest.mark.parametrize(("during_step", "at_s"), [(True, 5.5), (False, 6.0)])
def test_joins_are_sent_a_layer_on_or_at_the_end_of_the_step(during_step: bool, at_s: float) -> None:
    host = tier()
    arrived(host, "a")
    joins = (
        PiggybackJoin(request_id="a", position=9, slot=1, epoch=7, layer=0),
        PiggybackJoin(request_id="a", position=9, slot=2, epoch=7, layer=1),  # the last layer: it is a token now
    )
    host.submit(StepPlan(step_id=1, joins=joins), sent(5.0, 1.0) if during_step else lambda layer: 6.0)
    assert host.next_event_s() == pytest.approx(at_s + 2 * (0.01 + 0.01) + 0.002)
    assert [(event.slot, event.layer) for event in host.poll(100.0)] == [(1, 1)]


def test_moves_of_both_directions_share_the_link() -> None:
    host = tier()
    arrived(host, "c")
    for each in (move("a", 0), move("b", 1), move("c", 2, MoveDirection.TO_DEVICE)):
        host.start_move(each, 0.0)
    assert len(host.poll(1.24)) == 2
    assert len(host.poll(1.25)) == 1


def test_copies_by_host_threads_go_before_attention() -> None:
    host = tier(copies=Copies(to_host=AlphaBeta(0.5), to_device=AlphaBeta(), by_host_threads=True))
    arrived(host, "a")
    host.submit(StepPlan(step_id=1, entries=(entry("a", 0, 9),)), sent(0.0, 1.0))
    host.start_move(move("b", 9), 0.0)
    events = host.poll(10.0)
    assert [kind_of(event) for event in events] == [WORK_DONE, ATTENTION_DONE]
    host.submit(StepPlan(step_id=3, entries=(entry("a", 0, 9),)), sent(10.0, 1.0))
    assert host.next_event_s() == pytest.approx(10.0 + 2 * 0.02 + 0.002)


def ends_of(host: SimulatedHostTier, *entries: PiggybackEntry, start_s: float = 0.0) -> dict[int, float]:
    """Hand entries over; return by slot when their event comes."""
    host.submit(StepPlan(step_id=1, entries=entries), sent(start_s, 1.0))
    ends = {}
    while (at_s := host.next_event_s()) is not None:
        ends.update((event.slot, at_s) for event in host.poll(at_s))
    return ends


def test_requests_go_to_the_first_host_while_it_has_room_and_then_to_the_others() -> None:
    slow = HostNode(num_threads=1, key_s=2e-3, task_s=0.0)
    host = tier(NODE, slow, num_blocks=4)
    arrived(host, *"abc")  # two on the first host, one on the slow one
    # On the first host 522 ms each, one after the other; on the slow one 1,024.
    assert ends_of(host, *(entry(r, i, 511) for i, r in enumerate("abc"))) == {
        0: pytest.approx(0.524), 1: pytest.approx(1.046), 2: pytest.approx(1.024),
    }  # fmt: skip


def test_a_request_that_ended_leaves_its_host_to_others() -> None:
    host = tier(NODE, NODE, num_blocks=2)
    arrived(host, "a", "b")
    host.forget("b")
    host.forget("never came")
    arrived(host, "c")
    ends = ends_of(host, entry("a", 0, 9), entry("c", 1, 9))
    assert list(ends.values()) == pytest.approx([0.042, 0.042]), "each has a host of its own"


def test_a_request_that_outgrows_its_host_goes_to_another_one_and_attends_when_it_is_there() -> None:
    held = {"a": 2, "b": 1}
    far = HostNode(num_threads=2, key_s=1e-3, task_s=0.01, latency_s=0.002, move_byte_s=1e-6)
    host = tier(NODE, far, num_blocks=6, held=held)
    arrived(host, "a", "b")
    held["b"] = 2
    block_bytes = DIMS.spec.kv_block_bytes(16)
    assert ends_of(host, entry("a", 0, 9), entry("b", 1, 9)) == {
        0: pytest.approx(0.042),
        1: pytest.approx(0.042 + 0.5 + 1e-6 * block_bytes),  # of one block: what it had before
    }
    assert ends_of(host, entry("b", 1, 9), start_s=2.0) == {1: pytest.approx(2.042)}, "it is there now"


def test_a_tier_needs_a_host() -> None:
    with pytest.raises(ValueError, match="at least one host"):
        SimulatedHostTier(
            (), Copies(to_host=AlphaBeta(), to_device=AlphaBeta()), DIMS.spec, 16, num_blocks=1, held=lambda _: 1
        )


def test_a_late_join_takes_its_result_once_it_is_there() -> None:
    host = tier()
    arrived(host, "a", "b")
    host.submit(StepPlan(step_id=1, entries=(entry("a", 3, 99), entry("b", 4, 49))), sent(0.0, 1.0))
    join = PiggybackJoin(request_id="a", position=99, slot=3, epoch=7, layer=0, is_ready=False)
    assert not host.has_result(join, 0.2219)
    assert host.has_result(join, 0.2221)
    other = dataclasses.replace(join, epoch=8)
    assert not host.has_result(other, 0.2221), "it is somebody else's"
    host.use_result(join)
    assert not host.has_result(join, 0.2221)
    assert [event.slot for event in host.poll(1.0)] == [4], "nobody is told of what has joined"
    assert not host.attends and host.next_event_s() is None


def test_drafts_lengthen_a_task_by_the_keys_that_they_see() -> None:
    times = []
    for draft_ids in ((), (1, 2, 3)):
        host = tier(dataclasses.replace(NODE, draft_key_s=0.5e-3))
        arrived(host, "a")
        row = dataclasses.replace(entry("a", 0, 99), draft_ids=draft_ids)
        host.submit(StepPlan(step_id=0, entries=(row,)), lambda layer: 0.0)
        times.append(host.next_event_s())
        busy_s = host.busy_s
    assert times[1] - times[0] == pytest.approx(2 * 3 * 100 * 0.5e-3), "one piece, so one of the two threads has it"
    assert busy_s == pytest.approx(100 * 1e-3 + 0.01 + 3 * 100 * 0.5e-3)
