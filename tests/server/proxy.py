"""A connection that can be cut."""

from __future__ import annotations

import contextlib
import socket
import threading


def free_address() -> str:
    """Return an address of this machine that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


class Proxy:
    """Passes bytes on between an address and another, until it is told to cut its connections."""

    def __init__(self, outside: str, inside: str) -> None:
        self._inside = int(inside.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", int(outside.rpartition(":")[2])))
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            try:
                there = socket.create_connection(("127.0.0.1", self._inside))
            except OSError:
                here.close()
                continue
            self._open += [here, there]
            for source, target in ((here, there), (there, here)):
                threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Cut all connections; new ones are taken."""
        while self._open:
            each = self._open.pop()
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        """Cut all connections, and take no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
