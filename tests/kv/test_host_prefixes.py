"""Prefixes in host memory: what is kept of copies, and what gives way."""

from __future__ import annotations

from omniserve.core.plan import KVMove, MoveDirection
from omniserve.kv.base import MoveResult, Tier
from omniserve.kv.block_pool import RunPool
from omniserve.kv.host_prefixes import HostPrefixes
from omniserve.kv.prefix_cache import CachingPool
from omniserve.kv.tiered import TieredKVManager


def copying(kept: HostPrefixes, pool: RunPool, move_id: int, **sources: int) -> None:
    """Begin to copy device blocks, by the names of their keys."""
    targets = pool.take(len(sources))
    assert targets is not None
    move = KVMove(
        request_id="", move_id=move_id, direction=MoveDirection.TO_HOST, src_block_ids=tuple(sources.values()),
        dst_block_ids=tuple(targets), is_checkpoint=True,
    )  # fmt: skip
    kept.begin_copy(move, [name.encode() for name in sources])


def test_what_is_copied_of_a_block_that_was_taken_meanwhile_is_dropped() -> None:
    pool = RunPool(8, "host")
    kept = HostPrefixes(pool)
    copying(kept, pool, 1, a=10, b=11)
    kept.forget_source(11)
    copying(kept, pool, 2, c=11)  # it holds another prefix now, which is copied, too
    assert kept.end_copy(1, succeeded=True) is MoveResult.ARRIVED
    assert (kept.has(b"a"), kept.has(b"b"), kept.has(b"c")) == (True, False, False)
    assert kept.end_copy(2, succeeded=True) is MoveResult.ARRIVED
    assert kept.has(b"c") and pool.num_free == 6
    copying(kept, pool, 3, d=12, a=13)
    assert kept.end_copy(3, succeeded=False) is MoveResult.STAYED and not kept.has(b"d")
    copying(kept, pool, 4, a=13)
    assert kept.end_copy(4, succeeded=True) is MoveResult.UNUSED, "it is there already"
    assert sorted([*kept.owned_blocks(), *pool.free_ids()]) == [*range(8)]


def test_the_one_that_was_used_longest_ago_gives_way_but_none_that_is_read() -> None:
    pool = RunPool(4, "host")
    kept = HostPrefixes(pool)
    copying(kept, pool, 1, a=1, b=2, c=3)
    kept.end_copy(1, succeeded=True)
    for _ in range(2):
        assert len(kept.begin_reading([b"a", b"c"])) == 2
    assert kept.num_reclaimable == 1
    kept.reclaim(3)
    assert [kept.has(name) for name in (b"a", b"b", b"c")] == [True, False, True]
    kept.end_reading([b"a", b"c"])
    assert kept.num_reclaimable == 0, "another move reads them"
    kept.end_reading([b"a", b"c"])
    kept.begin_reading([b"a"])
    kept.end_reading([b"a"])
    kept.reclaim(1)
    assert [kept.has(name) for name in (b"a", b"c")] == [True, False]


def test_blocks_are_worth_a_copy_once_they_were_found_or_if_they_are_marked() -> None:
    pool = CachingPool(6, "device", most_protected=3)
    first, second = pool.begin([], 2), pool.begin([], 2, marks=True)
    assert first is not None and second is not None
    for blocks, names, marks in ((first, "ab", False), (second, "cd", True)):
        for block, name in zip(blocks, names, strict=True):
            pool.publish(block, name.encode(), marks=marks)
    assert pool.take_unsaved(9, num_ahead=6) == [], "they may not be written yet"
    assert pool.take_unsaved(9, num_ahead=1) == [], "two blocks hold nothing"
    assert pool.take_unsaved(1, num_ahead=2) == [(second[0], b"c")]
    pool.begin([b"a"], 1)
    assert pool.take_unsaved(9, num_ahead=2) == [(second[1], b"d")]
    assert pool.take_unsaved(9, num_ahead=2) == [(first[0], b"a")]
    assert pool.take_unsaved(9, num_ahead=2) == []
    pool.begin([b"b"], 1)
    for block in (first[0], *first, *first[1:]):
        pool.give_back([block])
    pool.take_unsaved(9, num_ahead=0)
    taken = pool.begin([], 4)
    assert taken is not None and pool.take_unsaved(9, num_ahead=6) == [], "b was forgotten"


def test_requests_take_the_host_blocks_that_prefixes_have() -> None:
    kv = TieredKVManager(
        num_device_blocks=4, num_host_blocks=3, block_size=2, prefix_cache=True, num_protected_blocks=4,
        host_prefixes=True,
    )  # fmt: skip
    keys = [b"a", b"b"]
    assert kv.allocate("r", 4) is not None
    kv.publish("r", 0, keys, marks=True)
    assert kv.start_saving_prefixes(num_ahead=4, max_blocks=9) is None
    move = kv.start_saving_prefixes(num_ahead=4, max_blocks=9)
    assert move is not None and kv.num_free(Tier.HOST) == 1
    assert kv.finish_move(move.move_id, succeeded=True) is MoveResult.ARRIVED
    kv.check_integrity()
    assert kv.num_free(Tier.HOST) == 3 and all(map(kv.has_on_host, keys))
    assert kv.allocate("r", 7) is not None
    move = kv.start_move("r", MoveDirection.TO_HOST)
    assert move is None, "four blocks are more than there are"
    assert kv.num_free(Tier.HOST) == 3 and all(map(kv.has_on_host, keys))
    kv.trim("r", 6)
    move = kv.start_move("r", MoveDirection.TO_HOST)
    assert move is not None and not any(map(kv.has_on_host, keys))
    kv.finish_move(move.move_id, succeeded=True)
    kv.check_integrity()
