"""An engine that dies is started again; everybody is told what to do meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import shutil
import signal
import tempfile
import time

import httpx
import openai
import pytest
from fake_engine import DIE, HANG, SLOW, STALL, FakeLoader
from running import wait_until

from omniserve.core.errors import EngineStopped
from omniserve.core.request import Request, SamplingParams
from omniserve.server.engines import client as engine_client
from omniserve.server.engines.client import EngineClient
from omniserve.server.engines.local import starter
from omniserve.server.engines.supervisor import EngineSupervisor, pause_before
from tests.server.attack.processes import engine_pid

ENDLESS = {"model": "fake", "prompt": [SLOW, 5], "max_tokens": 400}


def health(server, which=""):
    return httpx.get(f"{server.url}/health{which}", timeout=30)


def test_service_goes_on_after_the_engine_was_killed(start_process):
    server = start_process("--limit", "engine_restarts=3").wait_until_ready()
    client = server.client()
    stream = client.completions.create(**ENDLESS, stream=True)
    next(stream)
    assert health(server).status_code == health(server, "/ready").status_code == 200
    os.kill(engine_pid(server), signal.SIGKILL)
    with pytest.raises(openai.APIError, match="exit code -9"):
        list(stream)

    with pytest.raises(openai.InternalServerError, match="send the request again later") as caught:
        client.completions.create(model="fake", prompt="a")
    assert (caught.value.status_code, caught.value.code) == (503, "engine_stopped")
    assert int(caught.value.response.headers["retry-after"]) >= 1
    for which in ("", "/ready"):
        assert health(server, which).status_code == 503
        assert int(health(server, which).headers["retry-after"]) >= 1
    assert health(server, "/live").status_code == 200
    assert server.metric("omniserve_engine_up") == 0

    wait_until(lambda: health(server, "/ready").status_code == 200)
    assert client.completions.create(model="fake", prompt="a", max_tokens=3).usage.completion_tokens == 3
    assert server.metric("omniserve_engine_up") == server.metric("omniserve_engine_restarts_total") == 1
    assert server.metric('omniserve_requests_running{service_class="LS"}') == 0
    assert server.stop() == 0, "".join(server.log)


def test_server_ends_when_its_starts_are_used_up(start_server, no_pause):
    server = start_server("--limit", "engine_restarts=1").wait_until_ready()
    client = server.client()
    with pytest.raises(openai.InternalServerError, match="exit code 7"):
        client.completions.create(model="fake", prompt=[DIE])
    wait_until(lambda: health(server).status_code == 200)
    with pytest.raises(openai.InternalServerError, match="exit code 7"):
        client.completions.create(model="fake", prompt=[DIE])
    assert server.wait() == 1
    assert sum("start 1 of 1" in line for line in server.log) == 1


def test_start_that_fails_uses_up_one_of_the_starts(start_server, no_pause, tmp_path):
    obstacle = tmp_path / "obstacle"
    server = start_server("--limit", "engine_restarts=1", "--fail-while", str(obstacle)).wait_until_ready()
    obstacle.touch()
    with pytest.raises(openai.InternalServerError):
        server.client().completions.create(model="fake", prompt=[DIE])
    assert server.wait() == 1
    assert "could not start again: the fake engine may not start yet" in "".join(server.log)


def test_signal_while_the_engine_is_down_stops_the_server(start_server, no_pause, tmp_path):
    obstacle = tmp_path / "obstacle"
    server = start_server("--limit", "engine_restarts=9", "--fail-while", str(obstacle)).wait_until_ready()
    obstacle.touch()
    with pytest.raises(openai.InternalServerError):
        server.client().completions.create(model="fake", prompt=[DIE])
    wait_until(lambda: any("start 2 of 9" in line for line in server.log))
    assert server.stop() == 1


def test_engine_that_died_has_a_successor_until_none_can_be_started(engines_in_threads, no_pause, tmp_path):
    obstacle = tmp_path / "obstacle"

    async def scenario():
        async with supervised(FakeLoader(fail_while=obstacle), max_restarts=2) as engine:
            first = engine.client
            await die(first)
            assert engine.failure is not None
            second = await successor(engine)
            assert first is not second
            assert (await second.stats()).steps > 0 and engine.num_restarts == 1

            obstacle.touch()
            await die(second)
            await asyncio.wait_for(engine.stopped.wait(), 60)
            assert "may not start yet" in engine.failure and engine.retry_after_s is None

    asyncio.run(scenario())


@contextlib.asynccontextmanager
async def supervised(loader, *, max_restarts):
    """Run an engine that is started again."""
    engine = EngineSupervisor(lambda: EngineClient(starter(loader)), max_restarts=max_restarts)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def successor(engine):
    """Return the client of the engine that is started after one that died."""
    async with asyncio.timeout(60):
        while engine.failure is not None:
            await asyncio.sleep(0.02)
    return engine.client


async def die(client, cause=DIE):
    """Kill the fake engine; return what its request is told when it is dead."""
    queue = asyncio.Queue()
    request = Request(request_id="r", prompt_token_ids=[cause], sampling=SamplingParams(max_tokens=1))
    client.submit(request, time.monotonic(), queue.put_nowait)
    while not isinstance(event := (await queue.get())[1], EngineStopped):
        pass
    return str(event)


def test_an_engine_whose_device_hangs_says_so_in_the_log_and_has_a_successor(engines_in_threads, no_pause, caplog):
    async def scenario():
        async with supervised(FakeLoader(), max_restarts=1) as engine:
            first = engine.client
            told = await die(first, STALL)
            assert re.fullmatch(r"Stalled: the device has not finished a step's tokens within 0\.1 s: .*", told)
            second = await successor(engine)
            assert first is not second and (await second.stats()).steps > 0
            return told

    told = asyncio.run(scenario())
    assert f"the engine has stopped: {told}; start 1 of 1 in 0.01 s" in caplog.text
    log = caplog.text
    assert "the engine's step failed" in log and "Traceback" in log and "omniserve.core.errors.Stalled" in log


def test_an_engine_that_hangs_without_a_word_is_killed_and_has_a_successor(monkeypatch):
    async def scenario():
        monkeypatch.setattr(engine_client, "_ASK_EVERY_S", 0.02)
        async with supervised(FakeLoader(), max_restarts=1) as engine:
            first, process = engine.client, engine.client._peer._process
            queue = asyncio.Queue()
            slow = Request(request_id="s", prompt_token_ids=[SLOW, 5], sampling=SamplingParams(max_tokens=8))
            first.submit(slow, time.monotonic(), queue.put_nowait)
            while (await queue.get())[0] != "s" or first._listeners:
                assert engine.failure is None, "it is slow, and answers"
            monkeypatch.setattr(engine_client, "_SILENCE_S", 0.25)
            assert "its process hung: it did not answer for 0.25 s, and was killed" in await die(first, HANG)
            second = await successor(engine)
            assert first is not second and process.exitcode == -signal.SIGKILL
            assert (await second.stats()).steps > 0

    asyncio.run(scenario())


def test_a_process_that_cannot_even_be_killed_holds_up_nobody(monkeypatch, caplog):
    class Undying:
        pid, exitcode = 4711, None

        def __init__(self):
            self.sentinel, self._end = os.pipe()
            self.joins, self.was_killed = [], False

        def is_alive(self):
            return True

        def kill(self):
            self.was_killed = True

        def join(self, timeout=None):
            assert timeout is not None, "it would hang here"
            self.joins.append(timeout)

    async def scenario():
        client = EngineClient(starter(FakeLoader()))
        await client.start(lambda text: None)
        peer, real = client._peer, client._peer._process
        peer._process = undying = Undying()
        try:
            await asyncio.wait_for(client.close(), 30)
            assert undying.was_killed and undying.joins == [15.0, 30.0]
        finally:
            real.kill()

    asyncio.run(scenario())
    assert "process 4711 did not end within 30 s after it was killed" in caplog.text


def test_a_start_that_finds_no_room_is_a_failed_one_and_the_next_may_do_better(
    engines_in_threads, no_pause, monkeypatch
):
    make_directory, folders, num_calls = tempfile.mkdtemp, [], 0

    def make(*arguments):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        folders.append(make_directory(*arguments))
        return folders[-1]

    async def scenario():
        monkeypatch.setattr(tempfile, "mkdtemp", make)
        async with supervised(FakeLoader(), max_restarts=2) as engine:
            shutil.rmtree(folders.pop())  # as cleaners of /tmp do
            await die(engine.client)
            await successor(engine)
            assert engine.num_restarts == 1 and num_calls == 3

    asyncio.run(scenario())


def test_nobody_is_started_for_a_server_that_is_about_to_stop(engines_in_threads):
    async def scenario():
        async with supervised(FakeLoader(), max_restarts=2) as engine:
            dead = engine.client
            await die(dead)
            engine.keep_down()  # in the pause before the start
            await asyncio.wait_for(engine.stopped.wait(), 60)
            assert engine.client is dead and engine.num_restarts == 0 and engine.retry_after_s is None
            assert "exit code 7" in engine.failure

    asyncio.run(scenario())


def test_pauses_grow_up_to_a_minute():
    assert [pause_before(n) for n in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
