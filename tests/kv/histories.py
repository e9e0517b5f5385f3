"""A random history on a tiered KV manager, with the memory behind it, and what else the tests of managers share."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omniserve.core.work import KVMove, MoveDirection
from omniserve.kv import MoveResult, Tier, TieredKVManager
from omniserve.kv.incremental import IncrementalKVManager
from tests.kv.free_blocks import free_block_ids

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

    manager: type[TieredKVManager | IncrementalKVManager] = TieredKVManager

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
        return {self.grow: 8, self.checkpoint: 8, self.move: 3, self.finish: 6, self.abandon: 0.2, self.free: 0.3}

    def run(self, num_actions: int = 400) -> Counter[str]:
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
        return self.reached

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
        move = self.kv.checkpoints.start(
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
        move = self.kv.moves.start(
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
        return {r: self.kv.checkpoints.num_blocks(r) for r in self.requests if self.kv.checkpoints.num_blocks(r)}

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
        num_copied = self.kv.checkpoints.num_blocks(move.request_id)
        result = self.kv.moves.finish(move.move_id, succeeded=succeeded)
        self.reached[("checkpoint " if move.is_checkpoint else "move ") + result] += 1
        if not mine:
            if move.is_checkpoint and result is not MoveResult.UNUSED:
                assert result is (MoveResult.ARRIVED if succeeded else MoveResult.STAYED)
                num_copied += len(move.src_block_ids) if succeeded else 0
            else:
                assert result is MoveResult.UNUSED
            assert self.kv.checkpoints.num_blocks(move.request_id) == num_copied
        elif result is MoveResult.LOST:
            assert not succeeded and self.kv.tier(mine[0]) is None
            self.lose(mine[0])
        else:
            assert result is (MoveResult.ARRIVED if succeeded else MoveResult.STAYED)
            assert self.kv.tier(mine[0]) is (target if succeeded else source)
            self.requests[mine[0]].move_id = None
            self.reached["kept"] += move.direction is TO_DEVICE and self.kv.checkpoints.num_blocks(mine[0]) > 0

    def abandon(self) -> None:
        request_id = self.pick(moving=True, tier=Tier.DEVICE)
        if request_id is not None:
            move_id = self.requests[request_id].move_id
            assert move_id is not None
            self.kv.moves.abandon(move_id)
            assert self.kv.tier(request_id) is None and self.kv.num_blocks(request_id) == 0
            self.lose(request_id)

    def lose(self, request_id: str) -> None:
        del self.requests[request_id]

    def free(self) -> None:
        request_id = self.pick()
        if request_id is not None:
            self.kv.free(request_id)
            del self.requests[request_id]
            assert self.kv.checkpoints.num_blocks(request_id) == 0

    def check(self) -> None:
        """Poison what is free; every request at rest then still reads what it wrote."""
        self.kv.check_integrity()
        for tier in Tier:
            for block in free_block_ids(self.kv, tier):
                self.memory[tier, block] = POISON
        for request_id, request in self.requests.items():
            if request.move_id is not None:
                continue
            blocks = self.kv.allocate(request_id, request.num_tokens)
            tier = self.kv.tier(request_id)
            assert blocks is not None and tier is not None
            read = [token for block in blocks for token in self.memory[tier, block]]
            assert read == [(request.life, position) for position in range(request.num_tokens)], request_id


def reach(run: Callable[[int], Counter[str]], kinds: Sequence[str], *, most_seeds: int, least: int = 21) -> None:
    """Run histories from seed 0 on until each kind of event has been reached so often, and in any case ten of them."""
    reached: Counter[str] = Counter()
    for seed in range(most_seeds):
        reached += run(seed)
        if seed >= 9 and all(reached[kind] >= least for kind in kinds):
            return
    raise AssertionError(f"after {most_seeds} histories: {reached}")


def checkpoint(kv: TieredKVManager | IncrementalKVManager, request_id: str, num_tokens: int) -> KVMove:
    move = kv.checkpoints.start(request_id, num_tokens, max_blocks=100)
    assert move is not None
    assert kv.moves.finish(move.move_id, succeeded=True) is MoveResult.ARRIVED
    return move
