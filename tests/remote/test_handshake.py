"""The handshake of all connections between machines: what is welcome, what is refused, and how it looks as JSON."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from omniserve.core.errors import PeerLost, PeerRefused
from omniserve.core.link import PICKLE, Codec, Link
from omniserve.remote import handshake
from omniserve.remote.handshake import Hello, Refused, Welcome, introduce, refuse

CODECS = (PICKLE, handshake.JSON)
HELLO = Hello("1.2", {"purpose": "rows", "rank": 0})


@pytest.fixture
def ends() -> Iterator[Callable[[Codec], tuple[Link, Link]]]:
    """A function that returns both ends of a connection: the one that connected, and the other."""
    links: list[Link] = []

    def open_one(codec: Codec) -> tuple[Link, Link]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            links.append(Link(socket.create_connection(server.getsockname()), "the server", codec))
            links.append(Link(server.accept()[0], "the client", codec))
        return links[-2], links[-1]

    yield open_one
    for link in links:
        link.close()


def answered(client: Link, server: Link, answer: Callable[[Any], None]) -> Any:
    """Introduce the client, and answer its hello by a function of it."""
    thread = threading.Thread(target=lambda: answer(server.receive(5.0)))
    thread.start()
    try:
        return introduce(client, HELLO, 5.0, refusal="it refuses: ")
    finally:
        thread.join()


@pytest.mark.parametrize("codec", CODECS)
def test_a_welcome_gives_its_terms(codec: Codec, ends: Callable[[Codec], tuple[Link, Link]]) -> None:
    client, server = ends(codec)
    seen: list[Hello] = []

    def answer(hello: Any) -> None:
        seen.append(hello)
        server.send(Welcome({"session": "s"}))

    assert answered(client, server, answer) == {"session": "s"}
    assert (seen[0].version, seen[0].caller["purpose"], seen[0].caller["rank"]) == ("1.2", "rows", 0)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("may_change", [False, True])
def test_a_refusal_says_why_and_whether_to_come_again(
    codec: Codec, may_change: bool, ends: Callable[[Codec], tuple[Link, Link]]
) -> None:
    client, server = ends(codec)
    with pytest.raises(PeerLost, match=r"^it refuses: no$") as refusal:
        answered(client, server, lambda hello: refuse(server, "no", may_change=may_change))
    assert isinstance(refusal.value, PeerRefused) is not may_change


def test_another_answer_is_a_refusal(ends: Callable[[Codec], tuple[Link, Link]]) -> None:
    client, server = ends(PICKLE)
    with pytest.raises(PeerRefused, match="it answers int"):
        answered(client, server, lambda hello: server.send(5))


@pytest.mark.parametrize(
    ("message", "plain"),
    [
        (HELLO, {"version": "1.2", "purpose": "rows", "rank": 0}),
        (Welcome({"session": "s"}), {"session": "s"}),
        (Refused("no", may_change=True), {"refused": "no", "may_change": True}),
    ],
)
def test_an_engine_and_a_host_exchange_flat_json(message: Any, plain: Any) -> None:
    data = handshake.JSON.dumps(message)
    assert json.loads(data) == plain
    assert type(handshake.JSON.loads(data)) is type(message)
