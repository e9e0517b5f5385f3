"""SimulatedPrefillEngines: prefill engines on clocks of their own, and what comes of them. Paper: omniserve 5.4.4.

Each is a whole engine with a scheduler, a KV manager and copies to its host, like that of ``omniserve.prefill``. It
runs up to the time at which the engine that asks looks: nothing can be asked of it before that time any more.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omniserve.core.config import EngineConfig, ParallelConfig, PrefillConfig
from omniserve.core.errors import RequestRejected
from omniserve.core.request import SLO, Request, SamplingParams, ServiceClass
from omniserve.core.work import CancelPrefill, Done, HostEvent, PrefilledKV, PrefillEngineJoined, RemotePrefill
from omniserve.kv.prefix_cache import PrefixKeys
from omniserve.latency.features import AlphaBeta
from omniserve.simulate.engine import SimulatedEngine
from omniserve.simulate.machine import Machine
from omniserve.simulate.runner import Chances

_LOOK_S = 0.001
"""Seconds after which an engine that waits for copies to its host looks again."""
_HAND_OVER_S = 0.05
"""Seconds that the next step waits at most for copies of latency-sensitive prompts to the host."""
_PATIENCE = 50
"""Steps in which the blocks of a prompt that is computed must come to the host."""

_Tell = Callable[[int, float, HostEvent], None]
"""(asker, at, event)."""


@dataclass(slots=True)
class _Export:
    """A prompt that is computed."""

    asker: int
    prefill: RemotePrefill
    keys: Sequence[bytes]
    num_sent: int
    """First blocks that were sent, or need not be."""
    began_s: float
    kind: ServiceClass
    is_computed: bool = False
    num_waits: int = 0
    """Steps since then without a block to send."""


class _Engine:
    """A prefill engine, with the messages to it and the link from it."""

    def __init__(self, number: int, machine: Machine, config: EngineConfig, link: AlphaBeta, seed: int) -> None:
        self._number, self._link, self._block_size = number, link, config.block_size
        self._block_bytes = machine.spec.kv_block_bytes(config.block_size, config.execution.kv_dtype)
        self._state_bytes = machine.spec.state_bytes
        self.engine = SimulatedEngine(machine, config, Chances(seed), caches_prefixes=True)
        require_shared_kv(self.engine, "a prefill engine")
        self.engine.scheduler.requests.prefixes_on_host.save_all()
        self._inbox: deque[tuple[float, float, int, RemotePrefill | int]] = deque()
        """(comes at, sent at, the asker, a prompt or the ``move_id`` of one to stop)."""
        self._exports: dict[str, _Export] = {}
        self._kinds = {spec.name: ServiceClass(spec.kind) for spec in config.classes}
        self._link_free_s = self._last_end_s = 0.0

    @property
    def _has_work(self) -> bool:
        return bool(self._exports) or self.engine.stepper.has_unfinished

    def send(self, asker: int, message: RemotePrefill | int, at_s: float) -> None:
        """Take a message."""
        self._inbox.append((at_s + self._link.alpha_s, at_s, asker, message))

    def next_s(self) -> float:
        """Return when it goes on; infinity: it has nothing to do."""
        if self._has_work:
            return self.engine.now_s
        return max(self.engine.now_s, self._inbox[0][0]) if self._inbox else math.inf

    def turn(self, tell: _Tell) -> None:
        """Take messages, run a step and send blocks; only if ``next_s`` is finite."""
        engine = self.engine
        engine.now_s = self.next_s()
        while self._inbox and self._inbox[0][0] <= engine.now_s:
            _, sent_s, asker, message = self._inbox.popleft()
            if isinstance(message, int):
                self._cancel(asker, message, tell)
            else:
                self._begin(asker, message, sent_s, tell)
        if not self._has_work:
            return
        for output in engine.step():
            if output.finished and (export := self._exports.get(output.request_id)) is not None:
                export.is_computed = True
        self._hand_over(tell)
        for request_id, export in list(self._exports.items()):
            self._send_blocks(request_id, export, tell)
            self._give_up_if_stuck(request_id, export, tell)
        if engine.stepper.last_plan_was_empty:
            engine.now_s += _LOOK_S

    def _hand_over(self, tell: _Tell) -> None:
        """Copy latency-sensitive prompts that are computed to the host before the next step, which may be long."""
        engine = self.engine
        until_s = engine.now_s + _HAND_OVER_S
        while waiting := [
            each for each in self._exports.items() if each[1].is_computed and each[1].kind is ServiceClass.LS
        ]:
            engine.stepper.start_moves()
            for request_id, export in waiting:
                self._send_blocks(request_id, export, tell)
            if engine.now_s > until_s or not engine.scheduler.requests.loads.is_saving:
                return
            engine.now_s += _LOOK_S

    def _begin(self, asker: int, prefill: RemotePrefill, sent_s: float, tell: _Tell) -> None:
        request_id = f"prefill-{asker}-{prefill.move_id}"
        request = Request(
            prompt_token_ids=prefill.token_ids,
            request_id=request_id,
            cache_salt=prefill.cache_salt,
            sampling=SamplingParams(max_tokens=1, ignore_eos=True),
            service_class=prefill.service_class,
            slo=SLO(ttft_s=prefill.ttft_s),
        )
        count = len(prefill.token_ids) // self._block_size
        keys = PrefixKeys(self._block_size, salt=prefill.cache_salt).up_to(prefill.token_ids, count)[:count]
        kind = self._kinds[prefill.service_class]
        export = _Export(asker, prefill, keys, prefill.first_block, sent_s, kind)
        if len(prefill.token_ids) + 1 > min(self.engine.max_model_len, self.engine.pool_tokens):
            self._end(export, tell, ok=False)
            return
        try:
            self.engine.add(request_id, request, arrival_s=self.engine.now_s)
        except RequestRejected:
            self._end(export, tell, ok=False)
            return
        self._exports[request_id] = export

    def _cancel(self, asker: int, move_id: int, tell: _Tell) -> None:
        request_id = f"prefill-{asker}-{move_id}"
        if (export := self._exports.pop(request_id, None)) is not None:  # else it has ended meanwhile
            self.engine.stepper.abort(request_id)
            self._end(export, tell, ok=False)

    def _send_blocks(self, request_id: str, export: _Export, tell: _Tell) -> None:
        """Send what has come to the host of a prompt, and its end."""
        prefixes = self.engine.kv.prefixes
        assert prefixes is not None and prefixes.host is not None
        first = export.num_sent
        export.num_sent += prefixes.host.match(export.keys[first:])
        if count := export.num_sent - first:
            begin_s = max(self._link_free_s, self.engine.now_s)
            self._link_free_s = begin_s + self._link.beta_s * count * self._block_bytes
            export.num_waits = 0
        if export.num_sent == len(export.keys) and (export.is_computed or not self._state_bytes):
            del self._exports[request_id]
            self._link_free_s = max(self._link_free_s, self.engine.now_s) + self._link.beta_s * self._state_bytes
            self._end(export, tell, ok=True)

    def _give_up_if_stuck(self, request_id: str, export: _Export, tell: _Tell) -> None:
        """End a prompt that is computed, and of which no more comes to the host."""
        if request_id in self._exports and export.is_computed and not self.engine.scheduler.requests.loads.is_saving:
            export.num_waits += 1
            if export.num_waits > _PATIENCE:
                del self._exports[request_id]
                self._end(export, tell, ok=False)

    def _end(self, export: _Export, tell: _Tell, *, ok: bool) -> None:
        at_s = max(self._link_free_s, self.engine.now_s) + self._link.alpha_s
        seconds = at_s - max(export.began_s, self._last_end_s)
        self._last_end_s = at_s
        num_blocks = export.num_sent - export.prefill.first_block
        states = b"" if ok and self._state_bytes else None
        prefilled = PrefilledKV(num_blocks=num_blocks, at_s=at_s, states=states)
        tell(export.asker, at_s, Done(move_id=export.prefill.move_id, ok=ok, seconds=seconds, prefilled=prefilled))


class SimulatedPrefillEngines:
    """The prefill engines of a machine.

    Args:
        machine: That of the engines that ask.
        config: Settings of those.
        seed: Seed of the spread of their machines.
        num_askers: Number of engines that ask.

    Raises:
        ValueError: The settings do not fit a prefill engine's machine.
    """

    def __init__(self, machine: Machine, config: EngineConfig, *, seed: int, num_askers: int = 1) -> None:
        self._engines: list[_Engine] = []
        for number, node in enumerate(machine.prefill_engines, 1):
            own = node.machine
            settings = node.config or dataclasses.replace(
                config,
                parallel=ParallelConfig(pipeline_parallel_size=own.num_stages),
                prefill=PrefillConfig(is_prefill_engine=True),
                device_kv_bytes=own.device_kv_bytes or config.device_kv_bytes,
                host_kv_bytes=own.host_kv_bytes or config.host_kv_bytes,
            )
            if settings.block_size != config.block_size:
                raise ValueError(
                    f"a prefill engine has block_size={settings.block_size}, and the engine that asks it "
                    f"{config.block_size}: give both the same"
                )
            self._engines.append(_Engine(number, own, settings, node.link, seed + number))
        self.askers = [Asker(number, self._engines, self._tell) for number in range(num_askers)]
        """The prefill engines as each of the engines that ask sees them."""
        for asker, engine in itertools.product(self.askers, range(1, 1 + len(self._engines))):
            asker.tell(0.0, PrefillEngineJoined(engine))

    def _tell(self, asker: int, at_s: float, event: HostEvent) -> None:
        self.askers[asker].tell(at_s, event)


class Asker:
    """Prefill engines as one of the engines that ask sees them, as ``PrefillEngines`` is for the engine.

    If there are several that ask, ``poll`` and ``next_event_s`` are for the one whose clock is behind the others'.
    """

    def __init__(self, number: int, engines: Sequence[_Engine], tell: _Tell) -> None:
        self._number, self._engines, self._tell_any = number, engines, tell
        self._events: list[tuple[float, int, HostEvent]] = []
        self._order = itertools.count()

    def ask(self, prefill: RemotePrefill, at_s: float) -> None:
        """Ask an engine for a prompt."""
        self._engines[prefill.engine - 1].send(self._number, prefill, at_s)

    def cancel(self, cancel: CancelPrefill, at_s: float) -> None:
        """Stop a prefill whose request has ended; it has its event all the same."""
        for engine in self._engines:
            engine.send(self._number, cancel.move_id, at_s)

    def poll(self, now_s: float) -> list[HostEvent]:
        """Return what has come by now."""
        for engine in self._engines:
            while engine.next_s() < now_s:
                engine.turn(self._tell_any)
        events = []
        while self._events and self._events[0][0] <= now_s:
            events.append(heapq.heappop(self._events)[2])
        return events

    def next_event_s(self, now_s: float) -> float:
        """Return when something may come next, now that nothing more is asked for at this time; infinity: never."""
        for engine in self._engines:
            while engine.next_s() <= now_s:
                engine.turn(self._tell_any)
        return min([*(event[0] for event in self._events[:1]), *(engine.next_s() for engine in self._engines)])

    def tell(self, at_s: float, event: HostEvent) -> None:
        """Have an event come at a time."""
        heapq.heappush(self._events, (at_s, next(self._order), event))


def require_shared_kv(engine: SimulatedEngine, what: str) -> None:
    """See that an engine can give KV of prompts to others, or take it from them.

    Raises:
        ValueError: It cannot.
    """
    if engine.tier is None or engine.kv.prefixes is None or engine.kv.prefixes.host is None:
        raise ValueError(
            f"{what} needs a host tier and prefixes on it: give it hosts, and set kv to tiered, host_kv_bytes above 0, "
            "host_kv_dtype to auto and host_prefixes to True"
        )
