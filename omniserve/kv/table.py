"""Table: the blocks of one request; while it moves, those on the target tier, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omniserve.core.work import KVMove
from omniserve.kv.tiers import Tier

if TYPE_CHECKING:
    from omniserve.kv.network import NetworkPool


@dataclass(slots=True)
class Table:
    """A request's blocks."""

    tier: Tier
    blocks: list[int]  # while it moves: the source
    move: KVMove | None = None
    network: NetworkPool | None = None  # the blocks are on this host on the network; None: on this machine
    going_to: NetworkPool | None = None  # moving: the destination is there
    # While it moves, the target is ``arrived``, then the move's destination, then ``behind``.
    arrived: list[int] = field(default_factory=list)  # target blocks that held its KV before the move
    behind: list[int] = field(default_factory=list)  # target blocks for tokens that are not computed yet
    num_kept: int = 0  # moving to the device: source blocks that stay as its checkpoint
    keys: Sequence[bytes] = ()  # moving to the host: keys of its first, full blocks

    @property
    def target(self) -> list[int]:
        """The blocks that it will have when its move is done."""
        assert self.move is not None
        return [*self.arrived, *self.move.dst_block_ids, *self.behind]

    def require_still(self) -> None:
        """Raise RuntimeError if the request is moving."""
        if self.move is not None:
            raise RuntimeError(
                f"request {self.move.request_id} is moving {self.move.direction}: its blocks cannot change now"
            )
