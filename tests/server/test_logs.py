"""Request ids go in and out, and logs that machines read hold one object a line."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time

import fake_engine
import httpx
import pytest

from omniserve.core.logs import JsonFormatter
from omniserve.server.connections import RequestLog


@pytest.fixture(scope="module")
def logging_server(start_module_server):
    return start_module_server("--api-key", "k").wait_until_ready()


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
            await RequestLog(fail)(scope, None, None)
        except RuntimeError:  # as the HTTP server does
            record = logging.LogRecord("x", logging.ERROR, "", 0, "failed", (), sys.exc_info())
            return json.loads(JsonFormatter().format(record))

    line = asyncio.run(scenario())
    assert line["request_id"] == "mine" and "RuntimeError: a bug" in line["exception"]


def test_lines_for_machines_and_those_of_the_engine_can_be_joined_with_those_of_the_api(start_process):
    server = start_process("--log-format", "json", "--log-level", "debug", "--api-key", "k").wait_until_ready()

    def complete(name, **body):
        url, headers = f"{server.url}/v1/completions", {"x-request-id": name, "authorization": "Bearer k"}
        return httpx.post(url, json={"prompt": "ab", "max_tokens": 3} | body, headers=headers, timeout=30)

    answer = complete("good", n=2).json()
    complete("bad", prompt=[fake_engine.BAD_OUTPUT])
    complete("refused", prompt=[fake_engine.REFUSE])
    complete("stopped", prompt="ab", stop=["b"], max_tokens=100)
    get(server, "/v1/models", **{"x-request-id": "unknown"})
    server.wait_for_metric('omniserve_requests_running{service_class="LS"}', 0)
    server.stop()
    lines = [json.loads(line) for line in server.log]
    assert all(set(line) >= {"time", "level", "logger", "message"} for line in lines)
    assert any(line["message"].startswith("serving fake on") for line in lines)
    access = {line["request_id"]: line for line in lines if line["logger"] == "omniserve.access"}
    good, unknown = access["good"], access["unknown"]
    assert (good["method"], good["path"], good["status"]) == ("POST", "/v1/completions", 200)
    assert good["key"] == "--api-key 1" and good["seconds"] > 0
    assert unknown["status"] == 401 and "key" not in unknown
    call = {name: line["call_id"] for name, line in access.items() if "call_id" in line}
    assert call["good"] == answer["id"]
    about = {}
    for line in lines:
        if "engine_request_id" in line and "request_id" in line:
            about.setdefault(line["request_id"], []).append(
                (line["engine_request_id"], line["message"].split(" ", 2)[2])
            )
    both = [f"{call['good']}-{i}" for i in range(2)]
    for i in both:  # the lines of one may come between those of the other
        assert [line for line in about["good"] if line[0] == i] == [(i, "accepted"), (i, "ended: length, 3 tokens")]
    assert len(about["good"]) == 4
    one = f"{call['bad']}-0"
    assert about["bad"] == [(one, "accepted"), (one, "failed"), (one, "ended: error, 1 tokens")]
    assert about["refused"] == [(f"{call['refused']}-0", "refused: the fake engine does not like this prompt")]
    one = f"{call['stopped']}-0"
    assert about["stopped"] == [(one, "accepted"), (one, "aborted")]


def test_lines_for_people_are_few(server, client):
    client.completions.create(model="fake", prompt="a", extra_headers={"x-request-id": "unlogged"})
    assert not any("unlogged" in line or "/v1/completions" in line for line in server.log)


@pytest.mark.slow
def test_each_line_of_a_start_is_json(tmp_path):
    """The model is real: torch, transformers and what they import, in all processes, until the layers are compiled."""
    command = [sys.executable, "-m", "omniserve.server", "--port", "0", "--log-format", "json"]
    command += ["--limit", "profile_start_s=1", "--limit", "profile_time_limit_s=2"]
    folders = {"XDG_CACHE_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path), "HOME": str(tmp_path)}
    with open(tmp_path / "out", "w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | folders)
        try:
            deadline_s = time.monotonic() + 500
            while "compiled halves are in use" not in (text := (tmp_path / "out").read_text()):
                assert server.poll() is None and time.monotonic() < deadline_s, text
                time.sleep(0.5)
        finally:
            server.terminate()
            status = server.wait(120)
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert status == 0
    assert any(line["message"].startswith("serving omniserve-builtin on") for line in lines)
    assert {line["logger"] for line in lines if line["level"] != "info"} <= {"omniserve.profiling.measure"}, "noise"
    assert "merged 0" not in str(lines)
