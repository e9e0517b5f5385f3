"""Reads: WAITING requests leave their queue while KV for them comes from disk or from a prefill engine (READING)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

from omniserve.core.config import EngineConfig
from omniserve.core.request import ServiceClass
from omniserve.kv.base import KVManager
from omniserve.sched.disk_reads import MOST_LOOKED_UP, DiskReads
from omniserve.sched.prefixes import Prefixes
from omniserve.sched.remote_prefills import MOST_ASKED_FOR, RemotePrefills
from omniserve.sched.side_work import SideWorkQueue
from omniserve.sched.state import BE, LS, Phase, RequestQueue, RequestState
from omniserve.sched.step_cost import Forecast

_NUM_NEXT = 2 * MOST_ASKED_FOR[BE]
"""Number of prompts, the first of the queues, for which ``blocks_wanted`` keeps room, as an engine may be asked for
them."""


class Reads:
    """Takes requests out of ``waiting``, and puts them back in their places when their KV is in host memory.

    Args:
        waiting: The queues of WAITING requests.
        max_blocks: Most blocks that are being written to disk at a time.
    """

    def __init__(
        self, kv: KVManager, prefixes: Prefixes, side_work: SideWorkQueue, config: EngineConfig,
        waiting: Mapping[ServiceClass, RequestQueue], *, max_blocks: int,
    ) -> None:  # fmt: skip
        self.disk = DiskReads(kv, prefixes, side_work, put_back=self._put_back, max_blocks=max_blocks)
        self.prefills = RemotePrefills(kv, prefixes, side_work, config, put_back=self._put_back)
        self._waiting, self._block_size = waiting, kv.block_size

    def __contains__(self, state: RequestState) -> bool:
        """Tell whether a request is READING."""
        return state in self.disk or state in self.prefills

    def states(self) -> Iterator[RequestState]:
        """Yield the requests that are READING."""
        yield from self.disk.states()
        yield from self.prefills.states()

    def start(
        self, forecast: Forecast | None, now_s: float, *, running_ls: Iterable[RequestState], reserve_blocks: int
    ) -> None:  # fmt: skip
        """Take requests from their queues whose KV is to come from disk or from a prefill engine.

        Args:
            running_ls: LS requests on the device, whose prompts are computed before those that wait.
            reserve_blocks: Host blocks to leave free.
        """
        if self.disk.is_on:
            for kind, most in MOST_LOOKED_UP.items():
                for state in list(itertools.islice(self._waiting[kind], most)):
                    if self.disk.start(state, forecast, reserve_blocks=reserve_blocks):
                        self._take(state)
        if self.prefills.is_on:
            num_ahead = sum(state.num_uncomputed_tokens for state in running_ls)
            for kind, most in MOST_ASKED_FOR.items():
                for state in list(itertools.islice(self._waiting[kind], most)):
                    if self.prefills.start(
                        state, now_s, forecast, num_ahead=num_ahead, reserve_blocks=reserve_blocks
                    ):  # fmt: skip
                        self._take(state)
                    elif kind is LS:
                        num_ahead += state.num_tokens

    def blocks_wanted(self) -> int:
        """Return how many host blocks WAITING requests need for KV of prefill engines: what has come, what comes next.

        A decode that moves to the host to let a BE prompt in leaves them free. In their blocks it would push out what
        has come, or keep the next prompts from being asked for, and the step would have to compute those itself.
        """
        if not self.prefills.is_on:
            return 0
        askable = (state for kind in (LS, BE) for state in self._waiting[kind] if self.prefills.may_ask(state))
        upcoming = sum(-(-state.num_tokens // self._block_size) for state in itertools.islice(askable, _NUM_NEXT))
        return self.prefills.blocks_arrived() + upcoming

    def forget(self, state: RequestState) -> None:
        """Forget a READING request that has ended."""
        self.disk.forget(state)
        self.prefills.forget(state)

    def look_again(self, state: RequestState) -> None:
        """Look a request up again that comes to wait anew, as it was preempted."""
        self.disk.look_again(state)
        self.prefills.look_again(state)

    def give_up(self) -> None:
        """Begin nothing any more, and await no prefill engine. Copies under way still end."""
        self.disk.give_up()
        self._put_back(self.prefills.give_up())

    def _take(self, state: RequestState) -> None:
        self._waiting[state.kind].remove(state)
        state.phase = Phase.READING

    def _put_back(self, states: Iterable[RequestState]) -> None:
        for state in states:
            state.phase = Phase.WAITING
            self._waiting[state.kind].add(state)
