"""Arrival and prediction travel between client and engine."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from fake_engine import AGE, ANNOUNCED, SCALE, SCALED_TTFT_S, SECONDS_PER_TOKEN, SLOW, FakeLoader

from omniserve.core.request import SLO, Request, SamplingParams
from omniserve.server.engines.client import Accepted, EngineClient
from omniserve.server.engines.local import starter

HEADER = "x-omniserve-predicted-ttft-ms"


@pytest.mark.parametrize("stream", [False, True])
def test_answer_tells_the_largest_prediction_of_its_choices(server, stream):
    body = {"model": "fake", "prompt": [[5], [6, 7, 8], [9, 9]], "stream": stream}
    with server.http() as http:
        response = http.post("/v1/completions", json=body)
    assert response.headers[HEADER] == str(3 * SECONDS_PER_TOKEN * 1e3)


@pytest.mark.parametrize("stream", [False, True])
def test_answer_without_prediction_has_no_header(server, stream):
    body = {"model": "fake", "prompt": "a", "service_tier": "flex", "stream": stream}
    with server.http() as http:
        response = http.post("/v1/completions", json=body)
    assert response.status_code == 200
    assert HEADER not in response.headers


@pytest.mark.parametrize("stream", [False, True])
def test_answer_and_metrics_tell_an_objective_that_was_scaled(server, stream):
    """Attainment is told of the objective that holds, and a request's own objectives are never scaled."""

    def count(objective):
        return server.metric(f'omniserve_scaled_objectives_total{{objective="{objective}",service_class="LS"}}')

    body = {"model": "fake", "prompt": [SCALE], "max_tokens": 1, "stream": stream}
    before = [count(objective) for objective in ("ttft", "tpot")]
    with server.http() as http:
        scaled = http.post("/v1/completions", json=body)
        own = http.post("/v1/completions", json=body | {"slo": {"ttft_s": 30.0}})
    headers = "x-omniserve-scaled-ttft-slo-ms", "x-omniserve-scaled-tpot-slo-ms"
    assert [scaled.headers.get(name) for name in headers] == [str(SCALED_TTFT_S * 1e3), None]
    assert own.status_code == 200 and not set(headers) & set(own.headers)
    grown = [count(objective) - value for objective, value in zip(("ttft", "tpot"), before, strict=True)]
    assert grown == [1, 0]


def test_requests_have_been_there_since_their_call_came(server):
    """A body that comes slowly is part of what the client waits for."""
    upload_s = 0.3

    def body():
        yield b'{"model": "fake", "prompt": '
        time.sleep(2 * upload_s)  # begins a little before the server has the head
        yield json.dumps([AGE]).encode() + b"}"

    with server.http() as http:
        response = http.post("/v1/completions", content=body())
    assert float(response.headers[HEADER]) >= upload_s * 1e3


def test_requests_are_announced_in_the_middle_of_a_step(server):
    """The scheduler looks at what comes while a step runs before the step ends."""
    slow = {"model": "fake", "prompt": [SLOW, 5], "max_tokens": 40, "stream": True}
    with server.http() as http, http.stream("POST", "/v1/completions", json=slow) as stream:
        lines = stream.iter_lines()  # kept: an iterator that is dropped closes the stream, and no step is slow then
        next(lines)
        response = http.post("/v1/completions", json={"model": "fake", "prompt": [ANNOUNCED], "max_tokens": 1})
    assert response.headers[HEADER] == "7000.0"


def test_metrics_of_predictions(server):
    def values():
        names = [
            'ttft_predicted_seconds_sum{service_class="LS"}',
            'ttft_prediction_error_seconds_count{service_class="LS"}',
            'ttft_prediction_error_seconds_bucket{le="-1.0",service_class="LS"}',
        ]
        return [server.metric(f"omniserve_{name}") for name in names]

    def call():
        with server.http() as http:
            http.post("/v1/completions", json={"model": "fake", "prompt": [5] * 100, "max_tokens": 2})

    call()  # so that the series are there
    before = values()
    call()
    grown = [after - value for after, value in zip(values(), before, strict=True)]
    # Predicted to take far longer than it does: the error is below -1 s.
    assert grown == [100 * SECONDS_PER_TOKEN, 1, 1]


def test_engine_gets_the_arrival_and_tells_its_prediction():
    request = Request(
        request_id="r", prompt_token_ids=[5, 6], sampling=SamplingParams(max_tokens=1), slo=SLO(ttft_s=1000)
    )

    async def submit(arrival_s):
        client = EngineClient(starter(FakeLoader()))
        await client.start(lambda text: None)
        try:
            queue = asyncio.Queue()
            client.submit(request, arrival_s, queue.put_nowait)
            return [(await queue.get())[1] for _ in range(2)]
        finally:
            await client.close()

    arrival_s = time.monotonic() - 123
    accepted, output = asyncio.run(submit(arrival_s))
    assert accepted == Accepted(2 * SECONDS_PER_TOKEN, None)
    assert output.times.arrival_s == arrival_s
    assert output.times.predicted_ttft_s == 2 * SECONDS_PER_TOKEN
