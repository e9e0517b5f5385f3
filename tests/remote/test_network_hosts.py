"""CPU hosts on the network that come, fail in every way there is, and come back."""

from __future__ import annotations

import dataclasses
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from omniserve import HostsConfig
from omniserve.core import link
from omniserve.core.errors import PeerLost
from omniserve.core.work import HOST_BLOCKS, AttentionResult, Done, HostEvent, KVMove, MoveDirection
from omniserve.host.tier import HostTier
from omniserve.remote import host_server
from omniserve.remote.handshake import Hello, Welcome
from omniserve.remote.host_server import HostServer, spec_of_plain, spec_to_plain
from omniserve.remote.network_hosts import HostUser, NetworkHosts
from tests.events import ATTENTION_DONE, ATTENTION_FAILED, HOST_JOINED, HOST_LOST, WORK_DONE, WORK_FAILED, Kind, kind_of
from tests.host.helpers import ATTENTION, BLOCK_SIZE, KINDS, collect, make_spec, make_tier, shorten_pauses, wait_until
from tests.remote.proxy import Proxy

SECRET = b"a secret of some length"
SPEC = make_spec()
BLOCK_BYTES = SPEC.kv_block_bytes(BLOCK_SIZE)


class Network:
    """An engine's tier, and a host that it reaches through a proxy."""

    def __init__(self, secret_file: Path, *, timeout_s: float = 5.0) -> None:
        secret_file.write_bytes(SECRET)
        self.host = HostServer(secret=SECRET, kv_bytes=100 * BLOCK_BYTES, num_threads=2, cores=None)
        self.host.start()
        self.proxy = Proxy(self.host.address)
        self.tier = make_tier(SPEC, num_blocks=4)
        self.config = HostsConfig(
            cpu_hosts=("{}:{}".format(*self.proxy.address),), cpu_host_secret_file=str(secret_file),
            cpu_host_timeout_s=timeout_s,
        )  # fmt: skip
        self.hosts = self.connect()
        self.events: list[HostEvent] = []

    def connect(self) -> NetworkHosts:
        return NetworkHosts(self.config, self.tier)

    def poll(self) -> None:
        """Take events, and connect what has answered."""
        self.events += self.hosts.poll(self.tier.poll())

    def wait_for(self, kind: Kind, count: int = 1) -> list[HostEvent]:
        """Return the events once so many of a kind are there, and forget them."""

        def has_come() -> bool:
            self.poll()
            return sum(kind_of(event) == kind for event in self.events) >= count

        wait_until(has_come)
        taken, self.events = self.events, []
        return taken

    def submit(self, slots: Sequence[int], layer: int = 0) -> None:
        rows = [torch.randn(len(slots), heads, SPEC.head_size) for heads in (SPEC.num_heads, 2, 2)]
        self.tier.submit(layer, torch.tensor(slots), *rows)

    def begin(self, slots: Sequence[int], epoch: int = 1) -> None:
        for slot in slots:
            self.tier.begin_token(slot, epoch, 5, [HOST_BLOCKS + slot])

    def start_move(self, move_id: int, num_blocks: int, direction: MoveDirection) -> Any:
        cache = torch.randn(2, SPEC.num_layers, num_blocks, 2, BLOCK_SIZE, SPEC.head_size)
        ids = tuple(range(num_blocks)), tuple(HOST_BLOCKS + i for i in range(num_blocks))
        src, dst = ids if direction is MoveDirection.TO_HOST else ids[::-1]
        move = KVMove(request_id="r", move_id=move_id, direction=direction, src_block_ids=src, dst_block_ids=dst)
        self.tier.start_move(move, *cache)
        return cache

    def close(self) -> None:
        self.hosts.close()
        self.proxy.close()
        self.tier.close()
        self.host.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_pauses(monkeypatch)


