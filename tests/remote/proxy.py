"""A TCP proxy in this process, which can be made to fail: between an engine and a CPU host."""

from __future__ import annotations

import contextlib
import random
import socket
import threading

_CHUNK = 1 << 16


class Proxy:
    """Forwards each connection to ``target``."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._ends: list[socket.socket] = []
        self._lock = threading.Lock()
        self._go_on = threading.Event()
        self._go_on.set()
        self.refuses = False
        """New connections are closed at once."""
        self.corrupt = ""
        """``up`` or ``down``: a bit of the next bytes to the host, or to the engine, is flipped, once."""
        threading.Thread(target=self._accept, daemon=True).start()

    def silence(self, is_silent: bool = True) -> None:
        """Forward nothing any more, but keep the connections open; or go on."""
        if is_silent:
            self._go_on.clear()
        else:
            self._go_on.set()

    def cut(self) -> None:
        """End all connections; what is on the way is lost."""
        with self._lock:
            for end in self._ends:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._ends.clear()

    def cut_one(self, rng: random.Random) -> None:
        """End one connection."""
        with self._lock:
            if self._ends:
                end = self._ends.pop(rng.randrange(len(self._ends)))
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._go_on.set()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.refuses:
                near.close()
                continue
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._ends += [near, far]
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink, way in ((near, far, "up"), (far, near, "down")):
                threading.Thread(target=self._forward, args=(source, sink, way), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                self._go_on.wait()
                if self.corrupt == way:
                    self.corrupt = ""
                    middle = len(data) // 2
                    data = data[:middle] + bytes([data[middle] ^ 16]) + data[middle + 1 :]
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
