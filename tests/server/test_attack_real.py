"""Attacks on a real engine: odd bodies, leaving in every phase, ten times too much work."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys

import pytest
from hypothesis import given
from running import RunningServer, wait_until

from omniserve.launch.models import BUILTIN_MODEL_NAME
from tests.server.attack import bodies
from tests.server.attack.real import FLAGS, overload
from tests.server.attack.sockets import send

MIB = 1 << 20
LONG = {"model": BUILTIN_MODEL_NAME, "prompt": "The with statement", "ignore_eos": True, "stream": True}
QUICK = ("--execution", "compile=false", "--limit", "profile_time_limit_s=2", "--limit", "max_queued_requests=64")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    home = str(tmp_path_factory.mktemp("home"))
    command = [sys.executable, "-m", "omniserve.server", *FLAGS, *QUICK]
    server = RunningServer(command, XDG_DATA_HOME=home, XDG_CACHE_HOME=home).wait_until_ready()
    yield server
    free(server)
    assert server.stop() == 0
    assert not [line for line in server.log if "Traceback" in line], "".join(server.log)


def free(server):
    server.wait_until_free()
    server.wait_for_metric('omniserve_kv_blocks_used{tier="host"}', 0)


def read_until(connection, mark):
    while mark not in (part := connection.recv(1 << 16)):
        assert part, "the server closed the connection"


def leave_in_prefill(server):
    send(server, LONG | {"prompt": "word " * 400, "max_tokens": 5}).close()


def leave_in_decode(server):
    with send(server, LONG | {"max_tokens": 400, "n": 3}) as connection:
        read_until(connection, b"data:")


def leave_with_a_grammar(server):
    with send(server, LONG | {"max_tokens": 400, "ignore_eos": False, "response_format": {"type": "json_object"}}):
        pass


def leave_while_queued(server):
    with send(server, LONG | {"max_tokens": 200, "n": 60, "service_tier": "flex"}) as first:
        read_until(first, b"data:")
        send(server, LONG | {"max_tokens": 200, "service_tier": "flex"}).close()


def leave_on_the_host_tier(server):
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(send(server, LONG | {"max_tokens": 400, "n": 20, "service_tier": "flex"}))
        host_blocks = 'omniserve_kv_blocks_used{tier="host"}'
        wait_until(lambda: server.metric(host_blocks) > 0, lambda: "no request went to the host tier")


def leave_while_scored(server):
    fields = {"prompt": "word " * 300, "echo": True, "logprobs": 5, "max_tokens": 0, "stream": False}
    send(server, {"model": BUILTIN_MODEL_NAME} | fields).close()


def any_body_is_answered(server, num_examples=30):
    with server.http() as http:

        @bodies.bounded(num_examples)
        @given(request=bodies.requests())
        def attack(request):
            path, body = request
            bodies.check_answer(http.post(path, content=body, headers={"content-type": "application/json"}))

        attack()


def a_start_prints_lines_of_the_project_alone(server):
    # A profile that was measured on a busy machine is a warning.
    own = re.compile(r"INFO (engine: |serving \S+ on http://)|(INFO|WARNING) omniserve\.[\w.]+: ")
    serving = next(number for number, line in enumerate(server.log) if line.startswith("INFO serving"))
    assert [line for line in server.log[: serving + 1] if not own.match(line)] == []


LEAVES = [f for name, f in sorted(globals().items()) if name.startswith("leave_")]


@pytest.mark.parametrize("attack", [a_start_prints_lines_of_the_project_alone, *LEAVES, any_body_is_answered])
def test_whatever_is_done_to_it_a_real_server_is_free_afterwards(server, attack):
    """All in one function, so that one process of tests starts one server."""
    attack(server)
    free(server)


@pytest.mark.slow
def test_any_of_many_bodies_is_answered(server):
    any_body_is_answered(server, 80)


@pytest.mark.slow
def test_ten_times_too_much_work(server):
    report = asyncio.run(overload(server, factor=10, seconds=6, capacity_s=2))
    assert report.tally.outcomes["200"] > 0
    assert report.tally.outcomes["429"] > report.tally.outcomes["200"], report
    assert report.most.api_bytes < report.before.api_bytes + 300 * MIB, report
    assert report.most.engine_bytes < report.before.engine_bytes + 300 * MIB, report
    assert report.after.num_files <= report.before.num_files + 5, report