@pytest.fixture
def open_network(tmp_path: Path) -> Iterator[Callable[..., Network]]:
    opened: list[Network] = []

    def open_one(**settings: Any) -> Network:
        opened.append(Network(tmp_path / "secret", **settings))
        opened[-1].wait_for(HOST_JOINED)
        return opened[-1]

    yield open_one
    for network in opened:
        network.close()


def test_sizes_survive_the_way_to_the_host() -> None:
    spec = make_spec(attention=ATTENTION + KINDS)
    assert spec_of_plain(spec_to_plain(spec)) == spec


def test_a_host_serves_and_tells_what_it_does(open_network: Callable[..., Network]) -> None:
    network = open_network()
    network.begin(range(8))
    for layer in range(SPEC.num_layers):
        network.submit(range(8), layer)
        assert {event.layer for event in collect(network.tier, 8)} == {layer}
    sent = network.start_move(1, 20, MoveDirection.TO_HOST)
    network.wait_for(WORK_DONE)
    got = network.start_move(2, 20, MoveDirection.TO_DEVICE)
    network.wait_for(WORK_DONE)
    assert torch.equal(sent, got)
    (told,) = network.tier.hosts()
    assert told.host == 1 and not told.is_lost and told.tasks_sent == 8 * SPEC.num_layers
    assert told.bytes_moved == 2 * 20 * BLOCK_BYTES and told.tasks_in_hand == told.moves_in_hand == 0
    wait_until(lambda: network.tier.hosts()[0].tasks_done == 8 * SPEC.num_layers)  # with the next answer to a ping


def _cut(network: Network) -> None:
    network.proxy.cut()


def _silence(network: Network) -> None:
    network.proxy.silence()


def _corrupt_up(network: Network) -> None:
    network.proxy.corrupt = "up"


def _corrupt_down(network: Network) -> None:
    network.proxy.corrupt = "down"


def _end(network: Network) -> None:
    session = network.host._sessions.get(0)
    assert session is not None
    network.host._end(session)


@pytest.mark.parametrize("fail", [_cut, _silence, _corrupt_up, _corrupt_down, _end])
def test_what_a_lost_host_has_in_hand_fails_once_and_it_can_come_back(
    open_network: Callable[..., Network], fail: Callable[[Network], None]
) -> None:
    network = open_network(timeout_s=0.6)
    network.begin(range(8))
    assert network.host._sessions
    network.host._sessions[0].tier.inject(delay_s=0.05)
    network.submit(range(4))
    fail(network)
    network.submit(range(4, 8))
    network.start_move(7, 30, MoveDirection.TO_HOST)
    network.start_move(8, 30, MoveDirection.TO_DEVICE)
    events = network.wait_for(HOST_LOST)
    while network.tier.busy:
        network.poll()
    network.poll()
    events += network.events
    answered = [event.slot for event in events if isinstance(event, AttentionResult)]
    assert sorted(answered) == list(range(8))
    assert sorted(event.move_id for event in events if isinstance(event, Done)) == [7, 8]
    failed = [e for e in events if kind_of(e) in (ATTENTION_FAILED, WORK_FAILED)]
    assert failed, "the fault came too late for the test"
    if not any(kind_of(event) == HOST_JOINED for event in events):
        network.submit([0])  # its token is bound to blocks that are lost
        assert network.wait_for(ATTENTION_FAILED)
        network.start_move(9, 1, MoveDirection.TO_HOST)
        assert network.wait_for(WORK_FAILED)
        network.proxy.silence(False)
        network.wait_for(HOST_JOINED)
    network.events.clear()
    network.begin(range(8), epoch=2)
    network.submit(range(8))
    done = network.wait_for(ATTENTION_DONE, 8)
    assert [event.epoch for event in done] == [2] * 8


def test_a_token_of_a_lost_host_does_not_go_to_its_next_session(
    open_network: Callable[..., Network], caplog: pytest.LogCaptureFixture
) -> None:
    network = open_network()
    network.begin([0])
    network.proxy.cut()
    network.wait_for(HOST_JOINED)
    network.submit([0])
    (event,) = network.wait_for(ATTENTION_FAILED)
    assert "lost" in event.message and not network.tier.hosts()[0].is_lost
    assert not [record for record in caplog.records if record.levelname == "ERROR"], "a warning tells of the host"


