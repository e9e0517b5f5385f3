"""``bidirectional``: an LS and a BE request may share a device block, one from the left, the other from the right.

Paper: bros 5.1 (block structure), 5.2 (allocation and preemption, lazy checkpointing), 6 (direction table).

A block holds tokens of one LS request in its slots from 0 upward, and of one BE request from the last slot downward.
As a block table has a block for every ``block_size`` tokens, it is the last block of either request that can be shared.
Three things happen to a BE request's blocks:

* While it is *on the device*, an LS request that finds no free block moves into the empty slots of its last one.
  Nobody overwrites anybody: whoever of the two outgrows the block goes on in another one, into which what it has there
  is copied before the step (``take_relocations``).
* While it is *pending* (evicted: it has given way, but keeps what it has), LS requests take its blocks, those with the
  most empty slots first. An LS request's last block is taken from the left only, and what it grows over is lost to the
  BE request slot by slot. As a pending request loses its tokens from the end on, what is left on the device is always a
  prefix, of so many *tokens*.
* What is about to be overwritten is copied to the host before, if there is time (``start_saving``): blocks that an LS
  request will soon have outgrown, and those that are next to be taken. A request that comes back has copied back what
  is missing on the device, if the host has it, and computes the rest anew.

Where this departs from the paper, and why:

* An LS request is never overwritten, so it never has to be copied back.
* In the paper any BE request can be overwritten, and then sits out the step. Here only those that have given way, which
  is the scheduler's to say as with every manager, and costs nothing: who comes back to unharmed blocks goes on.
* Copies to the host run beside the steps, and never delay one. So a slot is checkpointed if it lies less than
  ``_SLOTS_AHEAD`` slots before the LS request, and a block if it is among the first in line (``checkpoint_blocks`` of
  them); what an LS prompt takes at once beyond that is computed again. What is copied is the block; which of its slots
  count is known by number of tokens.
* A BE request's blocks are whole ones (FindBlock would also put a prompt's tail beside an LS request).
* Host blocks run from the left, so that the host tier can attend to them: copies turn the blocks of BE requests round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import ClassVar

from omniserve.core.plan import KVMove, MoveDirection, SlotCopy
from omniserve.core.request import ServiceClass
from omniserve.kv.base import KV_MANAGERS, MoveResult, Tier
from omniserve.kv.pending import PendingRequests
from omniserve.kv.saved_blocks import BlockCopy, SavedBlocks
from omniserve.kv.shared_growth import SharedGrowth
from omniserve.kv.shared_pool import SharedBlockPool
from omniserve.kv.tiered import Table, TieredKVManager

_SLOTS_AHEAD = 4


@KV_MANAGERS.register("bidirectional")
class BidirectionalKVManager(TieredKVManager):
    """Paged KV on two tiers whose device blocks may be shared by an LS and a BE request."""

    restores: ClassVar[bool] = True
    is_directed: ClassVar[bool] = True

    def __init__(self, *, num_device_blocks: int, num_host_blocks: int, block_size: int) -> None:
        super().__init__(num_device_blocks=num_device_blocks, num_host_blocks=num_host_blocks, block_size=block_size)
        self._device = self._pools[Tier.DEVICE] = SharedBlockPool(num_device_blocks, "device")
        self._best_effort: set[str] = set()
        self._lengths: dict[str, int] = {}  # tokens that a table is for
        self._saved = SavedBlocks(self._pools[Tier.HOST])
        self._pending = PendingRequests(self._device, self._saved, self._best_effort, block_size)
        self._growth = SharedGrowth(
            self._device,
            self._pending,
            tables=self._tables,
            lengths=self._lengths,
            best_effort=self._best_effort,
            block_size=block_size,
        )
        self._restores: dict[int, dict[int, BlockCopy]] = {}

    @property
    def num_shared_blocks(self) -> int:
        """Counter: blocks that an LS request moved into beside a BE request."""
        return self._growth.num_shared_blocks

    @property
    def num_relocated_blocks(self) -> int:
        """Counter: shared blocks that one of the two outgrew and left."""
        return self._growth.num_relocated_blocks

    @property
    def num_overwritten_tokens(self) -> int:
        """Counter: tokens of pending requests that were given up on the device."""
        return self._pending.num_overwritten_tokens

    # -- who runs which way --------------------------------------------------------------------------------------

    def declare(self, request_id: str, kind: ServiceClass) -> None:
        if kind is ServiceClass.BE:
            self._best_effort.add(request_id)

    def runs_from_right(self, request_id: str) -> bool:
        return request_id in self._best_effort

    def take_relocations(self) -> tuple[SlotCopy, ...]:
        return self._growth.take_relocations()

    # -- device blocks -------------------------------------------------------------------------------------------

    def allocate(self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0) -> tuple[int, ...] | None:
        table, pending = self._tables.get(request_id), self._pending.get(request_id)
        if table is not None and (table.tier is Tier.HOST or table.move is not None):
            blocks = super().allocate(request_id, num_tokens, reserve_blocks=reserve_blocks)
            if blocks is not None:
                self._lengths[request_id] = max(num_tokens, self._lengths[request_id])
            return blocks
        if table is not None and num_tokens <= self._lengths[request_id]:
            return tuple(table.blocks)
        held = table.blocks if table is not None else pending.blocks if pending is not None else []
        if not self._growth.grow(request_id, held, num_tokens, reserve_blocks):
            return None
        if pending is not None:
            self._pending.resume(request_id)
        self._tables[request_id] = Table(Tier.DEVICE, held)
        self._lengths[request_id] = num_tokens
        return tuple(held)

    # -- requests that give way ----------------------------------------------------------------------------------

    def evict(self, request_id: str, num_computed_tokens: int) -> None:
        table = self._tables[request_id]
        self._require_still(request_id, table)
        del self._tables[request_id]
        if table.tier is Tier.HOST:
            num_full = num_computed_tokens // self.block_size
            self._pools[Tier.HOST].give_back(reversed(table.blocks[num_full:]))
            copies = {index: BlockCopy(block, self.block_size) for index, block in enumerate(table.blocks[:num_full])}
            self._saved.put(request_id, copies)
            self._pending.add(request_id, 0, [])
            return
        num_kept = -(-num_computed_tokens // self.block_size)
        if num_kept and table.blocks[num_kept - 1] in self._device.sharers and not self.runs_from_right(request_id):
            num_kept -= 1  # nobody is a pending request's guest
        self._device.give_back(reversed(table.blocks[num_kept:]))
        num_tokens = min(num_computed_tokens, num_kept * self.block_size)
        self._pending.add(request_id, num_tokens, table.blocks[:num_kept])

    def num_kept_tokens(self, request_id: str, tier: Tier) -> int:
        pending = self._pending.get(request_id)
        if pending is None:
            return 0
        if tier is Tier.DEVICE:
            return pending.num_tokens
        num_tokens = self._pending.num_restorable(request_id)
        return num_tokens if num_tokens > pending.num_tokens else 0

    def free(self, request_id: str) -> None:
        self._pending.drop(request_id)
        super().free(request_id)
        self._saved.drop(request_id)
        self._lengths.pop(request_id, None)
        self._best_effort.discard(request_id)

    # -- copies on the host --------------------------------------------------------------------------------------

    def start_checkpoint(
        self,
        request_id: str,
        num_computed_tokens: int,
        *,
        max_blocks: int,
        reserve_blocks: int = 0,
        give_way: Iterable[str] = (),
    ) -> KVMove | None:
        return None  # nothing is copied of a request that has not given way

    def start_saving(self, *, num_ahead: int, max_blocks: int, reserve_blocks: int = 0) -> list[KVMove]:
        crowded = self._growth.crowded(_SLOTS_AHEAD)
        by_request = self._pending.unsaved(crowded, num_ahead=num_ahead, max_blocks=max_blocks)
        moves = []
        host = self._pools[Tier.HOST]
        for request_id, wanted in by_request.items():
            # Copies of those who run are not needed as they are.
            self._saved.reclaim(len(wanted) + reserve_blocks - host.num_free, of=self._tables)
            indices = sorted(wanted)[: max(0, host.num_free - reserve_blocks)]
            if not indices:
                continue
            src = [self._pending[request_id].blocks[index] for index in indices]
            move = self._new_move(request_id, MoveDirection.TO_HOST, src, None, is_checkpoint=True)
            targets = zip(indices, move.dst_block_ids, strict=True)
            copies = {index: BlockCopy(block, wanted[index]) for index, block in targets}
            self._saved.begin(move.move_id, request_id, copies)
            moves.append(move)
        return moves

    # -- moves ---------------------------------------------------------------------------------------------------

    def start_move(
        self, request_id: str, direction: MoveDirection, *, reserve_blocks: int = 0, keep_tokens: int = 0
    ) -> KVMove | None:
        move = super().start_move(request_id, direction, reserve_blocks=reserve_blocks)
        if move is not None:
            self._saved.drop(request_id)
        return move

    def start_restore(self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0) -> KVMove | None:
        pending = self._pending[request_id]
        num_restored = self._pending.num_restorable(request_id)
        if num_restored <= pending.num_tokens:
            return None
        first, stop = pending.num_tokens // self.block_size, -(-num_restored // self.block_size)
        # A block of which the device has a part is copied as a whole: into its place, if nobody else is there.
        rest = pending.blocks[first:]
        reused = [block for block in rest if block not in self._device.sharers]
        missing = -(-num_tokens // self.block_size) - first - len(reused)
        if not self._make_room(Tier.DEVICE, missing, reserve_blocks, request_id):
            return None
        taken = self._device.take(missing)
        assert taken is not None, f"no room for all of {request_id}"
        self._pending.resume(request_id)
        self._device.give_back(block for block in rest if block not in reused)
        target = reused + taken
        copies = self._saved.take(request_id, range(first, stop))
        move = KVMove(
            request_id=request_id,
            move_id=next(self._move_ids),
            direction=MoveDirection.TO_DEVICE,
            src_block_ids=tuple(copy.block for copy in copies.values()),
            dst_block_ids=tuple(target[: stop - first]),
            is_reversed=self.runs_from_right(request_id),
        )
        self._tables[request_id] = Table(
            Tier.HOST,
            list(move.src_block_ids),
            move=move,
            arrived=pending.blocks[:first],
            behind=target[stop - first :],
        )
        self._lengths[request_id] = num_tokens
        self._moves[move.move_id] = request_id
        self._restores[move.move_id] = copies
        return move

    def finish_move(self, move_id: int, *, succeeded: bool) -> MoveResult:
        if move_id in self._saved:
            return self._saved.finish(move_id, succeeded=succeeded)
        copies = self._restores.pop(move_id, None)
        if copies is None:
            return super().finish_move(move_id, succeeded=succeeded)
        request_id = self._moves.pop(move_id)
        table = self._tables.pop(request_id)
        assert table.move is not None
        if succeeded:
            self._saved.put(request_id, copies)
            self._tables[request_id] = Table(Tier.DEVICE, [*table.arrived, *table.move.dst_block_ids, *table.behind])
            return MoveResult.ARRIVED
        self._pools[Tier.HOST].give_back(table.blocks)
        self._device.give_back([*table.move.dst_block_ids, *table.behind])
        self._pending.add(request_id, len(table.arrived) * self.block_size, table.arrived)
        return MoveResult.LOST

    def _new_move(
        self,
        request_id: str,
        direction: MoveDirection,
        src: list[int],
        after: int | None,
        *,
        is_checkpoint: bool = False,
    ) -> KVMove:
        move = super()._new_move(request_id, direction, src, after, is_checkpoint=is_checkpoint)
        return dataclasses.replace(move, is_reversed=self.runs_from_right(request_id))

    # -- what gives way ------------------------------------------------------------------------------------------

    def _num_reclaimable(self, tier: Tier, spare: str) -> int:
        if tier is Tier.DEVICE:
            return self._pending.num_reclaimable(spare)
        return self._saved.num_reclaimable(spare)

    def _reclaim(self, tier: Tier, num_blocks: int, spare: str) -> None:
        if tier is Tier.DEVICE:
            self._pending.reclaim(num_blocks, spare)
        else:
            # A copy of what is still on the device may never be needed.
            others = [request_id for request_id in self._saved.request_ids() if request_id != spare]
            self._saved.reclaim(num_blocks, of=sorted(others, key=self._pending.__contains__))

    def _num_host_copies(self, request_id: str) -> int:
        return self._saved.num_held(request_id)

    def num_free(self, tier: Tier) -> int:
        return super().num_free(tier) + (self._num_reclaimable(tier, spare="") if tier is Tier.DEVICE else 0)

    # -- checks --------------------------------------------------------------------------------------------------

    def _owned(self) -> dict[Tier, list[int]]:
        owned = super()._owned()
        owned[Tier.DEVICE] += self._pending.owned_blocks()
        owned[Tier.HOST] += self._saved.owned_blocks()
        return owned

    def check_integrity(self) -> None:
        super().check_integrity()
        assert not any(request_id in self._tables for request_id in self._pending), "a pending request has a table"
        assert self._restores.keys() <= self._moves.keys(), "a restore that is no move"
        self._pending.check()
        self._growth.check()
