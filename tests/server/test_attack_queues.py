"""An engine that is stuck in a step: what waits for it in the API process is bounded."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest
from fake_engine import FakeEngine, FakeLoader

from omniserve.core.config import EngineConfig
from omniserve.core.request import Request, SamplingParams
from omniserve.server.engines import client as engine_client
from omniserve.server.engines.client import EngineClient
from omniserve.server.engines.local import starter
from omniserve.server.engines.messages import AskStats
from omniserve.server.errors import ApiError


class StuckEngine(FakeEngine):
    """Hears nothing while it is held up."""

    def __init__(self, *args, goes_on, **options):
        super().__init__(*args, **options)
        self.goes_on = goes_on

    def add(self, request, **options):
        self.goes_on.wait()
        return super().add(request, **options)

    def stats(self):
        self.goes_on.wait()
        return super().stats()


class CountingClient(EngineClient):
    """Counts what it sends."""

    def __init__(self):
        self.goes_on = threading.Event()
        self.goes_on.set()
        make = lambda _: StuckEngine(400, 0, EngineConfig(device_kv_bytes=4 << 20), goes_on=self.goes_on)  # noqa: E731
        super().__init__(starter(make))
        self.sent = []

    def _send(self, message):
        self.sent.append(type(message))
        return super()._send(message)


def with_client(scenario):
    async def run():
        client = CountingClient()
        await client.start(lambda text: None)
        try:
            await scenario(client)
        finally:
            client.goes_on.set()
            await client.close()

    asyncio.run(run())


async def poll(client, timeout_s):
    try:
        return await client.stats(timeout_s)
    except TimeoutError:
        return None


def test_polls_share_one_question(engines_in_threads):
    async def scenario(client):
        client.goes_on.clear()
        for _ in range(3):
            assert await asyncio.gather(*(poll(client, 0.01) for _ in range(50))) == [None] * 50
        assert client.sent == [AskStats]
        waiting = [asyncio.create_task(poll(client, 60)) for _ in range(50)]
        client.goes_on.set()
        assert None not in await asyncio.gather(*waiting)
        assert client.sent == [AskStats]
        assert (await client.stats()).steps > 0
        assert client.sent == [AskStats, AskStats]

    with_client(scenario)


def test_poll_that_is_cancelled_as_the_answer_comes_is_cancelled(engines_in_threads):
    async def scenario(client):
        polling = asyncio.create_task(client.stats())
        await asyncio.sleep(0)
        client._stats.add_done_callback(lambda _: polling.cancel())
        await asyncio.wait([polling])
        assert polling.cancelled()  # else the dashboard, which is cancelled once, goes on, and the server does not end

    with_client(scenario)


def test_poll_that_nobody_waits_for_any_more_ends_with_the_engine():
    async def run():
        client = EngineClient(starter(FakeLoader()))
        await client.start(lambda text: None)
        try:
            os.kill(client._peer._process.pid, signal.SIGSTOP)
            assert await poll(client, 0.01) is None
            client.kill()
            await asyncio.wait_for(client.stopped.wait(), 30)
        finally:
            await client.close()

    asyncio.run(run())


def test_requests_that_come_and_go_while_the_engine_hears_nothing(engines_in_threads, monkeypatch):
    monkeypatch.setattr(engine_client, "_MAX_UNTAKEN_BYTES", 20_000)

    async def scenario(client):
        def come_and_go(i):
            prompt = [5] * 100
            if i % 3 == 0:
                prompt[0] = 392  # the fake engine refuses it
            sampling = SamplingParams(max_tokens=2)
            request = Request(request_id=str(i), prompt_token_ids=prompt, sampling=sampling)
            client.submit(request, 0.0, asyncio.Queue().put_nowait)
            client.abort(str(i))

        client.goes_on.clear()
        for i in range(10):
            client.check_room()
            come_and_go(i)
        for i in range(10, 20):
            come_and_go(i)
        with pytest.raises(ApiError, match="too much waits") as caught:
            client.check_room()
        assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
        client.goes_on.set()
        async with asyncio.timeout(60):
            while client._untaken:  # how many goes the engine takes it in, the socket decides
                await client.stats(60)
        assert (await client.stats(60)).scheduler.running == {"LS": 0, "BE": 0}
        client.check_room()
        assert (client._num_untaken_bytes, client._untaken) == (0, {})

    with_client(scenario)
