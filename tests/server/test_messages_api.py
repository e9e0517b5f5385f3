"""Anthropic's Messages API over HTTP, and the chats that conversations become. The fake engine repeats the prompt."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import types
from pathlib import Path

import httpx
import pytest
from dialect_samples import FORMS
from fake_engine import DIE, SILENT
from running import wait_until
from tokenizers_for_tests import byte_level_tokenizer, tokenizer_with

from omniserve.core.config import EngineConfig
from omniserve.core.request import SLO, FinishReason, Request, RequestOutput, SamplingParams
from omniserve.server.anthropic.chat import read_request
from omniserve.server.anthropic.fields import FATES, MessagesBody
from omniserve.server.anthropic.shape import MessagesShape
from omniserve.server.anthropic.signatures import signature_of
from omniserve.server.choice import Choice, TextForm, merge
from omniserve.server.dialects import choose
from omniserve.server.dialects.base import Opening
from omniserve.server.errors import ApiError
from omniserve.server.fields import IGNORED_FIELDS_HEADER, UnknownFields
from omniserve.server.generation_defaults import GenerationDefaults
from omniserve.server.jobs import Usage
from omniserve.server.tokenizing.text import TextCodec

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOKENIZER = byte_level_tokenizer()
[ASSISTANT] = TOKENIZER("<|assistant|>").input_ids
WRITES = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}[{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}]{% endfor %}<|end|>{% endfor %}"
)
TEMPLATE = (
    "{% if tools %}{% endif %}" + WRITES + "{% if add_generation_prompt %}<|assistant|>"
    "{% if not enable_thinking | default(true) %}<think>\n\n</think>\n\n{% endif %}{{ reasoning_effort }}{% endif %}"
)
WEATHER = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
THINKING = {"type": "adaptive"}
THOUGHT = "<think>\nhm < x\n</think>\n\n"


def hermes(*calls):
    return FORMS["hermes"].write(list(calls))


@pytest.fixture(scope="module")
def start(start_module_server, tmp_path_factory):
    def start(*flags, template=TEMPLATE):
        folder = tmp_path_factory.mktemp("template")
        TOKENIZER.save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(template)
        parser = ["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
        return start_module_server("--tokenizer", str(folder), *parser, *flags).wait_until_ready()

    return start


@pytest.fixture(scope="module")
def server(start):
    server = start()
    with server.http() as server.session:
        yield server


def body_of(text, **fields):
    return {"model": "fake", "max_tokens": 400, "messages": [{"role": "user", "content": text}]} | fields


def say(server, text, *, stream=False, headers=None, **fields):
    """Make the fake engine say a text once; return the message, of a stream put together."""
    fields = {"ignore_eos": True, "stop_token_ids": [ASSISTANT], "thinking": THINKING} | fields
    if fields.get("tool_choice", {}).get("type") in ("any", "tool"):
        del fields["ignore_eos"]  # which is refused with a constraint
    response = server.session.post(MESSAGES, json=body_of(text, stream=stream, **fields), headers=headers)
    assert response.status_code == 200, response.text
    return accumulated(response.text) if stream else response.json()


def accumulated(text):
    """Return the message of a stream's events, whose order is checked."""
    message, arguments = None, {}
    events = [part.split("\n") for part in text.split("\n\n") if part]
    for name, data in events:
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] == "message_start":
            assert message is None
            message = event["message"]
            assert message["stop_reason"] is None and message["content"] == []
        elif event["type"] == "content_block_start":
            assert event["index"] == len(message["content"]) and not arguments
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1
            block, delta = message["content"][-1], event["delta"]
            kind = delta.pop("type").removesuffix("_delta")
            if kind == "input_json":
                arguments[0] = arguments.get(0, "") + delta["partial_json"]
            else:
                block[kind] += delta[kind]
        elif event["type"] == "content_block_stop":
            assert event["index"] == len(message["content"]) - 1
            if arguments:
                message["content"][-1]["input"] = json.loads(arguments.pop(0))
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
        else:
            assert event["type"] in ("ping", "message_stop"), event
    assert json.loads(events[-1][1].removeprefix("data: ")) == {"type": "message_stop"}
    return message


over_streams = pytest.mark.parametrize("stream", [False, True])


