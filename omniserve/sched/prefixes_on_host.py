"""PrefixesOnHost: what the prefix cache copies to host memory, and back for requests that begin with it.

Blocks that were found, or that are marked, are copied to the host when the device's pool runs short, and back before
the first step of a request that begins with them: it is restored like an evicted one, and has a table of its own then.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from omniserve.core.request import ServiceClass
from omniserve.core.work import Done, KVMove
from omniserve.kv.base import KVManager
from omniserve.kv.prefix_index import HostPrefixIndex
from omniserve.sched.options import SchedulerLimits
from omniserve.sched.prefixes import Prefixes
from omniserve.sched.side_work import SideWorkQueue
from omniserve.sched.state import RequestState

LEAST_RESTORED_TOKENS = 64
"""A shorter prefix is computed: what is copied from the host is there a step later at the soonest."""


class Coming(NamedTuple):
    """KV of a request's next tokens that the host or the disk has."""

    num_tokens: int
    seconds: float
    """Seconds until the KV is in host memory, from where it is copied beside a step."""


class PrefixesOnHost:
    """Saves prefixes to host memory, and restores them. Without a cache there it does nothing.

    With ``disk_kv.keep``, blocks that are worth a copy (``CachingPool.take_unsaved``) are copied to the host at once,
    else when the device's memory is short.
    """

    def __init__(self, kv: KVManager, prefixes: Prefixes, side_work: SideWorkQueue, limits: SchedulerLimits) -> None:
        self._kv, self._prefixes, self._side_work = kv, prefixes, side_work
        self._block_size = kv.block_size
        self._max_saved_blocks = limits.blocks_per_step(kv.block_size) if limits.num_host_slots else 0
        """Most blocks of prefixes that are being copied to the host at a time."""
        self._num_ahead = kv.num_device_blocks if limits.config.disk_kv.keep else 2 * self._max_saved_blocks
        self._saving: dict[int, int] = {}
        """Move id -> blocks, of the copies to the host under way."""
        self.num_restored_tokens: Counter[str] = Counter()
        """Counter, by class: tokens whose KV was copied back from the host for a request that begins with them."""

    @property
    def _index(self) -> HostPrefixIndex | None:
        index = self._prefixes.index
        return index.host if index is not None else None

    def give_up(self) -> None:
        """Be as without a prefix cache from now on, on the device, too. Copies under way still end."""
        self._prefixes.give_up()

    # -- saving --------------------------------------------------------------------------------------------------

    def save_all(self) -> None:
        """Copy all that is computed to the host, at once, from now on: others take it from there."""
        self._prefixes.saves_all, self._num_ahead = True, self._kv.num_device_blocks

    def save(self, *, reserve_blocks: int) -> None:
        """Begin to copy prefixes to the host that the device may forget; to be called when a plan is decided.

        ``reserve_blocks``: host blocks to leave free for requests that decode there.
        """
        index, max_blocks = self._index, self._max_saved_blocks - sum(self._saving.values())
        if index is None or max_blocks <= 0:
            return
        move = index.save(num_ahead=self._num_ahead, max_blocks=max_blocks, reserve_blocks=reserve_blocks)
        if move is not None:
            self._saving[move.move_id] = len(move.src_block_ids)
            self._side_work.expect(move.move_id, self._on_saved)
            self._side_work.begin(move)

    def _on_saved(self, done: Done) -> None:
        assert self._kv.moves is not None
        self._kv.moves.finish(done.move_id, succeeded=done.ok)
        del self._saving[done.move_id]

    @property
    def is_saving(self) -> bool:
        """Copies to the host are under way."""
        return bool(self._saving)

    def full_keys(self, state: RequestState) -> Sequence[bytes]:
        """Return the keys of the blocks that a DEVICE or HOST request has filled, for others to find; () for none."""
        if self._index is None or state.prefix is None or self._prefixes.has_states:
            return ()
        num_full = min(state.num_computed_tokens, state.num_tokens - state.num_pending_tokens) // self._block_size
        return state.prefix.keys.up_to(state.token_ids, num_full)[:num_full]

    # -- restoring -----------------------------------------------------------------------------------------------

    def parts(self, state: RequestState) -> tuple[Sequence[bytes], int, int]:
        """Look up a WAITING request.

        Returns:
            The keys of all blocks that it could find, how many of the first of them the device has, and how many of the
            next ones the host has.
        """
        if self._index is None:
            return (), 0, 0
        keys = self._prefixes.wanted(state)
        return keys, len(self._prefixes.found(state)), len(self._found(state))

    def num_tokens(self, state: RequestState) -> int:
        """Look up a WAITING request; return how many tokens the host has behind the tokens that the device has."""
        return len(self._found(state)) * self._block_size

    def is_worth_restoring(self, state: RequestState) -> bool:
        """Tell whether the host has enough tokens of a WAITING request, which the device has not, to copy them back."""
        return self.num_tokens(state) >= LEAST_RESTORED_TOKENS

    def start_restore(self, state: RequestState, *, reserve_blocks: int) -> tuple[KVMove, int] | None:
        """Begin to copy what the host has of a WAITING request; None if there is no room.

        Returns:
            The move, and how many of the request's first tokens have their KV when it is done.
        """
        keys, prefix, index = self._prefixes.found(state), state.prefix, self._index
        if index is None or prefix is None:
            return None
        host_keys = self._found(state)
        marks = state.kind is ServiceClass.LS
        move = index.restore(
            state.request_id, keys, host_keys, state.num_tokens, reserve_blocks=reserve_blocks, marks=marks
        )
        if move is None:
            return None
        self._prefixes.note_use(state, [*keys, *host_keys])
        prefix.num_found += len(host_keys)
        prefix.num_shared = 0
        self._prefixes.note_admission(state)
        self.num_restored_tokens[state.service_class] += len(host_keys) * self._block_size
        return move, prefix.num_found * self._block_size

    def _found(self, state: RequestState) -> Sequence[bytes]:
        """Return the keys of the blocks that the host has and that follow the device's."""
        prefix, index = state.prefix, self._index
        if index is None or prefix is None or not prefix.may_restore:
            return ()
        first, keys = len(self._prefixes.found(state)), self._prefixes.wanted(state)
        if self._prefixes.has_states:
            return keys if prefix.states is not None and index.match(keys) == len(keys) else ()
        return keys[first : first + index.match(itertools.islice(keys, first, None))]

    @staticmethod
    def note_lost(state: RequestState) -> None:
        """Book that a request's copy from the host has failed: it computes its tokens."""
        if state.prefix is not None:
            state.prefix.may_restore = False
