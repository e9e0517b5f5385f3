"""BidirectionalKVManager: the KV manager ``bidirectional``, on its device blocks and saved blocks."""

from __future__ import annotations

import functools
import itertools

from omniserve.core.request import ServiceClass
from omniserve.core.work import KVMove, MoveDirection, SlotCopy
from omniserve.kv.base import MoveResult, Tier
from omniserve.kv.bidirectional.device_blocks import DeviceBlocks, Evicted
from omniserve.kv.bidirectional.saved_blocks import BlockCopy, SavedBlocks
from omniserve.kv.tiered import Table, TieredKVManager

_SLOTS_AHEAD = 4


class BidirectionalKVManager(TieredKVManager):
    """Paged KV on two tiers; an LS and a BE request may share a device block."""

    def __init__(self, *, num_device_blocks: int, num_host_blocks: int, block_size: int) -> None:
        super().__init__(num_device_blocks=num_device_blocks, num_host_blocks=num_host_blocks, block_size=block_size)
        self._saved = SavedBlocks(self._pools[Tier.HOST])
        self._device = DeviceBlocks(num_device_blocks, block_size, self._tables, self._saved)
        self._pools[Tier.DEVICE] = self._device

    # -- directions ----------------------------------------------------------------------------------------------

    def declare(self, request_id: str, kind: ServiceClass) -> None:
        if kind is ServiceClass.BE:
            self._device.best_effort.add(request_id)

    def runs_from_right(self, request_id: str) -> bool:
        return request_id in self._device.best_effort

    def take_relocations(self) -> tuple[SlotCopy, ...]:
        return self._device.take_relocations()

    # -- device blocks -------------------------------------------------------------------------------------------

    def allocate(self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0) -> tuple[int, ...] | None:
        table, evicted = self._tables.get(request_id), self._device.evicted.get(request_id)
        if table is not None and (table.tier is Tier.HOST or table.move is not None):
            blocks = super().allocate(request_id, num_tokens, reserve_blocks=reserve_blocks)
            if blocks is not None:
                self._device.num_tokens[request_id] = max(num_tokens, self._device.num_tokens[request_id])
            return blocks
        if table is not None and num_tokens <= self._device.num_tokens[request_id]:
            return tuple(table.blocks)
        held = table.blocks if table is not None else evicted.blocks if evicted is not None else []
        if not self._device.grow(request_id, held, num_tokens, reserve_blocks):
            return None
        if evicted is not None:
            self._device.resume(request_id)
        self._tables[request_id] = Table(Tier.DEVICE, held)
        self._device.num_tokens[request_id] = num_tokens
        return tuple(held)

    def stretch(self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0) -> tuple[int, ...] | None:
        table = self._at_rest(request_id)
        is_shared = table.tier is Tier.DEVICE and table.blocks[-1] in self._device.sharers
        if is_shared and num_tokens > self._device.num_tokens[request_id]:
            return None  # the slots in between are the other's to grow into
        return super().stretch(request_id, num_tokens, reserve_blocks=reserve_blocks)

    def trim(self, request_id: str, num_tokens: int) -> None:
        super().trim(request_id, num_tokens)
        self._device.num_tokens[request_id] = num_tokens

    # -- eviction -----------------------------------------------------------------------------------------------

    def evict(self, request_id: str, num_computed_tokens: int) -> None:
        table = self._tables[request_id]
        self._require_still(request_id, table)
        del self._tables[request_id]
        if table.tier is Tier.HOST:
            num_full = num_computed_tokens // self.block_size
            self._pools[Tier.HOST].give_back(reversed(table.blocks[num_full:]))
            copies = {index: BlockCopy(block, self.block_size) for index, block in enumerate(table.blocks[:num_full])}
            self._saved.put(request_id, copies)
            self._device.evicted[request_id] = Evicted(0, [])
            return
        num_kept = -(-num_computed_tokens // self.block_size)
        if num_kept and table.blocks[num_kept - 1] in self._device.sharers and not self.runs_from_right(request_id):
            num_kept -= 1  # an evicted request shares no block from the left
        self._device.give_back(reversed(table.blocks[num_kept:]))
        num_tokens = min(num_computed_tokens, num_kept * self.block_size)
        self._device.evicted[request_id] = Evicted(num_tokens, table.blocks[:num_kept])

    def num_kept_tokens(self, request_id: str, tier: Tier) -> int:
        evicted = self._device.evicted.get(request_id)
        if evicted is None:
            return 0
        if tier is Tier.DEVICE:
            return evicted.num_tokens
        num_tokens = self._device.num_restorable(request_id)
        return num_tokens if num_tokens > evicted.num_tokens else 0

    def free(self, request_id: str) -> None:
        evicted = self._device.evicted.pop(request_id, None)
        if evicted is not None:
            self._device.give_back(reversed(evicted.blocks))
        super().free(request_id)
        self._saved.drop(request_id)
        self._device.num_tokens.pop(request_id, None)
        self._device.best_effort.discard(request_id)

    # -- copies on the host --------------------------------------------------------------------------------------

    def start_saving(self, *, num_ahead: int, max_blocks: int, reserve_blocks: int = 0) -> list[KVMove]:
        by_request = self._device.unsaved(slots_ahead=_SLOTS_AHEAD, num_ahead=num_ahead, max_blocks=max_blocks)
        moves = []
        host = self._pools[Tier.HOST]
        for request_id, wanted in by_request.items():
            # Copies of requests that have a table are not needed now.
            self._saved.reclaim(len(wanted) + reserve_blocks - host.num_free, of=self._tables)
            indices = sorted(wanted)[: max(0, host.num_free - reserve_blocks)]
            if not indices:
                continue
            src = [self._device.evicted[request_id].blocks[index] for index in indices]
            move = self._new_move(request_id, MoveDirection.TO_HOST, src, None, is_checkpoint=True)
            targets = zip(indices, move.dst_block_ids, strict=True)
            copies = {index: BlockCopy(block, wanted[index]) for index, block in targets}
            self._saved.begin(move.move_id, request_id, copies)
            self._ends[move.move_id] = functools.partial(self._saved.finish, move.move_id)
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
        evicted = self._device.evicted[request_id]
        num_restored = self._device.num_restorable(request_id)
        if num_restored <= evicted.num_tokens:
            return None
        first, stop = evicted.num_tokens // self.block_size, -(-num_restored // self.block_size)
        # A block of which the device has a part is copied as a whole: into its place, if no other request shares it.
        rest = evicted.blocks[first:]
        reused = [block for block in rest if block not in self._device.sharers]
        missing = -(-num_tokens // self.block_size) - first - len(reused)
        if not self._make_room(Tier.DEVICE, missing, reserve_blocks, request_id):
            return None
        taken = self._take(Tier.DEVICE, missing, after=None)
        self._device.resume(request_id)
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
            arrived=evicted.blocks[:first],
            behind=target[stop - first :],
        )
        self._device.num_tokens[request_id] = num_tokens
        self._await_end(move, self._end_restore, copies)
        return move

    def _end_restore(self, move: KVMove, copies: dict[int, BlockCopy], *, succeeded: bool) -> MoveResult:
        request_id = self._moves.pop(move.move_id)
        table = self._tables.pop(request_id)
        if succeeded:
            self._saved.put(request_id, copies)
            self._tables[request_id] = Table(Tier.DEVICE, table.target)
            return MoveResult.ARRIVED
        self._pools[Tier.HOST].give_back(table.blocks)
        self._device.give_back([*move.dst_block_ids, *table.behind])
        self._device.evicted[request_id] = Evicted(len(table.arrived) * self.block_size, table.arrived)
        return MoveResult.LOST

    def _is_reversed(self, request_id: str) -> bool:
        return self.runs_from_right(request_id)

    # -- what is reclaimed ---------------------------------------------------------------------------------------

    def _num_reclaimable(self, tier: Tier, spare: str) -> int:
        if tier is Tier.DEVICE:
            return self._device.num_reclaimable(spare)
        return self._saved.num_reclaimable(spare)

    def _reclaim(self, tier: Tier, num_blocks: int, spare: str) -> None:
        if tier is Tier.DEVICE:
            self._device.reclaim(num_blocks, spare)
        else:
            # A copy of a block that is still on the device may never be needed.
            others = [request_id for request_id in self._saved.request_ids() if request_id != spare]
            self._saved.reclaim(num_blocks, of=sorted(others, key=self._device.evicted.__contains__))

    def _num_host_copies(self, request_id: str) -> int:
        return self._saved.num_held(request_id)

    # -- checks --------------------------------------------------------------------------------------------------

    def _owned(self) -> dict[Tier, list[int]]:
        owned = super()._owned()
        owned[Tier.DEVICE] += itertools.chain.from_iterable(evicted.blocks for evicted in self._device.evicted.values())
        owned[Tier.HOST] += self._saved.owned_blocks()
        return owned
