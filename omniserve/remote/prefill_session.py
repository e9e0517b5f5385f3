"""The part that a prefill engine and each of its ranks share: they listen, and send blocks to an engine, or a rank of
one."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from omniserve.core.errors import PeerLost
from omniserve.core.link import Link
from omniserve.remote.prefill_messages import Alive, Blocks

logger = logging.getLogger(__name__)

_ALIVE_S = 1.0
_LONGEST_STEP_S = 60.0
"""An engine whose step takes longer does not say that it is alive any more."""


class Session:
    """A connection, and the threads that receive and send, from ``start`` on.

    Args:
        peer: The connection, on which both ends have proved that they know the secret.
        session_id: What both ends know it by.
        on_message: Called from a thread with each message that comes, and last with the error that ends it.
    """

    def __init__(self, peer: Link, session_id: str, on_message: Callable[[Session, object], None]) -> None:
        self.peer, self.id = peer, session_id
        self.turned_s: float | None = None
        """Time at which the engine last began a step or looked for messages; None: the session always says that it is
        alive."""
        self.queued_bytes = 0
        """Bytes of blocks that are to be sent."""
        self._on_message = on_message
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Receive and send from now on."""
        for target in (self._receive, self._send):
            threading.Thread(target=target, name="prefill-link", daemon=True).start()

    def send(self, message: object) -> None:
        """Send a message, in the order of these calls; this does not wait."""
        if isinstance(message, Blocks):
            with self._lock:
                self.queued_bytes += len(message.data)
        self._outbox.put(message)

    def close(self) -> None:
        """End the connection and the threads."""
        self._outbox.put(None)
        self.peer.shut_down()

    def _receive(self) -> None:
        try:
            while True:
                self._on_message(self, self.peer.receive())
        except (PeerLost, OSError) as error:
            self._on_message(self, error)

    def _send(self) -> None:
        with contextlib.suppress(PeerLost):  # the other thread finds that out, too
            while True:
                try:
                    message = self._outbox.get(timeout=_ALIVE_S)
                except queue.Empty:
                    if self.turned_s is not None and time.monotonic() - self.turned_s > _LONGEST_STEP_S:
                        continue
                    message = Alive()
                if message is None:
                    return
                self.peer.send(message)
                if isinstance(message, Blocks):
                    with self._lock:
                        self.queued_bytes -= len(message.data)


class Listener:
    """Accepts connections in a thread until it is closed, and greets each in a thread of its own.

    Args:
        address: Where to listen; port 0: any.
        greet: Called with each connection, and what the other end is called in messages.

    Raises:
        OSError: The address cannot be used.
    """

    def __init__(self, address: tuple[str, int], greet: Callable[[socket.socket, str], None]) -> None:
        self._greet = greet
        self._is_closed = threading.Event()
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._socket = socket.create_server(address, family=family)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        """The address at which it listens."""
        threading.Thread(target=self._accept, name="prefill-accept", daemon=True).start()

    def close(self) -> None:
        """Stop listening. May be called from any thread, and from a signal's handler."""
        self._is_closed.set()
        with contextlib.suppress(OSError):  # it is closed
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, address = self._socket.accept()
            except OSError as error:
                if not self._is_closed.is_set():
                    logger.error("no engine can connect any more: %s", error)
                return
            name = f"the engine at {address[0]}:{address[1]}"
            threading.Thread(target=self._greet, args=(connection, name), name="prefill-greet", daemon=True).start()


def bytes_of(pool_LBK2SH: Tensor, blocks: Sequence[int]) -> bytes:
    """Return the KV of blocks as it is sent (``Blocks.data``)."""
    data: bytes = pool_LBK2SH[:, list(blocks)].transpose(0, 1).contiguous().view(torch.uint8).numpy().tobytes()
    return data
