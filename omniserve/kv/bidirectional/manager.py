"""BidirectionalKVManager: the KV manager ``bidirectional``, on its device blocks and saved blocks."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from omniserve.core.request import ServiceClass
from omniserve.core.work import KVMove, MoveDirection, SlotCopy
from omniserve.kv.base import KVAbilities
from omniserve.kv.bidirectional.device_blocks import DeviceBlocks, Evicted
from omniserve.kv.bidirectional.saved_blocks import BlockCopy, SavedBlocks
from omniserve.kv.block_pool import RunPool
from omniserve.kv.host_copies import HostCopies
from omniserve.kv.retained import RetainedKV
from omniserve.kv.table import Table
from omniserve.kv.tables import TableMoves, TierTables
from omniserve.kv.tiers import MoveResult, Tier
from omniserve.kv.two_tiers import TierPools, TwoTierKVManager

_SLOTS_AHEAD = 4


class EvictedBlocks(RetainedKV):
    """The device blocks of evicted requests, and the copies on the host of what they lose."""

    def __init__(self, device: DeviceBlocks, saved: SavedBlocks) -> None:
        self._device, self._saved = device, saved

    def num_reclaimable(self, tier: Tier, spare: str) -> int:
        return (self._device if tier is Tier.DEVICE else self._saved).num_reclaimable(spare)

    def reclaim(self, tier: Tier, num_blocks: int, spare: str) -> None:
        if tier is Tier.DEVICE:
            self._device.reclaim(num_blocks, spare)
        else:
            # A copy of a block that is still on the device may never be needed.
            others = [request_id for request_id in self._saved.request_ids() if request_id != spare]
            self._saved.reclaim(num_blocks, of=sorted(others, key=self._device.evicted.__contains__))

    def strand(self, request_id: str, blocks: list[int]) -> None:
        assert not blocks, f"request {request_id} moves as a whole"

    def drop(self, request_id: str) -> None:
        evicted = self._device.evicted.pop(request_id, None)
        if evicted is not None:
            self._device.give_back(reversed(evicted.blocks))
        self._saved.drop(request_id)

    def num_host_blocks(self, request_id: str) -> int:
        return self._saved.num_held(request_id)

    def owned_blocks(self, tier: Tier) -> Iterable[int]:
        if tier is Tier.HOST:
            return self._saved.owned_blocks()
        return [block for evicted in self._device.evicted.values() for block in evicted.blocks]

    def check(self) -> None:
        """Do nothing: ``DeviceBlocks.check`` looks at evicted requests."""


class Sharing:
    """Tells from which side blocks run, and has them copied in time; see ``BlockSharing``."""

    def __init__(self, device: DeviceBlocks, saved: SavedBlocks, tables: TierTables, moves: TableMoves) -> None:
        self._device, self._saved, self._tables, self._moves = device, saved, tables, moves

    def declare(self, request_id: str, kind: ServiceClass) -> None:
        if kind is ServiceClass.BE:
            self._device.best_effort.add(request_id)

    def runs_from_right(self, request_id: str) -> bool:
        return request_id in self._device.best_effort

    def take_relocations(self) -> tuple[SlotCopy, ...]:
        return self._device.take_relocations()

    def start_saving(self, *, num_ahead: int, max_blocks: int, reserve_blocks: int = 0) -> list[KVMove]:
        by_request = self._device.unsaved(slots_ahead=_SLOTS_AHEAD, num_ahead=num_ahead, max_blocks=max_blocks)
        moves = []
        host = self._tables.pools[Tier.HOST]
        for request_id, wanted in by_request.items():
            # Copies of requests that have a table are not needed now.
            self._saved.reclaim(len(wanted) + reserve_blocks - host.num_free, of=self._tables.by_request)
            indices = sorted(wanted)[: max(0, host.num_free - reserve_blocks)]
            if not indices:
                continue
            source = [self._device.evicted[request_id].blocks[index] for index in indices]
            target = self._tables.take(Tier.HOST, len(indices), after=None)
            move = self._moves.make(request_id, MoveDirection.TO_HOST, source, target, is_checkpoint=True)
            copies = {index: BlockCopy(block, wanted[index]) for index, block in zip(indices, target, strict=True)}
            self._saved.begin(move.move_id, request_id, copies)
            moves.append(self._moves.begin_copy(move, self._saved.finish))
        return moves


class Evictions:
    """Evicts requests, and brings them back; see ``KVEvictions``."""

    def __init__(self, device: DeviceBlocks, saved: SavedBlocks, tables: TierTables, moves: TableMoves) -> None:
        self._device, self._saved, self._tables, self._moves = device, saved, tables, moves

    def evict(self, request_id: str, num_computed_tokens: int) -> None:
        table, block_size = self._tables.at_rest(request_id), self._tables.block_size
        del self._tables.by_request[request_id]
        if table.tier is Tier.HOST:
            num_full = num_computed_tokens // block_size
            self._tables.pools[Tier.HOST].give_back(reversed(table.blocks[num_full:]))
            copies = {index: BlockCopy(block, block_size) for index, block in enumerate(table.blocks[:num_full])}
            self._saved.put(request_id, copies)
            self._device.evicted[request_id] = Evicted(0, [])
            return
        num_kept = -(-num_computed_tokens // block_size)
        is_shared = num_kept > 0 and table.blocks[num_kept - 1] in self._device.sharers
        if is_shared and request_id not in self._device.best_effort:
            num_kept -= 1  # an evicted request shares no block from the left
        self._device.give_back(reversed(table.blocks[num_kept:]))
        num_tokens = min(num_computed_tokens, num_kept * block_size)
        self._device.evicted[request_id] = Evicted(num_tokens, table.blocks[:num_kept])

    def num_kept_tokens(self, request_id: str, tier: Tier) -> int:
        evicted = self._device.evicted.get(request_id)
        if evicted is None:
            return 0
        if tier is Tier.DEVICE:
            return evicted.num_tokens
        num_tokens = self._device.num_restorable(request_id)
        return num_tokens if num_tokens > evicted.num_tokens else 0

    def start_restore(self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0) -> KVMove | None:
        evicted, block_size = self._device.evicted[request_id], self._tables.block_size
        num_restored = self._device.num_restorable(request_id)
        if num_restored <= evicted.num_tokens:
            return None
        first, stop = evicted.num_tokens // block_size, -(-num_restored // block_size)
        # A block of which the device has a part is copied as a whole: into its place, if no other request shares it.
        rest = evicted.blocks[first:]
        reused = [block for block in rest if block not in self._device.sharers]
        missing = -(-num_tokens // block_size) - first - len(reused)
        if not self._tables.make_room(Tier.DEVICE, missing, reserve_blocks, request_id):
            return None
        taken = self._tables.take(Tier.DEVICE, missing, after=None)
        self._device.resume(request_id)
        self._device.give_back(block for block in rest if block not in reused)
        target = reused + taken
        copies = self._saved.take(request_id, range(first, stop))
        source = [copy.block for copy in copies.values()]
        table = Table(Tier.HOST, source, arrived=evicted.blocks[:first], behind=target[stop - first :])
        move = self._moves.make(request_id, MoveDirection.TO_DEVICE, source, target[: stop - first])
        self._device.num_tokens[request_id] = num_tokens
        return self._moves.begin(table, move, functools.partial(self._end_restore, copies))

    def _end_restore(self, copies: dict[int, BlockCopy], move: KVMove, *, succeeded: bool) -> MoveResult:
        table = self._moves.pop(move)
        if succeeded:
            self._saved.put(move.request_id, copies)
            self._tables.put(move.request_id, table.target)
            return MoveResult.ARRIVED
        self._tables.pools[Tier.HOST].give_back(table.blocks)
        self._device.give_back([*move.dst_block_ids, *table.behind])
        self._device.evicted[move.request_id] = Evicted(len(table.arrived) * self._tables.block_size, table.arrived)
        return MoveResult.LOST


class BidirectionalKVManager(TwoTierKVManager):
    """Paged KV on two tiers; an LS and a BE request may share a device block."""

    abilities = KVAbilities(moves=True, evictions=True, sharing=True)

    def __init__(self, *, num_device_blocks: int, num_host_blocks: int, block_size: int) -> None:
        tables: dict[str, Table] = {}
        host = RunPool(num_host_blocks, "host")
        self._saved = SavedBlocks(host)
        self._device = DeviceBlocks(num_device_blocks, block_size, tables, self._saved)
        super().__init__(
            tables,
            TierPools(device=self._device, host=host, copies=HostCopies(host)),
            EvictedBlocks(self._device, self._saved),
            block_size=block_size,
            leaves_checkpoint=False,
            runs_from_right=self._device.best_effort,
        )
        self.sharing = Sharing(self._device, self._saved, self._tables, self.moves)
        self.evictions = Evictions(self._device, self._saved, self._tables, self.moves)

    def allocate(self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0) -> tuple[int, ...] | None:
        table, evicted = self._tables.by_request.get(request_id), self._device.evicted.get(request_id)
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
        self._tables.put(request_id, held)
        self._device.num_tokens[request_id] = num_tokens
        return tuple(held)

    def allocate_lookahead(
        self, request_id: str, num_tokens: int, *, reserve_blocks: int = 0
    ) -> tuple[int, ...] | None:
        table = self._tables.at_rest(request_id)
        is_shared = table.tier is Tier.DEVICE and table.blocks[-1] in self._device.sharers
        if is_shared and num_tokens > self._device.num_tokens[request_id]:
            return None  # the slots in between are the other's to grow into
        return super().allocate_lookahead(request_id, num_tokens, reserve_blocks=reserve_blocks)

    def trim(self, request_id: str, num_tokens: int) -> None:
        super().trim(request_id, num_tokens)
        self._device.num_tokens[request_id] = num_tokens

    def free(self, request_id: str, keys: Sequence[bytes] = ()) -> None:
        super().free(request_id, keys)
        self._device.num_tokens.pop(request_id, None)
        self._device.best_effort.discard(request_id)