@over_streams
def test_a_message_is_answered(server, stream):
    message = say(server, "hello", stream=stream)
    assert message["content"] == [{"type": "text", "text": "hello", "citations": None}]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "fake")
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    num_prompt = len(TOKENIZER("<|user|>hello<|end|><|assistant|>").input_ids)
    assert message["usage"] == {
        "input_tokens": num_prompt, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
        "output_tokens": num_prompt, "output_tokens_details": {"thinking_tokens": 0}, "service_tier": "standard",
        "server_tool_use": None, "cache_creation": None, "inference_geo": None,
    }  # fmt: skip


@over_streams
def test_stop_reasons(server, stream):
    assert say(server, "hello", stream=stream, max_tokens=2)["stop_reason"] == "max_tokens"
    message = say(server, "hello you", stream=stream, stop_sequences=["", "yo", "lo"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "lo")
    assert message["content"] == [{"type": "text", "text": "hel", "citations": None}]
    message = say(server, "hello", stream=stream, stop_token_ids=None, max_tokens=64_000)
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert message["usage"]["input_tokens"] + message["usage"]["output_tokens"] == 512


@over_streams
def test_thinking_text_and_calls_are_blocks_in_their_order(server, stream):
    a, b = hermes(("weather", {"city": "Köln", "days": 5})), hermes(("weather", {}))
    message = say(server, f"{THOUGHT}I look. {a} Then {b}", stream=stream, tools=[WEATHER])
    kinds = [block["type"] for block in message["content"]]
    assert kinds == ["thinking", "text", "tool_use", "text", "tool_use"]
    thinking, text, call, then, other = message["content"]
    assert thinking == {"type": "thinking", "thinking": "hm < x", "signature": signature_of("", is_omitted=False)}
    assert (text["text"], then["text"].strip()) == ("I look.", "Then")
    assert (call["name"], call["input"], other["input"]) == ("weather", {"city": "Köln", "days": 5}, {})
    assert message["stop_reason"] == "tool_use" and call["id"] != other["id"]
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 3


@over_streams
def test_thinking_that_was_not_asked_for_is_left_out(server, stream):
    for thinking in (None, {"type": "disabled"}):
        message = say(server, f"{THOUGHT}hello", stream=stream, thinking=thinking)
        assert message["content"][-1]["text"].endswith("hello") and message["content"][0]["type"] == "text"
    message = say(server, f"{THOUGHT}hello", stream=stream, thinking={"type": "adaptive", "display": "omitted"})
    assert message["content"][0] == {
        "type": "thinking", "thinking": "", "signature": signature_of("hm < x", is_omitted=True)
    }  # fmt: skip


def test_the_template_is_told_whether_to_think(server):
    def num_prompt(**fields):
        return server.session.post(COUNT, json=body_of("hi", max_tokens=None, **fields)).json()["input_tokens"]

    thinks, closed = num_prompt(thinking=THINKING), len(TOKENIZER("<think>\n\n</think>\n\n").input_ids)
    assert num_prompt() == num_prompt(thinking={"type": "disabled"}) == thinks + closed
    assert num_prompt(thinking={"type": "enabled", "budget_tokens": 1024}) == thinks
    assert num_prompt(chat_template_kwargs={"enable_thinking": True}) == thinks
    effort = num_prompt(thinking=THINKING, output_config={"effort": "max"})
    assert effort == thinks + len(TOKENIZER("high").input_ids)
    assert num_prompt(output_config={"effort": "max"}) == effort + closed


def test_a_budget_bounds_thinking_where_it_is_marked(server, start):
    response = server.session.post(MESSAGES, json=body_of("a", thinking={"type": "enabled", "budget_tokens": 1024}))
    assert response.status_code == 200 and IGNORED_FIELDS_HEADER not in response.headers
    plain = start("--reasoning-parser", "none")
    with plain.http() as http:
        response = http.post(MESSAGES, json=body_of("a", thinking={"type": "enabled", "budget_tokens": 1024}))
    assert response.status_code == 200 and response.headers[IGNORED_FIELDS_HEADER] == "thinking.budget_tokens"


@over_streams
def test_tool_choice(server, stream):
    call = hermes(("weather", {"city": "a"}))
    for choice, reason in (
        ({"type": "auto"}, "tool_use"),
        ({"type": "any"}, "tool_use"),
        ({"type": "tool", "name": "weather"}, "tool_use"),
        ({"type": "none"}, "end_turn"),
    ):
        message = say(server, call, stream=stream, tools=[WEATHER], tool_choice=choice)
        assert message["stop_reason"] == reason, choice
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = say(server, f"{call}{call}", stream=stream, tools=[WEATHER], tool_choice=choice)
    assert [block["type"] for block in message["content"]] == ["tool_use"]


@over_streams
def test_tools_of_anthropics_servers_are_skipped_and_named(server, stream):
    hosted = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "bash_20250124", "name": "bash"},
    ]
    fields = body_of("hello", tools=[WEATHER, *hosted], context_management={"edits": []}, stream=stream)
    response = server.session.post(MESSAGES, json=fields)
    assert response.status_code == 200, response.text
    assert (
        response.headers[IGNORED_FIELDS_HEADER] == "context_management, tools.web_search_20250305, tools.bash_20250124"
    )
    response = server.session.post(MESSAGES, json=body_of("hello", tools=hosted, tool_choice={"type": "any"}))
    assert "'web_search_20250305' are skipped here" in response.json()["error"]["message"]


