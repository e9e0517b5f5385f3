"""KV managers over random histories of ids."""

from __future__ import annotations

import random

import pytest

from omniserve.core.work import MoveDirection
from omniserve.kv import KV_MANAGERS, PagedKVManager, Tier, TieredKVManager
from tests.quick import slow_except


@pytest.mark.parametrize("name", KV_MANAGERS.names())
@pytest.mark.parametrize("seed", slow_except(range(3), range(10)))
def test_no_block_is_lost_or_doubled(name: str, seed: int) -> None:
    rng = random.Random(seed)
    kv = KV_MANAGERS.get(name)(num_device_blocks=20, num_host_blocks=30, block_size=4)
    lengths: dict[str, int] = {}
    moves: dict[int, str] = {}
    abandoned: set[int] = set()
    for _ in range(500):
        request_id = f"r{rng.randrange(8)}"
        action = rng.random()
        if request_id in moves.values():
            move_id = next(m for m, r in moves.items() if r == request_id)
            assert kv.moves is not None
            with pytest.raises(RuntimeError):
                kv.free(request_id)
            if action < 0.5:
                kv.moves.finish(move_id, succeeded=rng.random() < 0.7)
                del moves[move_id]
            elif action < 0.7 and kv.tier(request_id) is Tier.DEVICE:
                kv.moves.abandon(move_id)
                assert kv.tier(request_id) is None
                abandoned.add(move_id)
                del moves[move_id], lengths[request_id]
        elif abandoned and action < 0.1:
            assert kv.moves is not None
            kv.moves.finish(abandoned.pop(), succeeded=rng.random() < 0.7)
        elif action < 0.6:
            wanted = lengths.get(request_id, 0) + rng.randint(1, 9)
            reserve = rng.choice([0, 5])
            before = kv.num_free(kv.tier(request_id) or Tier.DEVICE)
            blocks = kv.allocate(request_id, wanted, reserve_blocks=reserve)
            if blocks is not None:
                lengths[request_id] = wanted
                assert len(blocks) * 4 >= wanted and len(set(blocks)) == len(blocks)
            else:
                assert kv.num_free(kv.tier(request_id) or Tier.DEVICE) == before
        elif action < 0.75 and kv.tier(request_id) is not None:
            on_device = kv.tier(request_id) is Tier.DEVICE
            if kv.moves is None:
                continue
            move = kv.moves.start(request_id, MoveDirection.TO_HOST if on_device else MoveDirection.TO_DEVICE)
            if move is not None:
                assert len(move.src_block_ids) == len(move.dst_block_ids)
                moves[move.move_id] = request_id
        elif action < 0.85 and (tier := kv.tier(request_id)) is not None:
            before, held = kv.num_free(tier), kv.num_blocks(request_id)
            more, reserve = lengths[request_id] + rng.randint(1, 9), rng.choice([0, 3])
            blocks = kv.allocate_lookahead(request_id, more, reserve_blocks=reserve)
            if blocks is not None:
                assert len(blocks) * 4 >= more and len(blocks) - held == before - kv.num_free(tier)
                assert len(blocks) == held or kv.num_free(tier) >= reserve
                kv.check_integrity()
            kv.trim(request_id, lengths[request_id])
            assert (kv.num_free(tier), kv.num_blocks(request_id)) == (before, held)
        else:
            kv.free(request_id)
            lengths.pop(request_id, None)
        kv.check_integrity()
    for move_id in [*moves, *abandoned]:
        assert kv.moves is not None
        kv.moves.finish(move_id, succeeded=True)
    for request_id in lengths:
        kv.free(request_id)
    usage = kv.usage()
    assert usage.device_used == usage.host_used == 0


def test_integrity_check_finds_a_lost_block() -> None:
    kv = PagedKVManager(num_device_blocks=4, num_host_blocks=0, block_size=4)
    kv.allocate("a", 8)
    kv._tables["a"].pop()
    with pytest.raises(AssertionError, match="lost"):
        kv.check_integrity()


def test_a_move_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    kv = TieredKVManager(num_device_blocks=8, num_host_blocks=2, block_size=4)
    kv.allocate("a", 12)
    assert kv.moves.start("a", MoveDirection.TO_HOST) is None
    assert kv.tier("a") is Tier.DEVICE and kv.num_free(Tier.HOST) == 2
