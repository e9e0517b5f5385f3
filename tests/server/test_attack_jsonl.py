"""Input files of batches: whatever is in them, each bad line is named, and each good one has a result of its own."""

from __future__ import annotations

import io
import json

import pytest
from batch_inputs import line, results, submit, wait_for
from hypothesis import assume, example, given
from hypothesis import strategies as st

from omniserve.server.batches.endpoints import ENDPOINTS
from omniserve.server.batches.lines import body_of, check_file
from omniserve.server.completions.protocol import parse
from omniserve.server.errors import ApiError
from omniserve.server.fields import UnknownFields, other_encoding, without_marks
from tests.quick import slow_except
from tests.server.attack.bodies import COMPLETIONS, bounded, json_values

FIELDS = ("custom_id", "method", "url", "body", "more")


def check_model(name):
    if name not in (None, "fake"):
        raise ApiError("no such model", status=404, code="model_not_found")


@st.composite
def raw_lines(draw):
    kind = draw(st.sampled_from(["bytes", "json", "cut", "parts", "parts", "body", "body"]))
    if kind == "bytes":
        return draw(st.binary(min_size=1, max_size=40)).replace(b"\n", b"\r")
    if kind == "json":
        return json.dumps(draw(json_values)).encode()
    right = line(draw(st.text(min_size=1, max_size=3)), {"prompt": "a"})
    if kind == "cut":
        text = json.dumps(right)
        return text[: draw(st.integers(1, len(text)))].encode()
    if kind == "parts":
        right |= draw(st.dictionaries(st.sampled_from(FIELDS), json_values, min_size=1))
    else:
        right["body"] |= draw(st.dictionaries(st.sampled_from(["prompt", "stop", "n", "slo", "zz"]), json_values))
    return json.dumps(right).encode()


@pytest.mark.parametrize("num_examples", slow_except((30,), (30, 300)))
def test_every_bad_line_is_named(num_examples):
    @bounded(num_examples)
    @given(lines=st.lists(raw_lines(), max_size=8))
    @example(lines=[b'{"custom_id": "\\ud800", "method": "POST", "url": "/v1/completions", "body": {}}'])
    @example(lines=[b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": %s}' % (b"[" * 5000)])
    @example(lines=[b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"x": %s}}' % (
        b"[" * 950 + b"]" * 950)])  # fmt: skip
    def attack(lines):
        content = b"\n".join(lines)
        assume(other_encoding(content[:4]) is None)  # that is one fault, of the file
        found = check_file(io.BytesIO(content), COMPLETIONS, check_model, 1000, UnknownFields())
        numbers = sorted([fault.line for fault in found.faults if fault.line] + [good.number for good in found.lines])
        assert numbers == [number for number, raw in enumerate(lines, 1) if without_marks(raw).strip()]
        for good in found.lines:
            raw = content[good.start : good.start + good.length]
            try:
                parse(ENDPOINTS[COMPLETIONS].request_kind, body_of(raw), UnknownFields())
            except ApiError as error:
                assert error.status == 400

    attack()


def test_odd_lines_have_results_of_their_own(server, client):
    bodies = [
        {"prompt": "a", "max_tokens": 3},
        {"prompt": "a", "top_k": 10**30},
        {"prompt": "a", "stop_token_ids": [5] * 2000},
        {"prompt": ["a"] * 3000},
        {"prompt": "a", "metadata": {"x": [[[[]]]]}},
        {"prompt": "a", "temperature": float("nan")},
        {"prompt": "\x00", "max_tokens": 3},
        {"prompt": "a", "stream": True},
    ]
    batch = submit(client, [line(str(i), body) for i, body in enumerate(bodies)])
    batch = wait_for(client, batch.id)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 3, 5)
    failed = results(client, batch.error_file_id)
    assert sorted(entry["custom_id"] for entry in failed) == ["1", "2", "3", "5", "7"]
    assert all(entry["response"]["body"]["error"]["message"] for entry in failed)
    server.wait_until_free()
