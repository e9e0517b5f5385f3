"""KVSource: a place from which KV of a waiting request's first tokens comes; KVLoads: the requests that wait for it.

The KV comes into host memory while the request waits beside its queue (LOADING). From there it is copied to the device
as the request is admitted, like any prefix that the host has (``sched.prefixes_on_host``).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from omniserve.core.config import EngineConfig
from omniserve.core.request import ServiceClass
from omniserve.core.work import HostEvent
from omniserve.kv.base import KVManager
from omniserve.sched import prefixes_on_host
from omniserve.sched.fairness import Account
from omniserve.sched.lora_slots import LoRASlots
from omniserve.sched.options import SchedulerLimits
from omniserve.sched.prefixes_on_host import Coming, PrefixesOnHost
from omniserve.sched.request_queue import RequestQueue
from omniserve.sched.side_work import SideWorkQueue
from omniserve.sched.state import LS, Phase, RequestState
from omniserve.sched.step_cost import Forecast


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceContext:
    """What a source works with."""

    kv: KVManager
    prefixes: PrefixesOnHost
    side_work: SideWorkQueue
    config: EngineConfig
    end_loading: Callable[[Iterable[RequestState]], None]
    """To be called with the requests that wait for the source no more, whatever has come."""
    max_blocks: int
    """Most blocks that a source writes at a time beside the steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """What a source may decide by."""

    now_s: float
    forecast: Forecast | None
    num_tokens_ahead: int
    """Tokens of LS prompts that are computed here before the request."""
    reserve_blocks: int
    """Host blocks to leave free."""


class KVSource:
    """Brings KV of waiting requests into host memory, by side work that a plan starts."""

    name: ClassVar[str]
    """Name of the source in statistics: ``disk`` is counted as ``disk_tokens``."""
    most_looked_up: Mapping[ServiceClass, int]
    """Most requests of a kind that are looked up for a step, from the first of its queue on."""

    def __init__(self, context: SourceContext) -> None:
        self.num_tokens: Counter[str] = Counter()
        """Counter, by class: tokens whose KV has come."""

    def start(self, state: RequestState, outlook: Outlook) -> bool:
        """Begin to bring KV of a WAITING request, and have it wait for that; False: the source is of no use for it."""
        raise NotImplementedError

    def held(self) -> Iterable[RequestState]:
        """Return the requests that ``start`` has taken without beginning anything; they are looked up again."""
        return ()

    def forget(self, state: RequestState) -> None:
        """Forget a request that has ended while it waited for this source."""
        raise NotImplementedError

    def give_up(self) -> Iterable[RequestState]:
        """Begin nothing from now on; return the requests that need not wait for what is under way."""
        raise NotImplementedError

    def look_again(self, state: RequestState) -> None:
        """Look a request up anew that comes to wait again, as it was preempted."""

    def coming(self, keys: Sequence[bytes], first: int) -> Coming | None:
        """Return what the source has of these blocks from one on, for the prediction of a TTFT; None: too little."""
        return None

    def expected_s(self, state: RequestState) -> float | None:
        """Return in how many seconds a new request's first token is predicted by way of this source; None: unknown."""
        return None

    def blocks_wanted(self, waiting: Mapping[ServiceClass, RequestQueue]) -> int:
        """Return how many host blocks are to be left free for what has come, and for what is about to."""
        return 0

    def on_event(self, event: HostEvent) -> None:
        """Take note of an event that is not the end of side work."""

    def note_first_token(self, state: RequestState, now_s: float) -> None:
        """Take note that a request has its first token."""

    def write(self) -> None:
        """Begin to save KV at the source; called when a plan is decided."""

    @property
    def is_writing(self) -> bool:
        """KV is being saved."""
        return False


