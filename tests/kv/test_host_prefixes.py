"""Prefixes in host memory: what is kept of copies, and what gives way."""

from __future__ import annotations

from omniserve.core.work import KVMove, MoveDirection
from omniserve.kv.base import MoveResult, Tier
from omniserve.kv.host_prefixes import HostPrefixes, PrefixCopies, PrefixPool
from omniserve.kv.prefix_cache import CachingPool
from omniserve.kv.tiered import TieredKVManager


def is_on_host(kv: TieredKVManager, key: bytes) -> bool:
    return kv.prefixes.host.match([key]) == 1


def copying(copies: PrefixCopies, pool: PrefixPool, move_id: int, **sources: int) -> None:
    """Begin to copy device blocks, by the names of their keys."""
    targets = pool.take(len(sources))
    assert targets is not None
    move = KVMove(
        request_id="", move_id=move_id, direction=MoveDirection.TO_HOST, src_block_ids=tuple(sources.values()),
        dst_block_ids=tuple(targets), is_checkpoint=True,
    )  # fmt: skip
    copies.begin(move, [name.encode() for name in sources])


def test_what_is_copied_of_a_block_that_was_taken_meanwhile_is_dropped() -> None:
    pool = PrefixPool(8, "host")
    kept = HostPrefixes(pool)
    copies = PrefixCopies(kept)
    copying(copies, pool, 1, a=10, b=11)
    copies.forget_source(11)
    copying(copies, pool, 2, c=11)  # it holds another prefix now, which is copied, too
    assert copies.end(1, succeeded=True) is MoveResult.ARRIVED
    assert (b"a" in kept.blocks, b"b" in kept.blocks, b"c" in kept.blocks) == (True, False, False)
    assert copies.end(2, succeeded=True) is MoveResult.ARRIVED
    assert b"c" in kept.blocks and pool.num_free == 6
    copying(copies, pool, 3, d=12, a=13)
    assert copies.end(3, succeeded=False) is MoveResult.STAYED and b"d" not in kept.blocks
    copying(copies, pool, 4, a=13)
    assert copies.end(4, succeeded=True) is MoveResult.UNUSED, "it is there already"
    pool.check([])
    assert pool.num_free == 6


def test_the_one_that_was_used_longest_ago_gives_way_but_none_that_is_read() -> None:
    pool = PrefixPool(4, "host")
    kept = HostPrefixes(pool)
    copies = PrefixCopies(kept)
    copying(copies, pool, 1, a=1, b=2, c=3)
    copies.end(1, succeeded=True)
    for _ in range(2):
        assert len(kept.begin_reading([b"a", b"c"])) == 2
    assert kept.num_reclaimable == 1
    kept.reclaim(3)
    assert [name in kept.blocks for name in (b"a", b"b", b"c")] == [True, False, True]
    kept.end_reading([b"a", b"c"])
    assert kept.num_reclaimable == 0, "another move reads them"
    kept.end_reading([b"a", b"c"])
    kept.begin_reading([b"a"])
    kept.end_reading([b"a"])
    kept.reclaim(1)
    assert [name in kept.blocks for name in (b"a", b"c")] == [True, False]


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
    kv.prefixes.publish("r", 0, keys, marks=True)
    assert kv.prefixes.host.save(num_ahead=4, max_blocks=9) is None
    move = kv.prefixes.host.save(num_ahead=4, max_blocks=9)
    assert move is not None and kv.num_free(Tier.HOST) == 1
    assert kv.moves.finish(move.move_id, succeeded=True) is MoveResult.ARRIVED
    kv.check_integrity()
    assert kv.num_free(Tier.HOST) == 3 and all(is_on_host(kv, key) for key in keys)
    assert kv.allocate("r", 7) is not None
    move = kv.moves.start("r", MoveDirection.TO_HOST)
    assert move is None, "four blocks are more than there are"
    assert kv.num_free(Tier.HOST) == 3 and all(is_on_host(kv, key) for key in keys)
    kv.trim("r", 6)
    move = kv.moves.start("r", MoveDirection.TO_HOST)
    assert move is not None and not any(is_on_host(kv, key) for key in keys)
    kv.moves.finish(move.move_id, succeeded=True)
    kv.check_integrity()