def test_a_host_that_is_lost_before_its_join_was_told_has_joined_first(tmp_path: Path) -> None:
    network = Network(tmp_path / "secret")
    try:
        assert not network.tier.hosts()[0].is_lost
        network.proxy.cut()
        wait_until(lambda: bool(network.tier.hosts()[0].is_lost))
        network.poll()
        assert [kind_of(event) for event in network.events] == [HOST_JOINED, HOST_LOST]
        network.events.clear()
        (event,) = network.wait_for(HOST_JOINED)
        assert event.host == 1 and network.tier.hosts()[0].times_lost == 1
    finally:
        network.close()


def test_a_host_that_is_not_there_is_left_out_and_joins_later(tmp_path: Path) -> None:
    network = Network(tmp_path / "secret")
    try:
        network.wait_for(HOST_JOINED)
        network.proxy.refuses = True
        network.proxy.cut()
        network.wait_for(HOST_LOST)
        time.sleep(0.3)
        network.poll()
        assert not network.events
        network.proxy.refuses = False
        network.wait_for(HOST_JOINED)
    finally:
        network.close()


def test_a_host_serves_one_engine_at_a_time(open_network: Callable[..., Network], caplog: Any) -> None:
    network = open_network()
    second = network.connect()
    assert "refuses this engine: another engine uses this host" in caplog.text
    network.hosts.close()
    network.tier.close()
    network.tier = make_tier(SPEC, num_blocks=4)
    second._tier = network.tier
    network.hosts = second
    network.wait_for(HOST_JOINED)


def _as_rank(network: Network, rank: int, tier: HostTier) -> NetworkHosts:
    return NetworkHosts(network.config, tier, user=HostUser("an engine", rank, 2))


class _Rank:
    """A rank of an engine with two, and what its hosts have told."""

    def __init__(self, network: Network, rank: int) -> None:
        self.tier = make_tier(SPEC, num_blocks=4)
        self.hosts = _as_rank(network, rank, self.tier)
        self.told: list[Kind] = []
        self.num_blocks = self.num_threads = 0

    def poll(self) -> None:
        for event in self.hosts.poll(self.tier.poll()):
            self.told.append(kind_of(event))
            if kind_of(event) == HOST_JOINED:
                self.num_blocks, self.num_threads = event.num_blocks, event.num_threads

    def wait_for(self, *kinds: Kind) -> None:
        """Wait until these are what was told, in this order, and forget them."""

        def has_come() -> bool:
            self.poll()
            return len(self.told) >= len(kinds)

        wait_until(has_come)
        assert self.told == [*kinds]
        self.told.clear()

    def close(self) -> None:
        self.hosts.close()
        self.tier.close()


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[tuple[Network, _Rank, _Rank]]:
    network = Network(tmp_path / "secret")
    network.hosts.close()
    network.tier.close()
    ranks = _Rank(network, 0), _Rank(network, 1)
    yield network, *ranks
    for rank in ranks:
        rank.close()
    network.close()


def test_ranks_of_one_engine_share_a_host(two_ranks: tuple[Network, _Rank, _Rank], caplog: Any) -> None:
    network, *ranks = two_ranks
    for rank in ranks:
        rank.wait_for(HOST_JOINED)
        assert (rank.num_blocks, rank.num_threads) == (50, 1)
    network.tier = make_tier(SPEC, num_blocks=4)
    network.hosts = network.connect()
    network.poll()
    assert not network.events and "another engine uses this host" in caplog.text


def test_a_rank_that_lost_its_host_comes_back_before_the_host_has_noticed(
    two_ranks: tuple[Network, _Rank, _Rank], caplog: Any
) -> None:
    network, first, second = two_ranks
    first.wait_for(HOST_JOINED)
    second.wait_for(HOST_JOINED)
    session = network.host._sessions[0]
    again = _Rank(network, 0)  # the host holds the connections of the first to be good
    again.wait_for(HOST_JOINED)
    assert network.host._sessions[0] is not session and "another engine uses this host" not in caplog.text
    again.close()


