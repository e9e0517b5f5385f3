"""The API's side of an engine process: send requests, hand out what comes back, notice its death."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from omniserve.core.errors import EngineStopped
from omniserve.core.load import EngineLoad
from omniserve.core.logs import request_id as http_request_id
from omniserve.core.request import SLO, Request, RequestOutput
from omniserve.core.stats import EngineStats, FreedKV
from omniserve.server.engines import messages as engine_messages
from omniserve.server.engines.clock import Clock
from omniserve.server.engines.messages import EngineInfo
from omniserve.server.engines.peer import Connect, Peer
from omniserve.server.errors import ApiError, engine_gone


@dataclass(frozen=True, slots=True)
class Accepted:
    """The engine took a request."""

    predicted_ttft_s: float | None
    """The predicted TTFT in seconds from its arrival; None without prediction."""
    scaled_slo: SLO | None = None
    """The objectives that hold if admission has scaled those of the class; None: it has not."""


Event = tuple[str, Accepted | RequestOutput | int | Exception]
"""Request id and that it was accepted, an output, the token of one that is bare, or the error that ended it."""
Listener = Callable[[Event], object]
"""Takes the events of a request; must not wait. An ``asyncio.Queue``'s ``put_nowait`` is one."""


# How long a message that a dying engine sent may still be on its way.
_LAST_WORDS_S = 0.5
# While requests run the engine is asked so often how it is. It answers between two steps; none takes as long as this,
# not even one that compiles, and what hangs in a step has deadlines of a minute (``ops/streams.py``).
_ASK_EVERY_S = 30.0
_SILENCE_S = 600.0
# An engine on another machine has so long to say that it works for this server.
_GREETING_S = 10.0
# An engine that starts, and imports and loads what keeps its other threads waiting, has so many times as long.
_STARTING = 15
# It is looked for signs of life so often in the time that an engine may give none.
_LOOKS = 4
# Of requests that the engine has not taken out of its socket's queue yet; it does so between two steps.
_MAX_UNTAKEN_BYTES = 256 << 20
# What a message takes beside its bytes.
_BYTES_BESIDE = 1024


