"""Prefixes: which requests begin behind KV that the device has of others, and whose KV others can find.

A KV manager that caches does the rest; see ``kv.prefix_cache``.

When a step has been launched, the blocks that it fills get their keys: device work runs in order, so later steps can
read them. Blocks of prompts get keys as soon as their chunk is planned, so that requests of the same step find each
other: a layer writes the KV of all device rows before any of them attends (not under policies whose rows may leave a
step between layers).

A preempted request gives its blocks back; those that are still there when it returns are not recomputed.
``MemoryRules.ls_reserve`` keeps BE requests that come to the device out of the blocks that are protected for LS
prefixes, while LS requests are seen to come back to what the pool has, or had. BE requests that run may still grow into
them. Blocks that were found, or that are marked, are copied to the host when the device's pool runs short, and back
before the first step of a request that begins with them: it is restored like an evicted one, and has a table of its own
then.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from omniserve.core.request import ServiceClass
from omniserve.core.work import Done, KVMove
from omniserve.kv.base import CanCache, CanMove, KeepsPrefixesOnHost, KVManager
from omniserve.kv.prefix_cache import PrefixKeys
from omniserve.sched.options import SchedulerLimits
from omniserve.sched.side_work import SideWorkQueue
from omniserve.sched.state import PrefixUse, RequestState

_REUSE_RATE = 1 / 32
_LEAST_REUSE = 0.01
"""Prefixes of LS requests are protected while these find such a share of their prompts, or would if none had been
forgotten: an average of which the last request makes ``_REUSE_RATE``."""


LEAST_RESTORED_TOKENS = 64
"""A shorter prefix is computed: what is copied from the host is there a step later at the soonest."""


class Coming(NamedTuple):
    """KV of a request's next tokens that the host or the disk has."""

    num_tokens: int
    seconds: float
    """Seconds until the KV is in host memory, from where it is copied beside a step."""