def test_a_rank_connects_again_when_it_is_allowed(two_ranks: tuple[Network, _Rank, _Rank]) -> None:
    network, first, second = two_ranks
    first.wait_for(HOST_JOINED)
    second.wait_for(HOST_JOINED)
    for _ in range(2):
        network.host._end(network.host._sessions[0])
        first.wait_for(HOST_LOST)
        first.hosts.drop(1)  # it knows
        second.hosts.drop(1)
        second.wait_for(HOST_LOST)
        time.sleep(0.3)
        for rank in (first, second):
            rank.poll()
            assert rank.told == [] and rank.tier.hosts()[0].is_lost
            rank.hosts.allow(1)
            rank.wait_for(HOST_JOINED)


def test_a_rank_that_still_tries_gives_up_when_it_is_told(two_ranks: tuple[Network, _Rank, _Rank]) -> None:
    network, first, second = two_ranks
    first.wait_for(HOST_JOINED)
    second.wait_for(HOST_JOINED)
    network.proxy.refuses = True
    network.proxy.cut()
    first.wait_for(HOST_LOST)
    first.hosts.allow(1)
    time.sleep(0.1)
    for _ in range(2):
        first.hosts.drop(1)
    first.wait_for(HOST_LOST)
    network.proxy.refuses = False
    time.sleep(0.3)
    first.poll()
    assert first.told == []
    first.hosts.allow(1)
    first.wait_for(HOST_JOINED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 2}, "rank 2 of 1"),
        ({"version": "0.0.1"}, "the engine 0.0.1"),
        ({"block_size": 1 << 20}, "less than one block"),
        ({"dtype": "float8"}, "float8"),
        ({"spec": {}}, "attention"),
    ],
)
def test_an_engine_that_does_not_fit_is_refused(
    open_network: Callable[..., Network], monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    network = open_network()
    network.hosts.close()
    network.proxy.cut()
    ask = NetworkHosts._ask

    def changed(hello: Hello) -> Hello:
        return dataclasses.replace(hello, caller={**hello.caller, **change})

    monkeypatch.setattr(NetworkHosts, "_ask", lambda self, host, hello: ask(self, host, changed(hello)))
    with pytest.raises(ValueError, match=rf"CPU host 127\.0\.0\.1:\d+ refuses this engine: .*{message}"):
        network.connect()


@pytest.mark.parametrize(
    "welcome", [b"5", b"[]", b"{}", b'{"session": "s", "num_blocks": 0, "num_threads": 1}', b'{"session": "s"}']
)
def test_an_answer_that_no_host_gives_is_an_error_at_start(welcome: bytes, tmp_path: Path) -> None:
    secret_file = tmp_path / "secret"
    secret_file.write_bytes(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer = link.accept(listener.accept()[0], SECRET, "an engine", link.Codec(lambda raw: raw, lambda raw: raw))
            peer.receive(10.0)
            peer.send(welcome)

        liar = threading.Thread(target=answer)
        liar.start()
        config = HostsConfig(
            cpu_hosts=("{}:{}".format(*listener.getsockname()),), cpu_host_secret_file=str(secret_file)
        )  # fmt: skip
        tier = make_tier(SPEC, num_blocks=4)
        with pytest.raises(ValueError, match="answers what no host does"):
            NetworkHosts(config, tier)
        liar.join()
        tier.close()


def test_the_second_connection_may_be_there_as_the_first_is_answered(
    open_network: Callable[..., Network], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = open_network()
    network.proxy.cut()
    network.wait_for(HOST_LOST)
    send = link.Link.send

    def send_and_sleep(peer: link.Link, message: Any) -> None:
        send(peer, message)
        if isinstance(message, Welcome) and "num_blocks" in message.terms:
            time.sleep(0.2)  # the engine has opened its second connection by now

    monkeypatch.setattr(link.Link, "send", send_and_sleep)
    network.wait_for(HOST_JOINED)
    time.sleep(0.3)
    network.begin(range(8))
    network.submit(range(8))
    assert {kind_of(event) for event in collect(network.tier, 8)} == {ATTENTION_DONE}


def test_an_engine_that_is_gone_before_its_answer_leaves_the_host_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = link.Link.send
    fails = [True]

    def fail_once(peer: link.Link, message: Any) -> None:
        if isinstance(message, Welcome) and "num_blocks" in message.terms and fails:
            fails.pop()
            raise PeerLost("it is gone")
        send(peer, message)

    monkeypatch.setattr(link.Link, "send", fail_once)
    monkeypatch.setattr(host_server, "_SECOND_CONNECTION_S", 0.2)
    network = Network(tmp_path / "secret")
    try:
        network.wait_for(HOST_JOINED)
        assert not fails
    finally:
        network.close()


def test_a_wrong_secret_is_refused(open_network: Callable[..., Network], tmp_path: Path) -> None:
    network = open_network()
    (tmp_path / "secret").write_text("another secret of some length")
    with pytest.raises(ValueError, match="does not know the secret"):
        network.connect()


def test_strangers_neither_get_in_nor_disturb(open_network: Callable[..., Network]) -> None:
    network = open_network()
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4096):
        with socket.create_connection(network.host.address) as stranger:
            stranger.sendall(data)
    network.begin(range(8))
    network.submit(range(8))
    collect(network.tier, 8)


_MAGIC, _RESULTS, _STORED, _BLOCKS, _PONG = 0x31484F4F, 3, 7, 6, 4


def _frame(kind: int, count: int, body: bytes) -> bytes:
    """Return a frame with the right checksum."""
    header = struct.pack("<IIIIQ", _MAGIC, kind, 0, count, len(body))
    crc = 0xFFFFFFFF
    for byte in header + body:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return struct.pack("<IIIIQ", _MAGIC, kind, crc ^ 0xFFFFFFFF, count, len(body)) + body


def _result(
    slot: int = 0, layer: int = 0, num_rows: int = 1, message: int = 0, epoch: int = 1, position: int = 5
) -> bytes:
    return struct.pack("<iiiiqq", slot, layer, num_rows, message, epoch, position)


ROW = b"\0" * (SPEC.num_heads * SPEC.head_size * 4)


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (b"\0" * 64, "no frame"),
        (struct.pack("<IIIIQ", _MAGIC, _RESULTS, 0, 0, 1 << 40), "no frame"),
        (struct.pack("<IIIIQ", _MAGIC, _RESULTS, 1, 0, 0), "checksum"),
        (_frame(_RESULTS, 1, _result()), "shorter"),
        (_frame(_RESULTS, 1, _result() + ROW + b"\0"), "longer"),
        (_frame(_RESULTS, 1, _result(slot=1) + ROW), "nobody has asked"),
        (_frame(_RESULTS, 1, _result(slot=-1) + ROW), "nobody has asked"),
        (_frame(_RESULTS, 1, _result(slot=99) + ROW), "nobody has asked"),
        (_frame(_RESULTS, 1, _result(epoch=2) + ROW), "nobody has asked"),
        (_frame(_RESULTS, 1, _result(layer=1) + ROW), "nobody has asked"),
        (_frame(_RESULTS, 1, _result(position=6) + ROW), "nobody has asked"),
        (_frame(_RESULTS, 1, _result(num_rows=2) + 2 * ROW), "another size"),
        (_frame(_RESULTS, 1, _result(num_rows=-1) + ROW), "another size"),
        (_frame(_RESULTS, 1, _result(num_rows=0, message=-5)), "shorter"),
        (_frame(_RESULTS, 2, _result() + ROW), "shorter"),
        (_frame(_PONG, 1, b""), "shorter"),
        (_frame(_BLOCKS, 1, b""), "belongs elsewhere"),
        (_frame(77, 1, b""), "belongs elsewhere"),
    ],
)
def test_a_host_that_lies_is_lost(lie: bytes, message: str) -> None:
    tier = make_tier(SPEC, num_blocks=4)
    rows, blocks = socket.socketpair(), socket.socketpair()
    tier.connect(1, rows[0].detach(), blocks[0].detach(), 10, 5.0)
    tier.begin_token(0, 1, 5, [HOST_BLOCKS])
    tier.submit(0, torch.tensor([0]), *(torch.randn(1, heads, SPEC.head_size) for heads in (SPEC.num_heads, 2, 2)))
    rows[1].recv(1 << 16)
    rows[1].sendall(lie)
    events = collect(tier, 2)
    lost = next(event for event in events if kind_of(event) == HOST_LOST)
    assert message in lost.message
    assert {kind_of(event) for event in events} == {HOST_LOST, ATTENTION_FAILED}
    tier.close()


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize(
    "lie",
    [
        _frame(_STORED, 1, struct.pack("<qqq", 99, 1, 1)),
        _frame(_BLOCKS, 1, struct.pack("<qqq40x", 99, 0, 1)),
        _frame(_BLOCKS, 1, struct.pack("<qqq40x", 1, 1, 1)),
        _frame(_BLOCKS, 1, struct.pack("<qqq40x", 1, 0, 1000)),
        _frame(_BLOCKS, 1, struct.pack("<qqq40x", 1, 0, -1)),
        _frame(_BLOCKS, 1, struct.pack("<qqq40x", 1, 0, 1)),
        _frame(_RESULTS, 1, b""),
    ],
)
def test_a_host_that_lies_about_blocks_is_lost(lie: bytes, to_host: bool) -> None:
    tier = make_tier(SPEC, num_blocks=4)
    rows, blocks = socket.socketpair(), socket.socketpair()
    tier.connect(1, rows[0].detach(), blocks[0].detach(), 10, 5.0)
    cache = torch.zeros(2, SPEC.num_layers, 2, 2, BLOCK_SIZE, SPEC.head_size)
    ids = (0, 1), (HOST_BLOCKS, HOST_BLOCKS + 1)
    src, dst = ids if to_host else ids[::-1]
    direction = MoveDirection.TO_HOST if to_host else MoveDirection.TO_DEVICE
    tier.start_move(
        KVMove(request_id="r", move_id=1, direction=direction, src_block_ids=src, dst_block_ids=dst), *cache
    )
    blocks[1].recv(1 << 16)
    blocks[1].sendall(lie)
    events = collect(tier, 2)
    assert {kind_of(event) for event in events} == {HOST_LOST, WORK_FAILED}
    tier.close()


