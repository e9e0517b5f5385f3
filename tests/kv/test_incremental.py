"""Evicted requests: what is said to be kept of them is what they wrote, and costs nobody anything."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from omniserve.kv import MoveResult, Tier
from omniserve.kv.incremental import IncrementalKVManager
from tests.kv.free_blocks import free_block_ids
from tests.kv.histories import BLOCK, TO_DEVICE, TO_HOST, PoisonedBlocks, checkpoint, reach

DEVICE, HOST = Tier.DEVICE, Tier.HOST


class EvictedBlocks(PoisonedBlocks):
    """A random history with evictions, restores and what comes between them."""

    manager = IncrementalKVManager

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.restored: dict[str, int] = {}
        """Tokens that will be there, of requests that are being restored."""

    def weights(self) -> dict[Callable[[], None], float]:
        return super().weights() | {self.evict: 4, self.resume: 1, self.restore: 4, self.free_evicted: 0.2}

    def evict(self) -> None:
        request_id = self.pick()
        if request_id is None:
            return
        request, tier = self.requests.pop(request_id), self.kv.tier(request_id)
        assert tier is not None
        num_free, num_blocks = self.kv.num_free(DEVICE), self.kv.num_blocks(request_id)
        self.kv.evictions.evict(request_id, request.num_tokens)
        self.evicted[request_id] = request
        assert self.kv.tier(request_id) is None and self.kv.num_blocks(request_id) == 0
        assert self.kv.num_free(DEVICE) == num_free + (num_blocks if tier is DEVICE else 0)
        whole = request.num_tokens if tier is DEVICE else request.num_tokens // BLOCK * BLOCK
        assert self.kv.evictions.num_kept_tokens(request_id, tier) == whole
        self.reached[f"evicted from {tier}"] += 1

    def pick_evicted(self) -> str | None:
        return self.rng.choice(list(self.evicted)) if self.evicted else None

    def kept(self, request_id: str) -> tuple[int, int]:
        return self.kv.evictions.num_kept_tokens(request_id, DEVICE), self.kv.evictions.num_kept_tokens(
            request_id, HOST
        )

    def everything(self) -> object:
        return [(r, self.kept(r)) for r in self.evicted], self.copied(), self.kv.num_free(DEVICE)

    def draw_evicted(self) -> tuple[str, int, int] | None:
        """Draw an evicted request, a new length for it and a reserve; None if nobody is evicted."""
        request_id = self.pick_evicted()
        if request_id is None:
            return None
        return request_id, self.evicted[request_id].num_tokens + self.rng.randint(0, 5), self.rng.choice([0, 3])

    def resume(self) -> None:
        """Go on with what is on the device, and recompute the rest."""
        if (drawn := self.draw_evicted()) is None:
            return
        request_id, length, reserve = drawn
        request, before = self.evicted[request_id], self.everything()
        on_device, on_host = self.kept(request_id)
        blocks = self.kv.allocate(request_id, length, reserve_blocks=reserve)
        if blocks is None:
            assert self.everything() == before
            return
        self.requests[request_id] = self.evicted.pop(request_id)
        self.reached["resumed whole"] += on_device == request.num_tokens
        self.reached["resumed in part"] += 0 < on_device < request.num_tokens
        self.reached["not restored"] += on_host > on_device
        assert self.kept(request_id) == (0, 0), "it is not evicted any more"
        self.write(request_id, blocks, on_device, length)
        request.num_tokens = length

    def restore(self) -> None:
        if (drawn := self.draw_evicted()) is None:
            return
        request_id, length, reserve = drawn
        request, before = self.evicted[request_id], self.everything()
        on_device, on_host = self.kept(request_id)
        move = self.kv.evictions.start_restore(request_id, length, reserve_blocks=reserve)
        if move is None:
            assert self.everything() == before
            return
        assert move.direction is TO_DEVICE and not move.is_checkpoint
        assert len(move.src_block_ids) * BLOCK == on_host - on_device > 0, "only what the device has not is copied"
        assert self.kv.num_blocks(request_id) == -(-length // BLOCK) and self.kv.num_free(DEVICE) >= reserve
        with pytest.raises(RuntimeError, match="is moving"):
            self.kv.evictions.evict(request_id, length)
        self.reached["restored in part"] += on_device > 0
        self.start(move)
        self.requests[request_id] = self.evicted.pop(request_id)
        request.move_id, request.num_tokens = move.move_id, length
        self.restored[request_id] = on_host

    def finish(self) -> None:
        super().finish()
        for request_id, num_tokens in list(self.restored.items()):
            request = self.requests[request_id]
            if request.move_id is None:
                del self.restored[request_id]
                self.reached["restored"] += 1
                assert self.kv.checkpoints.num_blocks(request_id) == num_tokens // BLOCK, "it keeps its checkpoint"
                blocks = self.kv.allocate(request_id, request.num_tokens)
                assert blocks is not None, "it has had its blocks since the restore began"
                self.write(request_id, blocks, num_tokens, request.num_tokens)

    def lose(self, request_id: str) -> None:
        if self.restored.pop(request_id, None) is not None:
            assert self.kept(request_id) == (0, 0) and self.kv.checkpoints.num_blocks(request_id) == 0
            self.reached["restore lost"] += 1
            super().lose(request_id)
            return
        request = self.evicted[request_id] = self.requests.pop(request_id)
        request.move_id = None
        on_device, on_host = self.kept(request_id)
        assert on_device == 0 and on_host <= request.num_tokens
        self.reached["stranded"] += on_host > 0

    def free_evicted(self) -> None:
        request_id = self.pick_evicted()
        if request_id is not None:
            self.kv.free(request_id)
            del self.evicted[request_id]
            assert self.kept(request_id) == (0, 0) and self.kv.checkpoints.num_blocks(request_id) == 0


def test_what_is_kept_is_what_was_written_over_random_histories() -> None:
    kinds = ["evicted from device", "evicted from host", "resumed whole", "resumed in part", "not restored"]
    kinds += ["restored", "restored in part", "restore lost", "stranded", "checkpoint unused", "out of memory"]
    reach(lambda seed: EvictedBlocks(seed).run(), kinds, most_seeds=150)


def make(num_device_blocks: int = 12, num_host_blocks: int = 16, **num_tokens: int) -> IncrementalKVManager:
    kv = IncrementalKVManager(num_device_blocks=num_device_blocks, num_host_blocks=num_host_blocks, block_size=BLOCK)
    for request_id, count in num_tokens.items():
        assert kv.allocate(request_id, count) is not None
    return kv


def kept(kv: IncrementalKVManager, request_id: str) -> tuple[int, int]:
    return kv.evictions.num_kept_tokens(request_id, DEVICE), kv.evictions.num_kept_tokens(request_id, HOST)


def test_a_request_whose_blocks_nobody_took_has_them_all_back_without_a_copy() -> None:
    kv = make(a=10)
    blocks = kv.allocate("a", 10)
    kv.evictions.evict("a", 10)
    assert kv.num_free(DEVICE) == 12 and kv.usage().device_used == 0
    assert kept(kv, "a") == (10, 0)
    assert kv.evictions.start_restore("a", 11) is None, "there is nothing to copy"
    assert kv.allocate("a", 11) == blocks
    kv.check_integrity()


def test_blocks_that_were_not_computed_yet_are_not_kept() -> None:
    kv = make(a=20)
    kv.evictions.evict("a", 5)
    assert kept(kv, "a") == (5, 0) and len(free_block_ids(kv, DEVICE)) == 10


def test_only_as_many_blocks_as_are_needed_are_taken_from_the_end_of_who_was_evicted_first() -> None:
    kv = make(a=16, b=16)
    first, second = kv.allocate("a", 16), kv.allocate("b", 16)
    assert first is not None and second is not None
    kv.evictions.evict("b", 15)
    kv.evictions.evict("a", 16)
    assert kv.allocate("c", 6 * BLOCK) is not None
    assert (kept(kv, "a"), kept(kv, "b")) == ((16, 0), (8, 0))
    assert kv.allocate("b", 20) is not None, "its own blocks are not taken for it"
    assert kv.allocate("b", 20)[:2] == second[:2]  # type: ignore[index]
    assert kept(kv, "a") == (4, 0)
    assert kv.allocate("d", 2 * BLOCK) is None and kept(kv, "a") == (4, 0), "in vain, so nothing is taken"
    kv.check_integrity()


def test_a_restore_copies_what_the_device_lost_and_leaves_the_checkpoint() -> None:
    kv = make(a=18)
    copied = checkpoint(kv, "a", 18)
    before = kv.allocate("a", 18)
    assert before is not None
    kv.evictions.evict("a", 18)
    kv.allocate("b", 10 * BLOCK)
    assert kept(kv, "a") == (8, 16)
    kv.free("b")
    move = kv.evictions.start_restore("a", 21, reserve_blocks=6)
    assert move is not None and move.src_block_ids == copied.dst_block_ids[2:]
    assert kv.num_blocks("a") == 6 and kv.num_free(DEVICE) == 6
    assert kv.moves.finish(move.move_id, succeeded=True) is MoveResult.ARRIVED
    table = kv.allocate("a", 21)
    assert table is not None and table[:4] == before[:2] + move.dst_block_ids
    assert kv.tier("a") is DEVICE and kv.checkpoints.num_blocks("a") == 4
    kv.evictions.evict("a", 16)
    assert kept(kv, "a") == (16, 16), "to evict it again costs nothing either"


def test_a_restore_without_room_changes_nothing() -> None:
    kv = make(a=16)
    checkpoint(kv, "a", 16)
    kv.evictions.evict("a", 16)
    kv.allocate("b", 9 * BLOCK)
    assert kept(kv, "a") == (12, 16)
    assert kv.evictions.start_restore("a", 17) is None
    assert kept(kv, "a") == (12, 16) and kv.num_free(DEVICE) == 3


def test_after_a_failed_restore_nothing_is_kept_or_held() -> None:
    kv = make(a=16)
    checkpoint(kv, "a", 16)
    kv.evictions.evict("a", 16)
    kv.allocate("b", 10 * BLOCK)
    kv.free("b")
    move = kv.evictions.start_restore("a", 20)
    assert move is not None and kv.moves.finish(move.move_id, succeeded=False) is MoveResult.LOST
    assert kept(kv, "a") == (0, 0) and kv.tier("a") is None
    usage = kv.usage()
    assert usage.device_used == usage.host_used == 0
    kv.check_integrity()


def test_a_checkpoint_does_not_give_way_while_it_is_read() -> None:
    kv = make(num_host_blocks=4, a=16)
    checkpoint(kv, "a", 16)
    kv.evictions.evict("a", 16)
    kv.allocate("b", 12 * BLOCK)
    kv.free("b")
    kv.allocate("c", 8)
    assert kv.evictions.start_restore("a", 17) is not None
    assert kv.moves.start("c", TO_HOST) is None


@pytest.mark.parametrize("num_taken", [0, 1, 4])
def test_a_copy_under_way_counts_if_nobody_took_what_it_reads(num_taken: int) -> None:
    kv = make(a=16)
    checkpoint(kv, "a", 8)
    copy = kv.checkpoints.start("a", 12, max_blocks=100)
    assert copy is not None
    kv.evictions.evict("a", 16)
    kv.allocate("b", (8 + num_taken) * BLOCK)
    result = kv.moves.finish(copy.move_id, succeeded=True)
    assert result is (MoveResult.UNUSED if num_taken == 4 else MoveResult.ARRIVED)
    assert kept(kv, "a") == (16 - 4 * num_taken, 8 if num_taken == 4 else 12)
    kv.check_integrity()


def test_host_memory_is_taken_from_copies_of_what_the_device_has_and_then_from_who_was_evicted_first() -> None:
    kv = make(num_device_blocks=16, num_host_blocks=9, a=12, b=12, c=12)
    for request_id in "abc":
        checkpoint(kv, request_id, 12)
    kv.evictions.evict("a", 12)
    kv.evictions.evict("b", 12)
    kv.allocate("d", 16)
    move = kv.moves.start("d", TO_HOST)
    assert move is not None
    assert [kv.checkpoints.num_blocks(request_id) for request_id in "abc"] == [2, 3, 0]
    kv.moves.finish(move.move_id, succeeded=True)
    assert kv.allocate("d", 20) is not None
    assert [kv.checkpoints.num_blocks(request_id) for request_id in "abc"] == [1, 3, 0]
    assert kept(kv, "a") == (12, 4)
    kv.check_integrity()


def test_full_blocks_of_an_evicted_host_resident_become_its_checkpoint() -> None:
    kv = make(a=10)
    move = kv.moves.start("a", TO_HOST)
    assert move is not None
    kv.moves.finish(move.move_id, succeeded=True)
    kv.evictions.evict("a", 10)
    assert kept(kv, "a") == (0, 8) and kv.num_free(HOST) == 14
    restore = kv.evictions.start_restore("a", 11)
    assert restore is not None and restore.src_block_ids == move.dst_block_ids[:2]


@pytest.mark.parametrize("ending", ["failed", "abandoned"])
def test_who_loses_the_rest_on_its_way_to_the_host_keeps_its_checkpoint(ending: str) -> None:
    kv = make(a=10)
    checkpoint(kv, "a", 10)
    move = kv.moves.start("a", TO_HOST)
    assert move is not None
    if ending == "abandoned":
        kv.moves.abandon(move.move_id)
    result = kv.moves.finish(move.move_id, succeeded=False)
    assert result is (MoveResult.UNUSED if ending == "abandoned" else MoveResult.LOST)
    assert kv.tier("a") is None and kept(kv, "a") == (0, 8)
    kv.free("a")
    assert kv.usage().host_used == 0


def test_integrity_check_finds_a_checkpoint_beyond_what_was_computed() -> None:
    kv = make(a=8)
    checkpoint(kv, "a", 8)
    kv.evictions.evict("a", 7)
    with pytest.raises(AssertionError, match="has 1 on the device"):
        kv.check_integrity()


def test_a_checkpoint_is_cut_to_what_is_not_recomputed_beside_it() -> None:
    kv = make(a=16)
    checkpoint(kv, "a", 16)
    kv.evictions.evict("a", 16)
    kv.allocate("b", 10 * BLOCK)
    kv.free("b")
    assert kv.allocate("a", 17) is not None and kv.checkpoints.num_blocks("a") == 2
    kv.evictions.evict("a", 9)
    kv.check_integrity()
    assert kept(kv, "a") == (9, 8)


def test_who_ends_while_it_is_evicted_leaves_nothing() -> None:
    kv = make(a=10)
    checkpoint(kv, "a", 10)
    kv.evictions.evict("a", 10)
    kv.free("a")
    assert len(free_block_ids(kv, DEVICE)) == 12 and len(free_block_ids(kv, HOST)) == 16
