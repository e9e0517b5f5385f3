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
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import ClassVar

from omniserve.kv.base import KV_MANAGERS, MoveResult, Tier
from omniserve.kv.pending import PendingRequests
from omniserve.kv.saved_blocks import BlockCopy, SavedBlocks
from omniserve.kv.shared_pool import SharedBlockPool
from omniserve.kv.tiered import Table, TieredKVManager
from omniserve.plan import KVMove, MoveDirection, SlotCopy
from omniserve.request import ServiceClass

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
        self._restores: dict[int, dict[int, BlockCopy]] = {}
        self._relocations: list[SlotCopy] = []
        self.num_shared_blocks = 0
        """Counter: blocks that an LS request moved into beside a BE request."""
        self.num_relocated_blocks = 0
        """Counter: shared blocks that one of the two outgrew and left."""

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
        relocations, self._relocations = tuple(self._relocations), []
        return relocations

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
        num_in_tail = min(self.block_size, num_tokens - (len(held) - 1) * self.block_size)
        leaves_tail = bool(held) and not self._fits(request_id, held[-1], num_in_tail)
        num_blocks = -(-num_tokens // self.block_size)
        missing = num_blocks - len(held) + leaves_tail
        num_in_last = num_tokens - (num_blocks - 1) * self.block_size
        found = self._find(request_id, missing, num_in_last, reserve_blocks) if missing > 0 else []
        if found is None:
            return None
        if leaves_tail:
            num_moving = self._num_in_tail(request_id)
            self._relocate(request_id, held.pop(), found[0], num_moving)
        elif held and held[-1] in self._device.sharers and not self.runs_from_right(request_id):
            # If it fits although that does not look so, the BE request is pending.
            _, other = self._device.sharers[held[-1]]
            if other in self._pending:
                self._pending.cut_beside(other, num_in_tail)
        held += found
        if pending is not None:
            self._pending.resume(request_id)
        self._tables[request_id] = Table(Tier.DEVICE, held)
        self._lengths[request_id] = num_tokens
        return tuple(held)

    def _relocate(self, request_id: str, source: int, target: int, num_tokens: int) -> None:
        from_right = self.runs_from_right(request_id)
        begin, end = (self.block_size - num_tokens, self.block_size) if from_right else (0, num_tokens)
        self._relocations.append(SlotCopy(source_block=source, target_block=target, begin=begin, end=end))
        self.num_relocated_blocks += 1
        self._device.give_back([source])

    def _fits(self, request_id: str, block: int, num_tokens: int) -> bool:
        """Tell whether a request can have ``num_tokens`` in this block, its last one, without moving out."""
        sharers = self._device.sharers.get(block)
        if sharers is None:
            return True
        ls, be = sharers
        if request_id == ls and be in self._pending:
            return True
        return num_tokens + self._num_in_tail(be if request_id == ls else ls) <= self.block_size

    def _num_in_tail(self, request_id: str) -> int:
        """Return how many slots of its last device block a request needs."""
        if request_id in self._pending:
            return self._pending.num_in_tail(request_id)
        return self._lengths[request_id] - (len(self._tables[request_id].blocks) - 1) * self.block_size

    def _find(self, request_id: str, count: int, num_in_last: int, reserve_blocks: int) -> list[int] | None:
        """Take ``count`` >= 1 blocks, using so many slots of the last one; None, and unchanged, if in vain."""
        num_free = self._device.num_free
        num_takeable = num_free + self._num_reclaimable(Tier.DEVICE, spare=request_id) - reserve_blocks
        may_share = num_free < count and num_in_last < self.block_size and not self.runs_from_right(request_id)
        if num_takeable < count:
            # To move in beside a request on the device takes no block that was free.
            is_enough = may_share and (count == 1 or num_takeable >= count - 1)
            if not is_enough or self._most_empty(num_in_last, among_pending=False) is None:
                return None
        num_whole = count - 1 if may_share else count
        blocks = self._take(request_id, num_whole)
        if may_share:
            other = self._most_empty(num_in_last, among_pending=num_takeable >= count)
            blocks += (
                [self._move_in(request_id, other, num_in_last)] if other is not None else self._take(request_id, 1)
            )
        return blocks

    def _take(self, request_id: str, count: int) -> list[int]:
        """Take whole blocks, if need be of pending requests; there are so many."""
        self._reclaim(Tier.DEVICE, count - self._device.num_free, spare=request_id)
        blocks = self._device.take(count)
        assert blocks is not None, f"no room for {count} blocks of {request_id}"
        return blocks

    def _most_empty(self, num_tokens: int, *, among_pending: bool) -> str | None:
        """Return the BE request with the most empty slots in the block that it can share with so many LS tokens.

        Args:
            among_pending: Also of pending requests, which may lose what stands in the way; else only of those at rest.
        """
        best, most = None, -1
        for request_id in filter(self.runs_from_right, (*self._tables, *self._pending)):
            num_empty = -1
            table = self._tables.get(request_id)
            if request_id in self._pending:
                if among_pending and self._pending.num_takeable(request_id) > 0:
                    has_guest = self._pending.has_guest(request_id)
                    num_empty = 0 if has_guest else self.block_size - self._num_in_tail(request_id)
            elif table is not None and table.tier is Tier.DEVICE and table.move is None:
                is_shared = table.blocks[-1] in self._device.sharers
                fitting = self.block_size - self._num_in_tail(request_id)
                num_empty = fitting if fitting >= num_tokens and not is_shared else -1
            if num_empty > most:
                best, most = request_id, num_empty
        return best

    def _move_in(self, ls: str, be: str, num_tokens: int) -> int:
        """Let an LS request have the left of a block of a BE request, which loses what stood there."""
        pending = self._pending.get(be)
        if pending is not None:
            if self._pending.has_guest(be):
                self._pending.cut(be, (len(pending.blocks) - 1) * self.block_size)
            self._pending.cut_beside(be, num_tokens)
        block = pending.blocks[-1] if pending is not None else self._tables[be].blocks[-1]
        self._device.share(block, ls, be)
        self.num_shared_blocks += 1
        return block

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
        by_request: defaultdict[str, dict[int, int]] = defaultdict(dict)
        for request_id, index in self._endangered(num_ahead):
            num_tokens = min(self.block_size, self._pending[request_id].num_tokens - index * self.block_size)
            is_planned = request_id in by_request and index in by_request[request_id]
            if max_blocks > 0 and not is_planned and not self._saved.has(request_id, index, num_tokens):
                by_request[request_id][index] = num_tokens
                max_blocks -= 1
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

    def _endangered(self, num_ahead: int) -> Iterator[tuple[str, int]]:
        """Yield what of pending BE requests is about to be overwritten: (request, index of the block)."""
        for ls, be in self._device.sharers.values():
            pending = self._pending.get(be)
            if pending is not None:
                num_empty = self.block_size - self._num_in_tail(ls) - self._num_in_tail(be)
                if num_empty < _SLOTS_AHEAD:
                    yield be, len(pending.blocks) - 1
        for request_id, index in islice(self._pending.line(), max(0, num_ahead - self._device.num_free)):
            if self.runs_from_right(request_id):
                yield request_id, index

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
            return sum(self._pending.num_takeable(r) for r in self._pending if r != spare)
        return self._saved.num_reclaimable(spare)

    def _reclaim(self, tier: Tier, num_blocks: int, spare: str) -> None:
        if tier is Tier.DEVICE:
            for request_id, index in list(islice(self._pending.line(spare), max(0, num_blocks))):
                self._pending.cut(request_id, index * self.block_size)
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
        for block, (ls, be) in self._device.sharers.items():
            assert self.runs_from_right(be) and not self.runs_from_right(ls), (block, ls, be)
            right = self._pending[be].blocks if be in self._pending else self._tables[be].blocks
            assert self._tables[ls].blocks[-1] == right[-1] == block, f"{ls} and {be} do not end in block {block}"
            num_slots = self._num_in_tail(ls) + self._num_in_tail(be)
            assert num_slots <= self.block_size, f"{ls} and {be} have {num_slots} tokens in block {block}"
