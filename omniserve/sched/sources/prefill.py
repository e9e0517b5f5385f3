"""PrefillSource: requests whose prompts a prefill engine computes wait beside their queue until the KV is here.

The KV comes into host memory. From there it is copied to the device as they are admitted, like any prefix that the host
has (``sched.prefixes_on_host``); the last tokens, less than a block and one more, are computed here.
Paper: omniserve 5.4.4.

To the scheduler a prefill engine is one more place where prefixes come from, like the disk. A placement
(``sources/placement.py``) chooses an engine for a request that waits, which then leaves its queue (LOADING) with host
blocks for the KV; a thread writes the KV into them (``prefill_receiver.py``). Decodes that move to the host to let
best-effort prompts in leave room for what has come and for the next few prompts (``blocks_wanted``). Recurrent
states are put into the request's state slot when the KV has been copied (``StateLoad``); without them the KV
is of no use, so a request of a model with states finds no other KV. If the engine is lost or lacks memory, what has
come is kept, and the rest is computed here.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from omniserve.core.request import ServiceClass
from omniserve.core.work import CancelPrefill, Done, HostEvent, PrefillEngineJoined, PrefillEngineLost, RemotePrefill
from omniserve.sched import prefixes_on_host
from omniserve.sched.request_queue import RequestQueue
from omniserve.sched.sources.base import KVSource, Outlook, SourceContext
from omniserve.sched.sources.placement import PLACEMENTS, PrefillEngine, Prompt
from omniserve.sched.state import BE, LS, Phase, RequestState
from omniserve.sched.step_cost import ttft_left_s

_MOST_TRIES = 2
_RATE = 1 / 4
"""Weight of the last prompt in what is learned of engines."""
_FORGETTING = 1 / 16
"""Share by which learned times fall each time that an engine is found too slow: else one slow prompt would be the
last."""

_NUM_NEXT = 8
"""Number of prompts, the first of the queues, for which ``blocks_wanted`` keeps room, as an engine may be asked for
them."""


@dataclass(slots=True)
class _Asked:
    """What engines were asked for a request since it began to wait."""

    num_times: int = 0
    has_come: bool = False
    """An engine has computed it, and its KV has come."""
    expected_s: float | None = None
    """Predicted end of the engine's work, on the scheduler's clock; None: nothing was predicted."""
    came_s: float = 0.0
    """Time at which the last of that KV came."""


@dataclass(slots=True)
class _Order:
    """A prompt that an engine was asked for."""

    engine: int
    state: RequestState | None
    """The request that waits for the prompt; None: it has ended."""
    kind: ServiceClass
    service_class: str
    num_tokens: int


class PrefillSource(KVSource):
    """Asks prefill engines for prompts, and books what comes of it."""

    name = "prefilled"
    most_looked_up = MappingProxyType({ServiceClass.LS: 64, ServiceClass.BE: 4})

    def __init__(self, context: SourceContext) -> None:
        super().__init__(context)
        kv, config = context.kv, context.config
        assert kv.prefixes is not None and kv.prefixes.host is not None
        self._index, self._is_on = kv.prefixes.host, True
        self._context, self._prefixes, self._side_work = context, context.prefixes, context.side_work
        self._block_size = kv.block_size
        self._max_step_tokens = config.max_num_batched_tokens
        self._placement = PLACEMENTS.get(config.prefill.prefill_placement)(self._max_step_tokens)
        if self._placement.waits_for_room:  # what is not looked up would be computed here
            self.most_looked_up = MappingProxyType(dict.fromkeys((LS, BE), sys.maxsize))
        self._held: list[RequestState] = []
        """Requests that wait for room on the host; each step they are looked up again."""
        self._kept: list[tuple[RequestState, Sequence[int]]] = []
        """With such a placement: requests whose KV has come, and the host blocks that stay until they are admitted."""
        self._token_s: dict[int, float | None] = {}
        """Recent seconds a token of each engine that can be asked; None: it has computed nothing yet."""
        self._rest_s: float | None = None
        """The value for ``Prompt.rest_s``; None: there was no first token yet."""
        self._after_s = 0.0
        """Recent seconds from the arrival of a prompt's KV to its first token."""
        self._orders: dict[int, _Order] = {}
        self._arrived: list[RequestState] = []
        """Requests whose KV has come, not all of which still wait."""

    @property
    def can_ask(self) -> bool:
        """There is an engine that can be asked."""
        return self._is_on and bool(self._token_s)

    def give_up(self) -> Iterable[RequestState]:
        waiting = [order.state for order in self._orders.values() if order.state is not None]
        waiting += self.held()
        self._let_go(lambda state: True)
        for order in self._orders.values():
            order.state = None
        self._is_on = False
        return waiting

    @staticmethod
    def may_ask(state: RequestState) -> bool:
        """Tell whether an engine may be asked for a WAITING request: its KV has not come, and no copy has failed.

        Prefill engines have no adapters.
        """
        use = state.prefix
        return state.lora is None and use is not None and use.may_restore and state.fact(_Asked).num_times < _MOST_TRIES

    def start(self, state: RequestState, outlook: Outlook) -> bool:
        """Let an engine compute a WAITING request's prompt, if the placement says so and there is room for its KV."""
        use, asked, now_s = state.prefix, state.fact(_Asked), outlook.now_s
        if not self.can_ask or use is None or not self.may_ask(state):
            return False
        keys, num_on_device, num_on_host = self._prefixes.parts(state)
        first = num_on_device + num_on_host
        num_tokens = (len(keys) - first) * self._block_size
        if num_tokens < prefixes_on_host.LEAST_RESTORED_TOKENS:
            return False
        local_s = self._local_s(state, first * self._block_size, outlook)
        left_s = ttft_left_s(state, now_s) if state.slo.ttft_s is not None else None
        chosen = self._placement.choose(
            Prompt(kind=state.kind, num_tokens=num_tokens, local_s=local_s, left_s=left_s, rest_s=self._rest_s or 0.0),
            [*map(self._view, self._token_s)],
        )
        if chosen is None:
            if state.kind is LS:
                asked.num_times = _MOST_TRIES  # it is not asked about again
                for number, token_s in self._token_s.items():
                    self._token_s[number] = None if token_s is None else (1 - _FORGETTING) * token_s
                if self._rest_s is not None:
                    self._rest_s *= 1 - _FORGETTING
            return False
        taken = self._index.begin_awaiting(
            keys[num_on_device:first], keys[first:], reserve_blocks=outlook.reserve_blocks
        )
        if taken is None:
            waits = self._placement.waits_for_room and bool(self._orders or self._kept)
            if waits:  # one of these will give its room back; else the prompt is too long for this host
                self._held.append(state)
            return waits
        move_id, blocks = taken
        ttft_s: float | None = None
        if state.slo.ttft_s is not None:
            ttft_s = state.arrival_s + state.slo.ttft_s - now_s - self._after_s  # the engine leaves headroom itself
        self._side_work.expect(move_id, self._on_done)
        self._side_work.begin(
            RemotePrefill(
                move_id=move_id,
                engine=chosen.number,
                token_ids=tuple(state.token_ids[: len(keys) * self._block_size]),
                first_block=first,
                host_block_ids=blocks,
                service_class=state.service_class,
                ttft_s=ttft_s if ttft_s is not None and ttft_s > 0 else None,
                cache_salt=state.request.cache_salt,
            )
        )
        self._orders[move_id] = _Order(chosen.number, state, state.kind, state.service_class, num_tokens)
        asked.expected_s = now_s + chosen.seconds(num_tokens) if chosen.token_s is not None else None
        asked.num_times += 1
        use.num_coming = num_on_host + len(blocks)
        return True

    def held(self) -> list[RequestState]:
        held, self._held = self._held, []
        self._let_go(lambda state: state.phase is not Phase.WAITING or not state.fact(_Asked).has_come)
        return held

    def _let_go(self, is_over: Callable[[RequestState], bool]) -> None:
        """Let the host drop what has come for some requests."""
        kept: list[tuple[RequestState, Sequence[int]]] = []
        for state, blocks in self._kept:
            if is_over(state):
                self._index.let_go(blocks)
            else:
                kept.append((state, blocks))
        self._kept = kept

    def expected_s(self, state: RequestState) -> float | None:
        if not self.can_ask or state.prefix is None:
            return None
        keys, num_on_device, num_on_host = self._prefixes.parts(state)
        num_tokens = (len(keys) - num_on_device - num_on_host) * self._block_size
        if num_tokens < prefixes_on_host.LEAST_RESTORED_TOKENS:
            return None
        known = [engine for engine in map(self._view, self._token_s) if engine.token_s is not None]
        rest_s = self._rest_s or 0.0
        return min((engine.seconds(num_tokens) + rest_s for engine in known), default=None)

    def _view(self, number: int) -> PrefillEngine:
        orders = [order for order in self._orders.values() if order.engine == number]
        return PrefillEngine(
            number=number,
            tokens=sum(order.num_tokens for order in orders),
            token_s=self._token_s[number],
            ls_tokens=sum(order.num_tokens for order in orders if order.kind is LS),
        )

    def _local_s(self, state: RequestState, start: int, outlook: Outlook) -> float | None:
        """Return in how many seconds a request's first token comes if its prompt is computed here."""
        now_s, forecast, num_ahead = outlook.now_s, outlook.forecast, outlook.num_tokens_ahead
        predicted_s = state.predicted_ttft_s if state.predicted_here_s is None else state.predicted_here_s
        if predicted_s is not None:
            return max(0.0, state.arrival_s + predicted_s - now_s)
        if forecast is None:
            return None
        step = forecast.step()
        ahead_s = step.seconds_with(0, self._max_step_tokens, samples=0) * num_ahead / self._max_step_tokens
        return ahead_s + step.seconds_with(start, state.num_tokens - start, samples=1)

    def forget(self, state: RequestState) -> None:
        if state in self._held:
            self._held.remove(state)
        for move_id, order in self._orders.items():
            if order.state is state:
                order.state = None
                self._side_work.begin(CancelPrefill(move_id=move_id))

    def on_event(self, event: HostEvent) -> None:
        if isinstance(event, PrefillEngineJoined):
            self._token_s[event.engine] = None
        elif isinstance(event, PrefillEngineLost):
            self._token_s.pop(event.engine, None)

    def _on_done(self, done: Done) -> None:
        """Book the end of a prefill."""
        order, prefilled = self._orders.pop(done.move_id), done.prefilled
        assert prefilled is not None
        if not self._is_on:
            return  # given up: nothing may be found in these blocks, so they stay taken
        self._index.end_awaiting(done.move_id, prefilled.num_blocks)
        self.num_tokens[order.service_class] += prefilled.num_blocks * self._block_size
        if done.ok and order.engine in self._token_s:
            token_s, before_s = done.seconds / order.num_tokens, self._token_s[order.engine]
            self._token_s[order.engine] = token_s if before_s is None else before_s + _RATE * (token_s - before_s)
        if order.state is None:
            return
        if done.ok and order.state.prefix is not None:
            asked = order.state.fact(_Asked)
            asked.num_times = _MOST_TRIES  # what the host loses meanwhile is computed here
            asked.has_come, asked.came_s = True, prefilled.at_s
            order.state.prefix.was_computed_elsewhere, order.state.prefix.states = True, prefilled.states
            self._arrived = [*self._waiting(self._arrived), order.state]
            if self._placement.waits_for_room:
                keys, num_on_device, _ = self._prefixes.parts(order.state)
                self._kept.append((order.state, self._index.keep(keys[num_on_device:])))
        self._context.end_loading([order.state])

    def blocks_wanted(self, waiting: Mapping[ServiceClass, RequestQueue]) -> int:
        """Return how many host blocks are to be left free for what has come, and for the prompts that come next.

        In their blocks a decode that moves to the host would push out what has come, or keep the next prompts from
        being asked for, and the step would have to compute those itself.
        """
        if not self.can_ask:
            return 0
        self._arrived = [*self._waiting(self._arrived)]
        askable = (state for kind in (LS, BE) for state in waiting[kind] if self.may_ask(state))
        wanted = (*self._arrived, *itertools.islice(askable, _NUM_NEXT))
        return sum(-(-state.num_tokens // self._block_size) for state in wanted)

    @staticmethod
    def _waiting(arrived: Iterable[RequestState]) -> Iterator[RequestState]:
        for state in arrived:
            if state.phase is Phase.WAITING and state.fact(_Asked).has_come:
                yield state

    def note_first_token(self, state: RequestState, now_s: float) -> None:
        """Learn how long it takes from a prompt's KV to the first token, if an engine computed it."""
        asked = state.fact(_Asked)
        if state.kind is not LS or not asked.has_come:
            return
        self._after_s += _RATE * (now_s - asked.came_s - self._after_s)
        if asked.expected_s is not None:
            rest_s = max(0.0, now_s - asked.expected_s)
            self._rest_s = rest_s if self._rest_s is None else self._rest_s + _RATE * (rest_s - self._rest_s)

    def look_again(self, state: RequestState) -> None:
        asked = state.fact(_Asked)
        asked.num_times, asked.has_come = 0, False
        if state.prefix is not None:
            state.prefix.was_computed_elsewhere, state.prefix.states = False, None
