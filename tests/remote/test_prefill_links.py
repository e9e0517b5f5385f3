"""A rank's connections for prefill engines: what comes early or late, what is wrong, and ends that say nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from omniserve import HostsConfig, PrefillConfig
from omniserve.core import link
from omniserve.core.config import ParallelConfig
from omniserve.core.work import HostEvent, RemotePrefill
from omniserve.remote.handshake import Refused, Welcome
from omniserve.remote.network_hosts import NetworkHosts
from omniserve.remote.prefill_engines import PrefillEngines
from omniserve.remote.prefill_messages import Failed, Finished
from omniserve.remote.prefill_ranks import RankReceiver, RankSender
from tests.events import ENGINE_JOINED, ENGINE_LOST, WORK_DONE, WORK_FAILED, Kind, kind_of
from tests.host.helpers import make_spec, make_tier, wait_until
from tests.prefill.servers import SECRET


class Pair:
    """A rank of an engine and the one of a prefill engine that has the same part of the model."""

    def __init__(self, secret_file: str, *, timeout_s: float = 5.0, fingerprint: str = "the same") -> None:
        self.theirs, self.ours = torch.randn(2, 2, 9, 1, 2, 4, 8)
        self.sender = RankSender(self.theirs, fingerprint="the same", secret=SECRET.encode(), address=("127.0.0.1", 0))
        config = PrefillConfig(
            prefill_engines=("127.0.0.1:1",), prefill_secret_file=secret_file, prefill_timeout_s=timeout_s
        )
        self.told: list[HostEvent] = []
        self.receiver = RankReceiver(config, 1, self.ours, fingerprint=fingerprint, tell=self.told.append)

    def join(self) -> None:
        self.receiver.join(1, "a session", self.sender.address)

    def wait_for(self, kind: Kind) -> Any:
        """Return the next event, which must be of this kind."""
        wait_until(lambda: bool(self.told))
        event = self.told.pop(0)
        assert kind_of(event) == kind
        return event

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()


def _prefill(move_id: int, *blocks: int) -> RemotePrefill:
    return RemotePrefill(
        move_id=move_id, engine=1, token_ids=(1,), first_block=0, host_block_ids=blocks, service_class="LS",
        ttft_s=None, cache_salt=None,
    )  # fmt: skip


@pytest.fixture
def pair_of(secret_file: str) -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(**settings: object) -> Pair:
        pairs.append(Pair(secret_file, **settings))  # type: ignore[arg-type]
        pairs[-1].join()
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def test_blocks_may_come_before_the_step_that_asks_for_them(pair_of: Callable[..., Pair]) -> None:
    pair = pair_of()
    pair.wait_for(ENGINE_JOINED)
    pair.sender.send("a session", 7, [5, 2])
    pair.sender.end("a session", Finished(7))
    time.sleep(0.1)
    pair.receiver.start(_prefill(7, 3, 8))
    event = pair.wait_for(WORK_DONE)
    assert (event.move_id, event.prefilled.num_blocks) == (7, 2)
    assert torch.equal(pair.ours[:, [3, 8]], pair.theirs[:, [5, 2]])


def test_what_nobody_asks_for_ends_the_connection(pair_of: Callable[..., Pair]) -> None:
    pair = pair_of(timeout_s=2.0)
    pair.wait_for(ENGINE_JOINED)
    pair.receiver.start(_prefill(7, 3))
    pair.sender.end("a session", Finished(8))
    pair.wait_for(ENGINE_LOST)
    assert pair.wait_for(WORK_FAILED).move_id == 7
    pair.receiver.start(_prefill(9, 3))
    assert pair.wait_for(WORK_FAILED).move_id == 9


def test_a_prefill_that_failed_tells_how_much_has_come(pair_of: Callable[..., Pair]) -> None:
    pair = pair_of()
    pair.wait_for(ENGINE_JOINED)
    pair.receiver.start(_prefill(7, 3, 8))
    pair.sender.send("a session", 7, [5])
    pair.sender.end("a session", Failed(7, ""))
    assert pair.wait_for(WORK_FAILED).prefilled.num_blocks == 1


@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_dropped_engine_is_told_of_once_and_can_be_joined_again(
    pair_of: Callable[..., Pair], is_waiting: bool
) -> None:
    pair = pair_of()
    for _ in range(2):
        pair.wait_for(ENGINE_JOINED)
        if is_waiting:  # for the step that asks
            pair.sender.end("a session", Finished(8))
        pair.receiver.drop(1)
        pair.wait_for(ENGINE_LOST)
        pair.receiver.drop(1)
        pair.sender.end_session("a session")
        time.sleep(0.05)
        assert not pair.told
        pair.join()
    pair.wait_for(ENGINE_JOINED)


def test_a_rank_with_other_weights_is_refused(pair_of: Callable[..., Pair], caplog: pytest.LogCaptureFixture) -> None:
    pair = pair_of(fingerprint="another")
    pair.wait_for(ENGINE_LOST)
    assert "other weights in its part of the model" in caplog.text


def test_strangers_are_refused(pair_of: Callable[..., Pair]) -> None:
    pair = pair_of()
    pair.wait_for(ENGINE_JOINED)
    peer = link.connect(pair.sender.address, SECRET.encode(), 5.0, "the rank")
    peer.send(Welcome())
    assert isinstance(peer.receive(5.0), Refused)
    peer.close()
    with socket.create_connection(pair.sender.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1000):
                pass
    pair.receiver.start(_prefill(7, 3))
    pair.sender.send("a session", 7, [5])
    pair.sender.end("a session", Finished(7))
    pair.wait_for(WORK_DONE)


# -- ends that say nothing -------------------------------------------------------------------------------------------

_SILENT_S, _SOON_S = 60.0, 20.0


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """An address at which connections are accepted, and never answered."""
    monkeypatch.setattr("omniserve.core.link._HANDSHAKE_S", _SILENT_S)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[:2]


def _closes_soon(close: Callable[[], None]) -> None:
    began_s = time.monotonic()
    close()
    assert time.monotonic() - began_s < _SOON_S


def test_a_rank_that_connects_to_a_silent_one_ends(silent: tuple[str, int], secret_file: str) -> None:
    pair = Pair(secret_file)
    pair.receiver.join(1, "a session", silent)
    time.sleep(0.1)
    _closes_soon(pair.close)
    assert not pair.told


def test_an_engine_that_connects_to_silent_peers_ends(
    silent: tuple[str, int], secret_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = ("{}:{}".format(*silent),)
    monkeypatch.setattr(threading.Event, "wait", _at_most_a_moment(threading.Event.wait))  # it waits for a first answer
    prefills = PrefillEngines(
        PrefillConfig(prefill_engines=address, prefill_secret_file=secret_file), torch.zeros(2, 9, 1, 2, 4, 8),
        fingerprint="", state_bytes=0, classes=["LS"], parallel=ParallelConfig(),
    )  # fmt: skip
    with contextlib.closing(make_tier(make_spec(), num_blocks=4)) as tier:
        hosts = NetworkHosts(HostsConfig(cpu_hosts=address, cpu_host_secret_file=secret_file), tier)
        _closes_soon(hosts.close)
    _closes_soon(prefills.close)


def _at_most_a_moment(wait: Callable[..., bool]) -> Callable[..., bool]:
    return lambda event, timeout=None: wait(event, 0.2 if timeout is None else min(timeout, 0.2))
