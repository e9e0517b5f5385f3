"""A KV source of one's own: one new file, and one line that registers it. CONTRIBUTING.md walks through this one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType

import pytest

from omniserve.core.request import ServiceClass
from omniserve.core.work import Done, SideWork
from omniserve.kv.prefix_cache import PrefixKeys
from omniserve.sched import sources
from omniserve.sched.sources import KVSourceEntry
from omniserve.sched.sources.base import KVSource, Outlook, SourceContext
from omniserve.sched.state import Phase, RequestState
from tests.sched.benches import Clock
from tests.sched.limits import BLOCK

SHELF = {*PrefixKeys(BLOCK, salt="kept").up_to([7] * 480, 480 // BLOCK)}
"""Keys of the blocks that the shelf has: those of 480 tokens of a prompt with the salt "kept"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetch(SideWork):
    """Bring blocks from the shelf into host blocks."""

    move_id: int
    host_block_ids: tuple[int, ...]


class ShelfSource(KVSource):
    """Has waiting requests wait for what the shelf has of their prompts."""

    name = "shelf"
    most_looked_up = MappingProxyType({ServiceClass.LS: 4, ServiceClass.BE: 4})

    def __init__(self, context: SourceContext) -> None:
        super().__init__(context)
        self._context = context
        assert context.kv.prefixes is not None and context.kv.prefixes.host is not None
        self._host = context.kv.prefixes.host
        self._coming: dict[int, tuple[RequestState | None, int]] = {}

    def start(self, state: RequestState, outlook: Outlook) -> bool:
        keys, on_device, on_host = self._context.prefixes.parts(state)
        first = on_device + on_host
        wanted = [*itertools.takewhile(SHELF.__contains__, itertools.islice(keys, first, None))]
        if not wanted:
            return False
        taken = self._host.begin_awaiting(keys[on_device:first], wanted, reserve_blocks=outlook.reserve_blocks)
        if taken is None:
            return False
        move_id, blocks = taken
        self._coming[move_id] = state, len(wanted)
        self._context.side_work.expect(move_id, self._on_done)
        self._context.side_work.begin(Fetch(move_id=move_id, host_block_ids=blocks))
        return True

    def _on_done(self, done: Done) -> None:
        state, num_blocks = self._coming.pop(done.move_id)
        self._host.end_awaiting(done.move_id, num_blocks if done.ok else 0)
        if state is not None:
            self.num_tokens[state.service_class] += done.ok * num_blocks * BLOCK
            self._context.end_loading([state])

    def forget(self, state: RequestState) -> None:
        self._coming = {i: (None if other is state else other, count) for i, (other, count) in self._coming.items()}

    def give_up(self) -> Iterable[RequestState]:
        return ()


class Shop(Clock):
    """A machine with a shelf, whose KV comes with the next step; ``fails``: it does not."""

    def __init__(self, *, fails: int = 0) -> None:
        super().__init__(host_blocks=200, caches={"prefix_cache": True, "host_prefixes": True})
        self._fails = fails
        self._fetches: list[Fetch] = []
        self.computed: Counter[str] = Counter()

    def turn(self) -> None:
        plan = self.step()
        done = [Done(move_id=fetch.move_id, ok=self._fetched(fetch)) for fetch in self._fetches]
        self.scheduler.notify(done)
        self._fetches = plan.side_work(Fetch)
        for chunk in plan.chunks:
            self.computed[chunk.request_id] += len(chunk.token_ids)

    def _fetched(self, fetch: Fetch) -> bool:
        if self._fails:
            self._fails -= 1
            return False
        slots = [block * BLOCK + offset for block in fetch.host_block_ids for offset in range(BLOCK)]
        self.device.kv |= {("host", slot): 7 for slot in slots}
        return True


@pytest.fixture(autouse=True)
def shelf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "KV_SOURCES", [KVSourceEntry(lambda config, kv: True, lambda: ShelfSource)])


def test_a_request_waits_for_what_the_source_has_and_computes_the_rest() -> None:
    shop = Shop()
    shop.add("be-kept", prompt=500, output=2, salt="kept")
    shop.add("be", prompt=500, output=2, salt="other")
    shop.turn()
    assert shop.requests.states["be-kept"].phase is Phase.LOADING, "the other one is not held up"
    while len(shop.finished) < 2:
        shop.turn()
    assert shop.computed["be-kept"] - shop.computed["be"] == -480
    assert shop.scheduler.stats().loaded_from("shelf")["BE"] == 480
    assert not shop.scheduler.has_unfinished


def test_what_does_not_come_is_tried_again_and_an_end_meanwhile_leaves_nothing() -> None:
    shop = Shop(fails=1)
    shop.add("be-kept", prompt=500, output=2, salt="kept")
    while len(shop.finished) < 1:
        shop.turn()
    assert shop.computed["be-kept"] < 100 and shop.scheduler.stats().loaded_from("shelf")["BE"] == 480
    shop = Shop()
    shop.add("be-kept", prompt=500, output=2, salt="kept")
    shop.turn()
    shop.scheduler.abort("be-kept", shop.now_s)
    shop.turn()
    shop.turn()
    assert not shop.scheduler.has_unfinished and shop.kv.usage().device_used == 0
