"""Engines that listen on a socket: found, refused, lost, found again; encrypted where others could connect."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from pathlib import Path

import fake_engine
import openai
import pytest
import zmq
from fake_engine import SILENT, SLOW, FakeLoader
from proxy import Proxy, free_address
from running import wait_until
from test_engines_admin import ask, engines
from test_fleet import calls, complete

from omniserve.core.config import EngineConfig
from omniserve.core.request import RequestOutput, RequestTimes
from omniserve.server.engines import admin_cli
from omniserve.server.engines import cli as engine_cli
from omniserve.server.engines.agent import EngineServer
from omniserve.server.engines.clock import Clock
from omniserve.server.engines.curve import ENGINE, SERVER, checked_address, make_keys, read_keys
from omniserve.server.engines.sources import read_engines_file
from tests.server.in_process import threads_for_engines

pytestmark = pytest.mark.usefixtures("no_pause")


class Agent:
    """An engine server in a thread of this process, its engine in another."""

    def __init__(self, address: str, keys=None, heartbeat_s: float = 20.0, max_model_len: int = 512) -> None:
        self.address = address
        loader = FakeLoader(config=EngineConfig(device_kv_bytes=4 << 20, block_size=16, classes=CLASSES))
        if max_model_len != 512:
            loader = FakeLoader(config=loader.config, vocab_size=399)
        started = threading.Event()

        async def run() -> int:
            self._loop = asyncio.get_running_loop()
            self.server = EngineServer(loader, address, keys, heartbeat_s=heartbeat_s)
            started.set()
            return await self.server.run()

        def main() -> None:
            with threads_for_engines():
                self.status = asyncio.run(run())

        self._thread = threading.Thread(target=main, daemon=True)
        self._thread.start()
        assert started.wait(30)

    def stop(self) -> int:
        self._loop.call_soon_threadsafe(self.server.stop)
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.status


CLASSES = EngineConfig().classes


@pytest.fixture
def start_agent():
    agents = []

    def start(*arguments, **fields):
        agents.append(Agent(*arguments, **fields))
        return agents[-1]

    yield start
    for agent in agents:
        if agent._thread.is_alive():
            agent.stop()


def engines_file(tmp_path: Path, **fields) -> str:
    path = tmp_path / "engines.yaml"
    path.write_text(json.dumps(fields))
    return str(path)


@pytest.fixture
def keys(tmp_path):
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def test_a_server_without_engines_of_its_own_uses_that_of_another_process(start_server, start_agent, tmp_path, keys):
    address = free_address()
    agent = start_agent(address, read_keys(keys, ENGINE))
    file = engines_file(tmp_path, engines=[address], keys="keys")
    server = start_server("--replicas", "0", "--engines", file).wait_until_ready()
    assert complete(server, [5, 6, 7], max_tokens=8).usage.completion_tokens == 8
    stream = server.client().completions.create(model="fake", prompt=[5, 6], max_tokens=20, stream=True)
    assert sum(1 for _ in stream) > 0
    assert [(each["address"], each["state"]) for each in engines(server)] == [(address, "up")]
    server.wait_until_free()
    agent.stop()
    wait_until(lambda: engines(server)[0]["state"] == "down")
    assert "it was ended on its machine" in engines(server)[0]["failure"] or "cut" in engines(server)[0]["failure"]
    with pytest.raises(openai.InternalServerError, match="send the request again later"):
        complete(server, [5])
    start_agent(address, read_keys(keys, ENGINE))
    wait_until(lambda: engines(server)[0]["state"] == "up", lambda: str(engines(server)))
    assert complete(server, [5]).usage.completion_tokens == 3


def test_an_engine_is_added_by_its_address_if_that_is_allowed(start_server, start_agent, tmp_path):
    address = free_address()
    start_agent(address)
    file = engines_file(tmp_path, allowed=["tcp://127.0.0.1:*"])
    server = start_server("--engines", file, "--router", "round-robin").wait_until_ready()
    ask(server, "POST", status=403, json={"address": "tcp://127.0.0.2:7201"})
    added = ask(server, "POST", json={"address": address})
    assert (added["id"], added["address"]) == (1, address)
    wait_until(lambda: engines(server)[1]["state"] == "up", lambda: str(engines(server)))
    ask(server, "POST", status=409, json={"address": address})
    for _ in range(4):
        complete(server, [5])
    assert calls(server) == [2, 2]
    ask(server, "DELETE", "/0")
    wait_until(lambda: len(engines(server)) == 1)
    assert complete(server, [5]).usage.completion_tokens == 3


def test_requests_of_a_cut_connection_go_on_elsewhere_and_it_is_made_again(start_server, start_agent, tmp_path):
    address, outside = free_address(), free_address()
    start_agent(address)
    with contextlib.closing(Proxy(outside, address)) as proxy:
        file = engines_file(tmp_path, engines=[outside])
        server = start_server("--engines", file, "--router", "round-robin").wait_until_ready()
        wait_until(lambda: [each["state"] for each in engines(server)] == ["up", "up"], lambda: str(engines(server)))
        ended = []
        for i, prompt in enumerate(([5], [SILENT], [5], [SLOW, 5])):  # the second engine has the last of each two
            threading.Thread(target=lambda p=prompt: ended.append(outcome(server, p)), daemon=True).start()
            wait_until(lambda i=i: sum(calls(server)) == i + 1)
        wait_until(lambda: len(ended) == 2 and engines(server)[1]["num_requests"] == 2)
        wait_until(lambda: server.metric('omniserve_itl_seconds_count{service_class="LS"}') > 801)
        proxy.cut()
        wait_until(lambda: len(ended) == 3, lambda: str(ended))
        assert isinstance(ended[2], openai.APIError) and "was cut" in str(ended[2])
        wait_until(lambda: [each["state"] for each in engines(server)] == ["up", "up"], lambda: str(engines(server)))
        assert [each["num_requests"] for each in engines(server)] == [1, 0], "the silent one is here now"
        wait_until(lambda: server.metric('omniserve_requests_running{service_class="LS"}') == 1)
        complete(server, [5])
        complete(server, [5])


def outcome(server, prompt):
    try:
        return complete(server, prompt, max_tokens=400)
    except openai.APIError as error:
        return error


def test_another_server_takes_an_engine_when_the_first_one_has_ended(start_server, start_agent, tmp_path):
    address = free_address()
    start_agent(address)
    file = engines_file(tmp_path, engines=[address])
    first = start_server("--replicas", "0", "--engines", file).wait_until_ready()
    second = start_server("--engines", file).wait_until_ready()
    assert complete(first, [5]).usage.completion_tokens == 3
    first.stop()
    wait_until(lambda: engines(second)[1]["state"] == "up", lambda: str(engines(second)))
    complete(second, [5])


def test_another_server_does_not_find_the_adapters_of_the_first_one(start_server, start_agent, tmp_path, monkeypatch):
    loras = fake_engine.FakeLoRAs()
    monkeypatch.setattr(fake_engine, "FakeLoRAs", lambda: loras)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"r": 4}')
    address = free_address()
    start_agent(address)
    file = engines_file(tmp_path, engines=[address])
    flags = ("--replicas", "0", "--engines", file)
    first = start_server(*flags, f"--lora-modules=x={tmp_path / 'adapter'}").wait_until_ready()
    assert first.client().completions.create(model="x", prompt=[5], max_tokens=3).usage.completion_tokens == 3
    assert loras.known
    first.stop()
    second = start_server(*flags).wait_until_ready()
    assert complete(second, [5]).usage.completion_tokens == 3
    assert not loras.known


def test_an_engine_of_another_model_does_not_join(start_server, start_agent, tmp_path):
    address = free_address()
    start_agent(address, max_model_len=256)
    server = start_server("--engines", engines_file(tmp_path, engines=[address])).wait_until_ready()
    wait_until(
        lambda: "is not that of the other engines" in str(engines(server)[1]["failure"]), lambda: str(engines(server))
    )
    assert complete(server, [5]).usage.completion_tokens == 3


def test_who_has_another_key_or_none_is_not_served(start_server, start_agent, tmp_path, keys):
    address = free_address()
    start_agent(address, read_keys(keys, ENGINE))
    make_keys(tmp_path / "others")
    for name in ("engine.key",):  # knows the engine, which does not know it
        (tmp_path / "others" / name).write_bytes((keys / name).read_bytes())
    for fields, told in (({"keys": "others"}, "does not know this server's key"), ({}, "no connection could be made")):
        server = start_server("--engines", engines_file(tmp_path, engines=[address], **fields)).wait_until_ready()
        wait_until(lambda s=server, t=told: t in str(engines(s)[1]["failure"]), lambda s=server: str(engines(s)))
        server.close()


def test_bytes_of_strangers_change_nothing(start_server, start_agent, tmp_path):
    address = free_address()
    start_agent(address)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(address)
        stranger.send(b"cos\nsystem\n(S'true'\ntR.")
        stranger.send_multipart([b"a", b"b", b"c"])
        server = start_server(
            "--replicas", "0", "--engines", engines_file(tmp_path, engines=[address])
        ).wait_until_ready()
        assert complete(server, [5]).usage.completion_tokens == 3


def test_addresses_without_keys_are_of_this_machine_alone():
    for address in ("tcp://127.0.0.1:7201", "tcp://[::1]:7201", "tcp://localhost:1"):
        assert checked_address(address, None, what="x") == address
    for address in ("tcp://0.0.0.0:7201", "tcp://10.0.0.2:7201", "tcp://[::]:1"):
        with pytest.raises(ValueError, match="omniserve engines keys FOLDER"):
            checked_address(address, None, what="x")
    for address in ("10.0.0.2:7201", "ipc://x", "tcp://a", "tcp://a:99999", "tcp://a:b", "tcp://a b:1"):
        with pytest.raises(ValueError, match="must be an address"):
            checked_address(address, None, what="x")


def test_an_engine_that_others_could_reach_is_refused_without_keys(
    capsys, builtin_flags=("--listen", "tcp://0.0.0.0:1")
):
    assert engine_cli.main(list(builtin_flags)) == 2
    assert "nothing would be encrypted" in capsys.readouterr().err


def test_keys_are_made_once_and_for_their_owner_alone(tmp_path, capsys):
    folder = tmp_path / "keys"
    assert admin_cli.main(["keys", str(folder)]) == 0
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["engine.key", "engine.key_secret", "server.key", "server.key_secret"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())
    engine, server = read_keys(folder, ENGINE), read_keys(folder, SERVER)
    assert engine.other == server.public and server.other == engine.public and repr(engine.secret) not in repr(engine)
    assert admin_cli.main(["keys", str(folder)]) == 1
    assert "is there already" in capsys.readouterr().err
    (folder / "server.key").unlink()
    with pytest.raises(ValueError, match=r"server\.key: .*omniserve engines keys"):
        read_keys(folder, ENGINE)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"engine": []}, "Extra inputs"),
        ({"engines": ["tcp://10.0.0.2:7201"]}, "nothing would be encrypted"),
        ({"engines": ["tcp://127.0.0.1:*"]}, "names no port"),
        ({"engines": ["tcp://127.0.0.1:1"] * 2}, "twice"),
        ({"keys": "nowhere"}, "omniserve engines keys"),
    ],
)
def test_a_wrong_file_is_told(tmp_path, fields, told):
    with pytest.raises(ValueError, match=told):
        read_engines_file(Path(engines_file(tmp_path, **fields)))


def test_times_of_another_machine_become_those_of_this_one():
    clock = Clock()
    assert clock.there(5.0) == 5.0
    clock.note(10.0, 110.5, 11.0)  # within a second
    clock.note(20.0, 120.05, 20.1)
    clock.note(30.0, 139.0, 38.0)  # under way for too long to say anything
    assert clock.there(21.0) == pytest.approx(121.0)
    times = RequestTimes(arrival_s=121.0, first_token_s=122.0)
    output = RequestOutput(
        request_id="r", service_class="LS", new_token_ids=(), times=times, host_stays=((121.0, 122.0),)
    )
    here = clock.here(output)
    assert here.times.arrival_s == pytest.approx(21.0) and here.times.first_token_s == pytest.approx(22.0)
    assert here.times.finished_s is None and here.host_stays[0] == pytest.approx((21.0, 22.0))