@over_streams
def test_usage_tells_what_was_cached(server, stream):
    message = say(server, "hello", stream=stream, cache_salt="abc")  # of which the fake engine has so many
    assert message["usage"]["cache_read_input_tokens"] == 3
    num_prompt = len(TOKENIZER("<|user|>hello<|end|><|assistant|>").input_ids)
    assert message["usage"]["input_tokens"] == num_prompt - 3


@over_streams
@pytest.mark.parametrize(
    ("tier", "answered", "service_class"),
    [
        (None, "standard", "LS"), ("auto", "standard", "LS"), ("standard_only", "standard", "LS"),
        ("priority", "priority", "LS"), ("flex", "batch", "BE"), ("BE", "batch", "BE"),
    ],
)  # fmt: skip
def test_service_tier_chooses_the_class(server, tier, answered, service_class, stream):
    counter = f'omniserve_requests_total{{finish_reason="stop",service_class="{service_class}"}}'
    before = server.metric(counter)
    assert say(server, "hi", stream=stream, service_tier=tier)["usage"]["service_tier"] == answered
    server.wait_for_metric(counter, before + 1)


def test_header_stands_for_the_service_tier(server):
    message = say(server, "hi", headers={"x-omniserve-service-tier": "flex"})
    assert message["usage"]["service_tier"] == "batch"


ERRORS = [
    ({"max_tokens": None}, 400, "max_tokens is missing"),
    ({"max_tokens": 0}, 400, "max_tokens: "),
    ({"model": "other"}, 404, "not served here"),
    ({"messages": []}, 400, "messages: "),
    ({"messages": [{"role": "system", "content": []}]}, 400, "no content"),
    ({"messages": [{"role": "assistant", "content": []}]}, 400, "no content"),
    ({"messages": [{"role": "user", "content": "x" * 4000}]}, 400, "prompt is too long: 513 tokens > 512 maximum; "),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "images are not supported"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]}, 400, "no PDF"),
    ({"messages": [{"role": "user", "content": [{"type": "what"}]}]}, 400, "expected tags: 'text'"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]}, 400, "has no blocks of"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]}, 400,
     "tool_result"),
    ({"tools": [{"name": "f"}]}, 400, "input_schema is missing"),
    ({"tools": [WEATHER, WEATHER]}, 400, "two tools have the same name"),
    ({"tool_choice": {"type": "any"}}, 400, "there are no tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "g"}}, 400, "none of the tools"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, 400, "output_config.format: "),
    ({"mcp_servers": [{"url": "x"}]}, 400, "MCP servers are not called"),
    ({"service_tier": "gold"}, 400, "service_tier: must be one of"),
]  # fmt: skip


