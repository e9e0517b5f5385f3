"""Pools of block ids: none is lost or doubled, and a host request's blocks lie together."""

from __future__ import annotations

import random

import pytest

from omniserve.kv.block_pool import BlockPool, RunPool


def runs(blocks: list[int]) -> int:
    """Pieces of memory that a reader of these blocks, in order, goes through."""
    return sum(following != block + 1 for block, following in zip(blocks, [*blocks[1:], -1], strict=True))


@pytest.mark.parametrize("pool_class", [BlockPool, RunPool])
@pytest.mark.parametrize("seed", range(5))
def test_random_histories_lose_and_double_nothing(pool_class: type[BlockPool], seed: int) -> None:
    rng = random.Random(seed)
    pool = pool_class(rng.choice([1, 7, 64, 100]), "test")
    owned: list[list[int]] = []
    for _ in range(600):
        if rng.random() < 0.5:
            count = rng.randint(1, 12)
            after = rng.choice(owned)[-1] if owned and rng.random() < 0.5 else None
            free = pool.num_free
            taken = pool.take(count, after)
            assert (taken is None) == (count > free)
            if taken is None:
                assert pool.num_free == free
            else:
                assert len(taken) == count
                owned.append(taken)
        elif owned:
            blocks = owned.pop(rng.randrange(len(owned)))
            keep = rng.randrange(len(blocks))
            rng.shuffle(blocks)
            if keep:
                owned.append(blocks[:keep])
            pool.give_back(blocks[keep:])
        pool.check(block for blocks in owned for block in blocks)
        assert len(pool.free_ids()) == pool.num_free
    for blocks in owned:
        pool.give_back(blocks)
    assert sorted(pool.free_ids()) == list(range(pool.num_blocks))


@pytest.mark.parametrize("pool_class", [BlockPool, RunPool])
def test_freeing_twice_is_an_error(pool_class: type[BlockPool]) -> None:
    pool = pool_class(8, "host")
    taken = pool.take(3)
    assert taken is not None
    pool.give_back(taken[:1])
    with pytest.raises(RuntimeError, match=f"host block {taken[0]} was freed twice"):
        pool.give_back(taken[:1])
    with pytest.raises(RuntimeError, match=f"host block {taken[1]} was freed twice"):
        pool.give_back([taken[1], taken[1]])


def test_runs_begin_at_the_lowest_ids_and_go_on_behind_a_table() -> None:
    pool = RunPool(100, "host")
    a, b = pool.take(10), pool.take(10)
    assert a == list(range(10)) and b == list(range(10, 20))
    assert pool.take(2, after=b[-1]) == [20, 21]
    assert pool.take(1, after=a[-1]) == [22], "its neighbour is taken"
    pool.give_back(a[5:])
    assert pool.take(7, after=4) == [5, 6, 7, 8, 9, 23, 24]


def test_a_short_request_leaves_long_runs_alone() -> None:
    pool = RunPool(64, "host")
    taken = pool.take(64)
    assert taken is not None
    pool.give_back(taken[8:12])
    pool.give_back(taken[20:60])
    assert pool.take(3) == [8, 9, 10]
    assert pool.take(40) == list(range(20, 60))
    assert pool.take(1) == [11] and pool.take(1) is None


def test_after_a_long_history_blocks_still_lie_together() -> None:
    """Requests of 1 to 64 blocks come, grow block by block, and go, at four fifths of the pool."""
    rng = random.Random(0)
    pool = RunPool(4000, "host")
    tables: list[list[int]] = []
    for _ in range(3000):
        while pool.num_free > 800:
            table = pool.take(rng.randint(1, 64))
            assert table is not None
            tables.append(table)
        for table in rng.sample(tables, 10):
            table += pool.take(1, after=table[-1]) or []
        pool.give_back(tables.pop(rng.randrange(len(tables))))
    blocks_per_run = sum(map(len, tables)) / sum(map(runs, tables))
    assert blocks_per_run > 3, blocks_per_run
