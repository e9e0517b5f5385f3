"""Checkpoints: what a request reads after any history of copies, moves and failures is what it wrote."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from omniserve.kv import MoveResult, PagedKVManager, Tier, TieredKVManager
from omniserve.plan import KVMove, MoveDirection

BLOCK = 4
TO_HOST, TO_DEVICE = MoveDirection.TO_HOST, MoveDirection.TO_DEVICE
POISON = ("poison",)


@dataclass
class _Request:
    life: int
    """Differs whenever the request starts anew: what an earlier life wrote is not its KV."""
    num_tokens: int = 0
    move_id: int | None = None


class PoisonedBlocks:
    """A random history. Blocks hold what was written there; what nobody owns is poisoned, and so is a torn copy."""

    manager: type[TieredKVManager] = TieredKVManager

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.kv = self.manager(
            num_device_blocks=self.rng.choice([10, 16, 30]),
            num_host_blocks=self.rng.choice([8, 16, 40]),
            block_size=BLOCK,
        )
        self.memory: dict[tuple[Tier, int], tuple[object, ...]] = {}
        self.requests: dict[str, _Request] = {}
        self.evicted: dict[str, _Request] = {}
        self.copies: dict[int, tuple[KVMove, list[tuple[object, ...]]]] = {}
        self.lives = 0
        self.reached: Counter[str] = Counter()

    def weights(self) -> dict[Callable[[], None], float]:
        return {
            self.grow: 8,
            self.checkpoint: 8,
            self.move: 3,
            self.finish: 6,
            self.abandon: 0.2,
            self.free: 0.3,
        }

    def run(self, num_actions: int) -> None:
        weights = self.weights()
        for action in self.rng.choices(list(weights), list(weights.values()), k=num_actions):
            action()
            self.check()
        while self.copies:
            self.finish()
        for request_id in (*self.requests, *self.evicted):
            self.kv.free(request_id)
        usage = self.kv.usage()
        assert usage.device_used == usage.host_used == 0

    def pick(self, *, moving: bool = False, tier: Tier | None = None) -> str | None:
        found = [r for r, q in self.requests.items() if (q.move_id is not None) == moving]
        found = [r for r in found if tier is None or self.kv.tier(r) is tier]
        return self.rng.choice(found) if found else None

    def start(self, move: KVMove) -> None:
        source = Tier.DEVICE if move.direction is TO_HOST else Tier.HOST
        assert len(move.src_block_ids) == len(move.dst_block_ids)
        self.copies[move.move_id] = (move, [self.memory[source, block] for block in move.src_block_ids])

    def grow(self) -> None:
        request_id = f"r{self.rng.randrange(5)}"
        request = self.requests.get(request_id)
        if request_id in self.evicted or (request is not None and request.move_id is not None):
            return
        length = (request.num_tokens if request is not None else 0) + self.rng.randint(1, 2 * BLOCK)
        blocks = self.kv.allocate(request_id, length, reserve_blocks=self.rng.choice([0, 0, 3]))
        if blocks is None:
            self.reached["out of memory"] += 1
            return
        if request is None:
            self.lives += 1
            request = self.requests[request_id] = _Request(self.lives)
        self.write(request_id, blocks, request.num_tokens, length)
        request.num_tokens = length

    def write(self, request_id: str, blocks: tuple[int, ...], start: int, end: int) -> None:
        tier = self.kv.tier(request_id)
        assert tier is not None
        for position in range(start, end):
            place = tier, blocks[position // BLOCK]
            before = self.memory.get(place, POISON)[: position % BLOCK]
            self.memory[place] = (*before, (self.requests[request_id].life, position))

    def checkpoint(self) -> None:
        request_id = self.pick(tier=Tier.DEVICE)
        if request_id is None:
            return
        num_tokens, max_blocks = self.requests[request_id].num_tokens, self.rng.randint(1, 4)
        reserve = self.rng.choice([0, 4])
        others = [r for r in self.requests if r != request_id and self.kv.tier(r) is Tier.DEVICE]
        move = self.kv.start_checkpoint(
            request_id,
            num_tokens,
            max_blocks=max_blocks,
            reserve_blocks=reserve,
            give_way=self.rng.sample(others, self.rng.choice([0, len(others)])),
        )
        if move is not None:
            assert move.is_checkpoint and move.direction is TO_HOST
            assert 0 < len(move.src_block_ids) <= max_blocks
            assert self.kv.num_free(Tier.HOST) >= reserve
            self.start(move)

    def move(self) -> None:
        request_id = self.pick()
        if request_id is None:
            return
        request, tier = self.requests[request_id], self.kv.tier(request_id)
        length, copied = self.kv.num_blocks(request_id), self.copied()
        num_free = self.kv.num_free(Tier.DEVICE)
        move = self.kv.start_move(
            request_id,
            TO_HOST if tier is Tier.DEVICE else TO_DEVICE,
            reserve_blocks=self.rng.choice([0, 2]),
            keep_tokens=self.rng.choice([0, request.num_tokens]),
        )
        if move is None:
            assert self.copied() == copied, "nothing has changed"
            return
        num_copied = copied.get(request_id, 0)
        if tier is Tier.DEVICE:
            assert len(move.src_block_ids) == length - num_copied
            assert self.kv.num_free(Tier.DEVICE) == num_free + num_copied, "copied blocks are free at once"
            self.reached["short moves"] += num_copied > 0
            others = {r: n for r, n in copied.items() if r != request_id}
            self.reached["reclaimed"] += others != self.copied()
        assert self.kv.num_blocks(request_id) == length
        request.move_id = move.move_id
        self.start(move)

    def copied(self) -> dict[str, int]:
        return {r: self.kv.num_checkpointed(r) for r in self.requests if self.kv.num_checkpointed(r)}

    def finish(self) -> None:
        if not self.copies:
            return
        move, seen = self.copies.pop(self.rng.choice(list(self.copies)))
        succeeded = self.rng.random() < 0.8
        source, target = (Tier.DEVICE, Tier.HOST) if move.direction is TO_HOST else (Tier.HOST, Tier.DEVICE)
        for src, dst, before in zip(move.src_block_ids, move.dst_block_ids, seen, strict=True):
            whole = self.memory.get((source, src)) == before
            self.memory[target, dst] = before if whole and succeeded else POISON
        mine = [r for r, request in self.requests.items() if request.move_id == move.move_id]
        num_copied = self.kv.num_checkpointed(move.request_id)
        result = self.kv.finish_move(move.move_id, succeeded=succeeded)
        self.reached[("checkpoint " if move.is_checkpoint else "move ") + result] += 1
        if not mine:
            if move.is_checkpoint and result is not MoveResult.UNUSED:
                assert result is (MoveResult.ARRIVED if succeeded else MoveResult.STAYED)
                num_copied += len(move.src_block_ids) if succeeded else 0
            else:
                assert result is MoveResult.UNUSED
            assert self.kv.num_checkpointed(move.request_id) == num_copied
        elif result is MoveResult.LOST:
            assert not succeeded and self.kv.tier(mine[0]) is None
            self.lose(mine[0])
        else:
            assert result is (MoveResult.ARRIVED if succeeded else MoveResult.STAYED)
            assert self.kv.tier(mine[0]) is (target if succeeded else source)
            self.requests[mine[0]].move_id = None
            self.reached["kept"] += move.direction is TO_DEVICE and self.kv.num_checkpointed(mine[0]) > 0

    def abandon(self) -> None:
        request_id = self.pick(moving=True, tier=Tier.DEVICE)
        if request_id is not None:
            move_id = self.requests[request_id].move_id
            assert move_id is not None
            self.kv.abandon_move(move_id)
            assert self.kv.tier(request_id) is None and self.kv.num_blocks(request_id) == 0
            self.lose(request_id)

    def lose(self, request_id: str) -> None:
        del self.requests[request_id]

    def free(self) -> None:
        request_id = self.pick()
        if request_id is not None:
            self.kv.free(request_id)
            del self.requests[request_id]
            assert self.kv.num_checkpointed(request_id) == 0

    def check(self) -> None:
        """Poison what is free; every request at rest then still reads what it wrote."""
        self.kv.check_integrity()
        for tier in Tier:
            for block in self.kv.free_block_ids(tier):
                self.memory[tier, block] = POISON
        for request_id, request in self.requests.items():
            if request.move_id is not None:
                continue
            blocks = self.kv.allocate(request_id, request.num_tokens)
            tier = self.kv.tier(request_id)
            assert blocks is not None and tier is not None
            read = [token for block in blocks for token in self.memory[tier, block]]
            assert read == [(request.life, position) for position in range(request.num_tokens)], request_id


def test_every_request_reads_what_it_wrote_over_random_histories() -> None:
    reached: Counter[str] = Counter()
    for seed in range(60):
        history = PoisonedBlocks(seed)
        history.run(400)
        reached += history.reached
    kinds = [f"checkpoint {result}" for result in ("arrived", "stayed", "unused")]
    kinds += [f"move {result}" for result in MoveResult]
    kinds += ["short moves", "reclaimed", "kept", "out of memory"]
    assert all(reached[kind] > 20 for kind in kinds), reached


def make(num_host_blocks: int = 16, num_tokens: int = 10) -> TieredKVManager:
    kv = TieredKVManager(num_device_blocks=12, num_host_blocks=num_host_blocks, block_size=BLOCK)
    assert kv.allocate("a", num_tokens) is not None
    return kv


def checkpoint(kv: TieredKVManager, request_id: str, num_tokens: int) -> KVMove:
    move = kv.start_checkpoint(request_id, num_tokens, max_blocks=100)
    assert move is not None
    assert kv.finish_move(move.move_id, succeeded=True) is MoveResult.ARRIVED
    return move


def test_only_full_blocks_are_copied_and_each_only_once() -> None:
    kv = make(num_tokens=10)
    first = checkpoint(kv, "a", 10)
    blocks = kv.allocate("a", 20)
    assert blocks is not None and first.src_block_ids == blocks[:2]
    assert kv.start_checkpoint("a", 11, max_blocks=9) is None
    second = checkpoint(kv, "a", 17)
    assert second.src_block_ids == blocks[2:4]
    assert kv.num_checkpointed("a") == 4


def test_a_move_copies_the_rest_and_frees_what_was_copied_at_once() -> None:
    kv = make(num_tokens=10)
    copied = checkpoint(kv, "a", 10)
    move = kv.start_move("a", TO_HOST)
    assert move is not None and not move.is_checkpoint
    assert len(move.src_block_ids) == 1 and kv.num_free(Tier.DEVICE) == 11
    assert kv.tier("a") is Tier.DEVICE and kv.num_blocks("a") == 3
    assert kv.finish_move(move.move_id, succeeded=True) is MoveResult.ARRIVED
    assert kv.allocate("a", 10) == copied.dst_block_ids + move.dst_block_ids


def test_a_move_of_what_is_copied_altogether_is_empty() -> None:
    kv = make(num_tokens=8)
    checkpoint(kv, "a", 8)
    move = kv.start_move("a", TO_HOST)
    assert move is not None and move.src_block_ids == move.dst_block_ids == ()
    assert kv.num_blocks("a") == 2 and kv.num_free(Tier.DEVICE) == 12
    assert kv.finish_move(move.move_id, succeeded=True) is MoveResult.ARRIVED
    assert kv.tier("a") is Tier.HOST and kv.num_blocks("a") == 2


def test_a_failed_move_keeps_a_request_that_had_no_checkpoint_and_loses_one_that_had() -> None:
    kv = make()
    move = kv.start_move("a", TO_HOST)
    assert move is not None and kv.finish_move(move.move_id, succeeded=False) is MoveResult.STAYED
    assert kv.tier("a") is Tier.DEVICE
    checkpoint(kv, "a", 10)
    move = kv.start_move("a", TO_HOST)
    assert move is not None and kv.finish_move(move.move_id, succeeded=False) is MoveResult.LOST
    assert kv.tier("a") is None
    usage = kv.usage()
    assert usage.device_used == usage.host_used == 0


@pytest.mark.parametrize("ending", ["free", "move", "reclaim"])
def test_the_target_of_a_copy_that_nobody_needs_is_held_until_it_ends(ending: str) -> None:
    kv = make(num_host_blocks=6, num_tokens=12)
    checkpoint(kv, "a", 4)
    copy = kv.start_checkpoint("a", 12, max_blocks=9)
    assert copy is not None and len(copy.dst_block_ids) == 2
    if ending == "free":
        kv.free("a")
    elif ending == "move":
        move = kv.start_move("a", TO_HOST)
        assert move is not None and len(move.src_block_ids) == 2, "what is under way does not count as copied"
    else:
        kv.allocate("b", 4 * 4)
        assert kv.start_move("b", TO_HOST) is not None
        assert kv.num_checkpointed("a") == 0
    assert not set(copy.dst_block_ids) & set(kv.free_block_ids(Tier.HOST))
    num_free = kv.num_free(Tier.HOST)
    assert kv.finish_move(copy.move_id, succeeded=True) is MoveResult.UNUSED
    assert kv.num_free(Tier.HOST) == num_free + 2
    kv.check_integrity()


def test_a_failed_copy_is_tried_again() -> None:
    kv = make(num_tokens=8)
    copy = kv.start_checkpoint("a", 8, max_blocks=9)
    assert copy is not None
    assert kv.start_checkpoint("a", 8, max_blocks=9) is None, "one at a time"
    assert kv.finish_move(copy.move_id, succeeded=False) is MoveResult.STAYED
    assert kv.num_checkpointed("a") == 0 and kv.num_free(Tier.HOST) == 16
    assert checkpoint(kv, "a", 8).src_block_ids == copy.src_block_ids


def test_host_blocks_of_a_request_that_came_back_stay_as_its_checkpoint() -> None:
    kv = make(num_tokens=10)
    move = kv.start_move("a", TO_HOST)
    assert move is not None
    kv.finish_move(move.move_id, succeeded=True)
    back = kv.start_move("a", TO_DEVICE, keep_tokens=10)
    assert back is not None and kv.num_checkpointed("a") == 0
    assert kv.finish_move(back.move_id, succeeded=True) is MoveResult.ARRIVED
    assert kv.num_checkpointed("a") == 2 and kv.num_free(Tier.HOST) == 14
    again = kv.start_move("a", TO_HOST)
    assert again is not None and again.src_block_ids == back.dst_block_ids[2:]


def test_residents_and_moves_take_the_blocks_of_the_oldest_checkpoint_from_its_end() -> None:
    kv = make(num_host_blocks=9, num_tokens=16)
    kv.allocate("b", 12)
    kv.allocate("c", 8)
    checkpoint(kv, "a", 16)
    checkpoint(kv, "b", 12)
    move = kv.start_move("c", TO_HOST)
    assert move is not None
    kv.finish_move(move.move_id, succeeded=True)
    assert kv.num_free(Tier.HOST) == 0
    assert kv.allocate("c", 9, reserve_blocks=6) is not None, "what checkpoints hold counts as free"
    assert (kv.num_checkpointed("a"), kv.num_checkpointed("b")) == (3, 3)
    assert kv.allocate("c", 13, reserve_blocks=6) is None
    assert (kv.num_checkpointed("a"), kv.num_checkpointed("b")) == (3, 3), "in vain, so nothing is reclaimed"
    assert kv.allocate("c", 9 + 16) is not None
    assert (kv.num_checkpointed("a"), kv.num_checkpointed("b")) == (0, 2)
    move = kv.start_move("b", TO_HOST)
    assert move is None and kv.num_checkpointed("b") == 2, "its own checkpoint is not reclaimed for a move"
    kv.check_integrity()


def test_only_a_request_at_rest_on_the_device_is_checkpointed() -> None:
    kv = make()
    with pytest.raises(RuntimeError, match="cannot be checkpointed"):
        kv.start_checkpoint("nobody", 4, max_blocks=1)
    move = kv.start_move("a", TO_HOST)
    assert move is not None
    with pytest.raises(RuntimeError, match="cannot be checkpointed"):
        kv.start_checkpoint("a", 4, max_blocks=1)
    kv.finish_move(move.move_id, succeeded=True)
    with pytest.raises(RuntimeError, match="cannot be checkpointed"):
        kv.start_checkpoint("a", 4, max_blocks=1)


def test_without_a_host_tier_nothing_is_checkpointed() -> None:
    assert make(num_host_blocks=0).start_checkpoint("a", 8, max_blocks=9) is None
    paged = PagedKVManager(num_device_blocks=4, num_host_blocks=0, block_size=BLOCK)
    paged.allocate("a", 8)
    assert paged.start_checkpoint("a", 8, max_blocks=9) is None
    assert paged.num_checkpointed("a") == 0


def test_integrity_check_finds_a_checkpoint_of_nobody() -> None:
    kv = make(num_tokens=8)
    checkpoint(kv, "a", 8)
    kv._pools[Tier.DEVICE].give_back(kv._tables.pop("a").blocks)
    with pytest.raises(AssertionError, match="has 0 on the device"):
        kv.check_integrity()