@over_streams
@pytest.mark.parametrize(("fields", "status", "message"), ERRORS)
def test_errors_have_anthropics_shape(server, fields, status, message, stream):
    response = server.session.post(MESSAGES, json=body_of("hi", stream=stream) | fields)
    assert response.status_code == status, response.text
    error = response.json()
    assert error["type"] == "error" and set(error) == {"type", "error", "request_id"}
    assert error["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert message in error["error"]["message"]
    assert error["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]


def test_other_errors(server):
    response = server.session.get(MESSAGES)
    assert (response.status_code, response.json()["error"]["type"]) == (405, "invalid_request_error")
    response = server.session.post("/v1/messages/batches", json={})
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    assert "error" in server.session.post("/v1/chat/completions", json={}).json()


def test_errors_under_load(start):
    server = start("--limit", "max_queued_requests=1")
    with server.http() as http:
        with http.stream("POST", "/v1/completions", json={"prompt": [SILENT], "stream": True}) as waiting:
            assert waiting.status_code == 200
            response = http.post(MESSAGES, json=body_of("hi"))
        assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error"), response.text
        assert int(response.headers["retry-after"]) >= 1


@over_streams
def test_an_engine_that_died_is_told(start, stream):
    server = start()
    with server.http() as http:
        assert http.post("/v1/completions", json={"prompt": [DIE]}).status_code >= 500
        wait_until(lambda: http.post(MESSAGES, json=body_of("hi", stream=stream)).status_code == 529)
        response = http.post(MESSAGES, json=body_of("hi", stream=stream))
        assert response.json()["error"]["type"] == "overloaded_error"


def test_an_error_in_a_stream_is_an_event(start):
    server = start("--limit", "max_unread_tokens=1")  # which a slow reader of many steps has to exceed
    with server.http() as http:
        fields = {"ignore_eos": True, "slo": {"ttft_s": 100, "tpot_s": 100}, "speculation": True}  # 4 tokens a step
        text = http.post(MESSAGES, json=body_of("hello", stream=True, **fields)).text
    assert text.startswith("event: message_start")
    name, data = text.rstrip("\n").split("\n\n")[-1].split("\n")
    error = json.loads(data.removeprefix("data: "))
    assert (name, error["type"], error["error"]["type"]) == ("event: error", "error", "timeout_error")


def test_a_key_may_come_as_x_api_key(start_server):
    server = start_server("--api-key", "secret").wait_until_ready()
    for headers, status in (
        ({"x-api-key": "secret"}, 200), ({"authorization": "Bearer secret"}, 200), ({"x-api-key": "other"}, 401),
        ({"x-api-key": ""}, 401), ({}, 401), ({"authorization": "Bearer other", "x-api-key": "secret"}, 401),
    ):  # fmt: skip
        response = httpx.post(f"{server.url}{MESSAGES}", json=body_of("hi", max_tokens=1), headers=headers)
        assert response.status_code == status, (headers, response.text)
        if status == 401:
            assert response.json()["type"] == "error"
            assert response.json()["error"]["type"] == "authentication_error"
            assert response.json()["request_id"] == response.headers["request-id"]
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == status


def test_models_have_the_shape_that_the_client_knows(server):
    headers = {"anthropic-version": "2023-06-01"}
    page = server.session.get("/v1/models", headers=headers).json()
    assert [card["id"] for card in page["data"]] == ["fake"] == [page["first_id"]] and page["has_more"] is False
    card = server.session.get("/v1/models/fake", headers=headers).json()
    assert card == page["data"][0] and (card["type"], card["max_input_tokens"]) == ("model", 512)
    assert server.session.get("/v1/models/other", headers=headers).json()["type"] == "error"
    assert server.session.get("/v1/models").json()["object"] == "list"


def test_tokens_are_counted_as_the_prompt_has_them(server):
    fields = body_of("hi", system="Be brief.", tools=[WEATHER], thinking=THINKING)
    response = server.session.post(COUNT, json=fields | {"temperature": 0.5})
    assert IGNORED_FIELDS_HEADER not in response.headers
    counted = response.json()
    message = server.session.post(MESSAGES, json=fields).json()
    assert counted == {"input_tokens": message["usage"]["input_tokens"]}
    long = server.session.post(COUNT, json={"messages": body_of("word " * 10_000)["messages"]})
    assert long.json()["input_tokens"] > 20_000
    response = server.session.post(COUNT, json={"messages": body_of("word " * 100_000)["messages"]})
    assert "prompt is too long: 500022 tokens > 512 maximum" in response.json()["error"]["message"]
    assert server.session.post(COUNT, json={"model": "other", **fields}).status_code == 200
    assert server.session.post(COUNT, json={**fields, "model": "other"}).json()["error"]["type"] == "not_found_error"


def test_lines_of_batches_may_be_messages(server):
    line = {"custom_id": "a", "method": "POST", "url": MESSAGES, "body": body_of("hello")}
    files = {"file": ("in.jsonl", json.dumps(line).encode())}
    file = server.session.post("/v1/files", files=files, data={"purpose": "batch"}).json()
    given = {"input_file_id": file["id"], "endpoint": MESSAGES, "completion_window": "24h"}
    batch = server.session.post("/v1/batches", json=given).json()

    def get():
        return server.session.get(f"/v1/batches/{batch['id']}").json()

    wait_until(lambda: get()["status"] == "completed")
    output = server.session.get(f"/v1/files/{get()['output_file_id']}/content").json()
    message = output["response"]["body"]
    assert message["content"] == [{"type": "text", "text": "hello", "citations": None}]
    assert message["usage"]["service_tier"] == "batch"


def test_a_call_of_claude_code(start):
    """In the form in which Claude Code 2.1.197 sends the second call of a session, with shorter texts."""
    server = start("--drop-billing-header")
    cached = {"cache_control": {"type": "ephemeral"}}
    call = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "echo hi"}}
    result = {"tool_use_id": "toolu_1", "type": "tool_result", "content": "hi", "is_error": False, **cached}
    body = {
        "model": "fake", "max_tokens": 64000, "stream": True, "thinking": {"type": "adaptive"},
        "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.c40; cc_entrypoint=sdk-cli;"},
            {"type": "text", "text": "You are an agent.", **cached}, {"type": "text", "text": "\nBe brief.", **cached},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<a>b</a>\n"}, {"type": "text", "text": "Run echo"}]},
            {"role": "system", "content": "There are agents."},
            {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]},
        ],
        "tools": [{"name": "Bash", "description": "Runs", "input_schema": {"type": "object", "properties": {}}}],
    }  # fmt: skip
    headers = {
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14", "anthropic-version": "2023-06-01",
        "x-api-key": "any", "anthropic-dangerous-direct-browser-access": "true", "x-app": "cli",
        "x-claude-code-session-id": "s",
    }  # fmt: skip
    with server.http() as http:
        response = http.post(f"{MESSAGES}?beta=true", json=body | {"ignore_eos": True}, headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers[IGNORED_FIELDS_HEADER] == "context_management"
    [block] = accumulated(response.text)["content"]  # of the fake engine, which repeats the prompt without its marks
    assert block["text"].startswith(
        'You are an agent.\n\n\nBe brief.<a>b</a>\n\n\nRun echoThere are agents.[Bash {"command": "echo hi"}]<|tool|>hi'
    )


# The chat that a conversation becomes.


def codec_of(template):
    codec = TextCodec(tokenizer_with(template), tool_call_parser="hermes")
    asyncio.run(codec.look_at_templates())
    return codec


CODECS = {
    "any order": WRITES,
    # As Mistral's: what follows an assistant's message is a user's.
    "alternating": "{% set n = namespace(last='') %}{% for m in messages %}"
    "{% if m.role == n.last or (m.role == 'user' and n.last == 'tool') "
    "or (m.role == 'system' and not loop.first) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% set n.last = m.role %}{% endfor %}" + WRITES,
    # As DeepSeek's: all that systems say comes first.
    "system first": "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}",
}


@functools.cache
def service_with(template="any order", **fields):
    given = {
        "codec": codec_of(CODECS[template]), "unknown_fields": UnknownFields(refuse=True),
        "defaults": GenerationDefaults(), "drops_billing_header": False,
    }  # fmt: skip
    return types.SimpleNamespace(**given | fields)


def chat_of(messages, template="any order", *, service=None, **fields):
    body = {"max_tokens": 5, "messages": messages} | fields
    return read_request(service or service_with(template), json.dumps(body).encode())


def written(messages, template="any order", **fields):
    return [message.for_template() for message in chat_of(messages, template, **fields).messages]


def user(*content):
    return {"role": "user", "content": list(content) if content and isinstance(content[0], dict) else "".join(content)}


def text(content):
    return {"type": "text", "text": content, "cache_control": {"type": "ephemeral", "ttl": "1h"}}


CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Köln"}}
CALLED = {
    "role": "assistant",
    "content": [{"type": "thinking", "thinking": "hm", "signature": "x"}, text("I look."), CALL],
}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("sunny"), text("warm")]}
WRITTEN_CALL = {
    "role": "assistant", "content": "I look.", "reasoning_content": "hm", "reasoning": "hm",
    "tool_calls": [
        {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    ],
}  # fmt: skip
WRITTEN_RESULT = {"role": "tool", "tool_call_id": "toolu_1", "name": "weather", "content": "sunny\n\nwarm"}


def test_a_conversation_becomes_a_chat():
    messages = [user(text("a"), text("b")), CALLED, user(RESULT, text("and now?")), user("then")]
    assert written(messages, system=[text("Be brief."), text("Be kind.")]) == [
        {"role": "system", "content": "Be brief.\n\nBe kind."}, {"role": "user", "content": "a\n\nb"}, WRITTEN_CALL,
        WRITTEN_RESULT, {"role": "user", "content": "and now?\n\nthen"},
    ]  # fmt: skip
    assert written([user("a"), CALLED, user(RESULT, text("b"))], "alternating")[-1] == {
        **WRITTEN_RESULT, "content": "sunny\n\nwarm\n\nb"
    }  # fmt: skip


def test_a_failed_call_is_an_error():
    failed = RESULT | {"is_error": True, "content": "no such city"}
    assert written([user("a"), CALLED, user(failed)])[-1]["content"] == "Error: no such city"
    assert written([user("a"), CALLED, user({**RESULT, "content": []})])[-1]["content"] == ""


def test_a_late_message_of_the_system_is_written_in_its_place():
    messages = [user("a"), {"role": "system", "content": "Be brief."}]
    assert written(messages)[-1] == {"role": "system", "content": "Be brief."}
    for template in ("alternating", "system first"):
        assert written(messages, template) == [
            {"role": "user", "content": "a\n\n<system-reminder>\nBe brief.\n</system-reminder>"}
        ]
    both = [{"role": "system", "content": "b"}, user("a")]
    assert written(both, "alternating", system="a")[0] == {"role": "system", "content": "a\n\nb"}


def test_documents_and_results_of_searches_are_text():
    plain = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
    parts = {"type": "document", "context": "C", "source": {"type": "content", "content": [text("a"), text("b")]}}
    found = {
        "type": "search_result",
        "title": "T",
        "source": "https://a",
        "content": [text("x")],
        "citations": {"enabled": True},
    }
    [message] = written([user(plain, parts, found, text("?"))])
    assert message["content"] == (
        "<document>\n<title>T</title>\nx\n</document>\n\n<document>\n<context>C</context>\na\n\nb\n</document>\n\n"
        "<search_result>\n<title>T</title>\n<source>https://a</source>\nx\n</search_result>\n\n?"
    )


def test_thinking_goes_back_to_the_template():
    def thought(*blocks):
        message = {"role": "assistant", "content": [*blocks, text("b")]}
        return written([user("a"), message, user("c")])[1].get("reasoning_content")

    assert thought({"type": "thinking", "thinking": "hm", "signature": "anything"}) == "hm"
    omitted = {"type": "thinking", "thinking": "", "signature": signature_of("hm Ä", is_omitted=True)}
    assert thought(omitted) == "hm Ä"
    for other in ("EqoB", "", "bm90aGluZw==", "%%%", signature_of("x", is_omitted=False)):
        assert thought({"type": "thinking", "thinking": "", "signature": other}) is None
    assert thought({"type": "redacted_thinking", "data": "EqoB"}) is None


def test_what_anthropics_servers_did_is_skipped_and_named():
    content = [
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [{"type": "web_search_result"}]},
        {"type": "text", "text": "b", "citations": [{"type": "web_search_result_location"}]},
    ]
    request = chat_of([user("a"), {"role": "assistant", "content": content}, user("c")])
    assert [message.for_template()["content"] for message in request.messages] == ["a", "b", "c"]
    assert request.ignored_fields == ("messages.content.server_tool_use", "messages.content.web_search_tool_result")


