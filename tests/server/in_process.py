"""Servers in the test's own process: real sockets, the real link to the engine, whose loop runs in a thread.

Signals, deaths and what belongs to a whole process (its log's format, its garbage) need a process: ``start_process``.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import fake_engine
from running import START_TIMEOUT_S, Server

from omniserve.server import http_process, serve
from omniserve.server.batches.database import Database
from omniserve.server.batches.store import Store
from omniserve.server.connections import Connections, allow_connections
from omniserve.server.engines import local
from omniserve.server.engines import process as engine_process
from omniserve.server.engines.process import EngineMaker
from omniserve.server.options import ServerOptions

_here: contextvars.ContextVar[InProcessServer | None] = contextvars.ContextVar("in_process_server", default=None)
"""The in-process server that the running code belongs to."""
_running: set[InProcessServer] = set()
"""Those that may have started threads which say nothing of whose they are."""


class InProcessServer(Server):
    """A server in a thread, and its engine in another one; ready when it is made, or ended."""

    def __init__(self, options: ServerOptions, make_engine: EngineMaker, **environment: str) -> None:
        super().__init__()
        self._listening = threading.Event()
        self._status: int | None = None
        self._loop = _Loop()
        with mock.patch.dict(os.environ, environment):
            connections = Connections(allow_connections(options.limits.max_connections), options.limits.stall_timeout_s)
            self._main = serve._Main(options, make_engine, connections)
            context = contextvars.copy_context()
            context.run(_here.set, self)
            self._thread = threading.Thread(target=context.run, args=(self._run,), name="server", daemon=True)
            self._thread.start()
            assert self._listening.wait(START_TIMEOUT_S), self.log

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                _running.add(self)
                self._status = runner.run(self._main.run())
        finally:
            _running.discard(self)
            self._listening.set()

    def note(self, line: str) -> None:
        """Keep a line of the log."""
        self.log.append(line)
        if match := re.search(r"on (https?://\S+)/v1", line):
            self.url = match[1]
            self._listening.set()

    def wait_until_ready(self) -> InProcessServer:
        assert hasattr(self, "url"), f"the server ended: {''.join(self.log)}"
        return self

    def send_signal(self, number: int) -> None:
        self._loop.handlers[number]()

    def skip(self, seconds: float) -> None:
        """Have so much time pass at once for what the server's event loop does later."""
        self._loop.call_soon_threadsafe(self._loop.skip, seconds)

    @property
    def batches_database(self) -> Database:
        """The database of this server's batches."""
        store = self._main._batches._store
        assert isinstance(store, Store)
        return store.database

    def wait(self) -> int:
        self._thread.join(START_TIMEOUT_S)
        assert not self._thread.is_alive(), f"the server did not end:\n{''.join(self.log)}"
        assert self._status is not None, "it failed in its thread"
        return self._status

    def close(self) -> None:
        """End the server without waiting for requests."""
        if self._thread.is_alive():
            options = self._main._options
            limits = dataclasses.replace(options.limits, shutdown_timeout_s=0.0)
            self._main._options = dataclasses.replace(options, limits=limits)
            self.stop()


class _Loop(asyncio.SelectorEventLoop):
    """Keeps the handlers of signals, which only the main thread of a process could set."""

    def __init__(self) -> None:
        super().__init__()
        self.handlers: dict[int, Callable[[], object]] = {}
        self._skipped_s = 0.0

    def add_signal_handler(self, number: int, callback: Callable[..., object], *args: object) -> None:
        self.handlers[number] = lambda: self.call_soon_threadsafe(callback, *args)

    def time(self) -> float:
        return super().time() + self._skipped_s

    def skip(self, seconds: float) -> None:
        self._skipped_s += seconds


class _Thread:
    """The engine's thread, with what ``LocalPeer`` uses of a process."""

    pid = None

    def __init__(self, *, target: Any, args: tuple[Any, ...], **_: Any) -> None:
        assert target is engine_process.run_engine_process
        self.exitcode: int | None = None
        self.sentinel, self._alive = os.pipe()
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(self._run, *args), daemon=True)
        self.start, self.join, self.is_alive = self._thread.start, self._thread.join, self._thread.is_alive

    def _run(self, make_engine: Any, command_address: str, output_address: str, _: str, __: str) -> None:
        try:
            self.exitcode = engine_process._run(make_engine, command_address, output_address, {})
        except _Died as death:
            (self.exitcode,) = death.args
        finally:
            os.close(self._alive)

    def kill(self) -> None:
        self.join(10.0)  # one that could not start is about to end
        assert not self.is_alive(), "only a process can be killed: start_process"

    def __del__(self) -> None:
        os.close(self.sentinel)


class _Died(BaseException):
    """Ends an engine's thread without a word, as ``os._exit`` ends its process."""


def _die(status: int) -> None:
    raise _Died(status)


class _Threads:
    Process = _Thread


class _NoCollector:
    """Leaves the garbage of the tests' process to Python."""

    def collect(self, *, is_idle: bool) -> bool:
        return False


class _Log(logging.Handler):
    """Gives each in-process server the lines that it would have written."""

    def emit(self, record: logging.LogRecord) -> None:
        server = _here.get()
        of_some_thread = server is None and threading.current_thread() is not threading.main_thread()
        for one in tuple(_running) if of_some_thread else {server} - {None}:
            one.note(self.format(record) + "\n")


def _in_processes_only(module: Any, name: str, instead: Callable[..., Any]) -> None:
    """Replace a function of a module for the servers here."""
    real = getattr(module, name)
    setattr(module, name, lambda *args, **fields: (real if _here.get() is None else instead)(*args, **fields))


_in_processes_only(fake_engine, "die", _die)
_in_processes_only(local, "engine_context", _Threads)
_in_processes_only(local, "set_engine_environment", lambda: None)
_in_processes_only(engine_process, "GarbageCollector", _NoCollector)
_in_processes_only(http_process, "GarbageCollector", _NoCollector)


@contextlib.contextmanager
def threads_for_engines() -> Iterator[None]:
    """Have engines run in threads, as those of the servers here, whoever starts them meanwhile."""
    nobody = mock.create_autospec(InProcessServer, instance=True)
    token = _here.set(nobody)
    try:
        yield
    finally:
        _here.reset(token)


@contextlib.contextmanager
def logs_of_servers() -> Iterator[None]:
    """Take down, for the servers here, what they log at level info or above."""
    handler = _Log()
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger("omniserve.server").setLevel(logging.INFO)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        logging.getLogger("omniserve.server").setLevel(logging.NOTSET)
