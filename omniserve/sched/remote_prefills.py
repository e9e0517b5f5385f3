"""RemotePrefills: requests whose prompts a prefill engine computes wait beside their queue until the KV is here.

The KV comes into host memory. From there it is copied to the device as they are admitted, like any prefix that the host
has (``sched.prefixes``); the last tokens, less than a block and one more, are computed here. Paper: omniserve 5.4.4.

To the scheduler a prefill engine is one more place where prefixes come from, like the disk. A placement
(``sched/placement.py``) chooses an engine for a request that waits, which then leaves its queue (READING) with host
blocks for the KV; a thread writes the KV into them (``prefill_receiver.py``). Decodes that move to the host to let
best-effort prompts in leave room for what has come and for the next few prompts (``Reads.blocks_wanted``). Recurrent
states are put into the request's state slot when the KV has been copied (``StepPlan.state_loads``); without them the KV
is of no use, so a request of a model with states finds no other KV. If the engine is lost or lacks memory, what has
come is kept, and the rest is computed here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from omniserve.core.config import EngineConfig
from omniserve.core.plan import HostEvent, HostEventKind, RemotePrefill
from omniserve.core.request import ServiceClass
from omniserve.kv.base import KeepsPrefixesOnHost, KVManager
from omniserve.sched import prefixes
from omniserve.sched.placement import PLACEMENTS, PrefillEngine, Prompt
from omniserve.sched.prefixes import Prefixes
from omniserve.sched.state import LS, Phase, RequestState
from omniserve.sched.step_cost import Forecast, ttft_left_s

_MOST_TRIES = 2
_RATE = 1 / 4
"""Weight of the last prompt in what is learned of engines."""
_FORGETTING = 1 / 16
"""Share by which learned times fall each time that an engine is found too slow: else one slow prompt would be the
last."""

MOST_ASKED_FOR = {ServiceClass.LS: 64, ServiceClass.BE: 4}
"""Most requests of a kind for which engines are asked in a step, from the first of its queue on."""


@dataclass(slots=True)
class _Order:
    """A prompt that an engine was asked for."""

    engine: int
    state: RequestState | None
    """The request that waits for the prompt; None: it has ended."""
    kind: ServiceClass
    service_class: str
    num_tokens: int


class RemotePrefills:
    """Asks prefill engines for prompts, and books what comes of it."""

    def __init__(self, kv: KVManager, prefixes: Prefixes, config: EngineConfig) -> None:
        wanted = bool(config.prefill.prefill_engines)
        self._kv = kv if wanted and isinstance(kv, KeepsPrefixesOnHost) and prefixes.is_on else None
        self._prefixes, self._block_size = prefixes, kv.block_size
        self._max_step_tokens = config.max_num_batched_tokens
        self._placement = PLACEMENTS.get(config.prefill.prefill_placement)(self._max_step_tokens)
        self._token_s: dict[int, float | None] = {}
        """Recent seconds a token of each engine that can be asked; None: it has computed nothing yet."""
        self._rest_s: float | None = None
        """The value for ``Prompt.rest_s``; None: there was no first token yet."""
        self._after_s = 0.0
        """Recent seconds from the arrival of a prompt's KV to its first token."""
        self._orders: dict[int, _Order] = {}
        self._begun: list[RemotePrefill] = []
        self._cancels: list[int] = []
        self._arrived: list[RequestState] = []
        """Requests whose KV has come, not all of which still wait."""
        self.num_tokens: Counter[str] = Counter()
        """Counter, by class: tokens whose KV has come from prefill engines."""

    @property
    def is_on(self) -> bool:
        """There is an engine that can be asked."""
        return bool(self._kv is not None and self._token_s)

    def give_up(self) -> list[RequestState]:
        """Use no engine from now on. Return the requests that were waiting for one; they no longer do."""
        waiting = [*self.states()]
        for order in self._orders.values():
            order.state = None
        self._kv = None
        return waiting

    @property
    def is_cancelling(self) -> bool:
        """There are prefills to stop, because their requests have ended."""
        return bool(self._cancels)

    def __contains__(self, state: RequestState) -> bool:
        """Tell whether a request waits for an engine."""
        return any(order.state is state for order in self._orders.values())

    def states(self) -> Iterator[RequestState]:
        """Yield the requests that wait for engines."""
        yield from (order.state for order in self._orders.values() if order.state is not None)

    @staticmethod
    def may_ask(state: RequestState) -> bool:
        """Tell whether an engine may be asked for a WAITING request: its KV has not come, and no copy has failed."""
        use = state.prefix
        return use is not None and use.may_restore and use.num_prefills < _MOST_TRIES

    def start(
        self, state: RequestState, now_s: float, forecast: Forecast | None, *, num_ahead: int = 0, reserve_blocks: int
    ) -> bool:
        """Let an engine compute a WAITING request's prompt, if the placement says so and there is room for its KV.

        Args:
            num_ahead: Tokens of LS prompts that are computed here before it.
            reserve_blocks: Host blocks to leave free.
        """
        use = state.prefix
        if self._kv is None or use is None or not self.may_ask(state):
            return False
        keys, num_on_device, num_on_host = self._prefixes.parts(state)
        first = num_on_device + num_on_host
        num_tokens = (len(keys) - first) * self._block_size
        if num_tokens < prefixes.LEAST_RESTORED_TOKENS:
            return False
        local_s = self._local_s(state, now_s, first * self._block_size, num_ahead, forecast)
        left_s = ttft_left_s(state, now_s) if state.slo.ttft_s is not None else None
        chosen = self._placement.choose(
            Prompt(
                kind=state.kind, num_tokens=num_tokens, local_s=local_s, left_s=left_s, rest_s=self._rest_s or 0.0
            ),
            [*map(self._view, self._token_s)],
        )  # fmt: skip
        if chosen is None:
            if state.kind is LS:
                use.num_prefills = _MOST_TRIES  # it is not asked about again
                for number, token_s in self._token_s.items():
                    self._token_s[number] = None if token_s is None else (1 - _FORGETTING) * token_s
                if self._rest_s is not None:
                    self._rest_s *= 1 - _FORGETTING
            return False
        taken = self._kv.start_awaiting_prefix(keys[num_on_device:first], keys[first:], reserve_blocks=reserve_blocks)
        if taken is None:
            return False
        move_id, blocks = taken
        ttft_s: float | None = None
        if state.slo.ttft_s is not None:
            ttft_s = state.arrival_s + state.slo.ttft_s - now_s - self._after_s  # the engine leaves headroom itself
        self._begun.append(RemotePrefill(
            move_id=move_id, engine=chosen.number, token_ids=tuple(state.token_ids[: len(keys) * self._block_size]),
            first_block=first, host_block_ids=blocks, service_class=state.service_class,
            ttft_s=ttft_s if ttft_s is not None and ttft_s > 0 else None, cache_salt=state.request.cache_salt,
        ))  # fmt: skip
        self._orders[move_id] = _Order(chosen.number, state, state.kind, state.service_class, num_tokens)
        use.expected_s = now_s + chosen.seconds(num_tokens) if chosen.token_s is not None else None
        use.num_prefills += 1
        use.num_coming = num_on_host + len(blocks)
        return True

    def predict(self, state: RequestState) -> float | None:
        """Return in how many seconds a new request's first token is predicted if an engine computes its prompt.

        None: none would be asked, or none has told yet how fast it is.
        """
        if not self.is_on or state.prefix is None:
            return None
        keys, num_on_device, num_on_host = self._prefixes.parts(state)
        num_tokens = (len(keys) - num_on_device - num_on_host) * self._block_size
        if num_tokens < prefixes.LEAST_RESTORED_TOKENS:
            return None
        known = [engine for engine in map(self._view, self._token_s) if engine.token_s is not None]
        rest_s = self._rest_s or 0.0
        return min((engine.seconds(num_tokens) + rest_s for engine in known), default=None)

    def _view(self, number: int) -> PrefillEngine:
        orders = [order for order in self._orders.values() if order.engine == number]
        return PrefillEngine(
            number=number, tokens=sum(order.num_tokens for order in orders), token_s=self._token_s[number],
            ls_tokens=sum(order.num_tokens for order in orders if order.kind is LS),
        )  # fmt: skip

    def _local_s(
        self, state: RequestState, now_s: float, start: int, num_ahead: int, forecast: Forecast | None
    ) -> float | None:
        """Return in how many seconds a request's first token comes if its prompt is computed here."""
        predicted_s = state.predicted_ttft_s if state.predicted_here_s is None else state.predicted_here_s
        if predicted_s is not None:
            return max(0.0, state.arrival_s + predicted_s - now_s)
        if forecast is None:
            return None
        step = forecast.step()
        ahead_s = step.seconds_with(0, self._max_step_tokens, samples=0) * num_ahead / self._max_step_tokens
        return ahead_s + step.seconds_with(start, state.num_tokens - start, samples=1)

    def forget(self, state: RequestState) -> None:
        """Forget a request that waits for an engine and has ended."""
        for move_id, order in self._orders.items():
            if order.state is state:
                order.state = None
                self._cancels.append(move_id)

    def take_orders(self) -> tuple[RemotePrefill, ...]:
        """Return, once, what was asked for; for the plan that is decided."""
        begun, self._begun = tuple(self._begun), []
        return begun

    def take_cancels(self) -> tuple[int, ...]:
        """Return, once, the ids of prefills whose requests have ended."""
        cancels, self._cancels = tuple(self._cancels), []
        return cancels

    def on_event(self, event: HostEvent) -> RequestState | None:
        """Book an event of a prefill engine; return the request that waits no more, if there is one."""
        if event.kind is HostEventKind.PREFILL_JOINED:
            self._token_s[event.host] = None
            return None
        if event.kind is HostEventKind.PREFILL_LOST:
            self._token_s.pop(event.host, None)
            return None
        order = self._orders.pop(event.move_id)
        if self._kv is None:
            return None  # given up: nothing may be found in these blocks, so they stay taken
        self._kv.end_awaiting_prefix(event.move_id, event.num_blocks)
        self.num_tokens[order.service_class] += event.num_blocks * self._block_size
        if event.kind is HostEventKind.PREFILL_DONE and order.engine in self._token_s:
            token_s, before_s = event.seconds / order.num_tokens, self._token_s[order.engine]
            self._token_s[order.engine] = token_s if before_s is None else before_s + _RATE * (token_s - before_s)
        if order.state is not None and order.state.prefix is not None and event.kind is HostEventKind.PREFILL_DONE:
            order.state.prefix.num_prefills = _MOST_TRIES  # what the host loses meanwhile is computed here
            order.state.prefix.was_prefilled, order.state.prefix.came_s = True, event.at_s
            order.state.prefix.states = event.states
            self._arrived = [*self._waiting(self._arrived), order.state]
        return order.state

    def blocks_arrived(self) -> int:
        """Return how many host blocks the KV that has come for WAITING requests has, with what the host had of it."""
        self._arrived = [*self._waiting(self._arrived)]
        return sum(-(-state.num_tokens // self._block_size) for state in self._arrived)

    @staticmethod
    def _waiting(arrived: Iterable[RequestState]) -> Iterator[RequestState]:
        for state in arrived:
            if state.phase is Phase.WAITING and state.prefix is not None and state.prefix.was_prefilled:
                yield state

    def note_first_token(self, state: RequestState, now_s: float) -> None:
        """Learn how long it takes from a prompt's KV to the first token, if an engine computed it."""
        use = state.prefix
        if state.kind is not LS or use is None or not use.was_prefilled:
            return
        self._after_s += _RATE * (now_s - use.came_s - self._after_s)
        if use.expected_s is not None:
            rest_s = max(0.0, now_s - use.expected_s)
            self._rest_s = rest_s if self._rest_s is None else self._rest_s + _RATE * (rest_s - self._rest_s)

    def look_again(self, state: RequestState) -> None:
        """Ask about a request anew that comes to wait again, as it was preempted."""
        if state.prefix is not None:
            state.prefix.num_prefills, state.prefix.was_prefilled, state.prefix.states = 0, False, None
