"""Request ids go in and out, and logs that machines read hold one object a line."""

from __future__ import annotations

import asyncio
import json
import logging
import sys

import httpx
import openai
import pytest

from omniserve.server.logs import JsonFormatter
from omniserve.server.request_ids import RequestIds


@pytest.fixture(scope="module")
def logging_server(start_server):
    return start_server("--log-format", "json", "--api-key", "k").wait_until_ready()


def get(server, path, **headers):
    return httpx.get(f"{server.url}{path}", headers=headers, timeout=30)


def test_request_id_of_the_client_comes_back(server, client):
    answer = client.completions.create(model="fake", prompt="a", extra_headers={"x-request-id": "mine-1"})
    assert answer._request_id == "mine-1"
    with server.http() as http:
        body = {"model": "fake", "prompt": "a", "stream": True}
        assert http.post("/v1/completions", json=body, headers={"x-request-id": "2"}).headers["x-request-id"] == "2"


@pytest.mark.parametrize("given", [None, "", "two words", "x" * 129, "a\tb", "e\u0301".encode()])
def test_otherwise_a_new_one_is_made(server, given):
    ids = [get(server, "/health", **({} if given is None else {"x-request-id": given})) for _ in range(2)]
    one, other = (response.headers["x-request-id"] for response in ids)
    assert one.startswith("req_") and other.startswith("req_") and one != other


@pytest.mark.parametrize(("path", "status"), [("/v1/nothing", 404), ("/v1/models", 401)])
def test_errors_have_one(logging_server, path, status):
    headers = {"x-request-id": "e"} | ({"authorization": "Bearer k"} if status == 404 else {})
    response = get(logging_server, path, **headers)
    assert (response.status_code, response.headers["x-request-id"]) == (status, "e")


def test_what_goes_wrong_at_last_is_logged_with_the_id():
    async def fail(scope, receive, send):
        raise RuntimeError("a bug")

    async def scenario():
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"x-request-id", b"mine")]}
        try:
            await RequestIds(fail)(scope, None, None)
        except RuntimeError:  # as the HTTP server does
            record = logging.LogRecord("x", logging.ERROR, "", 0, "failed", (), sys.exc_info())
            return json.loads(JsonFormatter().format(record))

    line = asyncio.run(scenario())
    assert line["request_id"] == "mine" and "RuntimeError: a bug" in line["exception"]


def test_lines_for_machines(start_server):
    server = start_server("--log-format", "json", "--api-key", "k").wait_until_ready()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0)
    client.completions.create(model="fake", prompt="a", extra_headers={"x-request-id": "one"})
    get(server, "/v1/models", **{"x-request-id": "two"})
    server.stop()
    lines = [json.loads(line) for line in server.log]
    assert all(set(line) >= {"time", "level", "logger", "message"} for line in lines)
    assert any(line["message"].startswith("serving fake on") for line in lines)
    about = {line["request_id"]: line for line in lines if line["logger"] == "omniserve.access"}
    assert (about["one"]["method"], about["one"]["path"], about["one"]["status"]) == ("POST", "/v1/completions", 200)
    assert about["one"]["key"] == "--api-key 1" and about["one"]["seconds"] > 0
    assert about["two"]["status"] == 401 and "key" not in about["two"]


def test_lines_for_people_are_few(server, client):
    client.completions.create(model="fake", prompt="a", extra_headers={"x-request-id": "unlogged"})
    assert not any("unlogged" in line or "/v1/completions" in line for line in server.log)
