"""Several engines behind one server: what each gets, who is tried next, and what is left when one dies."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import threading

import openai
import pytest
import zmq
from fake_engine import DIE, REJECT, REJECT_IF_BUSY, SILENT, SLOW
from running import wait_until

from omniserve.core.errors import EngineStopped
from omniserve.core.request import Request
from omniserve.routing.routers import ROUTERS
from omniserve.server.engines.client import EngineClient
from omniserve.server.engines.fleet import Fleet
from omniserve.server.engines.sources import LocalSource


@pytest.fixture
def two(start_server):
    return start_server("--replicas", "2", "--router", "round-robin").wait_until_ready()


def calls(server, count=2):
    return [server.metric(f'omniserve_replica_calls_total{{replica="{i}"}}') for i in range(count)]


def complete(server, prompt, **fields):
    return server.client().completions.create(model="fake", prompt=prompt, **{"max_tokens": 3, **fields})


def test_calls_take_turns_and_answers_are_those_of_one_engine(two, server):
    texts = [complete(two, [5, 6, i], max_tokens=8).choices[0].text for i in range(10)]
    assert texts == [complete(server, [5, 6, i], max_tokens=8).choices[0].text for i in range(10)]
    assert calls(two) == [5, 5]
    two.wait_until_free()


def test_metrics_are_those_of_one_server(two):
    complete(two, [5])
    assert two.metric('omniserve_kv_blocks{tier="device"}') == 2 * 100  # of each fake engine
    assert two.metric("omniserve_latency_error") == 0.125
    assert two.metric("omniserve_host_healthy") == 1
    assert [two.metric(f'omniserve_replica_up{{replica="{i}"}}') for i in range(2)] == [1, 1]


def test_a_server_of_one_engine_has_no_series_of_replicas(server):
    with server.http() as http:
        assert "omniserve_replica_" not in http.get("/metrics").text


def test_a_refusal_is_tried_elsewhere(two):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        slow = pool.submit(complete, two, [SLOW, 7], max_tokens=40)  # the first engine
        wait_until(lambda: sum(requests(two)) == 1, lambda: f"{requests(two)} requests run")
        for _ in range(4):  # by turns the first one is asked first, and refuses
            assert complete(two, [REJECT_IF_BUSY, 5]).usage.completion_tokens == 3
        assert not slow.done()
        assert calls(two)[1] == 4
        slow.result()


def requests(server):
    return [server.metric(f'omniserve_replica_requests{{kind="LS",replica="{i}"}}') for i in range(2)]


def test_a_refusal_by_all_is_a_429_with_the_soonest_time(two):
    with pytest.raises(openai.RateLimitError) as refused:
        complete(two, [REJECT])
    assert refused.value.response.headers["retry-after"] == "3"  # 2.5 s
    assert sum(calls(two)) == 2 and requests(two) == [0, 0]


def test_a_call_that_kills_engines_is_not_given_to_all(start_server):
    three = start_server(
        "--replicas", "3", "--router", "round-robin", "--limit", "engine_restarts=2"
    ).wait_until_ready()
    with pytest.raises(openai.InternalServerError):
        complete(three, [DIE])
    assert sorted(calls(three, 3)) == [0, 1, 1]
    assert complete(three, [5]).usage.completion_tokens == 3
    wait_until(lambda: three.metric("omniserve_engine_restarts_total") == 2, lambda: "".join(three.log))


def test_what_has_no_token_yet_goes_on_elsewhere(start_process):
    """The rest of a dead engine's requests gets an error that says so; the server goes on."""
    both = start_process("--replicas", "2", "--router", "round-robin").wait_until_ready()
    ended = []

    def wait_for(prompt):
        try:
            ended.append(complete(both, prompt, max_tokens=400))
        except openai.APIError as error:
            ended.append(error)

    threads = [threading.Thread(target=wait_for, args=[prompt], daemon=True) for prompt in ([SILENT], [SLOW], [SLOW])]
    for i, thread in enumerate(threads):
        thread.start()
        wait_until(lambda i=i: sum(calls(both)) == i + 1, lambda: f"{calls(both)}")
    # The first engine has the silent one and the second slow one, which has tokens by now or soon.
    wait_until(lambda: both.metric('omniserve_itl_seconds_count{service_class="LS"}') > 4, lambda: "no tokens")
    first, _ = engine_processes(both)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: calls(both)[1] == 2, lambda: f"{calls(both)}")
    wait_until(lambda: ended, lambda: "nobody was told")
    assert isinstance(ended[0], openai.InternalServerError) and "engine" in str(ended[0])
    assert len(ended) == 1 and requests(both)[1] == 2
    assert complete(both, [5]).usage.completion_tokens == 3


