"""Prefixes on disk: what is written, what comes back into host memory, and what gives way."""

from __future__ import annotations

import random

import pytest

from omniserve.core.work import DiskCopy, MoveDirection
from omniserve.kv.base import MoveResult, Tier
from omniserve.kv.disk_prefixes import DiskPrefixes
from omniserve.kv.tiered import TieredKVManager


def keys(names: str) -> list[bytes]:
    return [name.encode() for name in names]


def written(disk: DiskPrefixes, names: str, *, succeeded: bool = True) -> list[int]:
    slots = disk.begin_write(keys(names))
    blocks = tuple(range(len(slots)))
    copy = DiskCopy(
        move_id=0, to_disk=True, host_block_ids=blocks, slots=tuple(slots), keys=tuple(keys(names)[: len(slots)])
    )  # fmt: skip
    disk.end(copy, succeeded=succeeded)
    disk.check()
    return slots


def reading(disk: DiskPrefixes, names: str) -> DiskCopy:
    slots = tuple(disk.begin_read(keys(names)))
    return DiskCopy(
        move_id=1, to_disk=False, host_block_ids=tuple(range(len(slots))), slots=slots, keys=tuple(keys(names))
    )  # fmt: skip


def kept(disk: DiskPrefixes, names: str) -> str:
    return "".join(name for name in names if disk.match([name.encode()]))


def test_what_was_used_longest_ago_gives_way_but_none_that_is_read() -> None:
    disk = DiskPrefixes(4)
    written(disk, "abcd")
    disk.end(reading(disk, "a"), succeeded=True)
    copy = reading(disk, "b")
    written(disk, "ef")
    assert kept(disk, "abcdef") == "abef"
    assert len(written(disk, "ghij")) == 3, "a slot is being read"
    assert kept(disk, "abefghij") == "bghi"
    disk.end(copy, succeeded=True)
    written(disk, "k")
    assert kept(disk, "bghik") == "ghik"
    assert disk.num_used == 4


def test_a_write_that_fails_leaves_its_slot_free_and_a_read_that_fails_what_it_read() -> None:
    disk = DiskPrefixes(4)
    written(disk, "ab", succeeded=False)
    assert disk.num_used == 0 and kept(disk, "ab") == ""
    written(disk, "abc")
    disk.end(reading(disk, "ab"), succeeded=False)
    disk.check()
    assert kept(disk, "abc") == "c" and disk.num_used == 1


def test_what_an_earlier_run_has_left_is_there() -> None:
    disk = DiskPrefixes(5, [(b"a", 3), (b"b", 0)])
    disk.check()
    assert kept(disk, "ab") == "ab" and disk.begin_read([b"a"]) == [3]
    assert sorted(DiskPrefixes(5, [(b"a", 3), (b"b", 0)]).begin_write(keys("cde"))) == [1, 2, 4]


def manager(*, num_host_blocks: int = 6, num_slots: int = 8) -> TieredKVManager:
    return TieredKVManager(
        num_device_blocks=4, num_host_blocks=num_host_blocks, block_size=1, prefix_cache=True, host_prefixes=True,
        disk=DiskPrefixes(num_slots),
    )  # fmt: skip


def is_on_host(kv: TieredKVManager, key: bytes) -> bool:
    return kv.prefixes.host.match([key]) == 1


def is_on_disk(kv: TieredKVManager, key: bytes) -> bool:
    return kv.prefixes.disk.match([key]) == 1


def filled(kv: TieredKVManager, names: str) -> None:
    """Let the host have the blocks of these keys, by a request that decoded there and was preempted."""
    blocks = kv._tables.pools[Tier.HOST].take(len(names))
    assert blocks is not None
    kv._copies.prefixes.adopt(keys(names), blocks)


def test_what_the_host_has_is_written_once_and_read_when_it_has_it_no_more() -> None:
    kv = manager()
    assert kv.abilities.disk and kv.prefixes.disk is not None
    assert kv.prefixes.disk.write(max_blocks=4) is None
    filled(kv, "abcde")
    copy = kv.prefixes.disk.write(max_blocks=2)
    assert copy is not None and copy.to_disk and copy.keys == (b"a", b"b")
    assert kv.moves.finish(copy.move_id, succeeded=True) is MoveResult.ARRIVED
    copy = kv.prefixes.disk.write(max_blocks=9)
    assert copy is not None and copy.keys == (b"c", b"d", b"e")
    kv._copies.prefixes.reclaim(9)
    assert is_on_host(kv, b"c") and not is_on_host(kv, b"a"), "what is being written stays"
    assert kv.moves.finish(copy.move_id, succeeded=False) is MoveResult.STAYED
    assert kv.prefixes.disk.write(max_blocks=9) is None, "a write is not tried again"
    assert is_on_disk(kv, b"a") and not is_on_disk(kv, b"c") and kv.prefixes.disk.usage() == (2, 8)
    read = kv.prefixes.disk.read([], keys("ab"))
    assert read is not None and not read.to_disk and read.slots == (0, 1)
    assert kv.prefixes.disk.reading(b"a") == read.move_id and not is_on_host(kv, b"a")
    kv.check_integrity()
    assert kv.usage().host_used == 0, "prefixes do not count"
    assert kv.moves.finish(read.move_id, succeeded=True) is MoveResult.ARRIVED
    assert is_on_host(kv, b"a") and is_on_host(kv, b"b") and kv.prefixes.disk.reading(b"a") is None
    assert kv.prefixes.disk.write(max_blocks=9) is None, "the disk has them"


