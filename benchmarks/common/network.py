"""CPU hosts and prefill engines in processes of their own, and links to them that are as slow as a network."""

from __future__ import annotations

import contextlib
import multiprocessing
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.common.sources import starts
from omniserve import PrefillConfig
from omniserve.launch.dataclass_flags import flag_of

Address = tuple[str, int]
_CHUNK = 1 << 15
_SO_MAX_PACING_RATE = 47  # of Linux; the socket module has no name for it
_SHORTEST_SLEEP_S = 100e-6  # shorter sleeps take longer than they should
_OVERSLEPT_S = 200e-6  # what a sleep may take too long, so that a full link is not slower than it should be


@contextlib.contextmanager
def secret_file() -> Iterator[Path]:
    """Give a file with a new secret."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "secret"
        path.write_text(secrets.token_hex(32))
        yield path


@contextlib.contextmanager
def prefill_engine(model: Path, **settings: Any) -> Iterator[PrefillConfig]:
    """Run ``python -m omniserve.prefill`` with these values of its flags; yield how an engine reaches it."""
    options = [text for name, value in settings.items() for text in (flag_of(name), str(value))]
    with secret_file() as secret, listening("omniserve.prefill", secret, "--model", str(model), *options) as address:
        yield PrefillConfig(prefill_engines=("{}:{}".format(*address),), prefill_secret_file=str(secret))


@contextlib.contextmanager
def cpu_host(secret: Path, *, threads: int, kv_gib: float) -> Iterator[Address]:
    """Run ``python -m omniserve.host`` on the loopback interface; yield its address.

    Args:
        secret: The file that the engine's ``cpu_host_secret_file`` names.
        threads: That attend.
        kv_gib: Memory for KV.
    """
    with listening("omniserve.host", secret, "--threads", str(threads), "--kv-gib", str(kv_gib)) as address:
        yield address


@contextlib.contextmanager
def paced_cpu_host(secret: Path, *, threads: int, kv_gib: float, bits_per_s: float) -> Iterator[Address]:
    """Run a ``cpu_host`` whose connections the kernel lets send ``bits_per_s`` at most, in either direction.

    No program stands in between, unlike with ``slow_link``, but there is no delay.
    """
    bytes_per_s = int(bits_per_s / 8)
    start = f"from benchmarks.common import network; network.pace_accepted({bytes_per_s}); "
    start += "import runpy; runpy.run_module('omniserve.host', run_name='__main__', alter_sys=True)"
    options = ("--threads", str(threads), "--kv-gib", str(kv_gib))
    with listening("omniserve.host", secret, *options, run=("-c", start)) as address, pacing(address, bytes_per_s):
        yield address


def pace_accepted(bytes_per_s: int) -> None:
    """Bound what each connection sends that this process accepts from now on."""
    create_server = socket.create_server  # the connections that a listener accepts inherit what it is set to
    socket.create_server = lambda *args, **settings: _paced(create_server(*args, **settings), bytes_per_s)


@contextlib.contextmanager
def pacing(to: Address, bytes_per_s: int) -> Iterator[None]:
    """Bound what each connection sends that this process makes to an address meanwhile."""
    connect = socket.create_connection

    def create_connection(address: Address, *args: Any, **settings: Any) -> socket.socket:
        made = connect(address, *args, **settings)
        return _paced(made, bytes_per_s) if address == to else made

    socket.create_connection = create_connection  # type: ignore[assignment]
    try:
        yield
    finally:
        socket.create_connection = connect


def _paced(made: socket.socket, bytes_per_s: int) -> socket.socket:
    made.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, bytes_per_s)
    return made


@contextlib.contextmanager
def listening(module: str, secret: Path, *options: str, run: Sequence[str] = ()) -> Iterator[Address]:
    """Run a program, such as ``omniserve.prefill``, that listens on the loopback interface; yield its address.

    ``run`` are the interpreter's arguments that do that; empty: ``-m module``.

    Raises:
        RuntimeError: It has not started.
    """
    starts(module)
    command = [sys.executable, *(run or ("-m", module)), "--listen", "127.0.0.1:0", "--secret-file", str(secret)]
    process = subprocess.Popen([*command, "--log-level", "warning", *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("listens at "):
            raise RuntimeError(f"{module} has not started: {line}")
        host, _, port = line.removeprefix("listens at ").strip().rpartition(":")
        yield host, int(port)
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def slow_link(target: Address, *, delay_s: float, bits_per_s: float) -> Iterator[Address]:
    """Forward connections to an address as a slow network would, from a process of its own; yield the address to use.

    Args:
        target: Where connections go.
        delay_s: One way.
        bits_per_s: Speed of each direction; connections share it in chunks of 32 KiB, first come, first served.
    """
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_forward_all, args=(there, target, delay_s, bits_per_s / 8), daemon=True
    )
    process.start()
    try:
        yield here.recv()
    finally:
        process.terminate()
        process.join()


class _Wire:
    """A direction of the link: a chunk passes after those before it."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def passed_at_s(self, num_bytes: int) -> float:
        """Wait until there is room for a chunk; return when the last of it has left."""
        with self._lock:
            now_s = time.perf_counter()
            self._free_at_s = max(self._free_at_s, now_s - _OVERSLEPT_S) + num_bytes / self._bytes_per_s
            free_at_s = self._free_at_s
            if free_at_s - now_s > _SHORTEST_SLEEP_S:  # holds those back that come later, as a full link does
                time.sleep(free_at_s - now_s)
        return free_at_s


def _forward_all(ready: Connection, target: Address, delay_s: float, bytes_per_s: float) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    ready.send(listener.getsockname()[:2])
    up, down = _Wire(bytes_per_s), _Wire(bytes_per_s)
    while True:
        near, _ = listener.accept()
        far = socket.create_connection(target)
        for source, sink, wire in ((near, far, up), (far, near, down)):
            sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            on_way: deque[tuple[float, bytes]] = deque()
            waits = threading.Semaphore(0)
            threading.Thread(target=_read, args=(source, wire, delay_s, on_way, waits), daemon=True).start()
            threading.Thread(target=_write, args=(sink, on_way, waits), daemon=True).start()


def _read(
    source: socket.socket, wire: _Wire, delay_s: float, on_way: deque[tuple[float, bytes]], waits: threading.Semaphore
) -> None:
    data = b"-"
    while data:
        try:
            data = source.recv(_CHUNK)
        except OSError:
            data = b""
        on_way.append((wire.passed_at_s(len(data)) + delay_s, data))
        waits.release()


def _write(sink: socket.socket, on_way: deque[tuple[float, bytes]], waits: threading.Semaphore) -> None:
    with contextlib.suppress(OSError):  # the other side has gone
        while True:
            waits.acquire()
            arrives_s, data = on_way.popleft()
            if (left_s := arrives_s - time.perf_counter()) > 0:
                time.sleep(left_s)
            if not data:
                break
            sink.sendall(data)
        sink.shutdown(socket.SHUT_RDWR)
