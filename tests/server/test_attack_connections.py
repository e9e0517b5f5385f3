"""Thousands of connections: everybody is answered or refused, and memory and open files come back."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import resource
import time
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from running import wait_until
from uvicorn.server import ServerState

from omniserve.server.connections import Connections, allow_connections
from tests.quick import slow_except
from tests.server.attack.load import send_all
from tests.server.attack.processes import held
from tests.server.attack.sockets import connect, head, read_all

MIB = 1 << 20
HERE_AND_THERE = {"model": "fake", "max_tokens": 5}


@pytest.fixture(scope="module", autouse=True)
def many_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 20_000), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def wait_for_files(server, most):
    wait_until(lambda: held(server).num_files <= most, lambda: f"{held(server).num_files} files are open, not {most}")


def mixed(number):
    for i in range(number):
        tier = "default" if i % 3 else "flex"
        yield {"model": "fake", "prompt": "abc", "max_tokens": 4 + i % 5, "stream": i % 2 == 0, "service_tier": tier}


@pytest.mark.parametrize("number", slow_except((400,), (400, 2000)))
def test_so_many_connections_and_requests(start_process, number):
    queued = number * 3 // 10
    server = start_process("--limit", f"max_queued_requests={queued}").wait_until_ready()
    asyncio.run(send_all(server.url, mixed(50)))
    before = held(server)
    idle = [connect(server) for _ in range(number)]

    async def flood_and_look():
        flood = asyncio.create_task(send_all(server.url, mixed(number)))
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            while not flood.done():
                assert (await http.get("/health")).status_code == 200
                await asyncio.sleep(0.1)
        return await flood

    peaks = []
    for _ in range(2):
        tally = asyncio.run(flood_and_look())
        tally.check(number)
        assert tally.outcomes["200"] >= queued
        server.wait_until_free()
        wait_for_files(server, before.num_files + number + 5)
        peaks.append(held(server))
    assert peaks[0].api_bytes < before.api_bytes + number * 0.15 * MIB
    assert peaks[0].engine_bytes < before.engine_bytes + number * 0.05 * MIB
    # Whatever the first flood took from the system is enough for another one.
    assert peaks[1].api_bytes < peaks[0].api_bytes + 30 * MIB
    assert peaks[1].engine_bytes < peaks[0].engine_bytes + 30 * MIB
    for connection in idle:
        connection.close()
    wait_for_files(server, before.num_files + 5)
    assert server.stop() == 0
    assert not [line for line in server.log if "Traceback" in line], "".join(server.log)


def test_hundreds_of_connections_are_all_served(server):
    idle = [connect(server) for _ in range(100)]
    tally = asyncio.run(send_all(server.url, mixed(300)))
    assert tally.outcomes == {"200": 300}
    for connection in idle:
        connection.close()
    server.wait_until_free()


def test_idle_connections_give_way(start_server):
    server = start_server("--limit", "max_connections=10").wait_until_ready()
    idle = [connect(server) for _ in range(30)]
    for connection in idle[:20]:
        assert read_all(connection) == b""
    assert httpx.get(f"{server.url}/health").status_code == 200
    idle[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert read_all(idle[-1]).startswith(b"HTTP/1.1 200")


def test_a_connection_is_kept_for_longer_than_clients_keep_it(start_server, monkeypatch):
    """Clients drop an idle connection after 5 s. If the server did so, too, a request in that moment would be lost."""
    server = start_server().wait_until_ready()
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    connection.connect()
    opened, passed_s, monotonic = connection.sock, 0.0, time.monotonic
    clock = SimpleNamespace(monotonic=lambda: monotonic() + passed_s)
    monkeypatch.setattr("omniserve.server.connections.time", clock)
    for wait_s in (0.0, 5.5):
        passed_s += wait_s
        server.skip(wait_s)
        time.sleep(0.3)  # in which it looks for idle connections twice
        connection.request("GET", "/health/live")
        response = connection.getresponse()
        assert response.status == 200 and response.read()
        assert connection.sock is opened, "it is not another one"


def test_beyond_the_last_connection_there_is_a_refusal(start_server):
    server = start_server("--limit", "max_connections=10").wait_until_ready()
    busy = [connect(server) for _ in range(10)]
    body = b'{"model": "fake", "prompt": [396, 5], "max_tokens": 400, "stream": true}'
    for connection in busy:
        connection.sendall(head(body) + body)
    for connection in busy:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
    tally = asyncio.run(send_all(server.url, [HERE_AND_THERE | {"prompt": "a"}] * 30))
    assert tally.outcomes == {"503": 30}
    tally.check(30)
    refused = httpx.get(f"{server.url}/health")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "overloaded"
    for connection in busy:
        connection.close()
    server.wait_until_free()
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_flood_beyond_the_last_connection_takes_no_files_from_others(start_process):
    server = start_process("--limit", "max_connections=10").wait_until_ready()
    body = b'{"model": "fake", "prompt": [396, 5], "max_tokens": 400, "stream": true}'
    busy = [connect(server) for _ in range(10)]
    for connection in busy:
        connection.sendall(head(body) + body)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
    room = held(server).num_files + 96  # of 128 that are kept back, others have some
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (room, room))
    flood = [connect(server) for _ in range(250)]
    said = [read_all(connection) for connection in flood]
    assert {answer[:12] for answer in said} == {b"", b"HTTP/1.1 503"}
    for connection in (*busy, *flood):
        connection.close()
    server.wait_until_free()
    assert not [line for line in server.log if "open files" in line], "".join(server.log[:20])


class FakeConnection:
    """Remembers what was done to it."""

    def __init__(self, num_unsent=0):
        self.transport = self
        self.num_unsent = num_unsent
        self.end = None

    def get_write_buffer_size(self):
        return self.num_unsent

    def close(self):
        self.end = "closed"

    def abort(self):
        self.end = "aborted"


def test_whoever_was_idle_longest_gives_way(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr("omniserve.server.connections.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    connections = Connections(3, patience_s=100)
    a, b, c, d, e, f = (FakeConnection(num_unsent) for num_unsent in (0, 5, 0, 0, 0, 0))
    assert all(connections.enter(connection) for connection in (a, b, c))
    connections.note(a, is_idle=False)
    connections.note(a, is_idle=True)
    connections.note(c, is_idle=True)  # it was: no change
    assert connections.enter(d)
    assert (a.end, b.end, c.end) == (None, None, "aborted"), "b has not read its answer"
    assert connections.enter(e) and a.end == "aborted"
    connections.note(d, is_idle=False)
    connections.note(e, is_idle=False)
    assert not connections.enter(f)
    connections.close_idle()
    assert b.end is None
    for _ in range(100):
        next(clock)
    connections.close_idle()
    assert b.end is None, "its request may have come, and not have been read yet"
    connections.close_idle()
    assert (b.end, d.end) == ("closed", None)
    connections.leave(b)
    assert connections.enter(f)


def test_a_request_that_comes_while_the_server_is_busy_is_read():
    """A callback takes longer than a connection has patience, and a look for idle ones comes right behind it."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def scenario():
        connections = Connections(3, patience_s=0.2)
        config = uvicorn.Config(app, lifespan="off", log_config=None)
        config.load()
        state, loop = ServerState(), asyncio.get_running_loop()

        def protocol():
            made = connections.protocol(config=config, server_state=state, app_state={})
            connection_made = made.connection_made

            def slow(transport):
                connection_made(transport)
                time.sleep(0.5)
                connections.close_idle()

            made.connection_made = slow
            return made

        async with await loop.create_server(protocol, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            assert (await reader.readuntil(b"ok")).endswith(b"ok")
            await asyncio.sleep(0.3)
            for _ in range(2):
                connections.close_idle()
            assert await reader.read() == b"", "it is closed when it has been idle"
            writer.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_so_many_are_told_why_they_are_refused_at_a_time():
    connections = Connections(0, patience_s=100)
    refused = [FakeConnection() for _ in range(40)]
    told = [connection for connection in refused if connections.refuse(connection) is not None]
    assert told == refused[:32]
    connections.leave(told[7])
    assert [connections.refuse(connection) is not None for connection in refused[32:34]] == [True, False]


@pytest.mark.parametrize(("files", "wanted", "room"), [(100_000, None, 10_000), (1000, None, 872), (1000, 500, 500)])
def test_as_many_connections_as_files_can_be_open(monkeypatch, files, wanted, room):
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, files))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    assert allow_connections(wanted) == room
    assert raised == [(min(files, 65536), files)]


@pytest.mark.parametrize(("files", "wanted"), [(1000, 900), (100, None)])
def test_more_connections_than_files_can_be_open(monkeypatch, files, wanted):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    with pytest.raises(ValueError, match="raise that limit"):
        allow_connections(wanted)
