"""Blocks that two requests share: who is where, what is overwritten, what is saved before, what comes back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from omniserve.core.request import ServiceClass
from omniserve.core.work import KVMove, SlotCopy
from omniserve.kv import MoveResult, Tier
from omniserve.kv.bidirectional import BidirectionalKVManager
from tests.kv.free_blocks import free_block_ids
from tests.kv.histories import BLOCK, TO_DEVICE, TO_HOST, reach

DEVICE, HOST = Tier.DEVICE, Tier.HOST
LS, BE = ServiceClass.LS, ServiceClass.BE
Slot = tuple[Tier, int, int]


@dataclass
class _Request:
    life: int
    kind: ServiceClass
    num_tokens: int = 0
    move_id: int | None = None
    num_restored: int | None = None
    """Tokens that will be there when the copies of a restore are done."""


class SharedBlocks:
    """A random history over slots: what is nobody's is empty, and of a copy counts what did not change meanwhile."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.kv = BidirectionalKVManager(
            num_device_blocks=self.rng.choice([10, 16, 24]),
            num_host_blocks=self.rng.choice([6, 12, 40]),
            block_size=BLOCK,
        )
        self.memory: dict[Slot, tuple[int, int]] = {}
        self.live: dict[str, _Request] = {}
        self.pending: dict[str, _Request] = {}
        self.copies: dict[int, tuple[KVMove, list[tuple[int, int] | None]]] = {}
        self.lives = 0
        self.reached: Counter[str] = Counter()

    def run(self, num_actions: int = 400) -> Counter[str]:
        weights: dict[Callable[[], None], float] = {
            self.grow: 14, self.evict: 4, self.resume: 4, self.restore: 3, self.save: 6, self.move: 1, self.finish: 6,
            self.abandon: 0.2, self.free: 0.5,
        }  # fmt: skip
        for action in self.rng.choices(list(weights), list(weights.values()), k=num_actions):
            action()
            self.check()
        while self.copies:
            self.finish()
        for request_id in (*self.live, *self.pending):
            self.kv.free(request_id)
        usage = self.kv.usage()
        assert usage.device_used == usage.host_used == 0
        assert len(free_block_ids(self.kv, DEVICE)) == usage.device_total
        self.reached["overwritten"] += self.kv._device.num_overwritten_tokens
        return self.reached

    # -- places --------------------------------------------------------------------------------------------------

    def slot(self, request_id: str, tier: Tier, blocks: tuple[int, ...] | list[int], position: int) -> Slot:
        offset = position % BLOCK
        from_right = tier is DEVICE and self.kv.sharing.runs_from_right(request_id)
        return tier, blocks[position // BLOCK], BLOCK - 1 - offset if from_right else offset

    def slots(self, move: KVMove, tier: Tier, blocks: tuple[int, ...]) -> list[Slot]:
        turned = tier is DEVICE and move.is_reversed
        return [(tier, block, BLOCK - 1 - i if turned else i) for block in blocks for i in range(BLOCK)]

    def write(self, request_id: str, blocks: tuple[int, ...], start: int, end: int) -> None:
        """Do what a step does: relocate, then write."""
        for copy in self.kv.sharing.take_relocations():
            self.reached["relocated"] += 1
            for i in range(copy.begin, copy.end):
                self.memory.pop((DEVICE, copy.target_block, i), None)
                if (token := self.memory.get((DEVICE, copy.source_block, i))) is not None:
                    self.memory[DEVICE, copy.target_block, i] = token
        tier = self.kv.tier(request_id)
        assert tier is not None
        for position in range(start, end):
            self.memory[self.slot(request_id, tier, blocks, position)] = (self.live[request_id].life, position)

    def pick(self, *, moving: bool = False) -> str | None:
        found = [r for r, q in self.live.items() if (q.move_id is not None) == moving]
        return self.rng.choice(found) if found else None

    def pick_evicted(self) -> str | None:
        return self.rng.choice(list(self.pending)) if self.pending else None

    # -- actions -------------------------------------------------------------------------------------------------

    def grow(self) -> None:
        request_id = f"r{self.rng.randrange(8)}"
        request = self.live.get(request_id)
        if request_id in self.pending or (request is not None and request.move_id is not None):
            return
        is_new = request is None
        if request is None:
            self.lives += 1
            request = _Request(self.lives, self.rng.choice([LS, BE, BE]))
            self.kv.sharing.declare(request_id, request.kind)
        end = request.num_tokens + self.rng.choice([1, 1, self.rng.randint(1, 3 * BLOCK)])
        num_free, reserve = self.kv.num_free(DEVICE), self.rng.choice([0, 0, 3])
        num_shared, on_device = self.kv._device.num_shared_blocks, self.kv.tier(request_id) is not HOST
        blocks = self.kv.allocate(request_id, end, reserve_blocks=reserve)
        if blocks is None:
            assert self.kv.num_free(DEVICE) == num_free and not self.kv.sharing.take_relocations()
            self.reached["out of memory"] += 1
            if is_new:
                self.kv.free(request_id)
            return
        if on_device and self.kv.num_free(DEVICE) < num_free:
            assert self.kv.num_free(DEVICE) >= reserve
        if self.kv._device.num_shared_blocks > num_shared:
            assert request.kind is LS
            self.reached["shared"] += 1
        self.live[request_id] = request
        self.write(request_id, blocks, request.num_tokens, end)
        request.num_tokens = end

    def evict(self) -> None:
        request_id = self.pick()
        if request_id is None:
            return
        request, tier = self.live.pop(request_id), self.kv.tier(request_id)
        self.kv.evictions.evict(request_id, request.num_tokens)
        self.pending[request_id] = request
        kept = self.kv.evictions.num_kept_tokens(request_id, DEVICE)
        if tier is HOST:
            assert kept == 0
            assert self.kv.evictions.num_kept_tokens(request_id, HOST) == request.num_tokens // BLOCK * BLOCK
        elif request.kind is BE:
            assert kept == request.num_tokens, "to give way costs nothing"
        self.reached[f"evicted from {tier}"] += 1

    def resume(self) -> None:
        """Go on with what is on the device, and recompute the rest."""
        request_id = self.pick_evicted()
        if request_id is None:
            return
        request = self.pending[request_id]
        kept = self.kv.evictions.num_kept_tokens(request_id, DEVICE)
        end = request.num_tokens + self.rng.randint(0, 5)
        blocks = self.kv.allocate(request_id, end, reserve_blocks=self.rng.choice([0, 3]))
        if blocks is None:
            assert self.kv.evictions.num_kept_tokens(request_id, DEVICE) == kept
            return
        self.live[request_id] = self.pending.pop(request_id)
        self.reached["resumed whole"] += kept == request.num_tokens
        self.reached["resumed with part of a block"] += kept < request.num_tokens and kept % BLOCK > 0
        self.write(request_id, blocks, kept, end)
        request.num_tokens = end

    def restore(self) -> None:
        request_id = self.pick_evicted()
        if request_id is None:
            return
        request = self.pending[request_id]
        kept, restorable = (self.kv.evictions.num_kept_tokens(request_id, tier) for tier in (DEVICE, HOST))
        end = request.num_tokens + self.rng.randint(0, 5)
        move = self.kv.evictions.start_restore(request_id, end, reserve_blocks=self.rng.choice([0, 3]))
        if move is None:
            assert self.kv.evictions.num_kept_tokens(request_id, DEVICE) == kept
            return
        assert restorable > kept and move.direction is TO_DEVICE
        assert len(move.src_block_ids) == -(-restorable // BLOCK) - kept // BLOCK, "only what is missing is copied"
        self.reached["restored beside kept blocks"] += kept >= BLOCK
        self.start(move)
        self.live[request_id] = self.pending.pop(request_id)
        request.num_tokens, request.move_id, request.num_restored = end, move.move_id, restorable

    def save(self) -> None:
        max_blocks = self.rng.randint(0, 4)
        reserve = self.rng.choice([0, 2])
        moves = self.kv.sharing.start_saving(num_ahead=4, max_blocks=max_blocks, reserve_blocks=reserve)
        assert sum(len(move.src_block_ids) for move in moves) <= max_blocks
        for move in moves:
            assert move.is_checkpoint and move.direction is TO_HOST and move.request_id in self.pending
            assert self.kv.num_free(HOST) >= reserve
            self.start(move)

    def move(self) -> None:
        request_id = self.pick()
        if request_id is None or self.live[request_id].kind is LS:
            return
        tier = self.kv.tier(request_id)
        move = self.kv.moves.start(request_id, TO_HOST if tier is DEVICE else TO_DEVICE, keep_tokens=99)
        if move is not None:
            self.live[request_id].move_id = move.move_id
            self.start(move)
            self.reached[f"moved from {tier}"] += 1

    def restorable(self, request_id: str) -> int:
        return max(self.kv.evictions.num_kept_tokens(request_id, tier) for tier in Tier)

    def start(self, move: KVMove) -> None:
        source = self.slots(move, DEVICE if move.direction is TO_HOST else HOST, move.src_block_ids)
        self.copies[move.move_id] = (move, [self.memory.get(slot) for slot in source])

    def finish(self) -> None:
        if not self.copies:
            return
        move, seen = self.copies.pop(self.rng.choice(list(self.copies)))
        succeeded = self.rng.random() < 0.85
        tiers = (DEVICE, HOST) if move.direction is TO_HOST else (HOST, DEVICE)
        source, target = self.slots(move, tiers[0], move.src_block_ids), self.slots(move, tiers[1], move.dst_block_ids)
        for old, new, before in zip(source, target, seen, strict=True):
            self.memory.pop(new, None)
            if succeeded and before is not None and self.memory.get(old) == before:
                self.memory[new] = before
        mine = next((r for r, q in self.live.items() if q.move_id == move.move_id), None)
        before_it = {r: self.restorable(r) for r in self.pending} if move.is_checkpoint else {}
        result = self.kv.moves.finish(move.move_id, succeeded=succeeded)
        assert all(self.restorable(r) >= count for r, count in before_it.items()), "a copy that ends takes nothing away"
        self.reached[("saving " if move.is_checkpoint else "move ") + result] += 1
        if mine is None:
            return
        request = self.live[mine]
        request.move_id = None
        num_restored, request.num_restored = request.num_restored, None
        if result is MoveResult.LOST:
            assert num_restored is not None and not succeeded
            self.pending[mine] = self.live.pop(mine)
        elif num_restored is not None:
            blocks = self.kv.allocate(mine, request.num_tokens)
            assert blocks is not None, "it has had its blocks since the restore began"
            self.write(mine, blocks, num_restored, request.num_tokens)

    def abandon(self) -> None:
        request_id = self.pick(moving=True)
        if request_id is not None and self.live[request_id].num_restored is None and self.kv.tier(request_id) is DEVICE:
            move_id = self.live.pop(request_id).move_id
            assert move_id is not None
            self.kv.moves.abandon(move_id)
            self.kv.free(request_id)

    def free(self) -> None:
        for request_id in (self.pick(), self.pick_evicted()):
            if request_id is not None:
                self.kv.free(request_id)
                self.live.pop(request_id, None)
                self.pending.pop(request_id, None)

    # -- what must hold ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Empty what is nobody's; everybody at rest then still has what it wrote."""
        self.kv.check_integrity()
        owned = list(self.owned())
        slots = {slot for slot, _ in owned}
        assert len(slots) == len(owned), "a slot has two tokens"
        for slot, token in owned:
            assert self.memory.get(slot) == token, (slot, token)
        tables = self.kv._tables.by_request
        moving = {
            block for r, q in self.live.items() if q.move_id is not None for block in tables[r].blocks
        } | {block for q in self.live.values() if q.move_id is not None
             for block in self.copies[q.move_id][0].dst_block_ids}  # fmt: skip
        for slot in [s for s in self.memory if s[0] is DEVICE and s[1] not in moving]:
            if slot not in slots:
                del self.memory[slot]

    def owned(self) -> Iterator[tuple[Slot, tuple[int, int]]]:
        for request_id, request in self.live.items():
            if request.move_id is not None:
                if request.num_restored is not None:
                    arrived = self.kv._tables.by_request[request_id].arrived
                    for position in range(len(arrived) * BLOCK):
                        yield self.slot(request_id, DEVICE, arrived, position), (request.life, position)
                continue
            tier, blocks = self.kv.tier(request_id), self.kv.allocate(request_id, request.num_tokens)
            assert tier is not None and blocks is not None
            for position in range(request.num_tokens):
                yield self.slot(request_id, tier, blocks, position), (request.life, position)
        for request_id, request in self.pending.items():
            blocks_kept = self.kv._device.evicted[request_id].blocks
            for position in range(self.kv.evictions.num_kept_tokens(request_id, DEVICE)):
                yield self.slot(request_id, DEVICE, blocks_kept, position), (request.life, position)
            for index, copy in self.kv._saved.copies(request_id).items():
                for i in range(copy.num_tokens):
                    yield (HOST, copy.block, i), (request.life, index * BLOCK + i)


def test_everybody_has_what_it_wrote_over_random_histories() -> None:
    kinds = ["out of memory", "shared", "relocated", "overwritten", "evicted from device", "evicted from host"]
    kinds += ["resumed whole", "resumed with part of a block", "restored beside kept blocks", "move lost"]
    kinds += ["move arrived", "saving arrived", "saving unused", "saving stayed", "moved from device"]
    reach(lambda seed: SharedBlocks(seed).run(), [*kinds, "moved from host"], least=4, most_seeds=100)


def make(num_device_blocks: int = 4, num_host_blocks: int = 16, **num_tokens: int) -> BidirectionalKVManager:
    """Return a manager with requests of so many tokens; those whose names begin with a b are BE."""
    kv = BidirectionalKVManager(num_device_blocks=num_device_blocks, num_host_blocks=num_host_blocks, block_size=BLOCK)
    for request_id, count in num_tokens.items():
        kv.sharing.declare(request_id, BE if request_id.startswith("b") else LS)
        assert kv.allocate(request_id, count) is not None
    return kv


def kept(kv: BidirectionalKVManager, request_id: str) -> tuple[int, int]:
    return kv.evictions.num_kept_tokens(request_id, DEVICE), kv.evictions.num_kept_tokens(request_id, HOST)


def save(kv: BidirectionalKVManager, num_ahead: int = 0) -> list[KVMove]:
    moves = kv.sharing.start_saving(num_ahead=num_ahead, max_blocks=100)
    for move in moves:
        kv.moves.finish(move.move_id, succeeded=True)
    return moves


def test_be_blocks_run_from_the_right_and_others_from_the_left() -> None:
    kv = make(a=3, b=3)
    assert kv.sharing.runs_from_right("b") and not kv.sharing.runs_from_right("a")
    kv.free("b")
    assert not kv.sharing.runs_from_right("b"), "who has ended is forgotten"


def test_while_blocks_are_free_nobody_shares_one() -> None:
    kv = make(b=5, a=5)
    assert kv._device.num_shared_blocks == 0 and not set(kv.allocate("a", 5) or ()) & set(kv.allocate("b", 5) or ())


def test_an_ls_request_without_a_free_block_moves_in_where_most_slots_are_empty() -> None:
    kv = make(b1=7, b2=5)
    b1, b2 = kv.allocate("b1", 7), kv.allocate("b2", 5)
    assert b1 is not None and b2 is not None
    assert kv.allocate("a", 4) is None, "a whole block would leave nothing of the other request"
    assert kv.allocate("a", 2) == (b2[1],)
    assert kv.allocate("c", 2) is None, "the other one has one empty slot"
    assert kv.allocate("c", 1) == (b1[1],)
    assert (kv.allocate("b1", 7), kv.allocate("b2", 5)) == (b1, b2) and not kv.sharing.take_relocations()
    kv.check_integrity()


def test_both_grow_into_the_same_block_until_it_is_full() -> None:
    kv = make(b=13, a=1)
    assert kv.allocate("a", 2) == (3,) and kv.allocate("b", 14) == (0, 1, 2, 3)
    assert kv.allocate("a", 3) is None and kv.allocate("b", 15) is None, "neither overwrites the other"
    assert not kv.sharing.take_relocations()


@pytest.mark.parametrize("mover", ["a", "b"])
def test_who_outgrows_a_shared_block_takes_its_slots_along(mover: str) -> None:
    kv = make(num_device_blocks=3, b=5, c=1, a=2)
    kv.free("c")
    if mover == "a":
        assert kv.allocate("b", 6) == (0, 1) and kv.allocate("a", 3) == (2,)
        begin, end = 0, 2
    else:
        assert kv.allocate("a", 3) == (1,) and kv.allocate("b", 6) == (0, 2)
        begin, end = 3, 4
    assert kv.sharing.take_relocations() == (SlotCopy(source_block=1, target_block=2, begin=begin, end=end),)
    assert kv.sharing.take_relocations() == ()
    kv.check_integrity()


def test_a_block_is_free_when_both_have_left_it() -> None:
    for first, second in (("a", "b"), ("b", "a")):
        kv = make(num_device_blocks=1, b=1, a=2)
        kv.free(first)
        assert kv.num_free(DEVICE) == 0
        kv.free(second)
        assert free_block_ids(kv, DEVICE) == [0]


def test_an_ls_request_overwrites_an_evicted_one_slot_by_slot() -> None:
    kv = make(b=16)
    kv.evictions.evict("b", 16)
    assert kept(kv, "b") == (16, 0) and kv.num_free(DEVICE) == 4
    for num_tokens, num_left in ((1, 15), (2, 14), (4, 12), (5, 11), (11, 5), (12, 4)):
        assert kv.allocate("a", num_tokens) is not None
        assert kept(kv, "b") == (num_left, 0)
        kv.check_integrity()
    assert kv._device.num_overwritten_tokens == 12 and not kv.sharing.take_relocations(), "nobody has to move"


def test_blocks_with_most_empty_slots_are_taken_first_and_then_from_the_end_of_who_was_evicted_first() -> None:
    kv = make(num_device_blocks=6, b1=8, b2=7, b3=5)
    for request_id in ("b1", "b2", "b3"):
        kv.evictions.evict(request_id, {"b1": 8, "b2": 7, "b3": 5}[request_id])
    left = []
    for _ in range(4):
        assert kv.allocate("a", kv.num_blocks("a") * BLOCK + BLOCK) is not None
        left.append(tuple(kv.evictions.num_kept_tokens(r, DEVICE) for r in ("b1", "b2", "b3")))
    assert left == [(8, 7, 4), (8, 4, 4), (4, 4, 4), (0, 4, 4)]


def test_what_is_left_beside_a_guest_comes_along_when_its_request_comes_back() -> None:
    kv = make(num_device_blocks=3, b=8, c=4)
    kv.evictions.evict("b", 8)
    assert kv.allocate("a", 1) == (1,) and kept(kv, "b") == (7, 0)
    kv.free("c")
    assert kv.allocate("b", 8) == (0, 2), "its fourth slot is taken"
    assert kv.sharing.take_relocations() == (SlotCopy(source_block=1, target_block=2, begin=1, end=4),)


def test_who_comes_back_shares_on_if_there_is_room() -> None:
    kv = make(num_device_blocks=2, b=6)
    kv.evictions.evict("b", 6)
    assert kv.allocate("a", 1) == (1,) and kv.allocate("b", 7) == (0, 1)
    assert not kv.sharing.take_relocations() and kv._device.num_overwritten_tokens == 0
    kv.check_integrity()


def test_only_slots_about_to_be_overwritten_are_copied_to_the_host() -> None:
    kv = BidirectionalKVManager(num_device_blocks=3, num_host_blocks=16, block_size=16)
    kv.sharing.declare("b", BE)
    kv.allocate("b", 3 * 16)
    kv.evictions.evict("b", 2 * 16 + 5)
    assert not save(kv), "nobody is near, and no block is next to be taken"
    kv.allocate("a", 1)
    assert not save(kv), "there are ten slots between them"
    kv.allocate("a", 8)
    (move,) = save(kv)
    assert move.src_block_ids == (2,) and move.is_reversed and move.is_checkpoint
    assert not save(kv), "it is saved already"
    kv.allocate("a", 14)
    assert kept(kv, "b") == (2 * 16 + 2, 2 * 16 + 5), "the device has lost three tokens, the host has them"


def test_blocks_next_to_be_taken_are_copied_and_no_more() -> None:
    kv = make(num_device_blocks=8, b=20)
    kv.evictions.evict("b", 18)
    assert not save(kv, num_ahead=3), "three blocks are free"
    moves = save(kv, num_ahead=5)
    assert [move.src_block_ids for move in moves] == [(3, 4)]
    assert kv.allocate("a", 6 * BLOCK) is not None
    assert kept(kv, "b") == (8, 0), "there is a hole before what was saved"


def test_a_restore_brings_back_what_is_missing_and_nothing_else() -> None:
    kv = make(b=16)
    kv.evictions.evict("b", 15)
    (move,) = save(kv, num_ahead=2)
    saved = dict(zip(move.src_block_ids, move.dst_block_ids, strict=True))
    assert set(saved) == {2, 3}
    kv.allocate("a", 6)
    assert kept(kv, "b") == (10, 15)
    kv.free("a")
    restore = kv.evictions.start_restore("b", 16)
    assert restore is not None and restore.direction is TO_DEVICE and restore.is_reversed
    assert restore.src_block_ids == (saved[2], saved[3]), "the block that is there in part, and the one that is not"
    assert restore.dst_block_ids[0] == 2, "it goes where it was: the guest has left"
    assert kv.moves.finish(restore.move_id, succeeded=True) is MoveResult.ARRIVED
    assert kv.tier("b") is DEVICE and kv.num_blocks("b") == 4
    kv.evictions.evict("b", 16)
    assert kept(kv, "b") == (16, 0), "to give way again costs nothing either"


def test_after_a_failed_restore_the_blocks_that_were_there_are_kept() -> None:
    kv = make(b=16)
    kv.evictions.evict("b", 16)
    save(kv, num_ahead=2)
    kv.allocate("a", 6)
    kv.free("a")
    restore = kv.evictions.start_restore("b", 17 - 1)
    assert restore is not None and kv.moves.finish(restore.move_id, succeeded=False) is MoveResult.LOST
    assert kept(kv, "b") == (8, 0)
    kv.free("b")
    assert kv.usage().device_used == kv.usage().host_used == 0


def test_what_is_overwritten_while_it_is_copied_does_not_count_as_saved() -> None:
    kv = make(b=16)
    kv.evictions.evict("b", 16)
    (move,) = kv.sharing.start_saving(num_ahead=1, max_blocks=4)
    kv.allocate("a", 2)
    assert kv.moves.finish(move.move_id, succeeded=True) is MoveResult.ARRIVED
    kv.allocate("a", 3)
    assert kept(kv, "b") == (13, 14), "two of the four were overwritten before the copy was done"


@pytest.mark.parametrize("num_left", [0, 1, 2, 3])
def test_a_copy_that_ends_never_makes_less_restorable(num_left: int) -> None:
    kv = make(b=14)
    kv.evictions.evict("b", 14)
    save(kv, num_ahead=1)
    assert kv.allocate("b", 16) is not None
    kv.evictions.evict("b", 16)
    (move,) = kv.sharing.start_saving(num_ahead=1, max_blocks=4)
    kv.allocate("a", BLOCK - num_left)
    before = kept(kv, "b")
    kv.moves.finish(move.move_id, succeeded=True)
    assert kept(kv, "b")[0] == before[0] == 12 + num_left
    assert max(kept(kv, "b")) >= max(before)
    kv.check_integrity()
    kv.free("a")
    kv.free("b")
    assert kv.usage().device_used == kv.usage().host_used == 0


def test_where_nothing_is_to_be_copied_no_copy_is_given_up() -> None:
    kv = make(num_device_blocks=4, num_host_blocks=4, b1=8, b2=8)
    kv.evictions.evict("b1", 8)
    save(kv, num_ahead=2)
    assert kv.allocate("b1", 8) is not None
    kv.evictions.evict("b2", 8)
    save(kv, num_ahead=2)
    assert kv.usage().host_used == 4
    assert kv.sharing.start_saving(num_ahead=2, max_blocks=4, reserve_blocks=2) == [] and kv.usage().host_used == 4


def test_copies_on_the_host_give_way_to_who_moves_there() -> None:
    kv = make(num_host_blocks=4, b1=8, b2=8)
    kv.evictions.evict("b1", 8)
    save(kv, num_ahead=2)
    assert kv.usage().host_used == 2
    assert kv.moves.start("b2", TO_HOST) is not None and kv.usage().host_used == 4
    kv.free("b1")
    assert kv.usage().host_used == 2


def test_integrity_check_finds_two_requests_in_one_slot() -> None:
    kv = make(num_device_blocks=1, b=2, a=2)
    kv._device.num_tokens["a"] = 3
    with pytest.raises(AssertionError, match="have 5 tokens in block 0"):
        kv.check_integrity()
