"""Links that benchmarks make as slow as a network."""

from __future__ import annotations

import socket

import pytest

from benchmarks.common import network

_PACING_RATE = 47
_UNBOUNDED = (-1, 0xFFFFFFFF)


def _rates(server: socket.socket) -> tuple[int, int]:
    """Return how fast both ends of a new connection may send: this one, and the one that was accepted."""
    with socket.create_connection(server.getsockname()) as connection, server.accept()[0] as accepted:
        here, there = (end.getsockopt(socket.SOL_SOCKET, _PACING_RATE) for end in (connection, accepted))
        return here, there


def test_both_ends_of_a_paced_connection_are_paced_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_server", socket.create_server)  # put back afterwards
    with socket.create_server(("127.0.0.1", 0)) as other:
        network.pace_accepted(1_000_000)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            with network.pacing(listener.getsockname(), 2_000_000):
                assert _rates(listener) == (2_000_000, 1_000_000)
                assert set(_rates(other)) <= set(_UNBOUNDED)
            assert _rates(listener)[0] in _UNBOUNDED
