"""What makes a request cheap for the API process changes nothing of what it says."""

from __future__ import annotations

import dataclasses
import json
import random
import time

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from omniserve.core.request import FinishReason, RequestOutput, RequestTimes, TokenLogprob
from omniserve.server.engines.messages import Step, decode_report, encode, is_bare
from omniserve.server.telemetry.metrics import QuickHistogram
from tests.server.attack.sockets import connect, read_all

OUTPUT = RequestOutput(
    request_id="a", service_class="LS", new_token_ids=(5,), num_prompt_tokens=3, num_output_tokens=2,
    times=RequestTimes(arrival_s=1.0, first_token_s=2.0),
)  # fmt: skip


def test_a_token_and_no_more_is_bare():
    assert is_bare(OUTPUT)
    whole = {
        "num_output_tokens": 1,  # the first one brings what the others do not repeat
        "new_token_ids": (5, 6),
        "finish_reason": FinishReason.LENGTH,
        "new_logprobs": (TokenLogprob(token_id=5, logprob=-1.0, top=()),),
        "prompt_logprobs": (TokenLogprob(token_id=5, logprob=-1.0, top=()),),
        "host_stays": ((1.0, 2.0),),
        "num_host_tokens": 1,
        "num_accepted_drafts": 1,
        "num_rejected_drafts": 1,
        "times": RequestTimes(arrival_s=1.0, host_since_s=2.0),
    }
    for field, value in whole.items():
        assert not is_bare(dataclasses.replace(OUTPUT, **{field: value})), field


def test_outputs_keep_their_order_in_a_message():
    ended = dataclasses.replace(OUTPUT, finish_reason=FinishReason.LENGTH)
    step = Step([], [("a", 5), OUTPUT, ("b", 6), ended])
    assert decode_report(encode(step)) == step


@pytest.mark.parametrize("bounds", [(-1, 0.5, 1, 2.5), (0.25, 3)])
def test_quick_histogram_says_what_prometheus_does(bounds):
    registry, quick = CollectorRegistry(), CollectorRegistry()
    theirs = Histogram("x_seconds", "About x", ["service_class"], buckets=bounds, registry=registry)
    ours = QuickHistogram("x_seconds", "About x", bounds, ["LS", "BE"])
    quick.register(ours)
    rng = random.Random(0)
    for name in ("LS", "BE"):
        theirs.labels(name)
    for _ in range(200):
        name, value = rng.choice(["LS", "BE"]), rng.choice([rng.uniform(-2, 4), *bounds])
        theirs.labels(name).observe(value)
        ours.observe(name, value)

    def lines(of: CollectorRegistry) -> list[str]:
        return [line for line in generate_latest(of).decode().splitlines() if "_created{" not in line]

    assert lines(quick) == lines(registry)


@pytest.mark.parametrize("text", ["plain", 'quo"te\\', "Grüße 日本 🙂\n", "\x7f\u2028"])
def test_a_piece_of_text_is_written_as_the_whole_chunk_would_be(client, text):
    """What is said in the middle of a stream is made of prepared parts: as ``json.dumps`` writes it."""
    said = ""
    with client.completions.with_streaming_response.create(
        model="fake", prompt=text, max_tokens=12, stream=True, extra_body={"ignore_eos": True}
    ) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    for event in events:
        parsed = json.loads(event)
        said += parsed["choices"][0]["text"]
        assert event.replace(',"choices"', ', "choices"') == json.dumps(parsed)
    assert said


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_streams_and_answers_say_the_same(client, kind):
    """Bare outputs, large parts and single tokens lead to the same text and counts."""

    def ask(**more):
        if kind == "chat":
            return client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "Grüße aus 日本 🙂"}], max_tokens=40, **more
            )
        return client.completions.create(model="fake", prompt="Grüße aus 日本 🙂", max_tokens=40, **more)

    whole, parts = ask(), list(ask(stream=True, stream_options={"include_usage": True}))
    text = whole.choices[0].message.content if kind == "chat" else whole.choices[0].text
    streamed = [
        (part.choices[0].delta.content if kind == "chat" else part.choices[0].text) or ""
        for part in parts
        if part.choices
    ]
    assert "".join(streamed) == text
    assert parts[-1].usage == whole.usage


def test_what_the_parser_takes_and_is_no_request_is_refused(server):
    head = b"POST /v1/completions HTTP/1.1\r\n"
    for data in (head + b"\r\n", head + b"Host: a\r\nHost: a\r\n\r\n", b"GET /\r\n\r\n"):
        with connect(server) as connection:
            connection.sendall(data)
            assert read_all(connection).startswith(b"HTTP/1.1 400 ")


def test_a_head_without_an_end_is_refused(server):
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
        until_s = time.monotonic() + 20
        try:
            while time.monotonic() < until_s:
                connection.sendall(b"y" * 30_000)
                time.sleep(0.01)
        except (BrokenPipeError, ConnectionResetError):
            return
        raise AssertionError("megabytes of a head were taken")
