"""Link: messages between two processes of one engine, over a TCP connection of their own.

Both ends first prove that they know a secret: each answers the other's random challenge with an HMAC-SHA256 of it. What
follows has checksums (CRC-32), but is neither encrypted nor signed: use a network that no stranger can write to.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import pickle
import secrets
import select
import socket
import struct
import threading
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from omniserve.core.errors import PeerClosed, PeerLost, PeerRefused

_MAGIC = b"omniserve-link-2\n"
_CHALLENGE_BYTES, _DIGEST_BYTES = 32, 32
_HEADER = struct.Struct("<QI")
"""Length and checksum of what follows."""
_MOST_BYTES = 1 << 30
_CHUNK = 1 << 16
_HANDSHAKE_S = 10.0
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
"""A machine that is gone is noticed in half a minute."""


class Codec(NamedTuple):
    """A pair of functions that turn messages into bytes and back."""

    dumps: Callable[[Any], bytes]
    loads: Callable[[bytes], Any]


PICKLE = Codec(lambda message: pickle.dumps(message, pickle.HIGHEST_PROTOCOL), pickle.loads)
"""Any object. A peer that knows the secret can run code at the other end."""
JSON = Codec(lambda message: json.dumps(message).encode(), json.loads)


class Link:
    """An open connection. ``name`` is what errors call the other end. One thread receives; any may send."""

    def __init__(self, connection: socket.socket, name: str, codec: Codec = PICKLE) -> None:
        self.name = name
        self._codec = codec
        self._socket = connection
        self._socket.settimeout(None)
        self._buffer = bytearray()
        self._lock = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    @property
    def own_address(self) -> str:
        """The IP address of this end."""
        return self._socket.getsockname()[0]

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            PeerLost: The other end is gone.
        """
        data = self._codec.dumps(message)
        try:
            with self._lock:
                self._socket.sendall(_HEADER.pack(len(data), zlib.crc32(data)) + data)
        except OSError as error:
            raise PeerLost(f"{self.name} is gone: {error}") from error

    def receive(self, timeout_s: float | None = None) -> Any:
        """Wait for the next message and return it; None waits for ever.

        Raises:
            PeerLost: The other end is gone, or sends nothing in time.
        """
        while (message := self.receive_now()) is None:
            self._wait(timeout_s)
        return message

    def receive_now(self) -> Any:
        """Return the next message; None if there is none yet.

        Raises:
            PeerLost: The other end is gone.
        """
        if (message := self._take()) is not None:
            return message
        try:
            while data := self._socket.recv(_CHUNK, socket.MSG_DONTWAIT):
                self._buffer += data
                if len(data) < _CHUNK:
                    return self._take()
        except BlockingIOError:
            return self._take()
        except OSError as error:
            raise PeerLost(f"{self.name} is gone: {error}") from error
        if (message := self._take()) is not None:
            return message
        if self._buffer:
            raise PeerLost(f"{self.name} has closed its connection in the middle of a message")
        raise PeerClosed(f"{self.name} has closed its connection")

    def _take(self) -> Any:
        """Take a whole message out of the buffer."""
        if len(self._buffer) < _HEADER.size:
            return None
        length, checksum = _HEADER.unpack_from(self._buffer)
        if length > _MOST_BYTES:
            raise PeerLost(f"{self.name} sends a message of {length} bytes")
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        data = memoryview(self._buffer)[_HEADER.size : end].tobytes()
        del self._buffer[:end]
        if zlib.crc32(data) != checksum:
            raise PeerLost(f"{self.name} sends a message with a wrong checksum")
        try:
            return self._codec.loads(data)
        except Exception as error:  # pickle raises any
            raise PeerLost(f"{self.name} sends a message that cannot be read: {error}") from error

    def _wait(self, timeout_s: float | None) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        if not poller.poll(None if timeout_s is None else timeout_s * 1000):
            raise PeerLost(f"{self.name} has not answered for {timeout_s:g} s")

    def detach(self) -> int:
        """Return the connection's file descriptor, which is the caller's now; every message has been received."""
        assert not self._buffer, f"{self.name} has sent more than was asked for"
        return self._socket.detach()

    def shut_down(self) -> None:
        """End the connection. A thread that is receiving or sending gets PeerLost."""
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def accept(connection: socket.socket, secret: bytes, name: str, codec: Codec = PICKLE) -> Link:
    """Let the other end of a new connection prove that it knows the secret, and prove it to it.

    Raises:
        PeerLost: It does not, or does not answer in time.
    """
    return _shake_hands(connection, secret, name, codec, b"server", b"client")


def connect(address: tuple[str, int], secret: bytes, timeout_s: float, name: str, codec: Codec = PICKLE) -> Link:
    """Connect to an address; the other end and this one prove to each other that they know the secret.

    Raises:
        PeerLost: It does not, or does not answer in time.
        OSError: No process listens there.
    """
    return _shake_hands(socket.create_connection(address, timeout_s), secret, name, codec, b"client", b"server")


def _shake_hands(connection: socket.socket, secret: bytes, name: str, codec: Codec, own: bytes, other: bytes) -> Link:
    connection.settimeout(_HANDSHAKE_S)
    try:
        challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        connection.sendall(_MAGIC + challenge)
        hello = _read(connection, len(_MAGIC) + _CHALLENGE_BYTES)
        if hello[: len(_MAGIC)] != _MAGIC:
            raise PeerRefused(f"{name} does not speak the protocol of this version")
        theirs = hello[len(_MAGIC) :]
        connection.sendall(_digest(secret, own, theirs, challenge))
        if not hmac.compare_digest(_read(connection, _DIGEST_BYTES), _digest(secret, other, challenge, theirs)):
            raise PeerRefused(f"{name} does not know the secret: give both ends the same file")
    except (OSError, EOFError) as error:
        connection.close()
        raise PeerLost(f"{name} does not prove that it knows the secret: {error}") from error
    except PeerLost:
        connection.close()
        raise
    return Link(connection, name, codec)


def _digest(secret: bytes, who: bytes, challenge: bytes, other_challenge: bytes) -> bytes:
    """Return the answer to a challenge. It names its sender, so that none can be sent back as one's own."""
    return hmac.new(secret, who + challenge + other_challenge, hashlib.sha256).digest()


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError("the connection was closed")
        data += more
    return data


def read_secret(path: str, variable: str | None = None) -> bytes:
    """Return the secret in a file, without white space around it; if there is no such file, that in the environment.

    Raises:
        ValueError: It is shorter than 16 bytes.
        OSError: The file cannot be read, and no such variable is set.
    """
    try:
        with open(path, "rb") as file:
            secret = file.read().strip()
    except FileNotFoundError:
        if variable is None or variable not in os.environ:
            raise
        path, secret = variable, os.environ[variable].encode()
    if len(secret) < 16:
        raise ValueError(f"{path} must hold a secret of at least 16 characters, the same for all machines")
    return secret


def host_and_port(address: str) -> tuple[str, int]:
    """Read ``HOST:PORT``.

    Raises:
        ValueError: It is not that.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"an address must be HOST:PORT, got {address!r}")
    return host.strip("[]"), int(port)
