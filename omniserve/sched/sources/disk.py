"""DiskSource: requests whose first tokens have their KV on disk wait beside their queue until it is in host memory.

From there it is copied to the device as they are admitted, like any prefix that the host has
(``sched.prefixes_on_host``).
Paper: omniserve 3.2.3 (KV that is loaded from disk).

A request of which the disk has more than the host leaves its queue (LOADING) before the policy plans, and comes back to
its place when the copy has ended. All requests that wait for the same block wait for one copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from omniserve.core.request import ServiceClass
from omniserve.core.work import DiskCopy, Done
from omniserve.sched import prefixes_on_host
from omniserve.sched.prefixes_on_host import Coming
from omniserve.sched.sources.base import KVSource, Outlook, SourceContext
from omniserve.sched.state import RequestState
from omniserve.sched.step_cost import Forecast

_MOST_WAITS = 4
"""Copies that a request waits for, one after another, before it computes what it lacks."""
_FORGETTING = 1 / 16
"""Share by which the learned time of a block falls each time that it is found too long."""
_RATE = 1 / 8
"""Weight of the last copy in the time that a block takes to be read."""


class _Read(NamedTuple):
    """A copy from disk under way."""

    copy: DiskCopy
    service_class: str
    """Class of the request that the copy was begun for."""
    states: dict[RequestState, None]
    """The requests that wait for the copy."""


@dataclass(slots=True)
class _LookUp:
    """What was tried for a request since it began to wait."""

    is_done: bool = False
    """The disk was looked up."""
    num_waits: int = 0
    """Copies from disk that it has waited for."""


class DiskSource(KVSource):
    """Begins copies from disk for requests that wait, and copies of what the host has to disk.

    A request is looked up once each time it comes to wait. Its blocks are read if that is predicted to be sooner than
    computing them; without a forecast, or before the first copy has told how long one takes, they are read.
    """

    name = "disk"
    most_looked_up = MappingProxyType({ServiceClass.LS: 64, ServiceClass.BE: 8})

    def __init__(self, context: SourceContext) -> None:
        super().__init__(context)
        kv = context.kv
        assert kv.moves is not None and kv.prefixes is not None and kv.prefixes.disk is not None
        self._disk, self._moves, self._is_on = kv.prefixes.disk, kv.moves, True
        self._context, self._prefixes, self._side_work = context, context.prefixes, context.side_work
        self._block_size = kv.block_size
        self._max_blocks = context.max_blocks
        self._writing: dict[int, int] = {}
        self._reading: dict[int, _Read] = {}
        self._block_s: float | None = None

    def give_up(self) -> Iterable[RequestState]:
        self._is_on = False
        return ()  # copies under way still end

    def start(self, state: RequestState, outlook: Outlook) -> bool:
        """Let a WAITING request wait for a copy from disk, if there is one to begin or under way that is of use."""
        use, look_up = state.prefix, state.fact(_LookUp)
        if not self._is_on or use is None or look_up.is_done or not use.may_restore:
            return False
        if look_up.num_waits >= _MOST_WAITS:  # the host loses what it reads
            return False
        look_up.is_done = True
        keys, num_on_device, num_on_host = self._prefixes.parts(state)
        first = num_on_device + num_on_host
        if first < len(keys) and (move_id := self._disk.reading(keys[first])) is not None:
            use.num_coming = num_on_host + self._num_on_disk(keys, first)
            self._reading[move_id].states[state] = None
            look_up.is_done = False  # what it lacks then may be on disk, too
            look_up.num_waits += 1
            return True
        on_disk = keys[first : first + self._disk.match(itertools.islice(keys, first, None))]
        # What another copy brings is not read twice: the request is looked up again behind this one.
        is_new = (self._disk.reading(key) is None for key in on_disk)
        wanted = on_disk[: sum(1 for _ in itertools.takewhile(bool, is_new))]
        if len(wanted) * self._block_size < prefixes_on_host.LEAST_RESTORED_TOKENS:
            return False
        if not self._is_read_sooner(first, len(wanted), outlook.forecast):
            return False
        copy = self._disk.read(keys[num_on_device:first], wanted, reserve_blocks=outlook.reserve_blocks)
        if copy is None:
            look_up.is_done = not self._reading  # copies that end make room
            return False
        look_up.is_done = len(wanted) == len(on_disk)
        use.num_coming = num_on_host + len(copy.keys)
        look_up.num_waits += 1
        self._reading[copy.move_id] = _Read(copy, state.service_class, {state: None})
        self._side_work.expect(copy.move_id, self._on_read)
        self._side_work.begin(copy)
        return True

    def coming(self, keys: Sequence[bytes], first: int) -> Coming | None:
        num_on_disk = self._num_on_disk(keys, first)
        if num_on_disk * self._block_size < prefixes_on_host.LEAST_RESTORED_TOKENS:
            return None
        return Coming(num_on_disk * self._block_size, self._seconds(num_on_disk))

    def _num_on_disk(self, keys: Sequence[bytes], first: int) -> int:
        """Return how many keys, from one on, have their blocks on disk."""
        if not self._is_on:
            return 0
        return self._disk.match(itertools.islice(keys, first, None))

    def _is_read_sooner(self, first: int, count: int, forecast: Forecast | None) -> bool:
        if forecast is None:
            return True
        start, num_tokens = first * self._block_size, count * self._block_size
        is_sooner = self._seconds(count) < forecast.step().seconds_with(start, num_tokens, samples=0)
        if not is_sooner and self._block_s is not None:
            self._block_s *= 1 - _FORGETTING  # or one slow copy would be the last
        return is_sooner

    def _seconds(self, count: int) -> float:
        """Return the seconds to read ``count`` blocks behind those under way; 0 before any was read."""
        if count == 0 or self._block_s is None:
            return 0.0
        return (sum(len(read.copy.keys) for read in self._reading.values()) + count) * self._block_s

    def forget(self, state: RequestState) -> None:
        for read in self._reading.values():
            read.states.pop(state, None)

    def write(self) -> None:
        if not self._is_on:
            return
        max_blocks = self._max_blocks - sum(self._writing.values())
        if max_blocks > 0 and (copy := self._disk.write(max_blocks=max_blocks)) is not None:
            self._writing[copy.move_id] = len(copy.keys)
            self._side_work.expect(copy.move_id, self._on_written)
            self._side_work.begin(copy)

    @property
    def is_writing(self) -> bool:
        return bool(self._writing)

    def _on_written(self, done: Done) -> None:
        self._finish(done)
        del self._writing[done.move_id]

    def _on_read(self, done: Done) -> None:
        self._finish(done)
        copy, service_class, states = self._reading.pop(done.move_id)
        if done.ok:
            self.num_tokens[service_class] += len(copy.keys) * self._block_size
            block_s = done.seconds / len(copy.keys)
            self._block_s = block_s if self._block_s is None else self._block_s + _RATE * (block_s - self._block_s)
        self._context.end_loading(states)

    def _finish(self, done: Done) -> None:
        self._moves.finish(done.move_id, succeeded=done.ok)

    def look_again(self, state: RequestState) -> None:
        look_up = state.fact(_LookUp)
        look_up.is_done, look_up.num_waits = False, 0
