"""A stream that waits says so in comments, so that no proxy cuts it; clients skip them."""

from __future__ import annotations

import itertools
import json

import pytest
from fake_engine import SILENT, SLOW

COMMENT = ": waiting"
SLOWLY = {"model": "fake", "prompt": [SLOW, 70, 71, 72], "max_tokens": 8, "temperature": 0}
"""Steps of 50 ms, each a token."""


@pytest.fixture(scope="module")
def server(start_module_server):
    return start_module_server("--limit", "stream_comment_interval_s=0.02").wait_until_ready()


@pytest.mark.parametrize(
    "fields", [{}, {"service_tier": "flex"}, {"n": 2}, {"stream_options": {"include_usage": True}}]
)
def test_a_stream_without_a_token_sends_comments(server, fields):
    silent = {"model": "fake", "prompt": [SILENT, 5], "max_tokens": 4, "stream": True} | fields
    with server.http() as http, http.stream("POST", "/v1/completions", json=silent) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert list(itertools.islice(answer.iter_lines(), 6)) == [COMMENT, ""] * 3
    server.wait_until_free()


def test_so_does_a_stream_that_waits_between_two_tokens(server):
    with server.http() as http, http.stream("POST", "/v1/completions", json=SLOWLY | {"stream": True}) as answer:
        lines = list(answer.iter_lines())
    events = [line for line in lines if line.startswith("data: ")]
    assert set(lines) == {COMMENT, "", *events} and events[-1] == "data: [DONE]"
    after_first = lines[lines.index(events[0]) :]
    assert COMMENT in after_first and COMMENT not in lines[lines.index(events[-1]) :]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    whole = server.client().completions.create(**SLOWLY).choices[0].text
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole


def test_the_openai_client_skips_them(server):
    client = server.client()
    streamed = [chunk.choices[0].text for chunk in client.completions.create(**SLOWLY, stream=True)]
    assert "".join(streamed) == client.completions.create(**SLOWLY).choices[0].text
    chat = {"model": "fake", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "temperature": 0}
    told = "".join(
        chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**chat, stream=True)
    )
    assert told == client.chat.completions.create(**chat).choices[0].message.content


def test_none_are_sent_at_an_interval_of_0(start_server):
    server = start_server("--limit", "stream_comment_interval_s=0").wait_until_ready()
    with server.http() as http, http.stream("POST", "/v1/completions", json=SLOWLY | {"stream": True}) as answer:
        assert COMMENT not in list(answer.iter_lines())
