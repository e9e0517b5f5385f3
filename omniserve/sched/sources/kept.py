"""KeptKV: what need not be recomputed of a waiting request, and is copied from the host as the request is admitted.

That is either what the prefix cache has (``PrefixesKept``), or what the KV manager has kept of a request that was
preempted: its blocks and its checkpoint (``EvictionsKept``). Paper: conserve 4.4.
"""

from __future__ import annotations

from typing import Protocol

from omniserve.core.work import KVMove
from omniserve.kv.base import KVEvictions, KVManager, Tier
from omniserve.sched.prefixes import Prefixes
from omniserve.sched.prefixes_on_host import PrefixesOnHost
from omniserve.sched.state import RequestState


class KeptKV(Protocol):
    """KV of requests that wait."""

    def take_from(self, state: RequestState) -> None:
        """Take the KV of a DEVICE or HOST request that is preempted, so that as much of it as can be is found again."""
        ...

    def num_tokens(self, state: RequestState, tier: Tier) -> int:
        """Return how many first tokens of a WAITING request have their KV on the device, or would after a restore."""
        ...

    def needs_restore(self, state: RequestState) -> bool:
        """Tell whether the host has KV of a WAITING request that the device has not, and that is worth a copy."""
        ...

    def start_restore(self, state: RequestState, *, reserve_blocks: int) -> tuple[KVMove, int] | None:
        """Give a WAITING request device blocks for all its tokens, and begin to copy what the host has into them.

        Returns:
            The move, and how many first tokens have their KV when it is done; None, and nothing has changed, if there
            is no room.
        """
        ...


class PrefixesKept:
    """Keeps what the prefix cache has, on the device and on the host."""

    def __init__(self, kv: KVManager, prefixes: Prefixes, on_host: PrefixesOnHost) -> None:
        self._kv, self._prefixes, self._on_host = kv, prefixes, on_host

    def take_from(self, state: RequestState) -> None:
        self._kv.free(state.request_id, self._on_host.full_keys(state))

    def num_tokens(self, state: RequestState, tier: Tier) -> int:
        return self._prefixes.num_tokens(state) if tier is Tier.DEVICE else 0

    def needs_restore(self, state: RequestState) -> bool:
        return self._on_host.is_worth_restoring(state)

    def start_restore(self, state: RequestState, *, reserve_blocks: int) -> tuple[KVMove, int] | None:
        return self._on_host.start_restore(state, reserve_blocks=reserve_blocks)


class EvictionsKept:
    """Keeps what is left of the blocks of preempted requests."""

    def __init__(self, evictions: KVEvictions) -> None:
        self._evictions = evictions

    def take_from(self, state: RequestState) -> None:
        self._evictions.evict(state.request_id, state.num_computed_tokens)

    def num_tokens(self, state: RequestState, tier: Tier) -> int:
        return self._evictions.num_kept_tokens(state.request_id, tier)

    def needs_restore(self, state: RequestState) -> bool:
        return self.num_tokens(state, Tier.HOST) > self.num_tokens(state, Tier.DEVICE)

    def start_restore(self, state: RequestState, *, reserve_blocks: int) -> tuple[KVMove, int] | None:
        num_tokens = self.num_tokens(state, Tier.HOST)
        move = self._evictions.start_restore(state.request_id, state.num_tokens, reserve_blocks=reserve_blocks)
        return None if move is None else (move, num_tokens)


def kept_of(kv: KVManager, prefixes: Prefixes, on_host: PrefixesOnHost, *, keeps_evicted: bool) -> KeptKV:
    """Return what is kept of requests: what is left of their blocks (``keeps_evicted``), or their prefixes."""
    if keeps_evicted and kv.evictions is not None:
        return EvictionsKept(kv.evictions)
    return PrefixesKept(kv, prefixes, on_host)
