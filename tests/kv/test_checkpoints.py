"""Checkpoints: what a request reads after any history of copies, moves and failures is what it wrote."""

from __future__ import annotations

import pytest

from omniserve.kv import MoveResult, PagedKVManager, Tier, TieredKVManager
from tests.kv.free_blocks import free_block_ids
from tests.kv.histories import BLOCK, TO_DEVICE, TO_HOST, PoisonedBlocks, checkpoint, reach


def test_every_request_reads_what_it_wrote_over_random_histories() -> None:
    kinds = [f"checkpoint {result}" for result in ("arrived", "stayed", "unused")]
    kinds += [f"move {result}" for result in MoveResult]
    kinds += ["short moves", "reclaimed", "kept", "out of memory"]
    reach(lambda seed: PoisonedBlocks(seed).run(), kinds, most_seeds=100)


def make(num_host_blocks: int = 16, num_tokens: int = 10) -> TieredKVManager:
    kv = TieredKVManager(num_device_blocks=12, num_host_blocks=num_host_blocks, block_size=BLOCK)
    assert kv.allocate("a", num_tokens) is not None
    return kv


def test_only_full_blocks_are_copied_and_each_only_once() -> None:
    kv = make(num_tokens=10)
    first = checkpoint(kv, "a", 10)
    blocks = kv.allocate("a", 20)
    assert blocks is not None and first.src_block_ids == blocks[:2]
    assert kv.checkpoints.start("a", 11, max_blocks=9) is None
    second = checkpoint(kv, "a", 17)
    assert second.src_block_ids == blocks[2:4]
    assert kv.checkpoints.num_blocks("a") == 4


def test_a_move_copies_the_rest_and_frees_what_was_copied_at_once() -> None:
    kv = make(num_tokens=10)
    copied = checkpoint(kv, "a", 10)
    move = kv.moves.start("a", TO_HOST)
    assert move is not None and not move.is_checkpoint
    assert len(move.src_block_ids) == 1 and kv.num_free(Tier.DEVICE) == 11
    assert kv.tier("a") is Tier.DEVICE and kv.num_blocks("a") == 3
    assert kv.moves.finish(move.move_id, succeeded=True) is MoveResult.ARRIVED
    assert kv.allocate("a", 10) == copied.dst_block_ids + move.dst_block_ids


def test_a_move_of_what_is_copied_altogether_is_empty() -> None:
    kv = make(num_tokens=8)
    checkpoint(kv, "a", 8)
    move = kv.moves.start("a", TO_HOST)
    assert move is not None and move.src_block_ids == move.dst_block_ids == ()
    assert kv.num_blocks("a") == 2 and kv.num_free(Tier.DEVICE) == 12
    assert kv.moves.finish(move.move_id, succeeded=True) is MoveResult.ARRIVED
    assert kv.tier("a") is Tier.HOST and kv.num_blocks("a") == 2


def test_a_failed_move_keeps_a_request_that_had_no_checkpoint_and_loses_one_that_had() -> None:
    kv = make()
    move = kv.moves.start("a", TO_HOST)
    assert move is not None and kv.moves.finish(move.move_id, succeeded=False) is MoveResult.STAYED
    assert kv.tier("a") is Tier.DEVICE
    checkpoint(kv, "a", 10)
    move = kv.moves.start("a", TO_HOST)
    assert move is not None and kv.moves.finish(move.move_id, succeeded=False) is MoveResult.LOST
    assert kv.tier("a") is None
    usage = kv.usage()
    assert usage.device_used == usage.host_used == 0


@pytest.mark.parametrize("ending", ["free", "move", "reclaim"])
def test_the_target_of_a_copy_that_nobody_needs_is_held_until_it_ends(ending: str) -> None:
    kv = make(num_host_blocks=6, num_tokens=12)
    checkpoint(kv, "a", 4)
    copy = kv.checkpoints.start("a", 12, max_blocks=9)
    assert copy is not None and len(copy.dst_block_ids) == 2
    if ending == "free":
        kv.free("a")
    elif ending == "move":
        move = kv.moves.start("a", TO_HOST)
        assert move is not None and len(move.src_block_ids) == 2, "what is under way does not count as copied"
    else:
        kv.allocate("b", 4 * 4)
        assert kv.moves.start("b", TO_HOST) is not None
        assert kv.checkpoints.num_blocks("a") == 0
    assert not set(copy.dst_block_ids) & set(free_block_ids(kv, Tier.HOST))
    num_free = kv.num_free(Tier.HOST)
    assert kv.moves.finish(copy.move_id, succeeded=True) is MoveResult.UNUSED
    assert kv.num_free(Tier.HOST) == num_free + 2
    kv.check_integrity()