def test_the_answer_continues_the_last_message_of_an_assistant():
    begun = {"role": "assistant", "content": "The best is ("}
    request = chat_of([user("a"), begun])
    assert request.continue_final_message and len(request.messages) == 2
    for empty in ("", []):
        request = chat_of([user("a"), {"role": "assistant", "content": empty}])
        assert not request.continue_final_message and len(request.messages) == 1
    with pytest.raises(ApiError, match="tool_result"):
        chat_of([user("a"), CALLED])


def test_only_the_block_with_a_hash_is_left_out():
    header = "x-anthropic-billing-header: cc_version=2.1.197.c40; cc_entrypoint=cli; cch=1a2b3;"
    other = text("You are Claude Code.")

    def system(*given, drops):
        service = types.SimpleNamespace(**vars(service_with()) | {"drops_billing_header": drops})
        blocks = given[0] if isinstance(given[0], str) else list(given)
        chat = chat_of([user("a")], service=service, system=blocks)
        return [message.for_template()["content"] for message in chat.messages[:-1]]

    assert system(text(header), other, drops=False) == [f"{header}\n\nYou are Claude Code."]
    assert system(text(header), other, drops=True) == ["You are Claude Code."]
    assert system(f"{header}\nYou are Claude Code.", drops=True) == ["You are Claude Code."]
    assert system(text(header), drops=True) == []
    for kept in ((other, text(header)), (text(f"See {header}"), other)):
        assert system(*kept, drops=True) == system(*kept, drops=False) != ["You are Claude Code."]


