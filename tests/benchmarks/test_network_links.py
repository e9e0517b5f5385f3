"""Links that benchmarks make as slow as a network."""

from __future__ import annotations

import socket

import pytest

from benchmarks.common import network

_PACING_RATE = 47


def test_both_ends_of_a_paced_connection_are_paced_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("create_server", "create_connection"):
        monkeypatch.setattr(socket, name, getattr(socket, name))  # put back afterwards
    with socket.create_server(("127.0.0.1", 0)) as other:
        network.pace(1_000_000)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            network.pace(2_000_000, listener.getsockname())
            for server, here, there in ((listener, 2_000_000, 1_000_000), (other, None, None)):
                with socket.create_connection(server.getsockname()) as connection, server.accept()[0] as accepted:
                    for end, rate in ((connection, here), (accepted, there)):
                        told = end.getsockopt(socket.SOL_SOCKET, _PACING_RATE)
                        assert told == rate if rate is not None else told in (-1, 0xFFFFFFFF)
