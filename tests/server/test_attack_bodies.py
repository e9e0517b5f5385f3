"""Any body gets an answer: never an internal error, never an engine that dies, and nothing stays behind."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given

from tests.quick import slow_except
from tests.server.attack.bodies import CHAT, COMPLETIONS, bounded, check_answer, requests

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def harmless(start_module_server):
    """A server to which any prompt may be sent."""
    server = start_module_server("--no-faults").wait_until_ready()
    with server.http() as server.session:
        yield server
    server.wait_until_free()
    assert server.stop() == 0
    assert not [line for line in server.log if "Traceback" in line], "".join(server.log)


def post(server, path, content):
    return server.session.post(path, content=content, headers={"content-type": "application/json"})


@pytest.mark.parametrize("num_examples", slow_except((60,), (60, 300)))
def test_any_body_is_answered(harmless, num_examples):
    @bounded(num_examples)
    @given(request=requests())
    @example(request=(COMPLETIONS, b'{"prompt": "a", "stream": true, "max_tokens": 3}'))
    def attack(request):
        path, body = request
        check_answer(post(harmless, path, body))

    attack()


HALF_PAIRS = [
    (COMPLETIONS, '{"prompt": "\\ud800"}'),
    (COMPLETIONS, '{"prompt": ["a", "\\udc00"]}'),
    (COMPLETIONS, '{"prompt": "a", "stop": ["\\ud800"]}'),
    (CHAT, '{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    (CHAT, '{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\ud800"}]}]}'),
    ("/tokenize", '{"prompt": "\\ud800"}'),
    (COMPLETIONS, '{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": '
     '{"name": "x", "schema": {"enum": ["\\ud800"]}}}}'),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), HALF_PAIRS)
def test_half_a_surrogate_pair_is_no_text(harmless, path, body):
    response = post(harmless, path, body)
    assert response.status_code == 400
    assert "hex escape" in response.json()["error"]["message"]


@pytest.mark.parametrize("depth", [190, 500, 900, 100_000])
@pytest.mark.parametrize(
    ("path", "text"),
    [
        (COMPLETIONS, '{"prompt": %s}'),
        (COMPLETIONS, '{"prompt": "a", "metadata": %s}'),
        (CHAT, '{"messages": [{"role": "user", "content": "hi"}], "tool_choice": %s}'),
        (CHAT, '{"messages": [{"role": "user", "content": "hi"}], "tool_choice": "required", "tools": '
         '[{"type": "function", "function": {"name": "f", "parameters": {"a": %s}}}]}'),
        (COMPLETIONS, '{"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "x", '
         '"schema": {"enum": [%s]}}}}'),
    ],
)  # fmt: skip
def test_deep_nesting_is_refused_or_borne(harmless, path, text, depth):
    check_answer(post(harmless, path, text % ("[" * depth + "]" * depth)))


@pytest.mark.parametrize("depth", [190, 500, 900])
def test_deep_arguments_of_an_earlier_call(harmless, depth):
    arguments = '{"a": ' + "[" * depth + "]" * depth + "}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    response = post(harmless, CHAT, json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}]}))
    check_answer(response)
    assert response.status_code in (200, 400)
    if response.status_code == 400:  # as long as it is
        assert "tokens" in response.json()["error"]["message"]


LONG_SCHEMA = {"type": "object", "properties": {"a" * 200_000: {"type": "integer"}}}
TOO_MUCH = [
    (COMPLETIONS, {"prompt": "a", "top_k": 10**30}, "top_k", "less than or equal to"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [10**30]}, "stop_token_ids", "ids are 0 to 399"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [400]}, "stop_token_ids", "ids are 0 to 399"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [5] * 1025}, "stop_token_ids", "at most 1024 items"),
    (COMPLETIONS, {"prompt": "a", "stop": ["b", "a" * 1025]}, "stop", "longer than 1024 characters"),
    (COMPLETIONS, {"prompt": "a", "repetition_penalty": 0.001}, "repetition_penalty", "greater than or equal to 0.01"),
    (COMPLETIONS, {"prompt": ["a"] * 2049}, "prompt", "at most 2048"),
    (COMPLETIONS, {"prompt": [[5]] * 2049}, "prompt", "at most 2048"),
    (COMPLETIONS, {"prompt": ["a"] * 2000, "n": 2}, "n", "more than 2048"),
    (CHAT, {"messages": USER * 4097}, "messages", "at most 4096 items"),
    ("/tokenize", {"messages": USER * 4097}, "messages", "at most 4096 items"),
    (CHAT, {"messages": USER, "tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]},
     "tools", "at most 128 items"),
    (CHAT, {"messages": USER, "tool_choice": "required", "tools": [
        {"type": "function", "function": {"name": "f", "parameters": LONG_SCHEMA}}]}, "tools", "make them smaller"),
    (COMPLETIONS, {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": LONG_SCHEMA}}}, "response_format", "make them smaller"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "param", "message"), TOO_MUCH)
def test_what_a_waiting_request_keeps_is_bounded(harmless, path, fields, param, message):
    response = post(harmless, path, json.dumps(fields))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


def test_prompts_that_are_too_many_are_refused_before_they_are_encoded(harmless):
    # Encoding them took a minute, during which nobody else was answered.
    response = post(harmless, COMPLETIONS, json.dumps({"prompt": ["a long text"] * 1_000_000}))
    assert response.status_code == 400
    assert "1000000 prompts" in response.json()["error"]["message"]
