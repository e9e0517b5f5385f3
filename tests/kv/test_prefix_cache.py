"""The pool of the prefix cache beside a model of it, and the keys of blocks."""

from __future__ import annotations

import random

import pytest

from omniserve.kv.prefix_cache import CachingPool, PrefixKeys


@pytest.mark.parametrize("seed", range(8))
def test_random_histories_keep_what_they_say(seed: int) -> None:
    """Whoever begins with published blocks gets those that hold what was written under their keys."""
    rng = random.Random(seed)
    size_of_pool = rng.choice([3, 20, 60])
    pool = CachingPool(size_of_pool, "test", most_protected=rng.choice([0, size_of_pool // 3]))
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
            found = pool.match(keys)
            count, reserve = found + rng.randint(0, 4), rng.choice([0, 3])
            needed, free = count - found + pool.num_idle(keys[:found]), pool.num_free
            blocks = pool.begin(keys[:found], count, reserve=reserve, marks=rng.random() < 0.3)
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
        elif action < 0.52:
            pool.protects = not pool.protects
        elif owners and action < 0.7:
            blocks, keys, first = rng.choice(owners)
            for block, key in list(zip(blocks, keys, strict=False))[first : rng.randint(first, len(blocks))]:
                pool.publish(block, key, marks=rng.random() < 0.3)
        elif owners:
            blocks, _, _ = owners.pop(rng.randrange(len(owners)))
            pool.give_back(reversed(blocks))
        for block in pool.free_ids():
            written[block] = b"poison"
        pool.check(block for blocks, _, _ in owners for block in blocks)
    assert num_found > 0


def filled(pool: CachingPool, *names: str, marks: bool = False) -> None:
    """Fill a block for each name, which is its key, and give it back."""
    for name in names:
        blocks = pool.begin([], 1)
        assert blocks is not None
        pool.publish(blocks[0], name.encode(), marks=marks)
        pool.give_back(blocks)


def kept(pool: CachingPool, *names: str) -> str:
    return "".join(name for name in names if pool.match([name.encode()]))


def test_the_blocks_that_were_idle_longest_are_forgotten_first_but_for_protected_ones() -> None:
    pool = CachingPool(6, "test", most_protected=2)
    filled(pool, "a", "b", "c", marks=True)
    filled(pool, "d", "e")
    assert pool.num_protected == 2 and pool.num_free == 6
    for count, left in ((1, "abcde"), (2, "bcde"), (3, "bce"), (4, "bc"), (5, "c"), (6, "")):
        blocks = pool.begin([], count)
        assert blocks is not None
        assert kept(pool, *"abcde") == left, "a is more than may be protected, and was idle longer than d"
        pool.give_back(blocks)


def test_protection_can_be_switched_off_and_what_was_forgotten_is_known() -> None:
    pool = CachingPool(4, "test", most_protected=2)
    filled(pool, "a", "b", marks=True)
    filled(pool, "c", "d")
    pool.protects = False
    assert pool.num_protected == 0
    assert pool.begin([], 2) is not None and kept(pool, *"abcd") == "cd", "a and b were idle for longer"
    known = [name for name in "abcd" if pool.knows(name.encode())]
    assert known == ["a", "b", "c", "d"]
    pool.protects = True
    assert pool.begin([], 2) is not None and [name for name in "abcd" if pool.knows(name.encode())] == ["a", "b"]
    pool.check([0, 1, 2, 3])


def test_a_block_is_free_when_its_last_user_gives_it_back() -> None:
    pool = CachingPool(8, "test")
    first = pool.begin([], 3)
    assert first is not None
    for block, key in zip(first, (b"a", b"b"), strict=False):
        pool.publish(block, key)
    second, third = pool.begin([b"a", b"b"], 4), pool.begin([b"a"], 2)
    assert second is not None and third is not None
    freed_by, free = pool.freed_by(), pool.num_free
    for blocks, num_freed in ((second, 2), (third, 1), (first, 3)):
        assert freed_by(blocks) == num_freed
        assert pool.freed_by()(blocks) == num_freed
        pool.give_back(blocks)
        free += num_freed
        assert pool.num_free == free


def test_so_many_forgotten_keys_are_known_as_there_are_blocks() -> None:
    pool = CachingPool(3, "test")
    for name in "abcdefgh":
        filled(pool, name, marks=True)
    assert kept(pool, *"abcdefgh") == "fgh"
    assert "".join(name for name in "abcdefgh" if pool.knows(name.encode())) == "cdefgh"
    filled(pool, "d", marks=True)
    assert "".join(name for name in "abcdefgh" if pool.knows(name.encode())) == "defgh"
    pool.check([])


def test_a_block_that_a_request_with_marks_finds_is_protected_from_then_on() -> None:
    pool = CachingPool(4, "test", most_protected=1)
    filled(pool, *"abc")
    found = pool.begin([b"a"], 1, marks=True)
    assert found is not None and pool.num_protected == 0, "it has a user"
    pool.give_back(found)
    assert pool.num_protected == 1
    blocks = pool.begin([], 3)
    assert blocks is not None and kept(pool, *"abc") == "a"
    pool.give_back(blocks)
    blocks = pool.begin([], 4)
    assert blocks is not None and kept(pool, *"abc") == "", "there was no other"
    pool.give_back(blocks)
    filled(pool, "d")
    assert pool.num_protected == 0, "a block that was forgotten is not marked any more"


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
