"""The pool of the prefix cache beside a model of it, and the keys of blocks."""

from __future__ import annotations

import random

import pytest

from omniserve.kv.prefix_cache import CachingPool, PrefixKeys


@pytest.mark.parametrize("seed", range(8))
def test_random_histories_keep_what_they_say(seed: int) -> None:
    """Whoever begins with published blocks gets those that hold what was written under their keys."""
    rng = random.Random(seed)
    pool = CachingPool(rng.choice([3, 20, 60]), "test")
    prompts = [[rng.randrange(3) for _ in range(rng.randint(1, 30))] for _ in range(6)]
    size = 2
    written: dict[int, bytes] = {}
    owners: list[tuple[list[int], list[bytes], int]] = []
    num_found = 0
    for _ in range(500):
        action = rng.random()
        if action < 0.5:
            tokens = rng.choice(prompts)
            keys = list(PrefixKeys(size).up_to(tokens, len(tokens) // size))
            found = next((i for i, key in enumerate(keys) if not pool.has(key)), len(keys))
            count, reserve = found + rng.randint(0, 4), rng.choice([0, 3])
            needed, free = count - found + pool.num_idle(keys[:found]), pool.num_free
            blocks = pool.begin(keys[:found], count, reserve=reserve)
            assert (blocks is None) == (needed > 0 and needed + reserve > free)
            assert pool.num_free == free - (needed if blocks is not None else 0)
            if blocks is not None:
                num_found += found
                assert [written[block] for block in blocks[:found]] == keys[:found]
                for block, key in zip(blocks[found:], keys[found:], strict=False):
                    written[block] = key
                for block in blocks[len(keys) :]:
                    written[block] = b""
                owners.append((blocks, keys, found))
        elif owners and action < 0.7:
            blocks, keys, first = rng.choice(owners)
            for block, key in list(zip(blocks, keys, strict=False))[first : rng.randint(first, len(blocks))]:
                pool.publish(block, key)
        elif owners:
            blocks, _, _ = owners.pop(rng.randrange(len(owners)))
            pool.give_back(reversed(blocks))
        for block in pool.free_ids():
            written[block] = b"poison"
        pool.check(block for blocks, _, _ in owners for block in blocks)
    assert num_found > 0


def test_a_block_is_not_freed_more_often_than_it_is_used() -> None:
    pool = CachingPool(2, "test")
    blocks = pool.begin([], 1)
    assert blocks is not None
    pool.publish(blocks[0], b"key")
    assert pool.begin([b"key"], 1) == blocks
    pool.give_back(blocks)
    pool.give_back(blocks)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.give_back(blocks)


def test_a_key_is_of_all_tokens_before() -> None:
    def keys(*tokens: int, salt: str = "", up_to: int = 2) -> list[bytes]:
        return list(PrefixKeys(2, salt=salt).up_to(tokens, up_to))

    one = keys(1, 2, 3, 4)
    assert one == keys(1, 2, 3, 4, 5) and len(set(one)) == 2
    assert keys(1, 2, 4, 3)[0] == one[0] and keys(1, 2, 4, 3)[1] != one[1]
    assert keys(9, 2, 3, 4)[1] != one[1], "other tokens came before"
    assert not set(one) & set(keys(1, 2, 3, 4, salt="x"))
    again = PrefixKeys(2)
    assert list(again.up_to([1, 2], 1)) == one[:1] and list(again.up_to([1, 2, 3, 4], 2)) == one
    with pytest.raises(AssertionError, match="not full"):
        keys(1, 2, 3)
