"""LS and BE requests that share device blocks, under a policy."""

from __future__ import annotations

import pytest

from omniserve.kv.bidirectional import BidirectionalKVManager
from omniserve.sched.state import Phase
from tests.sched.benches import Bench, names
from tests.sched.limits import BLOCK


@pytest.mark.parametrize(
    ("kv", "first", "num_preemptions"), [("tiered", ["ls"], 1), ("bidirectional", ["ls", "be"], 0)]
)
def test_an_ls_request_moves_in_beside_a_be_request_that_goes_on(
    kv: str, first: list[str], num_preemptions: int
) -> None:
    bench = Bench("sarathi", kv=kv, device_blocks=3, host_blocks=16)
    bench.add("be", prompt=9, output=3)
    bench.step()
    bench.add("ls", prompt=1, output=2)
    plan, _ = bench.step()
    assert sorted(names(plan)) == sorted(first), "else the BE request has to give way"
    assert bench.requests.counters["preemptions"] == num_preemptions
    bench.run_until(lambda: {"be", "ls"} <= bench.finished)


def test_be_requests_that_gave_way_go_on_where_nobody_took_their_slots() -> None:
    bench = Bench("sarathi", kv="bidirectional", device_blocks=6, host_blocks=16, checkpoint_blocks=2)
    bench.add("be", prompt=16, output=8)
    bench.step()
    bench.add("ls", prompt=11, output=2)
    computed = sum(
        len(chunk.token_ids)
        for plan, _ in bench.run_until(lambda: "be" in bench.finished)
        for chunk in plan.chunks
        if chunk.request_id == "be"
    )
    assert isinstance(bench.kv, BidirectionalKVManager) and bench.kv._device.num_overwritten_tokens > 0
    assert 8 < computed <= 8 + BLOCK, "something is computed again, but no more than a block"


def test_bros_goes_on_with_the_be_request_of_which_least_must_be_copied_back() -> None:
    bench = Bench("bros", kv="bidirectional", device_blocks=12, host_blocks=32, checkpoint_blocks=8, max_num_seqs=2)
    bench.add("be1", prompt=16)
    bench.add("be2", prompt=16)
    bench.step()
    requests, kv = bench.requests, bench.kv
    assert isinstance(kv, BidirectionalKVManager)
    for name in ("be1", "be2"):
        requests.preempt(requests.states[name])
    for move in kv.sharing.start_saving(num_ahead=12, max_blocks=12):
        kv.moves.finish(move.move_id, succeeded=True)
    assert kv.allocate("somebody", 8 * BLOCK) is not None
    kv.free("somebody")
    assert [requests.kept.needs_restore(requests.states[name]) for name in ("be1", "be2")] == [True, False]
    bench.add("ls", prompt=4)
    plan, _ = bench.step()
    assert names(plan) == ["ls", "be2"] and requests.states["be1"].phase is Phase.WAITING
