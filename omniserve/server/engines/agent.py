"""EngineServer: an engine of this machine for a server on another one.

This process starts the engine's, watches it and starts it again, as a server does with its own (``supervisor.py``), and
passes messages on between it and one server at a time. Messages are MessagePack; nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from omniserve.core.errors import EngineStopped
from omniserve.core.version import __version__
from omniserve.server.engines import messages as engine_messages
from omniserve.server.engines.client import EngineClient
from omniserve.server.engines.curve import CurveKeys
from omniserve.server.engines.local import starter
from omniserve.server.engines.process import EngineMaker
from omniserve.server.engines.supervisor import EngineSupervisor

logger = logging.getLogger("omniserve.engine")

_LINGER_MS = 500


class _OneKey:
    """Lets in the holder of one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


class EngineServer:
    """An engine for servers on other machines: one server uses it at a time, and the next one when that has gone.

    Args:
        make_engine: Makes the engine in its process.
        address: ``tcp://HOST:PORT``; for ``*`` a free port is taken.
        keys: Of this end; None: nothing is encrypted.
        heartbeat_s: Seconds without a word after which a server, or the engine's process, is taken for dead.
        max_restarts, log_level, log_format: As ``EngineSupervisor`` and ``starter`` take them.

    Raises:
        zmq.ZMQError: The address cannot be used.
    """

    def __init__(
        self,
        make_engine: EngineMaker,
        address: str,
        keys: CurveKeys | None,
        *,
        heartbeat_s: float = 20.0,
        max_restarts: int = 3,
        log_level: str = "info",
        log_format: str = "text",
    ) -> None:
        self._heartbeat_s = heartbeat_s
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        if keys is not None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(credentials_provider=_OneKey(keys.other))
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.LINGER, _LINGER_MS),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.IPV6, int("[" in address)),
        ):
            self._socket.setsockopt(option, value)
        if keys is not None:
            keys.put_on(self._socket, listens=True)
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self._close_sockets()
            raise
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """The address that it listens at."""
        start = starter(make_engine, log_level, log_format)
        self._supervisor = EngineSupervisor(
            lambda: EngineClient(start, heartbeat_s=heartbeat_s, relay=self._pass_on),
            max_restarts=max_restarts,
            on_progress=lambda text: logger.info("engine: %s", text),
            on_death=self._tell_of_death,
        )
        self._front: bytes | None = None
        """The connection of the server that has the engine; None: none has."""
        self._front_id = ""
        self._heard_s = 0.0
        self._is_resetting = False
        """The engine's reports are of requests of a server that is gone."""
        self._next: tuple[bytes, engine_messages.Hello] | None = None
        """A server that gets the engine when that was reset."""
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Serve until ``stop``, or until the engine has died too often; return the exit status."""
        loop = asyncio.get_running_loop()
        descriptor = int(self._socket.getsockopt(zmq.FD))
        loop.add_reader(descriptor, self._read)
        self._read()
        looking = asyncio.create_task(self._look_after_front())
        ends = [asyncio.create_task(self._stop.wait()), asyncio.create_task(self._supervisor.stopped.wait())]
        try:
            starting = asyncio.create_task(self._supervisor.start())
            await asyncio.wait([starting, *ends], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                return 0
            try:
                starting.result()
            except EngineStopped as error:
                logger.error("cannot start: %s", error)
                return 1
            logger.info("listens at %s", self.address)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._front is not None:
                self._send(self._front, engine_messages.Failed("it was ended on its machine"))
            return int(self._supervisor.stopped.is_set())
        finally:
            for task in (looking, *ends):
                task.cancel()
            loop.remove_reader(descriptor)
            self._supervisor.keep_down()
            await self._supervisor.close()
            self._close_sockets()

    def stop(self) -> None:
        """End the engine and ``run``."""
        self._stop.set()

    def _close_sockets(self) -> None:
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=_LINGER_MS)

    def _read(self) -> None:
        """Handle every message that is there: the descriptor tells of new ones only once all were taken."""
        while True:
            try:
                front, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                logger.warning("a message of another program was dropped")
                continue
            try:
                message = engine_messages.decode_front(data)
            except msgspec.MsgspecError as error:
                logger.warning("a message was dropped: %s", error)
                continue
            if front == self._front:
                self._heard_s = time.monotonic()
            match message:
                case engine_messages.Hello():
                    self._greet(front, message)
                case _ if front != self._front and (self._next is None or front != self._next[0]):
                    self._send(
                        front,
                        engine_messages.Failed(
                            "it had given up this connection, on which it heard nothing for too long"
                        ),
                    )
                case engine_messages.Beat(sent_s):
                    self._send(front, engine_messages.Pulse(sent_s, time.monotonic()))
                case engine_messages.Leave():
                    logger.info("the server has let go of the engine")
                    self._reset()
                case engine_messages.Kill():
                    self._supervisor.client.kill()
                case _:
                    self._supervisor.client.forward(data)

    def _greet(self, front: bytes, hello: engine_messages.Hello) -> None:
        client = self._supervisor.client
        if hello.version != __version__:
            text = f"it is OmniServe {__version__}, and this server {hello.version}: install the same on both"
            self._send(front, engine_messages.Failed(text))
        elif not self._supervisor.ready.is_set() or client.failure is not None:
            reason = client.failure or "it is being started"
            self._send(front, engine_messages.Failed(f"its engine is not ready: {reason}"))
        elif self._front is not None and hello.server_id != self._front_id:
            self._send(front, engine_messages.Failed("it works for another server, and joins this one when that ends"))
        elif self._front is not None or self._is_resetting:
            self._next = front, hello
            if not self._is_resetting:
                self._reset()
        else:
            assert self._supervisor.info is not None
            self._front, self._front_id, self._heard_s = front, hello.server_id, time.monotonic()
            self._send(front, self._supervisor.info)
            logger.info("a server uses the engine")

    def _reset(self) -> None:
        """End the session, and all requests."""
        self._front = None
        if self._supervisor.client.failure is None:
            self._is_resetting = True
            self._supervisor.client.forward(engine_messages.encode(engine_messages.Reset()))

    def _pass_on(self, report: engine_messages.Report, data: bytes) -> None:
        """Pass on a report of the engine."""
        if isinstance(report, engine_messages.WasReset):
            self._is_resetting = False
            if self._next is not None:
                following, self._next = self._next, None
                self._greet(*following)
        elif self._front is not None:
            self._send_bytes(self._front, data)

    def _tell_of_death(self) -> None:
        told = [each for each in (self._front, self._next and self._next[0]) if each is not None]
        self._is_resetting, self._next, self._front = False, None, None
        for front in told:
            self._send(front, engine_messages.Failed(self._supervisor.client.failure or "the engine has stopped"))

    async def _look_after_front(self) -> None:
        """End the session of a server that is not heard of any more."""
        every_s = self._heartbeat_s / 4
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(every_s)
            self._read()
            now_s = time.monotonic()
            self._heard_s += max(0.0, now_s - looked_s - every_s)  # for so long this process stood still itself
            if self._front is not None and now_s - self._heard_s > self._heartbeat_s:
                logger.warning("the server gave no sign of life for %g s: its requests are ended", self._heartbeat_s)
                self._reset()
            looked_s = now_s

    def _send(self, front: bytes, message: msgspec.Struct) -> None:
        self._send_bytes(front, engine_messages.encode(message))

    def _send_bytes(self, front: bytes, data: bytes) -> None:
        try:
            self._socket.send_multipart([front, data], zmq.NOBLOCK)
        except zmq.ZMQError:  # its connection is gone
            if front == self._front:
                logger.warning("the connection of the server is gone: its requests are ended")
                self._reset()
        # A send may take the descriptor's news of what has come meanwhile.
        asyncio.get_running_loop().call_soon(self._read)