class KVLoads:
    """Takes requests out of their queues while KV for them comes (LOADING), and puts them back in their places."""

    def __init__(
        self,
        kinds: Iterable[type[KVSource]],
        kv: KVManager,
        prefixes: PrefixesOnHost,
        side_work: SideWorkQueue,
        limits: SchedulerLimits,
        waiting: Mapping[ServiceClass, RequestQueue],
    ) -> None:
        context = SourceContext(
            kv=kv,
            prefixes=prefixes,
            side_work=side_work,
            config=limits.config,
            end_loading=self.release,
            max_blocks=limits.blocks_per_step(kv.block_size),
        )
        self.sources = [kind(context) for kind in kinds]
        self._loading: dict[RequestState, KVSource | LoRASlots] = {}
        self._accounts: Counter[Account] = Counter()
        """Numbers of LOADING requests by account, without zeros."""
        self._prefixes, self._waiting, self._block_size = prefixes, waiting, kv.block_size

    def __contains__(self, state: RequestState) -> bool:
        """Tell whether a request is LOADING."""
        return state in self._loading

    def __iter__(self) -> Iterator[RequestState]:
        """Yield the requests that are LOADING."""
        yield from self._loading

    @property
    def accounts(self) -> Iterable[Account]:
        """The accounts with requests that are LOADING."""
        return self._accounts.keys()

    def start(
        self, forecast: Forecast | None, now_s: float, *, running_ls: Iterable[RequestState], reserve_blocks: int
    ) -> None:
        """Take requests from their queues whose KV is to come from a source.

        Args:
            running_ls: LS requests on the device, whose prompts are computed before those that wait.
            reserve_blocks: Host blocks to leave free.
        """
        for source in self.sources:
            self.release(source.held())
            num_ahead = sum(state.num_uncomputed_tokens for state in running_ls)
            for kind, most in source.most_looked_up.items():
                for state in list(itertools.islice(self._waiting[kind], most)):
                    outlook = Outlook(
                        now_s=now_s, forecast=forecast, num_tokens_ahead=num_ahead, reserve_blocks=reserve_blocks
                    )
                    if source.start(state, outlook):
                        self._waiting[kind].remove(state)
                        self.hold(state, source)
                    elif kind is LS:
                        num_ahead += state.num_tokens

    def hold(self, state: RequestState, source: KVSource | LoRASlots) -> None:
        """Have a request that is in no queue wait, for KV or for its adapter."""
        state.phase = Phase.LOADING
        self._loading[state] = source
        self._accounts[state.account] += 1

    def release(self, states: Iterable[RequestState]) -> None:
        """Put requests back into their queues, whatever has come."""
        for state in states:
            self._take(state)
            state.phase = Phase.WAITING
            if state.prefix is not None:
                state.prefix.num_coming = 0
            self._waiting[state.kind].add(state)

    def forget(self, state: RequestState) -> None:
        """Forget a LOADING request that has ended."""
        self._take(state).forget(state)

    def _take(self, state: RequestState) -> KVSource | LoRASlots:
        self._accounts[state.account] -= 1
        if not self._accounts[state.account]:
            del self._accounts[state.account]
        return self._loading.pop(state)

    def look_again(self, state: RequestState) -> None:
        """Look a request up again that comes to wait anew, as it was preempted."""
        for source in self.sources:
            source.look_again(state)

    def give_up(self) -> None:
        """Find, publish, copy and load no KV any more, as a step has failed. What is under way still ends."""
        self._prefixes.give_up()
        for source in self.sources:
            self.release([*source.give_up()])

    def coming(self, state: RequestState) -> Coming | None:
        """Return what a WAITING request that has just come finds on the host, and at a source behind that.

        None: too little to be copied.
        """
        keys, num_on_device, num_on_host = self._prefixes.parts(state)
        first = num_on_device + num_on_host
        found = (source.coming(keys, first) for source in self.sources)
        more = next((coming for coming in found if coming is not None), Coming(0, 0.0))
        num_tokens = num_on_host * self._block_size + more.num_tokens
        return Coming(num_tokens, more.seconds) if num_tokens >= prefixes_on_host.LEAST_RESTORED_TOKENS else None

    def expected_s(self, state: RequestState) -> float | None:
        """Return in how many seconds a new request's first token is predicted by way of a source; None: unknown."""
        expected = (source.expected_s(state) for source in self.sources)
        return min((seconds for seconds in expected if seconds is not None), default=None)

    def blocks_wanted(self) -> int:
        """Return how many host blocks a decode that moves to the host to let a BE prompt in leaves free."""
        return sum(source.blocks_wanted(self._waiting) for source in self.sources)

    def on_event(self, event: HostEvent) -> None:
        """Take note of an event that is not the end of side work."""
        for source in self.sources:
            source.on_event(event)

    def note_first_token(self, state: RequestState, now_s: float) -> None:
        """Take note that a request has its first token."""
        for source in self.sources:
            source.note_first_token(state, now_s)

    def write(self) -> None:
        """Begin to save KV at the sources; to be called when a plan is decided."""
        for source in self.sources:
            source.write()

    @property
    def is_saving(self) -> bool:
        """KV is being copied to the host, or saved at a source, for later requests."""
        return self._prefixes.is_saving or any(source.is_writing for source in self.sources)

    def num_tokens(self) -> dict[str, Mapping[str, int]]:
        """Return, by the name of the source, the tokens whose KV has come, by class."""
        return {source.name: dict(source.num_tokens) for source in self.sources}