def test_an_engine_that_sends_nonsense_ends_its_session(open_network: Callable[..., Network]) -> None:
    far = make_tier(SPEC, num_blocks=4)
    for nonsense in (
        b"\0" * 64,
        _frame(1, 1, b""),
        _frame(1, 1, struct.pack("<iiiiiiqq", 99, 0, 1, 0, 0, 0, 1, 5)),
        _frame(1, 1, struct.pack("<iiiiiiqq", 0, 0, 1, 3, 0, 0, 1, 5)),
        _frame(1, 1, struct.pack("<iiiiiiqqi", 0, 0, 1, 0, 1, 0, 1, 5, 4)),
        _frame(1, 1, struct.pack("<iiiiiiqq", 0, 0, 1, -1, 0, 0, 1, 5) + 2 * ROW),
        _frame(_RESULTS, 1, b""),
    ):
        rows, blocks = socket.socketpair(), socket.socketpair()
        why: list[str] = []
        ends = rows[0].detach(), blocks[0].detach()
        thread = threading.Thread(target=lambda ends=ends, why=why: why.append(far.serve(*ends, 5.0)))
        thread.start()
        rows[1].sendall(nonsense)
        thread.join(10.0)
        assert not thread.is_alive() and why and why[0], nonsense
    far.close()
