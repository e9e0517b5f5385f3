"""Connections may be slow, cut off, endless or no HTTP at all: each ends, and nothing is held."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.attack.sockets import connect, head, read_all

BODY = json.dumps({"model": "fake", "prompt": "abc", "max_tokens": 3}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def impatient(start_module_server):
    """A server that waits half a second for anybody."""
    server = start_module_server("--limit", "stall_timeout_s=0.5", "--limit", "max_body_mib=0.25").wait_until_ready()
    yield server
    server.wait_until_free()
    assert not [line for line in server.log if "Traceback" in line], "".join(server.log)


def drip(connection, data, *, pause_s=0.02):
    """Send byte by byte until the server closes; return what it said."""
    said = b""
    connection.setblocking(False)
    for i in range(len(data)):
        try:
            connection.send(data[i : i + 1])
            said += connection.recv(1 << 16)
        except BlockingIOError:
            pass
        except (ConnectionResetError, BrokenPipeError):
            return said
        time.sleep(pause_s)
    connection.settimeout(30)
    return said + read_all(connection)


def test_request_that_comes_byte_by_byte_is_answered(server):
    with connect(server) as connection:
        said = drip(connection, head(BODY).replace(b"Host", b"Connection: close\r\nHost") + BODY, pause_s=0.001)
    assert said.startswith(b"HTTP/1.1 200")


UPLOAD = head(b"", "/v1/files", length=2000).replace(b"application/json", b"multipart/form-data; boundary=a")
# What a client sends at once, and what it sends byte by byte until it is cut off; what it is told begins with the last.
TOO_SLOW = {
    "no head": (b"", b"", b""),
    "a first line": (POST, b"", b""),
    "a header": (POST + b"X: " + b"y" * 100, b"", b""),
    "a slow header": (POST, b"X: " + b"y" * 1000, b""),
    "a slow header after an answer": (head(BODY) + BODY, POST + b"X: " + b"y" * 1000, b"HTTP/1.1 200"),
    "a slow completion": (head(BODY, length=2000), b" " * 1000, b"HTTP/1.1 408"),
    "a slow text": (head(BODY, "/tokenize", length=2000), b" " * 1000, b"HTTP/1.1 408"),
    "a slow batch": (head(BODY, "/v1/batches", length=2000), b" " * 1000, b"HTTP/1.1 408"),
    "a completion that stops": (head(BODY, length=2000) + BODY, b"", b"HTTP/1.1 408"),
    "a file that stops": (UPLOAD + b"--a\r\nContent-Disposition: form-data; name=", b"", b"HTTP/1.1 408"),
    "chunks": (CHUNKED, b"1\r\n \r\n" * 1000, b"HTTP/1.1 408"),
}


def test_what_comes_too_slowly_is_not_waited_for(impatient):
    """All at a time, as most of it is waiting."""

    def attack(at_once, byte_by_byte):
        with connect(impatient) as connection:
            connection.sendall(at_once)
            return drip(connection, byte_by_byte)

    with ThreadPoolExecutor(len(TOO_SLOW)) as pool:
        attacks = {name: pool.submit(attack, *sent) for name, (*sent, _) in TOO_SLOW.items()}
        said = {name: attack.result() for name, attack in attacks.items()}
    told = {name: answer[:12] for name, answer in said.items()}
    assert told == {name: begin for name, (*_, begin) in TOO_SLOW.items()}
    answers = [answer for answer in said.values() if b"HTTP/1.1 408" in answer]
    assert all(b'"code": "request_timeout"' in a and b"--limit stall_timeout_s" in a for a in answers), answers


@pytest.mark.parametrize("start", [CHUNKED, head(b"", length=1 << 40)], ids=["chunked", "content-length"])
def test_body_that_never_ends_is_refused_and_cut(impatient, start):
    part = b"10000\r\n" + b" " * (1 << 16) + b"\r\n" if start is CHUNKED else b" " * (1 << 16)
    with connect(impatient) as connection:
        connection.sendall(start)
        said, num_sent = b"", 0
        connection.setblocking(False)
        while True:
            try:
                num_sent += connection.send(part[num_sent % len(part) :])
            except BlockingIOError:
                time.sleep(0.001)
            except (ConnectionResetError, BrokenPipeError):
                break
            try:
                said += connection.recv(1 << 16)
            except BlockingIOError:
                pass
            except ConnectionResetError:
                break
    assert said.startswith(b"HTTP/1.1 413")


GARBAGE = [
    b"\x00" * 100, b"\xff\xfe\r\n\r\n", b"GET /x HTTP/9.9\r\n\r\n", b"GET /\r\n\r\n", b"\r\n" * 100 + b"x\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: y\r\n\r\n",
    b"G\x00T / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    POST + b"Content-Length: -1\r\n\r\n", POST + b"Content-Length: x\r\n\r\n",
    POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", POST + b"Content-Length: %d\r\n\r\n" % 10**30,
    POST + b"Transfer-Encoding: gzip\r\n\r\n", CHUNKED + b"zz\r\n", CHUNKED + b"-1\r\n", CHUNKED + b"1\r\nab\r\n",
    CHUNKED + b"f" * 100, POST + b"X" * 200_000 + b": y\r\n\r\n", POST + b"X: " + b"y" * 200_000,
    POST + b"A: b\r\n" * 50_000, b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    POST + b"X: a\x00b\r\n\r\n", POST + b" folded\r\n\r\n", b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
]  # fmt: skip


def test_garbage_is_refused_or_dropped(impatient):
    """All of it at a time, as the server waits for the rest of some."""

    def answer_to(data):
        with connect(impatient) as connection:
            try:
                connection.sendall(data)
            except (ConnectionResetError, BrokenPipeError):
                pass  # refused before it had come
            return read_all(connection)

    with ThreadPoolExecutor(len(GARBAGE)) as pool:
        said = list(pool.map(answer_to, GARBAGE))
    for data, text in zip(GARBAGE, said, strict=True):
        answers = text.split(b"HTTP/1.1 ")[1:]
        assert bool(answers) == bool(text), data[:24]
        for answer in answers:
            assert answer[:3] in (b"400", b"403", b"404", b"408", b"413"), (data[:24], answer[:200])
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"], data[:24]


def test_garbage_behind_an_answered_request_is_dropped(impatient):
    # The answer (a 404) is given before the body; its chunks break while it is complete.
    with connect(impatient) as connection:
        connection.sendall(CHUNKED.replace(b"completions", b"nothing"))
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404")
        connection.sendall(b"zz\r\n\r\n")
        read_all(connection)


def test_garbage_in_the_middle_of_a_stream_is_dropped(impatient):
    body = json.dumps({"model": "fake", "prompt": [396, 5], "max_tokens": 8, "stream": True}).encode()
    with connect(impatient) as connection:
        connection.sendall(head(body) + body + b"\x00 nonsense \r\n\r\n" * 1000)
        said = read_all(connection)
    assert said.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in said


def test_pipelined_requests_are_answered_in_order(server):
    paths = [b"/health", b"/v1/nothing", b"/health/live", b"/v1/models"] * 25
    requests = b"".join(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path for path in paths)
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(requests + last)
        said = read_all(connection)
    statuses = re.findall(rb"HTTP/1.1 (\d+)", said)
    assert statuses == [b"404" if path == b"/v1/nothing" else b"200" for path in paths] + [b"200"]
