"""MemoryRules: how much memory requests may take, and how much is left for others."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from omniserve.core.request import ServiceClass
from omniserve.core.work import KVMove, MoveDirection
from omniserve.kv.base import KVManager, Tier
from omniserve.sched.options import SchedulerLimits
from omniserve.sched.prefixes import Prefixes
from omniserve.sched.request_queue import RequestQueue
from omniserve.sched.residents import HostResidents
from omniserve.sched.state import BE, LS, Phase, RequestState


class MemoryRules:
    """The rules by which policies hand out blocks and places.

    Args:
        waiting: The queues of WAITING requests.
        device: Those of DEVICE requests.
        moving: Requests that move between the tiers or are restored, with their moves, by its number.
        offloads: Requests may move to the host.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVManager,
        prefixes: Prefixes,
        *,
        residents: HostResidents,
        waiting: Mapping[ServiceClass, RequestQueue],
        device: Mapping[ServiceClass, RequestQueue],
        moving: Mapping[int, tuple[RequestState, KVMove]],
        offloads: bool,
    ) -> None:
        self._limits, self._kv, self._prefixes, self._residents = limits, kv, prefixes, residents
        self._waiting, self._device, self._moving, self._offloads = waiting, device, moving, offloads

    @property
    def num_free(self) -> int:
        """Device blocks that are free."""
        return self._kv.num_free(Tier.DEVICE)

    @property
    def num_device_blocks(self) -> int:
        """Blocks of the device, free or not."""
        return self._kv.num_device_blocks

    def num_blocks(self, state: RequestState) -> int:
        """Return the length of a request's block table; while it moves, that of the table that it will have."""
        return self._kv.num_blocks(state.request_id)

    def num_held(self, state: RequestState) -> int:
        """Return how many device blocks a request holds, also if it is moving."""
        return self._kv.num_held(state.request_id, Tier.DEVICE)

    def num_shared_at_begin(self, state: RequestState) -> int:
        """Return how many of a DEVICE request's blocks others used, too, when it was admitted."""
        return self._prefixes.num_shared_at_begin(state)

    def freed_by(self) -> Callable[[RequestState | KVMove], int]:
        """Return a function that tells how many device blocks a DEVICE request, or a move to the host, will free.

        Each answer comes behind the ones before it: a block that some share is free when the last one gives it back.
        """
        return self._prefixes.freed_by()

    @property
    def moves_to_host(self) -> list[KVMove]:
        """Moves of requests to the host that are under way, the first begun first."""
        return [move for _, move in self._moving.values() if move.direction is MoveDirection.TO_HOST]

    @property
    def blocks_moving_out(self) -> int:
        """Device blocks that these moves will free."""
        return sum(map(self._prefixes.freed_by(), self.moves_to_host))

    @property
    def host_headroom(self) -> int:
        """Host blocks for residents to grow into, so that a full host tier does not drop what it just received."""
        return 2 * (self._residents.slots.num_used + 1) if self._offloads else 0

    def num_admitted(self, kind: ServiceClass) -> int:
        """Return how many requests take a place of ``max_num_seqs`` that one of this kind could have.

        Requests on their way to the device count, those on their way to the host do not; one that fails to get there
        comes on top.
        """
        kinds = (LS,) if kind is LS else (LS, BE)  # BE requests never use up the room of LS ones
        incoming = (state for state, move in self._moving.values() if move.direction is MoveDirection.TO_DEVICE)
        return sum(state.kind in kinds for state in incoming) + sum(len(self._device[kind]) for kind in kinds)

    def is_full(self, kind: ServiceClass) -> bool:
        """Return whether ``max_num_seqs`` keeps out another request of this kind."""
        return self.num_admitted(kind) >= self._limits.config.max_num_seqs

    def blocks_for(self, state: RequestState) -> int:
        """Return how many blocks all known tokens of a request need; of a WAITING one, less those that it shares."""
        num_blocks = -(-state.num_tokens // self._kv.block_size)
        return num_blocks - self._prefixes.num_shared(state) if state.phase is Phase.WAITING else num_blocks

    @property
    def ls_reserve(self) -> int:
        """Free device blocks that BE work leaves to LS requests: the reserve, and the protected prefixes of these."""
        return self._limits.ls_reserve_blocks + self._prefixes.num_kept_for_ls

    def reserve_for_ls(self, state: RequestState) -> int:
        """Return what a BE request leaves free: no block if it has the device to itself, or it might never run."""
        has_others = bool(self._device[LS] or self._waiting[LS]) or any(s is not state for s in self._device[BE])
        return self.ls_reserve if has_others else 0