def test_there_is_room_for_what_is_read_but_not_at_the_cost_of_what_will_be_used_with_it() -> None:
    kv = manager(num_host_blocks=4)
    filled(kv, "cde")
    copy = kv.prefixes.disk.write(max_blocks=9)
    assert copy is not None
    kv.moves.finish(copy.move_id, succeeded=True)
    kv._copies.prefixes.reclaim(9)
    filled(kv, "xyba")
    read = kv.prefixes.disk.read(keys("ab"), keys("cde"), reserve_blocks=1)
    assert read is not None and read.keys == (b"c",), "two blocks of four stay, and one is left"
    assert [is_on_host(kv, key) for key in keys("abxy")] == [True, True, True, False]
    assert kv.prefixes.disk.read([], keys("d"), reserve_blocks=1) is None
    kv._copies.prefixes.reclaim(9)
    assert is_on_host(kv, b"a"), "it stays until the copy ends"
    kv.check_integrity()
    assert kv.moves.finish(read.move_id, succeeded=False) is MoveResult.STAYED
    assert not is_on_host(kv, b"c") and not is_on_disk(kv, b"c"), "what cannot be read is forgotten"
    assert kv.num_free(Tier.HOST) == 4


def test_a_preempted_request_leaves_its_blocks_to_those_that_begin_like_it() -> None:
    kv = manager()
    kv.allocate("r", 3)
    move = kv.moves.start("r", MoveDirection.TO_HOST)
    assert move is not None
    kv.moves.finish(move.move_id, succeeded=True)
    kv.free("r", keys("ab"))
    assert is_on_host(kv, b"a") and is_on_host(kv, b"b") and kv.tier("r") is None
    kv.check_integrity()
    kv._copies.prefixes.reclaim(1)
    assert is_on_host(kv, b"a") and not is_on_host(kv, b"b")


@pytest.mark.parametrize("seed", range(30))
def test_random_copies_keep_the_books(seed: int) -> None:
    rng = random.Random(seed)
    kv = manager(num_host_blocks=rng.randint(2, 9), num_slots=rng.randint(1, 9))
    names = "abcdefghijkl"
    flights: list[DiskCopy | None] = []
    for _ in range(300):
        kind = rng.randrange(5)
        if kind == 0:
            fresh = [name for name in rng.sample(names, 3) if not is_on_host(kv, name.encode())]
            if len(fresh) <= kv._tables.pools[Tier.HOST].num_free and not any(
                kv.prefixes.disk.reading(n.encode()) for n in fresh
            ):
                filled(kv, "".join(fresh))
        elif kind == 1:
            flights.append(kv.prefixes.disk.write(max_blocks=rng.randint(1, 4)))
        elif kind == 2:
            wanted = [k for k in keys("".join(rng.sample(names, 3))) if is_on_disk(kv, k) and not is_on_host(kv, k)]
            wanted = [key for key in wanted if kv.prefixes.disk.reading(key) is None]
            flights.append(kv.prefixes.disk.read([], wanted, reserve_blocks=rng.choice([0, 1])))
        elif kind == 3:
            kv._copies.prefixes.reclaim(rng.randint(0, 3))
        elif flights:
            over = flights.pop(rng.randrange(len(flights)))
            assert over is not None
            kv.moves.finish(over.move_id, succeeded=rng.random() < 0.7)
        flights = [copy for copy in flights if copy is not None]
        writing = {slot for copy in flights if copy and copy.to_disk for slot in copy.slots}
        others = [slot for copy in flights if copy and not copy.to_disk for slot in copy.slots]
        assert not writing & set(others)
        kv.check_integrity()


def test_a_prefix_that_is_found_in_memory_stays_on_disk() -> None:
    disk = DiskPrefixes(3)
    written(disk, "abc")
    disk.touch(keys("ax"))
    written(disk, "d")
    assert kept(disk, "abcd") == "acd"


def test_of_two_reads_with_a_block_in_common_each_ends_for_itself() -> None:
    kv = manager()
    filled(kv, "abc")
    copy = kv.prefixes.disk.write(max_blocks=9)
    assert copy is not None
    kv.moves.finish(copy.move_id, succeeded=True)
    kv._copies.prefixes.reclaim(9)
    first, second = kv.prefixes.disk.read([], keys("bc")), kv.prefixes.disk.read([], keys("abc"))
    assert first is not None and second is not None
    kv.moves.finish(first.move_id, succeeded=True)
    kv.check_integrity()
    kv.moves.finish(second.move_id, succeeded=True)
    kv.check_integrity()
    assert kv.num_free(Tier.HOST) == 6 and [is_on_host(kv, key) for key in keys("abc")] == [True] * 3
