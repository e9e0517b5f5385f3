"""Start, disconnects, metrics, signals, and the death of the engine."""

from __future__ import annotations

import asyncio
import signal
import socket

import httpx
import openai
import pytest
from fake_engine import DIE, RAISE_IN_STEP, SLOW
from tokenizers_for_tests import byte_level_tokenizer

from omniserve.server.http_process import listen

ABC = byte_level_tokenizer()("abc").input_ids
LS_RUNNING = 'omniserve_requests_running{service_class="LS"}'
ENDLESS = {"model": "fake", "prompt": [SLOW, *ABC], "max_tokens": 400}


def test_client_that_leaves_frees_its_request(server):
    counter = 'omniserve_requests_total{finish_reason="abort",service_class="LS"}'
    before = server.metric(counter)
    with (
        server.http() as http,
        http.stream("POST", "/v1/completions", json=ENDLESS | {"stream": True, "n": 2}) as response,
    ):
        lines = response.iter_lines()  # kept: httpx closes the stream with it
        next(lines)
        server.wait_for_metric(LS_RUNNING, 2)
    server.wait_for_metric(LS_RUNNING, 0)
    assert server.metric(counter) == before + 2

    with pytest.raises(httpx.ReadTimeout):  # not streaming: the client gives up
        httpx.post(f"{server.url}/v1/completions", json=ENDLESS, timeout=0.5)
    server.wait_for_metric(LS_RUNNING, 0)
    assert server.metric(counter) == before + 3


def test_metrics(server, client):
    def value(name):
        return server.metric(f"omniserve_{name}")

    names = [f'{kind}_seconds_count{{service_class="BE"}}' for kind in ("ttft", "tpot", "e2e")]
    names += [f'slo_total{{met="true",objective="{kind}",service_class="LS"}}' for kind in ("ttft", "tpot")]
    names += ['slo_total{met="false",objective="ttft",service_class="BE"}']
    for tier in ("default", "flex"):  # a first call, so that the series are there
        slo = {"ttft_s": 1e-9 if tier == "flex" else 1000, "tpot_s": 1000}
        extra = {"service_tier": tier, "slo": slo}
        client.completions.create(model="fake", prompt="a", max_tokens=3, extra_body=extra)
    before = {name: value(name) for name in names}
    for tier in ("default", "flex"):
        slo = {"ttft_s": 1e-9 if tier == "flex" else 1000, "tpot_s": 1000}
        extra = {"service_tier": tier, "slo": slo}
        client.completions.create(model="fake", prompt="a", max_tokens=3, extra_body=extra)
    assert {name: value(name) for name in names} == {name: n + 1 for name, n in before.items()}

    for name, expected in {
        'requests_waiting{service_class="LS"}': 0,
        'requests_running{service_class="BE"}': 0,
        'kv_blocks_used{tier="device"}': 0,
        'kv_blocks_used{tier="host"}': 3,
        'kv_blocks_held{service_class="LS",tier="device"}': 0,
        'kv_blocks_held{service_class="BE",tier="host"}': 2,
        'kv_blocks{tier="device"}': 100,
        'kv_blocks{tier="host"}': 200,
        'output_tokens_total{service_class="LS"}': 5,
        'prompt_tokens_total{service_class="BE"}': 6,
        'steps_by_threads_total{threads="1"}': 21,
        'steps_by_threads_total{threads="2"}': 22,
        "piggyback_rows_total": 11,
        "preemptions_total": 12,
        "preempted_tokens_total": 18,
        "layer_preemptions_total": 17,
        'swaps_total{direction="out"}': 13,
        'swaps_total{direction="in"}': 14,
        "host_failures_total": 15,
        "host_kv_read_bytes_total": 19,
        "host_busy_seconds_total": 20.5,
        "checkpoints_total": 16,
        "resumed_tokens_total": 17,
        "latency_error": 0.125,
        "latency_drift": 1.25,
        "host_healthy": 1,
    }.items():
        assert value(name) == expected, name
    assert value("steps_total") > 0


def test_sigterm_finishes_what_runs_and_takes_nothing_new(start_server, monkeypatch):
    server = start_server().wait_until_ready()
    client = server.client()
    stream = client.completions.create(**ENDLESS | {"max_tokens": 200}, stream=True)
    num_chunks = len([next(stream)])
    server.send_signal(signal.SIGTERM)
    while not any("stopping" in line for line in server.log):
        num_chunks += len([next(stream)])
    with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
        client.completions.create(model="fake", prompt="a")
    assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (503, "1")
    assert httpx.get(f"{server.url}/health").status_code == 503
    monkeypatch.setattr("fake_engine.SLOW_STEP_S", 0.001)  # what was to be seen meanwhile was
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert num_chunks + len(chunks) == 200
    assert server.wait() == 0


def test_sigint_with_the_time_over_ends_streams_with_an_error(start_server):
    server = start_server(shutdown_timeout_s=0.2).wait_until_ready()
    stream = server.client().completions.create(**ENDLESS, stream=True)
    next(stream)
    server.send_signal(signal.SIGINT)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    assert server.wait() == 0


def test_second_signal_stops_at_once(start_process):
    server = start_process(shutdown_timeout_s=1000).wait_until_ready()
    stream = server.client().completions.create(**ENDLESS, stream=True)
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    while not any("stopping" in line for line in server.log):
        next(stream)
    assert server.stop() == 128 + signal.SIGTERM


@pytest.mark.parametrize(("prompt", "message"), [(RAISE_IN_STEP, "step failed"), (DIE, "exit code 7")])
def test_death_of_the_engine_is_told_to_all(start_server, prompt, message):
    server = start_server("--limit", "engine_restarts=0").wait_until_ready()
    client = server.client()
    stream = client.completions.create(**ENDLESS, stream=True)
    next(stream)
    with pytest.raises(openai.InternalServerError, match=message) as caught:
        client.completions.create(model="fake", prompt=[prompt])
    assert (caught.value.status_code, caught.value.code) == (500, "engine_stopped")
    with pytest.raises(openai.APIError, match=message):
        list(stream)
    assert server.wait() == 1
    assert any("the engine has stopped" in line and message in line for line in server.log)


def test_engine_that_cannot_start(start_server):
    server = start_server(fail="device_kv_bytes is too small; raise it")
    assert server.wait() == 1
    log = "".join(server.log)
    assert "cannot start: device_kv_bytes is too small; raise it" in log
    assert "Traceback" not in log


def test_answers_are_not_held_back_by_the_network_stack():
    """Regression: on a listener without a named protocol asyncio leaves Nagle's algorithm on, 40 ms an answer."""

    async def no_delay() -> int:
        seen: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accepted(_, writer):
            accepted_socket = writer.get_extra_info("socket")
            seen.set_result(accepted_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with listen("127.0.0.1", 0, stall_timeout_s=60, is_shared=False) as listener:
            async with await asyncio.start_server(accepted, sock=listener):
                _, writer = await asyncio.open_connection(*listener.getsockname())
                writer.close()
                return await seen

    assert asyncio.run(no_delay()) != 0


def test_port_in_use(start_server):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        server = start_server("--port", port, fail="it is started")
        assert server.wait() == 1
    (line,) = server.log
    assert f"cannot listen on 127.0.0.1:{port}" in line
