"""A pair of ZeroMQ sockets to another process of the server, read by the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import zmq


class Link:
    """Sends messages to one process, and takes those that come from it.

    Args:
        context: Of ZeroMQ; the link closes its sockets, not this.
        incoming, outgoing: Addresses of the two sockets.
        binds: This side makes the addresses.
        take: Called with each message that comes.
    """

    def __init__(
        self, context: zmq.Context, incoming: str, outgoing: str, *, binds: bool, take: Callable[[bytes], object]
    ) -> None:
        self._take = take
        self._incoming, self._outgoing = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self._incoming.setsockopt(zmq.RCVHWM, 0)
        self._outgoing.setsockopt(zmq.SNDHWM, 0)
        for socket, address in ((self._incoming, incoming), (self._outgoing, outgoing)):
            socket.setsockopt(zmq.LINGER, 0)
            (socket.bind if binds else socket.connect)(address)
        self._is_open = True
        # As the engines' client: not zmq.asyncio, whose futures cost more than all the rest.
        self._descriptor = int(self._incoming.getsockopt(zmq.FD))
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)

    def send(self, message: bytes) -> None:
        """Send a message; one to a process that has not connected yet, or is gone, is lost."""
        if self._is_open:
            with contextlib.suppress(zmq.Again):
                self._outgoing.send(message, zmq.NOBLOCK)

    def close(self) -> None:
        """Close the sockets. Calling it again does nothing."""
        if self._is_open:
            self._is_open = False
            asyncio.get_running_loop().remove_reader(self._descriptor)
            self._incoming.close()
            self._outgoing.close()

    def _read(self) -> None:
        """Take every message that is there: the descriptor tells of new ones only once all were taken."""
        while self._is_open:
            try:
                message = self._incoming.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(message)
