"""What is said about the blocks that several requests and moves will free comes true."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from omniserve.core.work import KVMove, MoveDirection
from omniserve.kv.base import Tier
from omniserve.kv.tiered import TieredKVManager


@pytest.mark.parametrize("seed", range(4))
def test_requests_and_moves_free_as_many_blocks_as_was_said_before_the_first_of_them_ended(seed: int) -> None:
    rng = random.Random(seed)
    kv = TieredKVManager(
        num_device_blocks=80, num_host_blocks=80, block_size=1, prefix_cache=True, host_prefixes=True
    )  # fmt: skip
    prefixes = kv.prefixes
    assert prefixes is not None and kv.moves is not None
    leaving: list[KVMove | SimpleNamespace] = []
    num_blocks = 0
    for number in range(12):
        text = rng.choice("abc")
        keys = [f"{text}{place}".encode() for place in range(rng.randint(1, 8))]
        num_found = prefixes.match(keys)
        table = prefixes.begin(str(number), keys[:num_found], len(keys) + rng.randint(0, 2))
        assert table is not None
        prefixes.publish(str(number), num_found, keys[num_found:])
        num_blocks += len(table)
        move = kv.moves.start(str(number), MoveDirection.TO_HOST) if rng.random() < 0.4 else None
        leaving.append(move or SimpleNamespace(request_id=str(number)))
    rng.shuffle(leaving)
    freed_by = prefixes.freed_by()
    said = [freed_by(each) for each in leaving]
    assert 0 < sum(said) < num_blocks, "some blocks have several users"
    for each, num_freed in zip(leaving, said, strict=True):
        num_free = kv.num_free(Tier.DEVICE)
        if isinstance(each, KVMove):
            kv.moves.finish(each.move_id, succeeded=True)
        else:
            kv.free(each.request_id)
        assert kv.num_free(Tier.DEVICE) - num_free == num_freed
    assert kv.num_free(Tier.DEVICE) == 80
