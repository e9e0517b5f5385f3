"""The API's side of the engine process: start it, send requests, hand out what comes back, notice its death."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
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
from omniserve.server.engines.messages import EngineInfo
from omniserve.server.engines.process import EngineMaker, run_engine_process
from omniserve.server.errors import ApiError, engine_gone
from omniserve.server.process_settings import engine_context, set_engine_environment

logger = logging.getLogger(__name__)


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
# An engine that closes may write prefixes to disk for ten seconds.
_CLOSE_S = 15.0
# How long a killed process may take to end: with gigabytes to give back, seconds. One in a driver's call may never.
_KILL_S = 30.0
# While requests run the engine is asked so often how it is. It answers between two steps; none takes as long as this,
# not even one that compiles, and what hangs in a step has deadlines of a minute (``ops/streams.py``).
_ASK_EVERY_S = 30.0
_SILENCE_S = 600.0
# Of requests that the engine has not taken out of its socket's queue yet; it does so between two steps.
_MAX_UNTAKEN_BYTES = 256 << 20
# What a message takes beside its bytes.
_BYTES_BESIDE = 1024


class EngineClient:
    """An engine process, and the requests that it has.

    Args:
        make_engine: Makes the engine in its process.
        log_level, log_format: Of that process.
        on_load: Told the engine's load every few steps; None: it does not say.
    """

    def __init__(
        self,
        make_engine: EngineMaker,
        *,
        log_level: str = "warning",
        log_format: str = "text",
        on_load: Callable[[EngineLoad], None] | None = None,
    ) -> None:
        self._make_engine = make_engine
        self._on_load = on_load
        self._log_level = log_level
        self._log_format = log_format
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
        self._asking: asyncio.Task[None] | None = None
        self._launched: contextlib.ExitStack | None = None
        """Closes what belongs to the process when it has ended; None without a process."""
        self.failure: str | None = None
        """The reason why the engine stopped; None while it is well."""
        self.stopped = asyncio.Event()

    async def start(self, on_progress: Callable[[str], None]) -> EngineInfo:
        """Start the process; return when the engine is ready.

        Raises:
            EngineStopped: The engine could not start; the message says why.
        """
        try:
            self._launch()
        except (OSError, zmq.ZMQError) as error:
            self.failure = f"its process could not be started: {error}"
            self.stopped.set()
            raise EngineStopped(self.failure) from error
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[EngineInfo] = loop.create_future()
        # Not zmq.asyncio, whose futures cost more than all the rest of a token's way through this process.
        self._outputs_fd = int(self._outputs.getsockopt(zmq.FD))
        loop.add_reader(self._outputs_fd, self._read, ready, on_progress)
        loop.add_reader(self._process.sentinel, self._on_death)
        stopped = asyncio.create_task(self.stopped.wait())
        both: set[asyncio.Future[Any]] = {ready, stopped}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not ready.done():
            raise EngineStopped(self.failure or "the engine process ended")
        self._ready = True
        self._asking = asyncio.create_task(self._ask_how_it_is())
        return ready.result()

    def _launch(self) -> None:
        with contextlib.ExitStack() as made:
            directory = made.enter_context(tempfile.TemporaryDirectory(prefix="omniserve-"))
            context = zmq.Context()
            made.callback(context.destroy, linger=0)
            self._outputs = context.socket(zmq.PULL)
            self._outputs.setsockopt(zmq.RCVHWM, 0)
            self._outputs.bind(f"ipc://{directory}/outputs")
            self._commands = context.socket(zmq.PUSH)
            self._commands.setsockopt(zmq.SNDHWM, 0)
            self._commands.bind(f"ipc://{directory}/commands")
            self._process = engine_context().Process(
                target=run_engine_process,
                args=(
                    self._make_engine,
                    f"ipc://{directory}/commands",
                    f"ipc://{directory}/outputs",
                    self._log_level,
                    self._log_format,
                    self._on_load is not None,
                ),
                name="omniserve-engine",
                daemon=True,
            )
            set_engine_environment()
            self._process.start()
            self._launched = made.pop_all()

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
        num_bytes = self._send(engine_messages.Add(request, arrival_s, http_request_id.get())) + _BYTES_BESIDE
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
        if self._launched is None:
            return
        if not self._ready:
            self._process.kill()  # it loads a model and hears nothing
        elif self._process.is_alive() and not self.stopped.is_set():
            self._send(engine_messages.Close())
        await asyncio.to_thread(self._process.join, _CLOSE_S)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join, _KILL_S)
            if self._process.is_alive():
                logger.error(
                    "the engine process %s did not end within %g s after it was killed: it hangs in a call of the "
                    "kernel, as a rule of the GPU's driver, and keeps its memory",
                    self._process.pid,
                    _KILL_S,
                )
        if not self.stopped.is_set():
            await self._die("the server closed the engine")
        if self._asking is not None:
            self._asking.cancel()
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._process.sentinel)
        loop.remove_reader(self._outputs_fd)
        self._launched.close()
        self._launched = None

    def kill(self) -> None:
        """End the process at once."""
        if self._launched is not None:
            self._process.kill()

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
            except zmq.Again:  # it took the question out of no queue: asked again later
                continue
            except TimeoutError:
                self._fail(f"its process hung: it did not answer for {_SILENCE_S:g} s, and was killed")
                self.kill()
                return

    def _send(self, message: engine_messages.Command) -> int:
        """Send a message; return its number of bytes."""
        data = engine_messages.encode(message)
        try:
            self._commands.send(data, zmq.NOBLOCK)
        except zmq.Again:
            # The process is dead or dying, and _on_death is about to tell all requests.
            if self._process.is_alive():
                raise
        return len(data)

    def _taken(self, request_id: str) -> None:
        self._num_untaken_bytes -= self._untaken.pop(request_id)

    def _read(self, ready: asyncio.Future[EngineInfo], on_progress: Callable[[str], None]) -> None:
        """Handle every message that is there: the descriptor tells of new ones only once all were taken."""
        while True:
            try:
                report = engine_messages.decode_report(self._outputs.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            match report:
                case engine_messages.Step(accepted, outputs):
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
                case engine_messages.Failed(reason):
                    self._fail(reason)

    def _deliver(self, request_id: str, item: Accepted | RequestOutput | Exception) -> None:
        listener = self._listeners.get(request_id)
        if listener is None:
            return  # aborted meanwhile
        if isinstance(item, Exception) or (isinstance(item, RequestOutput) and item.finished):
            del self._listeners[request_id]
        listener((request_id, item))

    def _on_death(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._process.sentinel)
        if not self._closing:
            self._death = loop.create_task(self._die("", _LAST_WORDS_S))

    async def _die(self, reason: str, patience_s: float = 0.0) -> None:
        """Give a last report of the engine a moment to arrive; without one, fail all requests."""
        try:
            await asyncio.wait_for(self.stopped.wait(), patience_s)
        except TimeoutError:
            code = self._process.exitcode
            self._fail(reason or f"the engine process died (exit code {code})")

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self.stopped.set()
        while self._listeners:  # one that hears of it may abort others
            request_id, listener = self._listeners.popitem()
            listener((request_id, EngineStopped(reason)))
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