class Prefixes:
    """Looks up requests that wait, and publishes what running ones have computed. Without a cache it does nothing.

    With ``disk_kv.keep``, blocks that are worth a copy (``CachingPool.take_unsaved``) are copied to the host at once,
    else when the device's memory is short. If the model has recurrent states, which no block holds, a request finds no
    KV of others, only that of its own prompt in host memory, with the states that a prefill engine has sent.

    Args:
        publishes_ahead: Chunks of prompts are published as they are planned, for others in the same step: at every
            layer a step writes the KV of all its device rows before any of them attends. Not if rows may leave a step
            between two layers: what they have not written must not be read.
    """

    def __init__(
        self, kv: KVManager, side_work: SideWorkQueue, limits: SchedulerLimits, *, publishes_ahead: bool = True
    ) -> None:
        self._kv, self._side_work = kv, side_work
        self._mover = kv if isinstance(kv, CanMove) else None
        self._host = kv if isinstance(kv, KeepsPrefixesOnHost) else None
        self._max_saved_blocks = limits.blocks_per_step(kv.block_size) if limits.num_host_slots else 0
        """Most blocks of prefixes that are being copied to the host at a time."""
        self._num_ahead = kv.num_device_blocks if limits.config.disk_kv.keep else 2 * self._max_saved_blocks
        self._saves_all = False
        self._has_states = limits.num_state_slots > 0
        self._saving: dict[int, int] = {}
        """Move id -> blocks, of the copies to the host under way."""
        self.num_restored_tokens: Counter[str] = Counter()
        """Counter, by class: tokens whose KV was copied back from the host for a request that begins with them."""
        self._cache = kv if isinstance(kv, CanCache) and kv.caches_prefixes() else None
        self._publishes_ahead = publishes_ahead
        self._block_size = kv.block_size
        self.num_cached_tokens: Counter[str] = Counter()
        """Counter, by class: prompt tokens that were found at their request's first admission."""
        self._ls_reuse = 2 * _LEAST_REUSE

    @property
    def is_on(self) -> bool:
        """There is a prefix cache in use."""
        return self._cache is not None

    def save_all(self) -> None:
        """Copy all that is computed to the host, at once, from now on: others take it from there."""
        self._saves_all, self._num_ahead = True, self._kv.num_device_blocks

    def give_up(self) -> None:
        """Be as without a cache from now on. Copies under way still end."""
        self._cache = self._host = None

    def note_arrival(self, state: RequestState) -> None:
        """Look up a new request."""
        if self._cache is None:
            return
        state.prefix = PrefixUse(PrefixKeys(self._block_size, salt=state.request.cache_salt))
        self._found(state)
        if state.kind is ServiceClass.LS:
            keys = state.prefix.keys.up_to(state.token_ids, self._most_found(state))
            num_known = sum(1 for _ in itertools.takewhile(self._cache.knows_cached, keys))
            share = 0.0 if self._has_states else num_known * self._block_size / state.num_tokens
            self._ls_reuse += _REUSE_RATE * (share - self._ls_reuse)
            self._cache.protect(self._ls_reuse >= _LEAST_REUSE)

    def num_tokens(self, state: RequestState) -> int:
        """Look up a WAITING request, and return how many of its first tokens are in the cache."""
        return len(self._found(state)) * self._block_size

    def num_shared(self, state: RequestState) -> int:
        """Return how many blocks of other requests a WAITING one would share."""
        return self._cache.num_used(self._found(state)) if self._cache is not None else 0

    @staticmethod
    def num_shared_at_begin(state: RequestState) -> int:
        """Return how many of a DEVICE request's blocks others used, too, when it was admitted."""
        return state.prefix.num_shared if state.prefix is not None else 0

    @property
    def num_kept_for_ls(self) -> int:
        """Free blocks that hold prefixes of LS requests, and are to be left to these."""
        return self._cache.num_protected() if self._cache is not None else 0

    def freed_by(self) -> Callable[[RequestState | KVMove], int]:
        """Return a function that tells how many device blocks a DEVICE request, or a move to the host, will free.

        Behind those that it was asked about before: a block that some share is free when the last one gives it back.
        """
        if (cache := self._cache) is None:
            return lambda each: (
                len(each.src_block_ids) if isinstance(each, KVMove) else self._kv.num_blocks(each.request_id)
            )
        count = cache.freed_by()
        return lambda each: count(
            each.src_block_ids if isinstance(each, KVMove) else cache.device_blocks(each.request_id)
        )

    def allocate(self, state: RequestState, *, reserve_blocks: int) -> tuple[int, ...] | None:
        """Return device blocks for all known tokens of a WAITING request, those from the cache first.

        None: there is no room, or nothing of it is in the cache.
        """
        keys, prefix = self._found(state), state.prefix
        if self._cache is None or prefix is None or not keys:
            return None
        prefix.num_shared = self._cache.num_used(keys)
        return self._cache.begin(
            state.request_id, keys, state.num_tokens, reserve_blocks=reserve_blocks, marks=state.kind is ServiceClass.LS
        )

    def release(self, state: RequestState) -> None:
        """Free the KV of a DEVICE or HOST request that is preempted, so that as much of it as can be is found again."""
        if self._host is None:
            self._kv.free(state.request_id)
        else:
            self._host.release(state.request_id, self._full_keys(state))

    def start_move_to_host(self, state: RequestState, *, reserve_blocks: int) -> KVMove | None:
        """Begin to move a DEVICE request to the host, which ``shares_on_host``; None if there is no room."""
        assert self._host is not None
        return self._host.start_move_to_host(state.request_id, self._full_keys(state), reserve_blocks=reserve_blocks)

    @property
    def shares_on_host(self) -> bool:
        """Requests that move to the host share blocks there."""
        return self._host is not None and self.is_on

    def _full_keys(self, state: RequestState) -> Sequence[bytes]:
        """Return the keys of the blocks that a DEVICE or HOST request has filled, for others to find; () for none."""
        if state.prefix is None or self._has_states:
            return ()
        num_full = min(state.num_computed_tokens, state.num_tokens - state.num_pending_tokens) // self._block_size
        return state.prefix.keys.up_to(state.token_ids, num_full)[:num_full]

    def is_worth_restoring(self, state: RequestState) -> bool:
        """Tell whether the host has enough tokens of a WAITING request, which the device has not, to copy them back."""
        return self.num_tokens_on_host(state) >= LEAST_RESTORED_TOKENS

    def num_tokens_on_host(self, state: RequestState) -> int:
        """Look up a WAITING request; return how many tokens the host has that follow those that the device has."""
        return len(self._on_host(state)) * self._block_size

    def start_restore(self, state: RequestState, *, reserve_blocks: int) -> tuple[KVMove, int] | None:
        """Begin to copy what the host has of a WAITING request; None if there is no room.

        Returns:
            The move, and how many of the request's first tokens have their KV when it is done.
        """
        keys, prefix = self._found(state), state.prefix
        if self._host is None or prefix is None:
            return None
        host_keys = self._on_host(state)
        move = self._host.start_restoring_prefix(
            state.request_id,
            keys,
            host_keys,
            state.num_tokens,
            reserve_blocks=reserve_blocks,
            marks=state.kind is ServiceClass.LS,
        )
        if move is None:
            return None
        prefix.num_found += len(host_keys)
        prefix.num_shared = 0
        self.note_admission(state)
        self.num_restored_tokens[state.service_class] += len(host_keys) * self._block_size
        return move, prefix.num_found * self._block_size

    @staticmethod
    def take_states(state: RequestState) -> bytes | None:
        """Return, once, the recurrent states that have come with a request's KV; None: there are none."""
        if state.prefix is None:
            return None
        states, state.prefix.states = state.prefix.states, None
        return states

    def note_lost(self, state: RequestState) -> None:
        """Book that a request's copy from the host has failed: it computes its tokens."""
        if state.prefix is not None:
            state.prefix.may_restore = False

    def save(self, *, reserve_blocks: int) -> None:
        """Begin to copy prefixes to the host that the device may forget; to be called when a plan is decided.

        ``reserve_blocks``: host blocks to leave free for requests that decode there.
        """
        max_blocks = self._max_saved_blocks - sum(self._saving.values())
        if self._host is None or max_blocks <= 0:
            return
        move = self._host.start_saving_prefixes(
            num_ahead=self._num_ahead, max_blocks=max_blocks, reserve_blocks=reserve_blocks
        )
        if move is not None:
            self._saving[move.move_id] = len(move.src_block_ids)
            self._side_work.expect(move.move_id, self._on_saved)
            self._side_work.begin(move)

    def _on_saved(self, done: Done) -> None:
        assert self._mover is not None
        self._mover.finish_move(done.move_id, succeeded=done.ok)
        del self._saving[done.move_id]

    @property
    def is_saving(self) -> bool:
        """Copies to the host are under way."""
        return bool(self._saving)

    def parts(self, state: RequestState) -> tuple[Sequence[bytes], int, int]:
        """Look up a WAITING request.

        Returns:
            The keys of all blocks that it could find, and how many of the first of them the device has, and then the
            host.
        """
        prefix = state.prefix
        if self._host is None or prefix is None or state.num_rows_to_score > state.num_scored_rows:
            return (), 0, 0
        most = self._most_found(state)
        return prefix.keys.up_to(state.token_ids, most)[:most], len(self._found(state)), len(self._on_host(state))

    def _on_host(self, state: RequestState) -> Sequence[bytes]:
        """Return the keys that follow those of ``_found`` and whose blocks the host has."""
        prefix = state.prefix
        if self._cache is None or self._host is None or prefix is None or not prefix.may_restore:
            return ()
        if state.num_rows_to_score > state.num_scored_rows:
            return ()
        first, most = len(self._found(state)), self._most_found(state)
        keys = prefix.keys.up_to(state.token_ids, most)[:most]
        if self._has_states:
            return keys if prefix.states is not None and all(map(self._cache.has_on_host, keys)) else ()
        return [*itertools.takewhile(self._cache.has_on_host, itertools.islice(keys, first, None))]

    def note_admission(self, state: RequestState) -> None:
        """Book that a request was admitted with what the last look has found."""
        prefix = state.prefix
        if prefix is None:
            return
        prefix.num_published = 0
        prefix.num_shared = prefix.num_shared if prefix.num_found else 0
        if prefix.num_prompt_tokens is None:
            prefix.num_prompt_tokens = prefix.num_found * self._block_size
            self.num_cached_tokens[state.service_class] += prefix.num_prompt_tokens

    def publish_ahead(self, state: RequestState, num_tokens: int) -> None:
        """Let requests of the same step find the blocks of a prompt's first tokens, which that step computes.

        Only if no step in flight can end the request: its chunk is then in the step for sure.
        """
        if self._publishes_ahead and not (state.decodes or state.num_pending_tokens or state.num_rows_to_score):
            self._publish(state, num_tokens)

    def publish(self, state: RequestState) -> None:
        """Let later requests find the blocks that a DEVICE request has filled by now."""
        self._publish(state, min(state.num_computed_tokens, state.num_tokens - state.num_pending_tokens))

    def _publish(self, state: RequestState, num_tokens: int) -> None:
        prefix = state.prefix
        if self._cache is None or prefix is None or (self._has_states and not self._saves_all):
            return
        num_full, first = num_tokens // self._block_size, prefix.num_published
        if num_full > first:
            keys = prefix.keys.up_to(state.token_ids, num_full)
            marks = state.kind is ServiceClass.LS
            self._cache.publish(state.request_id, first, keys[first:num_full], marks=marks)
            if self._saves_all and self._host is not None:
                self._host.want_copies(state.request_id, first, num_full - first)
            prefix.num_published = num_full

    def _found(self, state: RequestState) -> Sequence[bytes]:
        """Return the keys of a WAITING request's first blocks that the cache has.

        At least one token is left to compute, and all tokens that must tell log-probabilities of the prompt.
        """
        prefix = state.prefix
        if self._cache is None or prefix is None or state.num_rows_to_score > state.num_scored_rows:
            return ()
        if self._has_states:
            prefix.num_found = 0
            return ()
        most = self._most_found(state)
        keys = prefix.keys.up_to(state.token_ids, most)
        prefix.num_found = sum(1 for _ in itertools.takewhile(self._cache.has_cached, keys[:most]))
        return keys[: prefix.num_found]

    def _most_found(self, state: RequestState) -> int:
        return (state.num_tokens - max(1, state.num_pending_tokens)) // self._block_size