def test_a_failed_copy_is_tried_again() -> None:
    kv = make(num_tokens=8)
    copy = kv.checkpoints.start("a", 8, max_blocks=9)
    assert copy is not None
    assert kv.checkpoints.start("a", 8, max_blocks=9) is None, "one at a time"
    assert kv.moves.finish(copy.move_id, succeeded=False) is MoveResult.STAYED
    assert kv.checkpoints.num_blocks("a") == 0 and kv.num_free(Tier.HOST) == 16
    assert checkpoint(kv, "a", 8).src_block_ids == copy.src_block_ids


def test_host_blocks_of_a_request_that_came_back_stay_as_its_checkpoint() -> None:
    kv = make(num_tokens=10)
    move = kv.moves.start("a", TO_HOST)
    assert move is not None
    kv.moves.finish(move.move_id, succeeded=True)
    back = kv.moves.start("a", TO_DEVICE, keep_tokens=10)
    assert back is not None and kv.checkpoints.num_blocks("a") == 0
    assert kv.moves.finish(back.move_id, succeeded=True) is MoveResult.ARRIVED
    assert kv.checkpoints.num_blocks("a") == 2 and kv.num_free(Tier.HOST) == 14
    again = kv.moves.start("a", TO_HOST)
    assert again is not None and again.src_block_ids == back.dst_block_ids[2:]


def test_residents_and_moves_take_the_blocks_of_the_oldest_checkpoint_from_its_end() -> None:
    kv = make(num_host_blocks=9, num_tokens=16)
    kv.allocate("b", 12)
    kv.allocate("c", 8)
    checkpoint(kv, "a", 16)
    checkpoint(kv, "b", 12)
    move = kv.moves.start("c", TO_HOST)
    assert move is not None
    kv.moves.finish(move.move_id, succeeded=True)
    assert kv.num_free(Tier.HOST) == 0
    assert kv.allocate("c", 9, reserve_blocks=6) is not None, "what checkpoints hold counts as free"
    assert (kv.checkpoints.num_blocks("a"), kv.checkpoints.num_blocks("b")) == (3, 3)
    assert kv.allocate("c", 13, reserve_blocks=6) is None
    assert (kv.checkpoints.num_blocks("a"), kv.checkpoints.num_blocks("b")) == (3, 3), (
        "in vain, so nothing is reclaimed"
    )
    assert kv.allocate("c", 9 + 16) is not None
    assert (kv.checkpoints.num_blocks("a"), kv.checkpoints.num_blocks("b")) == (0, 2)
    move = kv.moves.start("b", TO_HOST)
    assert move is None and kv.checkpoints.num_blocks("b") == 2, "its own checkpoint is not reclaimed for a move"
    kv.check_integrity()


def test_only_a_request_at_rest_on_the_device_is_checkpointed() -> None:
    kv = make()
    with pytest.raises(RuntimeError, match="cannot be checkpointed"):
        kv.checkpoints.start("nobody", 4, max_blocks=1)
    move = kv.moves.start("a", TO_HOST)
    assert move is not None
    with pytest.raises(RuntimeError, match="cannot be checkpointed"):
        kv.checkpoints.start("a", 4, max_blocks=1)
    kv.moves.finish(move.move_id, succeeded=True)
    with pytest.raises(RuntimeError, match="cannot be checkpointed"):
        kv.checkpoints.start("a", 4, max_blocks=1)


def test_without_a_host_tier_nothing_is_checkpointed() -> None:
    assert make(num_host_blocks=0).checkpoints.start("a", 8, max_blocks=9) is None
    assert PagedKVManager(num_device_blocks=4, num_host_blocks=0, block_size=BLOCK).checkpoints is None


def test_integrity_check_finds_a_checkpoint_of_nobody() -> None:
    kv = make(num_tokens=8)
    checkpoint(kv, "a", 8)
    kv._tables.pools[Tier.DEVICE].give_back(kv._tables.by_request.pop("a").blocks)
    with pytest.raises(AssertionError, match="has 0 on the device"):
        kv.check_integrity()
