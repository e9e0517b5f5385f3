"""Clients that talk to a server over bare sockets."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

import httpx


def head(body: bytes, path: str = "/v1/completions", length: int | None = None) -> bytes:
    """Return the head of a request."""
    size = len(body) if length is None else length
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {size}"]
    return "\r\n".join([*lines, "", ""]).encode()


def connect(server: Any, receive_buffer: int | None = None) -> socket.socket:
    """Return a new connection; nothing on it takes longer than 30 s."""
    url = httpx.URL(server.url)
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(30)
    connection.connect((url.host, url.port))
    return connection


def send(server: Any, fields: dict[str, Any], **options: Any) -> socket.socket:
    """Send a right request on a new connection; return that."""
    body = json.dumps(fields).encode()
    connection = connect(server, **options)
    connection.sendall(head(body) + body)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)
