"""The prefix cache of the device: full blocks are found again by the tokens that they and all blocks before them hold.

A full block has a key, a hash of its tokens and of the key before. A request begins behind the blocks that are there,
but computes its last token at least, so no shared block is ever written. Each block has a count of users. Blocks that
an LS request has published or found are marked; of the marked idle blocks a share of the pool (``ls_prefix_share``),
those used last, goes after all others. Blocks of older branches of sessions go before all others, and blocks of their
newest requests after them (``kv.sessions``). After a step that failed nothing is found or kept any more: blocks may
have keys that it was to fill.

Paper: vLLM 4.4 (shared prefix). The chain of hashes is that of vLLM's automatic prefix caching. A block without users
keeps its KV until a request needs the memory; the one that has been without users for the longest time is taken first.
A share of the blocks may be protected: prefixes of LS requests stay there as long as there are others to take.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from omniserve.kv.block_pool import BlockPool
from omniserve.kv.sessions import Standing


class PrefixKeys:
    """The keys of one request's full blocks, made as they are asked for.

    A key is a SHA-256 over the block's tokens and the key of the block before it, so it stands for all tokens up to
    the block's end. Requests with different salts or LoRA adapters have no key in common.

    Args:
        lora: Digest of the adapter; empty: there is none.
    """

    def __init__(self, block_size: int, *, salt: str = "", lora: str = "") -> None:
        self.block_size = block_size
        adapter = b"\xff" + lora.encode() + b"\xff" if lora else b""  # no salt begins with such a byte
        self._root = hashlib.sha256(adapter + salt.encode()).digest()
        self._keys: list[bytes] = []

    def up_to(self, token_ids: Sequence[int], count: int) -> Sequence[bytes]:
        """Return the keys of the request's first blocks, at least ``count``; each was full when it was asked for."""
        keys, size = self._keys, self.block_size
        for number in range(len(keys), count):
            tokens = array("q", token_ids[number * size : (number + 1) * size])
            assert len(tokens) == size, f"block {number} is not full"
            keys.append(hashlib.sha256((keys[-1] if keys else self._root) + tokens.tobytes()).digest())
        return keys