def test_every_field_is_a_field_of_chats():
    request = chat_of(
        [user("a")], stop_sequences=["x"], temperature=0.5, top_p=0.5, top_k=5, metadata={"user_id": "u"}, seed=5,
        cache_salt="s", min_p=0.5, min_tokens=2, repetition_penalty=1.5, slo={"ttft_s": 2}, speculation=True,
        stop_token_ids=[5], prompt_cache_key="k", tools=[WEATHER | {"description": "d", "strict": True}],
        output_config={"effort": "medium"}, thinking={"type": "enabled", "budget_tokens": 1024}, ignore_eos=None,
    )  # fmt: skip
    told = request.model_dump(exclude_unset=True)
    assert told["stop"] == ["x"] and told["slo"] == {"ttft_s": 2} and told["reasoning_effort"] == "medium"
    assert (told["temperature"], told["top_p"], told["top_k"], told["seed"]) == (0.5, 0.5, 5, 5)
    assert request.tools[0].for_template()["function"] == {
        "name": "weather", "description": "d", "parameters": WEATHER["input_schema"], "strict": True
    }  # fmt: skip


# As the parameters of the client, beta or not, list them (anthropic 2.14).
DOCUMENTED = (
    "betas billing_policy cache_control compaction container context_management diagnostics fallback_credit_token "
    "fallbacks inference_geo max_tokens mcp_servers messages metadata model output_config output_format service_tier "
    "speed stop_sequences stream system temperature thinking thread tool_choice tools top_k top_p user_profile_id "
    "workspace_id"
).split()


