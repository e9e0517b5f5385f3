"""Prefixes: which requests begin behind KV that the device has of others, and whose KV others can find.

A KV manager's index does the rest (``kv.prefix_index``); ``sched.prefixes_on_host`` has what is copied to the host and
back.

When a step has been launched, the blocks that it fills get their keys: device work runs in order, so later steps can
read them. Blocks of prompts get keys as soon as their chunk is planned, so that requests of the same step find each
other: a layer writes the KV of all device rows before any of them attends (not under policies whose rows may leave a
step between layers).

A preempted request gives its blocks back; those that are still there when it returns are not recomputed.
``MemoryRules.ls_reserve`` keeps BE requests that come to the device out of the blocks that are protected for LS
prefixes, while LS requests are seen to come back to what the pool has, or had. BE requests that run may still grow into
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from omniserve.core.request import ServiceClass
from omniserve.core.work import KVMove
from omniserve.kv.base import KVManager
from omniserve.kv.prefix_cache import PrefixKeys
from omniserve.sched.options import SchedulerLimits
from omniserve.sched.state import PrefixUse, RequestState


class Prefixes:
    """Looks up requests that wait, and publishes what running ones have computed. Without a cache it does nothing.

    If the model has recurrent states, which no block holds, a request finds no KV of others, only that of its own
    prompt in host memory, with the states that a prefill engine has sent.

    Args:
        publishes_ahead: Chunks of prompts are published as they are planned, for others in the same step: at every
            layer a step writes the KV of all its device rows before any of them attends. Not if rows may leave a step
            between two layers: what they have not written must not be read.
    """

    def __init__(self, kv: KVManager, limits: SchedulerLimits, *, publishes_ahead: bool = True) -> None:
        self._kv, self._block_size = kv, kv.block_size
        self.index = kv.prefixes
        """The cache; None: there is none in use."""
        self.has_states = limits.num_state_slots > 0
        """The model has recurrent states."""
        self.saves_all = False
        """All that is computed is to be copied to the host."""
        self._publishes_ahead = publishes_ahead
        self._session_share = limits.config.execution.session_share
        self._session_ttl_s = limits.config.execution.session_ttl_s
        self.num_cached_tokens: Counter[str] = Counter()
        """Counter, by class: prompt tokens that were found at their request's first admission."""

    @property
    def is_on(self) -> bool:
        """There is a prefix cache in use."""
        return self.index is not None

    def give_up(self) -> None:
        """Be as without a cache from now on. Copies under way still end."""
        self.index = None

    # -- requests that come and wait -----------------------------------------------------------------------------

    def note_arrival(self, state: RequestState) -> None:
        """Look up a new request."""
        if self.index is None:
            return
        keys = PrefixKeys(self._block_size, salt=state.request.cache_salt, lora=state.adapter)
        state.prefix = PrefixUse(keys)
        self.found(state)
        if state.kind is ServiceClass.LS:
            findable = keys.up_to(state.token_ids, self._most_found(state)) if not self.has_states else ()
            self.index.note_ls_prompt(findable, state.num_tokens)

    def note_session(self, state: RequestState, now_s: float) -> None:
        """Note that a new request, which was not refused, is the newest of the session that it names."""
        request, prefix, index = state.request, state.prefix, self.index
        if not request.session or index is None or prefix is None or self.has_states:
            return
        if index.sessions is None:
            index.open_sessions(share=self._session_share).at(now_s)
        ttl_s = self._session_ttl_s if request.session_ttl_s is None else request.session_ttl_s
        most = self._most_found(state)
        keys = prefix.keys.up_to(state.token_ids, most)[:most]
        index.begin_session(request.session, state.request_id, keys, ttl_s=ttl_s)

    def note_use(self, state: RequestState, keys: Sequence[bytes]) -> None:
        """Book that a request begins with the cached blocks of these keys, wherever they were."""
        if self.index is not None and self.index.sessions is not None:
            self.index.sessions.use(state.request.session, state.request_id, keys)

    def tell_time(self, now_s: float) -> None:
        """Let sessions end that have not been used for long."""
        if self.index is not None and self.index.sessions is not None:
            self.index.sessions.at(now_s)

    def num_tokens(self, state: RequestState) -> int:
        """Look up a WAITING request, and return how many of its first tokens are in the cache."""
        return len(self.found(state)) * self._block_size

    def num_shared(self, state: RequestState) -> int:
        """Return how many blocks of other requests a WAITING one would share."""
        return self.index.num_used(self.found(state)) if self.index is not None else 0

    @staticmethod
    def num_shared_at_begin(state: RequestState) -> int:
        """Return how many of a DEVICE request's blocks others used, too, when it was admitted."""
        return state.prefix.num_shared if state.prefix is not None else 0

    def wanted(self, state: RequestState) -> Sequence[bytes]:
        """Return the keys of all blocks that a WAITING request could find; () while all rows of its prompt are needed.

        At least one token is left to compute.
        """
        if state.prefix is None or state.needs_all_rows:
            return ()
        most = self._most_found(state)
        return state.prefix.keys.up_to(state.token_ids, most)[:most]

    def found(self, state: RequestState) -> Sequence[bytes]:
        """Look up a WAITING request, and return the keys of its first blocks that the device has."""
        prefix = state.prefix
        if self.index is None or prefix is None or state.needs_all_rows:
            return ()
        if self.has_states:
            prefix.num_found = 0
            return ()
        keys = self.wanted(state)
        prefix.num_found = self.index.match(keys)
        return keys[: prefix.num_found]

    def _most_found(self, state: RequestState) -> int:
        return (state.num_tokens - max(1, state.num_pending_tokens)) // self._block_size

    # -- memory --------------------------------------------------------------------------------------------------

    @property
    def num_kept_for_ls(self) -> int:
        """Free blocks that hold prefixes of LS requests, and are to be left to these."""
        return self.index.num_protected if self.index is not None else 0

    def freed_by(self) -> Callable[[RequestState | KVMove], int]:
        """Return a function that tells how many device blocks a DEVICE request, or a move to the host, will free.

        Calls build on one another: a block that several requests share counts as freed with the last of them.
        """
        if self.index is None:
            return lambda each: (
                len(each.src_block_ids) if isinstance(each, KVMove) else self._kv.num_blocks(each.request_id)
            )
        return self.index.freed_by()

    def allocate(self, state: RequestState, *, reserve_blocks: int) -> tuple[int, ...] | None:
        """Return device blocks for all known tokens of a WAITING request, those from the cache first.

        None: there is no room, or nothing of it is in the cache.
        """
        keys, prefix = self.found(state), state.prefix
        if self.index is None or prefix is None or not keys:
            return None
        prefix.num_shared = self.index.num_used(keys)
        marks = state.kind is ServiceClass.LS
        blocks = self.index.begin(state.request_id, keys, state.num_tokens, reserve_blocks=reserve_blocks, marks=marks)
        if blocks is not None:
            self.note_use(state, keys)
        return blocks

    # -- requests that run ---------------------------------------------------------------------------------------

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
        if self.index is None or prefix is None or (self.has_states and not self.saves_all):
            return
        num_full, first = num_tokens // self._block_size, prefix.num_published
        if num_full > first:
            keys = prefix.keys.up_to(state.token_ids, num_full)
            marks = state.kind is ServiceClass.LS
            session = state.request.session
            self.index.publish(state.request_id, first, keys[first:num_full], marks=marks, session=session)
            if self.saves_all and self.index.host is not None:
                self.index.host.want_copies(state.request_id, first, num_full - first)
            prefix.num_published = num_full
