"""Links between ranks: who may connect, and what becomes of broken ones."""

from __future__ import annotations

import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omniserve.core import link
from omniserve.core.errors import PeerLost, PeerRefused
from omniserve.core.link import Link

SECRET = b"a secret of this test"


@pytest.fixture
def pair() -> Iterator[tuple[Link, socket.socket]]:
    """Yield a link, and the bare socket of its other end."""
    one, other = socket.socketpair()
    made = Link.__new__(Link)
    made._codec = link.PICKLE
    made.name, made._socket, made._buffer, made._lock = "rank 1", one, bytearray(), threading.Lock()
    yield made, other
    one.close()
    other.close()


def _both_ends(ours: bytes, theirs: bytes) -> tuple[Any, Any]:
    """Connect two ends that know these secrets; return their links, or errors."""
    listener = socket.create_server(("127.0.0.1", 0))
    results: dict[str, Any] = {}

    def serve() -> None:
        connection, _ = listener.accept()
        try:
            results["server"] = link.accept(connection, ours, "the client")
        except PeerLost as error:
            results["server"] = error

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        results["client"] = link.connect(listener.getsockname()[:2], theirs, 5.0, "the server")
    except PeerLost as error:
        results["client"] = error
    thread.join()
    listener.close()
    return results["server"], results["client"]


def test_two_ends_with_one_secret_talk() -> None:
    server, client = _both_ends(SECRET, SECRET)
    client.send({"numbers": list(range(100_000))})
    assert server.receive(5.0) == {"numbers": list(range(100_000))}
    assert server.receive_now() is None
    server.send("one")
    server.send("two")
    assert [client.receive(5.0), client.receive(5.0)] == ["one", "two"]
    client.close()
    with pytest.raises(PeerLost, match="the client has closed"):
        server.receive(5.0)
    server.close()


def test_another_secret_is_refused_by_both() -> None:
    server, client = _both_ends(SECRET, b"another secret of the test")
    assert isinstance(server, PeerRefused) or "secret" in str(server)
    assert isinstance(client, PeerRefused) or "secret" in str(client)
    assert isinstance(server, PeerLost) and isinstance(client, PeerLost)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(100), b"omniserve-rank-1\n" + bytes(64)])
def test_somebody_else_is_refused(said: bytes) -> None:
    one, other = socket.socketpair()
    other.sendall(said)
    other.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerLost, match="the stranger"):
        link.accept(one, SECRET, "the stranger")
    other.close()


def test_an_answer_of_the_other_side_cannot_be_sent_back_to_it() -> None:
    """A stranger who repeats challenge and answer, without the secret, is refused."""
    one, other = socket.socketpair()

    def repeat() -> None:
        while data := other.recv(4096):
            other.sendall(data)

    thread = threading.Thread(target=repeat)
    thread.start()
    with pytest.raises(PeerRefused, match="does not know the secret"):
        link.accept(one, SECRET, "the stranger")
    thread.join()
    other.close()


def test_a_message_may_come_in_pieces(pair: tuple[Link, socket.socket]) -> None:
    import pickle

    made, other = pair
    data = pickle.dumps("a message")
    whole = struct.pack("<QI", len(data), zlib.crc32(data)) + data
    for byte in whole[:-1]:
        other.sendall(bytes([byte]))
        assert made.receive_now() is None
    other.sendall(whole[-1:] + whole)
    assert [made.receive(5.0), made.receive(5.0)] == ["a message", "a message"]


def test_silence_and_nonsense_are_told(pair: tuple[Link, socket.socket]) -> None:
    made, other = pair
    with pytest.raises(PeerLost, match=r"rank 1 has not answered for 0\.05 s"):
        made.receive(0.05)
    other.sendall(struct.pack("<QI", 1 << 60, 0))
    with pytest.raises(PeerLost, match="a message of"):
        made.receive(5.0)


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:x", "host:99999"])
def test_addresses_are_read(text: str) -> None:
    assert link.host_and_port("[::1]:80") == ("::1", 80)
    assert link.host_and_port("a.b:1") == ("a.b", 1)
    with pytest.raises(ValueError, match="HOST:PORT"):
        link.host_and_port(text)


def test_a_secret_is_long_enough(tmp_path: Any) -> None:
    file = tmp_path / "secret"
    file.write_text("short\n")
    with pytest.raises(ValueError, match="at least 16 characters"):
        link.read_secret(str(file))
    file.write_text("long enough, and more\n")
    assert link.read_secret(str(file)) == b"long enough, and more"


def test_the_environment_has_the_secret_if_there_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    with pytest.raises(FileNotFoundError):
        link.read_secret(str(file), "A_SECRET")
    monkeypatch.setenv("A_SECRET", "of the environment, long enough")
    assert link.read_secret(str(file), "A_SECRET") == b"of the environment, long enough"
    file.write_text("of the file, long enough")
    assert link.read_secret(str(file), "A_SECRET") == b"of the file, long enough"
    file.unlink()
    monkeypatch.setenv("A_SECRET", "short")
    with pytest.raises(ValueError, match="A_SECRET must hold a secret"):
        link.read_secret(str(file), "A_SECRET")


def test_a_message_that_was_damaged_ends_the_connection(pair: tuple[Link, socket.socket]) -> None:
    made, other = pair
    other.sendall(struct.pack("<QI", 6, zlib.crc32(b"[1, 2]") ^ 1) + b"[1, 2]")
    with pytest.raises(PeerLost, match="wrong checksum"):
        made.receive(5.0)
