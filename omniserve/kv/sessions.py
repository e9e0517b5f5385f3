"""Sessions: which blocks of the prefix cache the newest request of a session shares, and which only older ones have.

A session is all requests that have a name in common: the turns of a chat, the calls of an agent. When a chat is edited
or an answer is asked for again, the KV behind that place is an *older branch*, which is not likely to be used again.
The pool of the device (``kv.prefix_cache``) forgets older branches first, and what newest requests begin with last; in
host memory and on disk older branches are the first to give way.

The books know blocks by their keys, on whatever tier they are. A block that a request outside of the session has used
is never of an older branch: it may hold a system prompt that many share.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


class Standing(enum.Enum):
    """What sessions say of a block."""

    OLDER = enum.auto()
    """Only requests of a session have used it, and the newest of them does not."""
    PLAIN = enum.auto()
    """Nothing."""
    NEWEST = enum.auto()
    """The newest request of a session begins with it."""


@dataclass(slots=True)
class _Session:
    request_id: str = ""
    """Id of its newest request."""
    ttl_s: float = 0.0
    until_s: float = 0.0
    keys: list[bytes] = field(default_factory=list)
    """Keys of the first blocks of its newest request, as far as they have been computed."""


class Sessions:
    """The sessions that were used of late.

    Args:
        most_keys: Most keys to remember, and most sessions; of more, what was used longest ago is forgotten.
        on_change: Is told of keys whose standing has changed, the end of a prefix before what is in front of it, and
            whether they are OLDER now.
    """

    def __init__(self, most_keys: int, *, on_change: Callable[[Sequence[bytes], bool], object]) -> None:
        self._most_keys, self._on_change = most_keys, on_change
        self._by_name: OrderedDict[str, _Session] = OrderedDict()
        """The last used last."""
        self._newest: dict[bytes, int] = {}
        """Key -> number of sessions whose newest request begins with the block."""
        self._owners: dict[bytes, str] = {}
        """Key of these -> the session whose requests alone have used the block."""
        self._older: OrderedDict[bytes, str] = OrderedDict()
        """Key of an older branch -> its session."""
        self._ends: list[tuple[float, str]] = []
        """A heap of times at which a session may end, with its name."""
        self._now_s = 0.0

    @property
    def names(self) -> Sequence[str]:
        """The names of the sessions, the last used last."""
        return list(self._by_name)

    def standing(self, key: bytes) -> Standing:
        """Return the standing of the block with a key."""
        if key in self._newest:
            return Standing.NEWEST
        return Standing.OLDER if key in self._older else Standing.PLAIN

    def at(self, now_s: float) -> None:
        """Note the time, in seconds; sessions that were not used for their TTL end: all their branches are older."""
        self._now_s = now_s
        while self._ends and self._ends[0][0] <= now_s:
            _, name = heapq.heappop(self._ends)
            session = self._by_name.get(name)
            if session is None:
                continue
            if session.until_s <= now_s:
                del self._by_name[name]
                self._leave(name, session.keys)
            else:
                heapq.heappush(self._ends, (session.until_s, name))

    def begin(self, name: str, request_id: str, keys: Sequence[bytes], *, ttl_s: float) -> None:
        """Note the newest request of a session.

        Args:
            keys: Keys of its first blocks, as far as some tier has them.
            ttl_s: Seconds after which the session ends, unless it is used meanwhile.
        """
        session = self._by_name.pop(name, None)
        if session is None or ttl_s < session.ttl_s:
            heapq.heappush(self._ends, (self._now_s + ttl_s, name))
        session = self._by_name[name] = session or _Session()
        pairs = zip(session.keys, keys, strict=False)
        num_common = next(
            (n for n, (before, now) in enumerate(pairs) if before != now), min(len(session.keys), len(keys))
        )
        left = session.keys[num_common:]
        del session.keys[num_common:]
        session.request_id, session.ttl_s, session.until_s = request_id, ttl_s, self._now_s + ttl_s
        self._extend(name, session, keys[num_common:])
        self._leave(name, left)
        self._squeeze()

    def use(self, name: str, request_id: str, keys: Sequence[bytes]) -> None:
        """Note that a request begins with the cached blocks of these keys; ``name``: its session, "" for none."""
        for key in keys:
            if self._owners.get(key, name) != name:
                del self._owners[key]
            if self._older.get(key, name) != name:
                del self._older[key]
        self._grow(name, request_id, 0, keys)

    def publish(self, name: str, request_id: str, first: int, keys: Sequence[bytes], new: Sequence[bytes]) -> None:
        """Note that a request has computed blocks.

        Args:
            name: Its session, "" for none.
            first: Number of the first of these blocks.
            keys: Their keys.
            new: Those of them that no device block had.
        """
        if not name or name not in self._by_name:
            for key in new:
                self._owners.pop(key, None)
                self._older.pop(key, None)
            return
        is_newest = self._grow(name, request_id, first, keys)
        for key in new:
            if self._owners.get(key, name) != name:
                del self._owners[key]
            if is_newest and self._newest.get(key) == 1:
                self._owners.setdefault(key, name)
            elif key not in self._newest:
                self._older[key] = name
        self._squeeze()

    def end(self, name: str) -> list[bytes]:
        """Forget a session; return the keys of blocks that only its requests may have used, the end of prefixes first.

        That is those of its older branches, and those of its newest request that no other session's begins with.
        """
        older = [key for key, owner in self._older.items() if owner == name]
        session = self._by_name.pop(name, None)
        mine = [] if session is None else [key for key in reversed(session.keys) if self._newest[key] == 1]
        if session is not None:
            self._leave(name, session.keys)
        for key in {*older, *mine}:
            self._older.pop(key, None)
        return [*older, *mine]

    def clear(self) -> None:
        """Forget all sessions; no block is to have a key any more, but those that requests use."""
        known = [*self._older, *self._newest]
        for books in (self._by_name, self._newest, self._owners, self._older, self._ends):
            books.clear()
        self._on_change(known, False)

    def _grow(self, name: str, request_id: str, first: int, keys: Sequence[bytes]) -> bool:
        """Add blocks, from number ``first`` on, if a request is the newest of its session; return whether it is."""
        session = self._by_name.get(name) if name else None
        if session is None or session.request_id != request_id:
            return False
        session.until_s = self._now_s + session.ttl_s
        num_known = len(session.keys) - first
        if 0 <= num_known < len(keys):
            self._extend(name, session, keys[num_known:])
        return True

    def _extend(self, name: str, session: _Session, keys: Sequence[bytes]) -> None:
        """Add keys to those of a session's newest request."""
        session.keys += keys
        for key in keys:
            num_sessions = self._newest[key] = self._newest.get(key, 0) + 1
            if self._owners.get(key, name) != name:
                del self._owners[key]
            owner = self._older.pop(key, None)
            if owner == name and num_sessions == 1:
                self._owners[key] = name
        self._on_change(keys[::-1], False)

    def _leave(self, name: str, keys: Sequence[bytes]) -> None:
        """Note that a session's newest request does not begin with blocks, which it did before."""
        older, plain = [], []
        for key in reversed(keys):
            self._newest[key] -= 1
            if self._newest[key]:
                continue
            del self._newest[key]
            if self._owners.pop(key, None) == name:
                self._older[key] = name
                older.append(key)
            else:
                plain.append(key)
        self._on_change(older, True)
        self._on_change(plain, False)

    def _squeeze(self) -> None:
        """Forget what was used longest ago, if that is too much to remember."""
        dropped: list[bytes] = []
        while self._older and len(self._newest) + len(self._older) > self._most_keys:
            dropped.append(self._older.popitem(last=False)[0])
        self._on_change(dropped, False)
        while len(self._by_name) > self._most_keys or len(self._newest) > self._most_keys:
            name, session = self._by_name.popitem(last=False)
            for key in session.keys:
                self._owners.pop(key, None)
            self._leave(name, session.keys)
        if len(self._ends) > 2 * len(self._by_name) + 64:
            self._ends = [(session.until_s, name) for name, session in self._by_name.items()]
            heapq.heapify(self._ends)

    def check(self) -> None:
        """Verify that the books fit one another.

        Raises:
            AssertionError: They do not.
        """
        counts: dict[bytes, int] = {}
        for key in itertools.chain.from_iterable(session.keys for session in self._by_name.values()):
            counts[key] = counts.get(key, 0) + 1
        assert counts == self._newest, (counts, self._newest)
        assert self._owners.keys() <= self._newest.keys() and not self._older.keys() & self._newest.keys()
        assert len(self._newest) + len(self._older) <= self._most_keys and len(self._by_name) <= self._most_keys
        assert {name for _, name in self._ends} >= self._by_name.keys()