def keys(names: str) -> list[bytes]:
    return [name.encode() for name in names]


def sharing(*, num_host_blocks: int = 12) -> TieredKVManager:
    return TieredKVManager(
        num_device_blocks=12, num_host_blocks=num_host_blocks, block_size=1, prefix_cache=True, host_prefixes=True
    )


def moving(kv: TieredKVManager, request_id: str, names: str, *, more: int = 1) -> KVMove | None:
    """Begin to move a request whose full blocks have these keys, and that has so many blocks more."""
    assert kv.allocate(request_id, len(names) + more) is not None
    return kv.moves.start(request_id, MoveDirection.TO_HOST, keys=keys(names))


def moved(kv: TieredKVManager, request_id: str, names: str, *, more: int = 1) -> KVMove:
    move = moving(kv, request_id, names, more=more)
    assert move is not None and kv.moves.finish(move.move_id, succeeded=True) is MoveResult.ARRIVED
    kv.check_integrity()
    return move


def test_requests_that_begin_alike_share_blocks_on_the_host() -> None:
    kv = sharing()
    assert len(moved(kv, "one", "abc").src_block_ids) == 4
    assert len(moved(kv, "two", "abd").src_block_ids) == 2, "only what the host has not is copied"
    one, two = kv.allocate("one", 5), kv.allocate("two", 5)
    assert one is not None and two is not None and one[:2] == two[:2] and not set(one[2:]) & set(two[2:])
    usage = kv.usage()
    assert usage.host_used == 8 and kv.num_held("one", Tier.HOST) == kv.num_held("two", Tier.HOST) == 5
    kv.free("one")
    kv.check_integrity()
    assert kv.usage().host_used == 5 and kv.num_free(Tier.HOST) == 7
    kv._copies.prefixes.reclaim(9)
    assert is_on_host(kv, b"a") and is_on_host(kv, b"d") and not is_on_host(kv, b"c"), "the other one uses them"
    kv.free("two")
    assert kv.num_free(Tier.HOST) == 12
    kv.check_integrity()


def test_a_move_that_fails_or_is_abandoned_leaves_what_others_share() -> None:
    kv = sharing()
    moved(kv, "one", "abc")
    move = moving(kv, "two", "abd")
    assert move is not None and kv.moves.finish(move.move_id, succeeded=False) is MoveResult.LOST
    kv.check_integrity()
    move = moving(kv, "two", "abd")
    assert move is not None
    kv.moves.abandon(move.move_id)
    kv.check_integrity()
    kv.moves.finish(move.move_id, succeeded=True)
    kv.check_integrity()
    assert kv.tier("two") is None and kv.num_blocks("one") == 4
    kv.free("one")
    assert kv.num_free(Tier.HOST) == 12


def test_a_request_that_finds_no_room_leaves_the_books_as_they_were() -> None:
    kv = sharing(num_host_blocks=5)
    moved(kv, "one", "abc")
    assert moving(kv, "two", "abd") is None, "two blocks are needed, one is free"
    kv.check_integrity()
    assert kv.tier("two") is Tier.DEVICE and kv.checkpoints.num_blocks("two") == 0
    kv.free("one")
    moved(kv, "three", "abd")
    assert kv.num_held("three", Tier.HOST) == 4


def test_a_request_goes_back_to_the_device_and_leaves_its_blocks_to_others() -> None:
    kv = sharing()
    moved(kv, "one", "abc")
    moved(kv, "two", "ab")
    back = kv.moves.start("one", MoveDirection.TO_DEVICE, keep_tokens=3)
    assert back is not None and len(back.src_block_ids) == 4
    kv.check_integrity()
    kv.moves.finish(back.move_id, succeeded=True)
    kv.check_integrity()
    assert kv.tier("one") is Tier.DEVICE and kv.checkpoints.num_blocks("one") == 0 and is_on_host(kv, b"c")
    again = kv.moves.start("one", MoveDirection.TO_HOST, keys=keys("abc"))
    assert again is not None and len(again.src_block_ids) == 1
    kv.moves.finish(again.move_id, succeeded=True)
    kv.check_integrity()