class EngineClient:
    """An engine process, and the requests that it has.

    Args:
        connect: Starts the process.
        on_load: Told the engine's load every few steps; None: it does not say, until ``hear_load``.
        heartbeat_s: Seconds without a sign of life after which an engine that is ready is taken for dead, and killed.
            One that starts has 15 times as long.
        relay: Given the engine's reports on requests, also as they came; None: they go to the requests' listeners.
    """

    def __init__(
        self,
        connect: Connect,
        *,
        on_load: Callable[[EngineLoad], None] | None = None,
        heartbeat_s: float = 20.0,
        relay: Callable[[engine_messages.Report, bytes], None] | None = None,
    ) -> None:
        self._connect, self._relay = connect, relay
        self._clock = Clock()
        self._look: Callable[[], None] = lambda: None
        """Handles what has come."""
        self._on_load = on_load
        self._heartbeat_s = heartbeat_s
        self._heard_s = 0.0
        self._listeners: dict[str, Listener] = {}
        self._stats: asyncio.Future[EngineStats] | None = None
        """Requests for stats that the engine has not answered yet."""
        self._lora_changes: dict[int, asyncio.Future[None]] = {}
        """Changes of LoRA adapters that the engine has not answered yet, by number."""
        self._num_lora_changes = 0
        self.refused_loras: set[str] = set()
        """LoRA adapters of other engines that this one refused when it was started again."""
        self._clearing: deque[asyncio.Future[FreedKV]] = deque()
        """Calls to clear the prefix cache that the engine has not answered yet, in its order."""
        self._untaken: dict[str, int] = {}
        """Bytes of the requests that the engine has not taken or refused yet, aborted ones included."""
        self._num_untaken_bytes = 0
        self._closing = False
        self._ready = False
        self._watching: list[asyncio.Task[None]] = []
        self._peer: Peer | None = None
        """The process; None before it was started, and after it has ended."""
        self.failure: str | None = None
        """The reason why the engine stopped; None while it is well."""
        self.stopped = asyncio.Event()

    async def start(self, on_progress: Callable[[str], None]) -> EngineInfo:
        """Start the process; return when the engine is ready.

        Raises:
            EngineStopped: The engine could not start; the message says why.
        """
        try:
            peer = self._peer = await self._connect()
        except (OSError, zmq.ZMQError, EngineStopped) as error:
            self.failure = str(error) if isinstance(error, EngineStopped) else f"its process could not start: {error}"
            self.stopped.set()
            raise EngineStopped(self.failure) from error
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[EngineInfo] = loop.create_future()
        self._look = functools.partial(self._read, peer, ready, on_progress)
        loop.add_reader(peer.reports_fd, self._look)
        loop.add_reader(peer.death_fd, self._on_death, peer)
        self._on_death(peer)  # the descriptor tells only of what comes after one has looked
        if peer.has_own_clock:
            self._send(engine_messages.Beat(time.monotonic()))
            self._greeting = loop.call_later(_GREETING_S, self._on_silence)
        self._watching.append(asyncio.create_task(self._feel_pulse(peer)))
        needed: list[asyncio.Future[Any]] = [ready]
        if peer.has_own_clock:  # without it the arrivals of requests could not be told
            needed.append(asyncio.create_task(self._clock.known.wait()))
        stopped = asyncio.create_task(self.stopped.wait())
        try:
            while not stopped.done() and (missing := [future for future in needed if not future.done()]):
                await asyncio.wait((*missing, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not all(future.done() for future in needed):
                raise EngineStopped(self.failure or "the engine process ended")
        finally:
            for future in (*needed, stopped):
                future.cancel()
        self._ready = True
        if self._on_load is not None:
            self._send(engine_messages.TellLoad())
        self._watching.append(asyncio.create_task(self._ask_how_it_is()))
        return ready.result()

    @property
    def num_requests(self) -> int:
        """Requests that the engine has."""
        return len(self._listeners)

    def hear_load(self, on_load: Callable[[EngineLoad], None]) -> None:
        """Have an engine tell its load from now on, or from when it is ready on."""
        self._on_load = on_load
        if self._ready and not self.stopped.is_set():
            self._send(engine_messages.TellLoad())

    def forward(self, data: bytes) -> None:
        """Send a command that is encoded already, if the engine is there."""
        if self._peer is not None and not self.stopped.is_set():
            self._send_bytes(data)

    def end_requests(self, error: EngineStopped) -> None:
        """End all requests with an error, as at the engine's death, but it goes on."""
        while self._listeners:  # one that hears of it may abort others
            request_id, listener = self._listeners.popitem()
            if not self.stopped.is_set():
                self._send(engine_messages.Abort(request_id))
            listener((request_id, error))

    def submit(self, request: Request, arrival_s: float, listener: Listener) -> None:
        """Send a request; its events go to ``listener``: that it was accepted, then outputs, or one exception.

        Args:
            request: A request with an id.
            arrival_s: Its arrival by ``time.monotonic``, which is one clock for all processes of a machine.

        Raises:
            EngineStopped: The engine is gone.
        """
        if self.stopped.is_set():
            raise EngineStopped(self.failure or "the engine has stopped")
        assert request.request_id is not None
        self._listeners[request.request_id] = listener
        add = engine_messages.Add(request, self._clock.there(arrival_s), http_request_id.get())
        num_bytes = self._send(add) + _BYTES_BESIDE
        self._untaken[request.request_id] = num_bytes
        self._num_untaken_bytes += num_bytes

    def check_room(self) -> None:
        """Raise ApiError if more waits for the engine than may: its socket's queue has no limit of its own.

        In the other direction none is needed: nothing comes but answers to what was sent.
        """
        if self._num_untaken_bytes > _MAX_UNTAKEN_BYTES:
            raise ApiError(
                "the engine is in a long step, and too much waits for its end; send the request again later",
                status=503,
                code="overloaded",
                retry_after_s=1,
            )

    def abort(self, request_id: str) -> None:
        """End a request; nothing more is heard of it. Unknown and finished ones are ignored."""
        if self._listeners.pop(request_id, None) is not None and not self.stopped.is_set():
            self._send(engine_messages.Abort(request_id))

    async def change_lora(self, name: str, folder: str | None) -> None:
        """Have the engine load a LoRA adapter from a folder, or unload it if that is None.

        Raises:
            ApiError: The engine refuses, or is gone.
        """
        if self.stopped.is_set():
            raise engine_gone(self.failure or "the engine has stopped", None)
        number = self._num_lora_changes = self._num_lora_changes + 1
        done = self._lora_changes[number] = asyncio.get_running_loop().create_future()
        self._send(engine_messages.ChangeLoRA(number, name, folder))
        await asyncio.shield(done)
        self.refused_loras.discard(name)

    async def clear_cache(self, sessions: list[str] | None) -> FreedKV:
        """Have the engine free its prefix cache, or what only these sessions use; return what was freed.

        Raises:
            ApiError: The engine is gone.
        """
        if self.stopped.is_set():
            raise engine_gone(self.failure or "the engine has stopped", None)
        freed: asyncio.Future[FreedKV] = asyncio.get_running_loop().create_future()
        self._clearing.append(freed)
        self._send(engine_messages.ClearCache(sessions))
        return await asyncio.shield(freed)

    async def stats(self, timeout_s: float = 5.0) -> EngineStats:
        """Ask the engine for its statistics; it answers between two steps, and one answer goes to all callers.

        Raises:
            EngineStopped: The engine is gone.
            TimeoutError: No answer in time.
        """
        if self.stopped.is_set():
            raise EngineStopped(self.failure or "the engine has stopped")
        if self._stats is None:  # in a long step another question would only make the queue longer
            self._stats = asyncio.get_running_loop().create_future()
            self._send(engine_messages.AskStats())
        # Not wait_for, which before Python 3.12 forgets that it was cancelled if the answer comes at the same time.
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(self._stats)

    async def close(self) -> None:
        """End the process; requests that still run get EngineStopped."""
        self._closing = True
        peer = self._peer
        if peer is None:
            return
        await peer.end(is_ready=self._ready, has_stopped=self.stopped.is_set())
        if not self.stopped.is_set():
            await self._die(peer, "the server closed the engine")
        for task in self._watching:
            task.cancel()
        loop = asyncio.get_running_loop()
        loop.remove_reader(peer.death_fd)
        loop.remove_reader(peer.reports_fd)
        peer.close()
        self._peer = None

    def kill(self) -> None:
        """End the process at once."""
        if self._peer is not None:
            self._peer.kill()

    @property
    def _patience_s(self) -> float:
        return self._heartbeat_s if self._ready else self._heartbeat_s * _STARTING

    async def _feel_pulse(self, peer: Peer) -> None:
        """Give up an engine that gives no sign of life: its requests are tried elsewhere, or told."""
        every_s = self._heartbeat_s / _LOOKS
        looked_s = self._heard_s = time.monotonic()
        while not self.stopped.is_set():
            if peer.has_own_clock:
                self._send(engine_messages.Beat(time.monotonic()))
            await asyncio.sleep(every_s)
            self._look()  # what has come counts, and this process may be late to read it
            now_s = time.monotonic()
            self._heard_s += max(0.0, now_s - looked_s - every_s)  # for so long this process stood still itself
            if now_s - self._heard_s > (patience_s := self._patience_s) and not self.stopped.is_set():
                silence = f"it gave no sign of life for {patience_s:g} s"
                self._fail(silence if peer.has_own_clock else f"{silence}, and was killed")
                if not peer.has_own_clock:  # else the other machine has to judge its process
                    self.kill()
            looked_s = now_s

    async def _ask_how_it_is(self) -> None:
        """Ask the engine for a sign of life, and kill one that hangs: its requests would wait for ever."""
        while True:
            await asyncio.sleep(_ASK_EVERY_S)
            if not self._listeners:
                continue
            try:
                await self.stats(_SILENCE_S)
            except EngineStopped:
                return
            except TimeoutError:
                self._fail(f"its process hung: it did not answer for {_SILENCE_S:g} s, and was killed")
                self.kill()
                return

    def _send(self, message: engine_messages.FrontMessage) -> int:
        """Send a message; return its number of bytes."""
        data = engine_messages.encode(message)
        self._send_bytes(data)
        return len(data)

    def _send_bytes(self, data: bytes) -> None:
        assert self._peer is not None
        # Nothing bounds the queue, so this fails only if the other end of the connection is gone: a process closes it
        # before it is known to have ended. All requests are told then, by _on_death, or for want of signs of life.
        with contextlib.suppress(zmq.Again):
            self._peer.send(data)
        if self._peer.has_own_clock:
            # One socket for both ways: a send may take the descriptor's news of what has come meanwhile.
            asyncio.get_running_loop().call_soon(self._look)

    def _taken(self, request_id: str) -> None:
        self._num_untaken_bytes -= self._untaken.pop(request_id)

    def _read(self, peer: Peer, ready: asyncio.Future[EngineInfo], on_progress: Callable[[str], None]) -> None:
        """Handle every message that is there: the descriptor tells of new ones only once all were taken."""
        has_come = False
        while True:
            try:
                data = peer.receive()
            except zmq.Again:
                break
            has_come = True
            if self.stopped.is_set():
                continue  # its requests have ended, and the callers know
            report = engine_messages.decode_report(data)
            if self._relay is not None and isinstance(report, engine_messages.OfRequests):
                self._relay(report, data)
                continue
            match report:
                case engine_messages.Step(accepted, outputs):
                    if peer.has_own_clock:
                        outputs = [each if isinstance(each, tuple) else self._clock.here(each) for each in outputs]
                    for request_id, predicted_ttft_s, scaled_slo in accepted:
                        self._taken(request_id)
                        self._deliver(request_id, Accepted(predicted_ttft_s, scaled_slo))
                    for output in outputs:
                        if not isinstance(output, tuple):
                            self._deliver(output.request_id, output)
                        elif (listener := self._listeners.get(output[0])) is not None:
                            listener(output)
                case engine_messages.Load(load):
                    assert self._on_load is not None
                    self._on_load(load)
                case engine_messages.Refused(request_id):
                    self._taken(request_id)
                    self._deliver(request_id, report.error)
                case engine_messages.LoRAChanged(number, error):
                    done = self._lora_changes.pop(number)
                    if error is None:
                        done.set_result(None)
                    else:
                        done.set_exception(ApiError(error))
                        done.exception()  # the caller may have given up
                case engine_messages.CacheCleared(freed):
                    self._clearing.popleft().set_result(freed)
                case engine_messages.Stats(stats):
                    assert self._stats is not None
                    self._stats.set_result(stats)
                    self._stats = None
                case engine_messages.Progress(text):
                    on_progress(text)
                case EngineInfo():
                    ready.set_result(report)
                case engine_messages.Pulse(sent_s, clock_s):
                    self._clock.note(sent_s, clock_s, time.monotonic())
                case engine_messages.Failed(reason):
                    self._fail(reason)
        if has_come:
            self._heard_s = time.monotonic()

    def _deliver(self, request_id: str, item: Accepted | RequestOutput | Exception) -> None:
        listener = self._listeners.get(request_id)
        if listener is None:
            return  # aborted meanwhile
        if isinstance(item, Exception) or (isinstance(item, RequestOutput) and item.finished):
            del self._listeners[request_id]
        listener((request_id, item))

    def _on_silence(self) -> None:
        if not self._ready and not self.stopped.is_set():
            self._fail(f"it did not answer within {_GREETING_S:g} s")

    def _on_death(self, peer: Peer) -> None:
        if peer.is_alive:
            return  # the descriptor told of something else
        loop = asyncio.get_running_loop()
        loop.remove_reader(peer.death_fd)
        if not self._closing:
            self._death = loop.create_task(self._die(peer, "", _LAST_WORDS_S))

    async def _die(self, peer: Peer, reason: str, patience_s: float = 0.0) -> None:
        """Give a last report of the engine a moment to arrive; without one, fail all requests."""
        try:
            await asyncio.wait_for(self.stopped.wait(), patience_s)
        except TimeoutError:
            self._fail(reason or peer.end_of())

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self.stopped.set()
        self.end_requests(EngineStopped(reason))
        unanswered: list[asyncio.Future[Any]] = [*self._lora_changes.values(), *self._clearing]
        for done in unanswered:
            done.set_exception(engine_gone(reason, None))
            done.exception()
        self._lora_changes.clear()
        self._clearing.clear()
        if self._stats is not None:
            self._stats.set_exception(EngineStopped(reason))
            self._stats.exception()  # the caller may have given up
            self._stats = None