def engine_processes(server):
    """Return the ids of a server's engine processes, in the order of their start."""
    found = []
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/status") as status, open(f"/proc/{name}/cmdline") as command:
                parent = next(line.split()[1] for line in status if line.startswith("PPid:"))
                if "multiprocessing" in command.read():
                    found.append((int(name), int(parent)))
        except (OSError, ValueError, StopIteration):
            continue
    own = [(pid, parent) for pid, parent in found if parent == server.process.pid]
    # Spawned ones are children of the server; the tracker of resources is one, too.
    return sorted(pid for pid, _ in own if "spawn_main" in open(f"/proc/{pid}/cmdline").read())


def test_an_adapter_that_one_engine_has_no_more_is_served_by_the_others(start_process, tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 4}')
    both = start_process(
        "--replicas", "2", "--router", "round-robin", f"--lora-modules=x={folder}", "--limit", "engine_restarts=3"
    ).wait_until_ready()

    def restart(number):
        before = both.metric("omniserve_engine_restarts_total")
        os.kill(engine_processes(both)[number], signal.SIGKILL)
        wait_until(lambda: both.metric("omniserve_engine_restarts_total") == before + 1, lambda: "".join(both.log))

    def names():
        return [model.id for model in both.client().models.list()]

    (folder / "adapter_config.json").unlink()
    restart(0)
    assert names() == ["fake", "x"]
    before = calls(both)
    for _ in range(4):
        assert both.client().completions.create(model="x", prompt=[5], max_tokens=3).usage.completion_tokens == 3
    assert sorted(now - then for now, then in zip(calls(both), before, strict=True)) == [0, 4]
    for _ in range(4):
        complete(both, [5])
    assert min(now - then for now, then in zip(calls(both), before, strict=True)) == 2
    restart(0)  # the one that is older by now
    assert names() == ["fake"], "no engine has it"
    assert complete(both, [5]).usage.completion_tokens == 3


def test_an_adapter_stays_while_an_engine_that_may_have_it_is_away():
    async def nowhere():
        raise OSError

    fleet = Fleet([LocalSource("local:0", nowhere), LocalSource("local:1", nowhere)], ROUTERS["round-robin"]())
    first, second = (member.engine.client for member in fleet.members)
    first.refused_loras.add("x")
    assert fleet.has_lora("x", beside=first)
    second.failure = "it died"
    assert fleet.has_lora("x", beside=first), "it is loaded there when that engine is back"
    second.failure = None
    second.refused_loras.add("x")
    assert not fleet.has_lora("x", beside=first)


def test_a_request_to_an_engine_that_is_just_dying_hears_of_its_death():
    class Dying:
        has_own_clock, is_alive = False, True

        def send(self, data):
            raise zmq.Again

    async def events_of_a_request():
        client, events = EngineClient(lambda: None), []
        client._peer = Dying()
        client.submit(Request(prompt_token_ids=(5,), request_id="a"), 0.0, events.append)
        assert not events
        client._fail("it died")
        return events

    ((request_id, error),) = asyncio.run(events_of_a_request())
    assert request_id == "a" and isinstance(error, EngineStopped) and str(error) == "it died"
