"""An engine process of this machine, as the API process reaches it: it starts the process, and can kill it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile

import zmq

from omniserve.server.engines import messages as engine_messages
from omniserve.server.engines.peer import Connect, Peer
from omniserve.server.engines.process import EngineMaker, run_engine_process
from omniserve.server.process_settings import engine_context, set_engine_environment

logger = logging.getLogger(__name__)

# An engine that closes may write prefixes to disk for ten seconds.
_CLOSE_S = 15.0
# How long a killed process may take to end: with gigabytes to give back, seconds. One in a driver's call may never.
_KILL_S = 30.0


class LocalPeer:
    """A process that runs an engine, and the sockets to it; see ``Peer``.

    Raises:
        OSError, zmq.ZMQError: It cannot be started.
    """

    has_own_clock = False

    def __init__(self, make_engine: EngineMaker, log_level: str, log_format: str) -> None:
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
                args=(make_engine, f"ipc://{directory}/commands", f"ipc://{directory}/outputs", log_level, log_format),
                name="omniserve-engine",
                daemon=True,
            )
            set_engine_environment()
            self._process.start()
            self._made = made.pop_all()
        # Not zmq.asyncio, whose futures cost more than all the rest of a token's way through this process.
        self.reports_fd = int(self._outputs.getsockopt(zmq.FD))
        self.death_fd: int = self._process.sentinel

    def receive(self) -> bytes:
        return self._outputs.recv(zmq.NOBLOCK)

    def send(self, data: bytes) -> None:
        self._commands.send(data, zmq.NOBLOCK)

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def end_of(self) -> str:
        return f"the engine process died (exit code {self._process.exitcode})"

    def kill(self) -> None:
        self._process.kill()

    async def end(self, *, is_ready: bool, has_stopped: bool) -> None:
        if not is_ready:
            self._process.kill()  # it loads a model and hears nothing
        elif self._process.is_alive() and not has_stopped:
            self.send(engine_messages.encode(engine_messages.Close()))
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

    def close(self) -> None:
        self._made.close()


def starter(make_engine: EngineMaker, log_level: str = "warning", log_format: str = "text") -> Connect:
    """Return what starts engine processes on this machine.

    Args:
        make_engine: Makes the engine in its process.
        log_level, log_format: Of that process.
    """

    async def start() -> Peer:
        return LocalPeer(make_engine, log_level, log_format)

    return start