def test_every_documented_field_is_honoured_or_has_a_fate():
    assert set(DOCUMENTED) <= {*MessagesBody.model_fields, *FATES}
    assert not {*MessagesBody.model_fields} & {*FATES}
    page = (Path(__file__).parents[2] / "docs" / "requests.md").read_text()
    section = page.partition("## Anthropic's messages")[2].partition("\n## ")[0]
    told = [name for name, fate in FATES.items() if fate.harmless is not None and "." not in name]
    assert [name for name in told if f"`{name}" not in section] == []


@pytest.mark.parametrize("name", [name for name in DOCUMENTED if name in FATES])
def test_a_field_with_a_fate_is_dropped_or_refused(name):
    fate = FATES[name]
    if fate.advice is not None:
        with pytest.raises(ApiError, match=name if "{name}" in fate.advice else "not called from here"):
            chat_of([user("a")], **{name: ["x"]})
    else:
        request = chat_of([user("a")], **{name: ["x"]})  # of a server that refuses unknown fields
        assert request.ignored_fields == (() if fate.harmless is None else (name,))


# Streams.


@pytest.mark.parametrize("dialect", ["hermes", "qwen3_coder", "mistral"])
@pytest.mark.parametrize("omits", [False, True])
def test_however_an_answer_comes_in_pieces_the_message_is_the_same(dialect, omits):
    write = FORMS[dialect].write
    answers = [
        f"{THOUGHT}I look.\n{write([('weather', {'city': 'Köln', 'days': 1})])}",
        f"{THOUGHT}hello END bye",
        "just text",
        f"{THOUGHT}",
        write([("weather", {}), ("weather", {"city": "a"})]),
        f"a {write([('weather', {'city': 'x'})])} b {write([('weather', {})])} c",
        "<tool_call>no call</tool_call> x",
        "",
    ]
    draws = random.Random(5)
    for text_ in answers:
        token_ids = TOKENIZER(text_).input_ids or [TOKENIZER.eos_token_id]
        results = set()
        for sizes in ([len(token_ids)], [1], *([draws.randint(1, 9) for _ in range(50)] for _ in range(8))):
            results.add(_through_a_shape(token_ids, sizes, dialect, omits=omits, streamed=False))
            results.add(_through_a_shape(token_ids, sizes, dialect, omits=omits, streamed=True))
        assert len(results) == 1, results