class CachingPool(BlockPool):
    """Hands out ids like ``BlockPool``. A block may have a key and several users; without users it keeps its KV.

    Such *idle* blocks count as free: ``take`` forgets them when no other block is left, the longest idle first. Callers
    give a request's blocks back from its last one on, so what is forgotten first is the end of a prefix.

    Blocks may be marked: of those that are, so many that have been idle for the shortest time are forgotten last while
    ``protects`` is set. The pool remembers the keys of marked blocks that it has forgotten, as many as it has blocks.

    Once ``standing`` says what sessions there are, blocks that are OLDER are forgotten first, and up to ``most_newest``
    of those that are NEWEST after all others; among protected marked blocks, these are the last, too.

    Args:
        most_protected: How many.
        on_forget: Is told of each block that is forgotten.
    """

    def __init__(
        self, num_blocks: int, name: str, *, most_protected: int = 0, on_forget: Callable[[int], object] | None = None
    ) -> None:
        super().__init__(num_blocks, name)
        self._on_forget = on_forget
        self._unsaved: dict[int, None] = {}
        self._unsaved_next: dict[int, None] = {}
        self.most_protected = most_protected
        self.protects = True
        self._forgotten: OrderedDict[bytes, None] = OrderedDict()
        """Keys of marked blocks, the last forgotten last."""
        self._num_users = [0] * num_blocks
        self._keys: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}
        self._is_marked = bytearray(num_blocks)
        self._idle: OrderedDict[int, int] = OrderedDict()
        """Idle blocks without a mark: block -> when it became idle; the longest idle first."""
        self._idle_marked: OrderedDict[int, int] = OrderedDict()
        self._clock = itertools.count()
        self.standing: Callable[[bytes], Standing] | None = None
        """What sessions say of the block with a key; None: there are none."""
        self.most_newest = 0
        self._idle_older: OrderedDict[int, int] = OrderedDict()
        """As ``_idle``, of OLDER blocks; these and the next two are empty without sessions."""
        self._idle_newest: OrderedDict[int, int] = OrderedDict()
        self._idle_newest_marked: OrderedDict[int, int] = OrderedDict()

    @property
    def num_free(self) -> int:
        num_free = len(self._free) + len(self._idle) + len(self._idle_marked)
        if self.standing is not None:
            num_free += len(self._idle_older) + len(self._idle_newest) + len(self._idle_newest_marked)
        return num_free

    @property
    def num_protected(self) -> int:
        """Idle blocks that are forgotten last."""
        num_marked = len(self._idle_marked) + len(self._idle_newest_marked)
        return min(num_marked, self.most_protected if self.protects else 0)

    def take(self, count: int, after: int | None = None) -> list[int] | None:
        if count > self.num_free:
            return None
        while len(self._free) < count:
            self._forget(self._longest_idle())
        taken = super().take(count, after)
        assert taken is not None
        for block in taken:
            self._num_users[block] = 1
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        """Take one user from each of these ids.

        Raises:
            RuntimeError: An id has none.
        """
        has_sessions = self.standing is not None
        for block in blocks:
            if not self._num_users[block]:
                raise RuntimeError(f"{self.name} block {block} was freed twice")
            self._num_users[block] -= 1
            if self._num_users[block]:
                continue
            if block in self._keys:
                if has_sessions:
                    self._queue_of(block)[block] = next(self._clock)
                else:
                    (self._idle_marked if self._is_marked[block] else self._idle)[block] = next(self._clock)
            else:
                super().give_back([block])

    def _queue_of(self, block: int) -> OrderedDict[int, int]:
        """Return the queue that a block with a key is in while it is idle."""
        is_marked = self._is_marked[block]
        if self.standing is not None and (standing := self.standing(self._keys[block])) is not Standing.PLAIN:
            if standing is Standing.OLDER:
                return self._idle_older
            return self._idle_newest_marked if is_marked else self._idle_newest
        return self._idle_marked if is_marked else self._idle

    def _leave_queues_of_sessions(self, block: int) -> None:
        for queue in (self._idle_older, self._idle_newest, self._idle_newest_marked):
            queue.pop(block, None)

    def revise(self, keys: Iterable[bytes] | None, *, forgets: bool = False) -> int:
        """Take note that the standing of these keys has changed, or forget their blocks; in any case of idle ones only.

        Args:
            keys: None: all.

        Returns:
            The number of idle blocks among theirs.
        """
        num_idle = 0
        for key in [*self._blocks] if keys is None else keys:
            block = self._blocks.get(key)
            if block is None or self._num_users[block]:
                continue
            num_idle += 1
            if forgets:
                self._forget(block)
                continue
            (self._idle_marked if self._is_marked[block] else self._idle).pop(block, None)
            self._leave_queues_of_sessions(block)
            queue = self._queue_of(block)
            queue[block] = next(self._clock)
            if queue is self._idle_older:  # not worth a copy
                self._unsaved.pop(block, None)
                self._unsaved_next.pop(block, None)
        return num_idle

    def _longest_idle(self) -> int:
        """Return the idle block that is to be forgotten next."""
        if self._idle_older:
            return next(iter(self._idle_older))
        if self._idle_newest or self._idle_newest_marked:
            return self._longest_idle_with_sessions()
        idle, marked = self._idle, self._idle_marked
        if len(marked) > self.num_protected or not idle:
            first = next(iter(marked))
            if not idle or marked[first] < idle[next(iter(idle))]:
                return first
        return next(iter(idle))

    def _longest_idle_with_sessions(self) -> int:
        """Return the idle block that is to be forgotten next, if none is OLDER.

        Those that are more than may be kept compete with those that nothing keeps: the longest idle goes.
        """
        marked, newest, both = self._idle_marked, self._idle_newest, self._idle_newest_marked
        too_many_marked = len(marked) + len(both) > self.num_protected
        too_many_newest = len(newest) + len(both) > self.most_newest
        queues = [self._idle, *([marked] if too_many_marked else ()), *([newest] if too_many_newest else ())]
        if too_many_marked and too_many_newest:
            queues.append(both)
        heads = [next(iter(queue.items())) for queue in queues if queue]
        if heads:
            return min(heads, key=lambda head: head[1])[0]
        return next(iter(newest or marked or both))

    def take_unsaved(self, count: int, *, num_ahead: int) -> list[tuple[int, bytes]]:
        """Return up to ``count`` blocks that are worth a copy elsewhere, with their keys; each is returned once.

        That is blocks that were found, and those that were published with a mark while marks were protected. None is
        returned while more than ``num_ahead`` blocks hold nothing, and none that has become worth it since the last
        call: the step that writes it may not have been launched.
        """
        chosen: list[int] = []
        if len(self._free) <= num_ahead:
            chosen = list(itertools.islice(self._unsaved, max(0, count)))
        for block in chosen:
            del self._unsaved[block]
        self._unsaved |= self._unsaved_next
        self._unsaved_next = {}
        return [(block, self._keys[block]) for block in chosen]

    def want_copies(self, blocks: Iterable[int]) -> None:
        """Note that those of these blocks that have a key are worth a copy."""
        for block in blocks:
            if block in self._keys and block not in self._unsaved:
                self._unsaved_next[block] = None

    def _forget(self, block: int) -> None:
        (self._idle_marked if self._is_marked[block] else self._idle).pop(block, None)
        if self.standing is not None:
            self._leave_queues_of_sessions(block)
        key = self._keys.pop(block)
        del self._blocks[key]
        self._unsaved.pop(block, None)
        self._unsaved_next.pop(block, None)
        if self._on_forget is not None:
            self._on_forget(block)
        if self._is_marked[block]:
            self._is_marked[block] = 0
            self._forgotten[key] = None
            if len(self._forgotten) > self.num_blocks:
                self._forgotten.popitem(last=False)
        super().give_back([block])

    def knows(self, key: bytes) -> bool:
        """Tell whether a block has this key, or a marked one had it and was forgotten."""
        return key in self._blocks or key in self._forgotten

    def match(self, keys: Iterable[bytes]) -> int:
        """Return how many of these keys, from the first one on, are those of blocks."""
        blocks, count = self._blocks, 0
        for key in keys:
            if key not in blocks:
                break
            count += 1
        return count

    def freed_by(self) -> Callable[[Iterable[int]], int]:
        """Return a function that tells how many of these blocks are free when a user of each gives it back.

        It counts on: a block with two users is free when it was asked about twice.
        """
        left: dict[int, int] = {}

        def count(blocks: Iterable[int]) -> int:
            num_freed = 0
            for block in blocks:
                left[block] = num_left = left.get(block, self._num_users[block]) - 1
                num_freed += not num_left
            return num_freed

        return count

    def num_idle(self, keys: Iterable[bytes]) -> int:
        """Return how many of the blocks with these keys have no user."""
        return sum(not self._num_users[self._blocks[key]] for key in keys)

    def begin(self, keys: Sequence[bytes], count: int, *, reserve: int = 0, marks: bool = False) -> list[int] | None:
        """Take ``count`` ids, the first of which are the blocks with these keys; None, and nothing taken, if in vain.

        Idle blocks are no longer free then. ``reserve`` ids must still be free, if any that is free now is taken. The
        blocks with these keys are marked if ``marks``.
        """
        blocks = [self._blocks[key] for key in keys]
        num_taken = count - len(blocks) + self.num_idle(keys)
        if num_taken and num_taken + reserve > self.num_free:
            return None
        has_sessions = self.standing is not None
        for block in blocks:
            self._idle.pop(block, None)
            self._idle_marked.pop(block, None)
            if has_sessions:
                self._leave_queues_of_sessions(block)
            self._is_marked[block] |= marks
            if block not in self._unsaved:
                self._unsaved_next[block] = None
            self._num_users[block] += 1
        others = self.take(count - len(blocks))
        assert others is not None
        return blocks + others

    def publish(self, block: int, key: bytes, *, marks: bool = False) -> bool:
        """Let others find a block that has a user; not if it has a key already, or another block has this one.

        ``marks``: mark it then. Return whether it is found from now on by this key.
        """
        assert self._num_users[block], f"{self.name} block {block} has no user"
        if block in self._keys or key in self._blocks:
            return False
        self._keys[block], self._blocks[key] = key, block
        self._is_marked[block] = marks
        if marks and self.protects:
            self._unsaved_next[block] = None
        self._forgotten.pop(key, None)
        return True

    def check(self, owned: Iterable[int]) -> None:
        """Verify that ``owned`` has each id as often as it has users, and that all others are free or idle.

        Raises:
            AssertionError: With the ids of which that is not true.
        """
        counts = Counter(owned)
        wrong = [block for block, users in enumerate(self._num_users) if counts[block] != users]
        assert not wrong, f"{self.name} blocks with other users than those that own them: {wrong[:16]}"
        without = sorted(block for block, users in enumerate(self._num_users) if not users)
        queues = self._idle, self._idle_marked, self._idle_older, self._idle_newest, self._idle_newest_marked
        idle = [*itertools.chain(*queues)]
        assert sorted([*self._free, *idle]) == without, f"{self.name} blocks are lost, or free and idle"
        assert self._keys.keys() >= set(idle), f"an idle {self.name} block has no key"
        wrong = [block for queue in queues for block in queue if self._queue_of(block) is not queue]
        assert not wrong, f"idle {self.name} blocks are in the wrong queue: {wrong[:16]}"
        assert all([*queue.values()] == sorted(queue.values()) for queue in queues)
        assert not any(self._is_marked[block] for block in range(self.num_blocks) if block not in self._keys)
        assert {key: block for block, key in self._keys.items()} == self._blocks
        assert len(self._forgotten) <= self.num_blocks and not self._forgotten.keys() & self._blocks.keys()