def _through_a_shape(token_ids, sizes, dialect, *, omits, streamed):
    """Return the message of an answer that comes in pieces, as JSON without the ids of calls."""
    display = "omitted" if omits else "summarized"
    thinking = {"type": "adaptive", "display": display}
    request = chat_of([user("a")], thinking=thinking, stop_sequences=["END"], tools=[WEATHER], stream=streamed)
    info = types.SimpleNamespace(classes=EngineConfig().classes)
    shape = MessagesShape(types.SimpleNamespace(model_name="m", info=info), request, "msg-1")
    parser = functools.partial(
        choose("", thinking="qwen3", calls=dialect).parser, {"weather": WEATHER["input_schema"]}, opening=Opening(),
        streams=streamed,
    )  # fmt: skip
    form = TextForm(stop=["END"], at_once=not streamed, parser=parser)
    asked = Request(request_id="r", prompt_token_ids=[5] * 7, sampling=SamplingParams(max_tokens=1000))
    choice = Choice(0, asked, service_with().codec, slo=SLO(), arrival_s=0.0, form=form, echo=None)
    deltas, at, turn = [], 0, 0
    while at < len(token_ids) and choice.finish_reason is None:
        size = sizes[turn % len(sizes)]
        reason = FinishReason.LENGTH if at + size >= len(token_ids) else None
        new = tuple(token_ids[at : at + size])
        output = RequestOutput(request_id="r", service_class="LS", new_token_ids=new, finish_reason=reason)
        deltas.append(choice.advance(output))
        at, turn = at + size, turn + 1
    deltas = [delta for delta in deltas if delta is not None]
    usage = Usage(
        num_prompt_tokens=7, num_output_tokens=choice.times.num_tokens, num_reasoning_tokens=choice.num_reasoning_tokens
    )
    if streamed:
        first = shape.first_events(Usage(num_prompt_tokens=7))
        message = accumulated(first + "".join(shape.events([delta]) for delta in deltas) + shape.last_events(usage))
    else:
        message = json.loads(shape.answer([merge(deltas)], usage))
    for block in message["content"]:
        block.pop("id", None)
    return json.dumps(message, sort_keys=True)


def test_arguments_are_the_text_that_the_model_wrote(server):
    arguments = '{"days": 1e400, "city": "\\ud800"}'
    call = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    for stream in (False, True):
        fields = {"ignore_eos": True, "stop_token_ids": [ASSISTANT], "tools": [WEATHER], "thinking": THINKING}
        response = server.session.post(MESSAGES, json=body_of(call, stream=stream, **fields))
        if stream:
            events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
            deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
            assert "".join(each.get("partial_json", "") for each in deltas) == arguments
        else:
            assert arguments in response.text
