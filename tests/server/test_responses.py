"""/v1/responses through the official client, over a real socket. The fake engine repeats the prompt."""

from __future__ import annotations

import functools
import json
import random
import time

import fake_engine
import httpx
import openai
import pydantic
import pytest
from batch_inputs import line, results, submit, wait_for
from dialect_samples import FORMS
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_create_params import (
    ResponseCreateParamsNonStreaming,
    ResponseCreateParamsStreaming,
)
from sqlalchemy import update
from tokenizers_for_tests import byte_level_tokenizer

from omniserve.core.request import SLO, FinishReason, Request, RequestOutput, SamplingParams
from omniserve.server.batches.database import RESPONSES, StorageError
from omniserve.server.choice import Choice, TextForm, merge
from omniserve.server.dialects import choose
from omniserve.server.dialects.base import Opening
from omniserve.server.fields import IGNORED_FIELDS_HEADER, NOT_HONOURED, UnknownFields, validate
from omniserve.server.responses.chat import chat_of
from omniserve.server.responses.fields import CreateResponse
from omniserve.server.responses.items import sealed, unsealed
from omniserve.server.responses.output_items import OutputItems
from omniserve.server.responses.store import ResponseStore
from omniserve.server.tokenizing.text import TextCodec

TOKENIZER = byte_level_tokenizer()
[ASSISTANT] = TOKENIZER("<|assistant|>").input_ids
# Roles are behind the messages: the first message's text begins what the fake engine repeats.
TEMPLATE = (
    "{% for m in messages %}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "<|{{ m.role if m.role in ('system', 'user', 'assistant') else 'user' }}|>{% endfor %}"
    "{% if tools %}{% endif %}{% if add_generation_prompt %}<|assistant|>"
)
ENDS = {"thinks": "<think>\n{% endif %}", "plain": "{% endif %}"}
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}}}}  # fmt: skip
PATCH = {"type": "custom", "name": "apply_patch", "description": "Change files."}
SAY = {"ignore_eos": True, "stop_token_ids": [ASSISTANT]}
"""The fake engine's output ends with the end of the messages."""
EVENTS = pydantic.TypeAdapter(ResponseStreamEvent)
TERMINAL = ("response.completed", "response.incomplete", "response.failed")

over_streams = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def client_of(start_module_server, tmp_path_factory):
    """Return clients of servers by the end of the template and the form of calls."""
    clients = {}

    def client_of(end="plain", calls="hermes"):
        if (end, calls) not in clients:
            folder = tmp_path_factory.mktemp("template")
            TOKENIZER.save_pretrained(folder)
            (folder / "chat_template.jinja").write_text(TEMPLATE + ENDS[end])
            flags = ("--tokenizer", str(folder), "--tool-call-parser", calls)
            clients[end, calls] = start_module_server(*flags).wait_until_ready().client()
        return clients[end, calls]

    return client_of


def raw_events(client, fields):
    """Return the events of a stream as JSON, which are of the official types, numbered, and end as they should."""
    url = f"{client.base_url}responses"
    with httpx.stream("POST", url, json=fields | {"stream": True}, timeout=60) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert lines[::2] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        assert EVENTS.validate_python(event).type == event["type"]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["type"] in TERMINAL for event in events] == [False] * (len(events) - 1) + [True]
    return events


def put_together(events):
    """Return the items that events build, each event in its place."""
    items, parts = [], {}
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items) and event["item"].get("status") == "in_progress"
            items.append(None)
            parts, item_id = {}, event["item"]["id"]
        elif kind == "response.output_item.done":
            assert event["item"]["id"] == item_id and event["output_index"] == len(items) - 1
            items[-1] = event["item"]
            texts = [part["text"] for name in ("content", "summary") for part in items[-1].get(name, [])]
            assert texts + [items[-1][n] for n in ("arguments", "input") if n in items[-1]] == list(parts.values())
        elif "item_id" in event:
            assert event["item_id"] == item_id and event["output_index"] == len(items) - 1 and items[-1] is None
            name = kind.split(".")[1].removesuffix("_part")
            if kind.endswith(".delta"):
                parts[name] = parts.get(name, "") + event["delta"]
            elif kind.endswith((".done", ".added")) and not kind.split(".")[1].endswith("_part"):
                assert parts[name] == event.get("text", event.get("arguments", event.get("input")))
    return items


def say(client, text, /, *, stream=False, **fields):
    """Make the fake engine say a text once; return the response, from a stream if ``stream``."""
    fields = {"model": "fake", "input": text, "store": False, **SAY} | fields
    fields = {name: value for name, value in fields.items() if value is not None}
    if not stream:
        answer = httpx.post(f"{client.base_url}responses", json=fields, timeout=60)
        assert answer.status_code == 200, answer.text
        response = answer.json()
    else:
        events = raw_events(client, fields)
        response = events[-1]["response"]
        assert put_together(events) == response["output"]
        assert events[0]["response"]["output"] == [] and events[0]["response"]["usage"] is None
    Response.model_validate(response)
    return response


def texts_of(response):
    return [(item["type"], "".join(part["text"] for part in item.get("content", []))) for item in response["output"]]


@over_streams
def test_a_text(client_of, stream):
    response = say(client_of(), "hello", stream=stream, instructions=None, metadata={"a": "b"})
    assert texts_of(response) == [("message", "hello")]
    assert (response["object"], response["status"], response["error"]) == ("response", "completed", None)
    assert response["id"].startswith("resp_")
    assert response["output"][0]["id"] == f"msg_{response['id'].removeprefix('resp_')}_0"
    assert (response["service_tier"], response["store"], response["metadata"]) == ("default", False, {"a": "b"})
    usage = response["usage"]
    assert usage["input_tokens"] == len(TOKENIZER("hello<|user|><|assistant|>").input_ids)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


def test_the_official_client_reads_it(client_of):
    client = client_of()
    given = {"model": "fake", "input": "hello", "extra_body": SAY, "store": False}
    assert client.responses.create(**given).output_text == "hello"
    with client.responses.stream(**given) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "hello"
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"
    ]  # fmt: skip

    class City(pydantic.BaseModel):
        name: str

    parsed = client.responses.parse(
        model="fake", input='{"name": "Ulm"}', text_format=City, store=False, extra_body={"stop_token_ids": [ASSISTANT]}
    )
    assert parsed.output_parsed == City(name="Ulm")


@over_streams
@pytest.mark.parametrize("summary", [None, "auto"])
def test_reasoning_is_an_item(client_of, stream, summary):
    fields = {"reasoning": {"effort": "high", "summary": summary}, "include": ["reasoning.encrypted_content"]}
    response = say(client_of("thinks"), "hm < x\n</think>\n\nhello", stream=stream, **fields)
    reasoning, message = response["output"]
    name = "content" if summary is None else "summary"
    kind = "reasoning_text" if summary is None else "summary_text"
    assert reasoning[name] == [{"type": kind, "text": "hm < x"}]
    assert not reasoning.get("content" if summary else "summary")
    assert unsealed(reasoning["encrypted_content"]) == "hm < x"
    assert reasoning["id"].startswith("rs_") and message["content"][0]["text"] == "hello"
    assert response["reasoning"] == {"effort": "high", "summary": summary}
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 3


@over_streams
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_calls_are_items(client_of, stream, name):
    client = client_of("plain", name)
    calls = [("weather", {"city": "Köln", "days": 5}), ("weather", {"city": "Ulm", "days": 1})]
    response = say(client, f"Wait. {FORMS[name].write(calls)}", stream=stream, tools=[WEATHER])
    message, *found = response["output"]
    assert (message["type"], message["content"][0]["text"]) == ("message", "Wait.")
    assert [(c["type"], c["name"], json.loads(c["arguments"]), c["status"]) for c in found] == [
        ("function_call", *call, "completed") for call in calls
    ]
    assert len({call["call_id"] for call in found}) == len({call["id"] for call in response["output"][1:]}) == 2
    assert response["tools"] == [{**WEATHER, "description": None, "strict": None}]
    last = say(client, FORMS[name].write(calls), stream=stream, tools=[WEATHER], parallel_tool_calls=False)
    assert [item["type"] for item in last["output"]] == ["function_call"]


@over_streams
def test_custom_tools_are_called_with_text(client_of, stream):
    client = client_of()
    text = '*** Begin Patch\n"é"'
    call = FORMS["hermes"].write([("apply_patch", {"input": text})])
    [item] = say(client, call, stream=stream, tools=[PATCH, WEATHER])["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", text)
    call = FORMS["hermes"].write([("apply_patch", {"patch": text})])  # as the model has it
    [item] = say(client, call, stream=stream, tools=[PATCH])["output"]
    assert json.loads(item["input"]) == {"patch": text}


@over_streams
def test_an_answer_that_is_cut_is_incomplete(client_of, stream):
    response = say(client_of(), "hello hello", stream=stream, max_output_tokens=3)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    [item] = response["output"]
    assert item["status"] == "incomplete" and response["completed_at"] is None
    response = say(client_of("thinks"), "hello hello", stream=stream, max_output_tokens=3)
    assert [(item["type"], item["status"]) for item in response["output"]] == [("reasoning", "incomplete")]


def test_a_call_that_is_cut_off_is_incomplete(client_of):
    call = '<tool_call>{"name": "weather", "arguments": {"city": "' + "a" * 40
    num_tokens = len(TOKENIZER(f"<|user|>{call}").input_ids) - 3
    [item] = say(client_of(), call, stream=True, tools=[WEATHER], max_output_tokens=num_tokens)["output"]
    assert (item["type"], item["name"], item["status"]) == ("function_call", "weather", "incomplete")
    assert item["arguments"].startswith('{"city": "aaa')


@over_streams
def test_log_probabilities_are_those_of_the_message(client_of, stream):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = say(client_of("thinks"), "hm</think>hello", stream=stream, **fields)
    [part] = response["output"][1]["content"]
    assert "".join(bytes(b for e in part["logprobs"] for b in e["bytes"]).decode()) == "hello<|user|>"
    assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {2}
    assert say(client_of(), "hello", stream=stream)["output"][0]["content"][0]["logprobs"] == []


def test_a_failure_is_the_last_event(client_of):
    bad = TOKENIZER.decode([fake_engine.BAD_OUTPUT])
    assert TOKENIZER(bad + " hello").input_ids[0] == fake_engine.BAD_OUTPUT
    events = raw_events(client_of(), {"input": bad + " hello", "model": "fake", "store": False})
    response = events[-1]["response"]
    assert (events[-1]["type"], response["status"], response["error"]["code"]) == (
        "response.failed", "failed", "server_error"
    )  # fmt: skip
    assert "could not go on" in response["error"]["message"]


def test_what_is_hosted_elsewhere_is_left_out_and_named(client_of):
    client = client_of()
    hosted = [{"type": "web_search", "external_web_access": True}, {"type": "namespace", "name": "n", "tools": []}]
    items = [{"type": "web_search_call", "id": "ws_1", "status": "completed"}, {"role": "user", "content": "hi"}]
    answer = httpx.post(
        f"{client.base_url}responses",
        json={"model": "fake", "input": items, "tools": [*hosted, WEATHER], "zzz": 1, "store": False, **SAY},
    )
    names = ["zzz", "tools.web_search", "tools.namespace", "input.web_search_call"]
    assert answer.json()["omniserve"] == {"ignored_fields": names}
    assert answer.headers[IGNORED_FIELDS_HEADER] == ", ".join(names)
    assert [tool["name"] for tool in answer.json()["tools"]] == ["weather"]
    assert "omniserve" not in say(client, "hi")
    for choice in ({"type": "web_search"}, {"type": "allowed_tools", "mode": "required", "tools": [hosted[0]]}):
        with pytest.raises(openai.BadRequestError, match="does not run") as error:
            client.responses.create(model="fake", input="a", tools=hosted, tool_choice=choice)
        assert error.value.param == "tool_choice"
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [*hosted[:1], {"type": "function", "name": "weather"}]}
    response = say(client, "hi", tools=[*hosted, WEATHER], tool_choice=allowed)
    assert response["tool_choice"] == allowed | {"tools": [{"type": "function", "name": "weather"}]}


def messages(**fields):
    """Return the messages of the chat that a request is."""
    fields["model"] = "fake"
    asked = validate(CreateResponse, fields, UnknownFields())
    request = chat_of(asked, fields, asked.input, defaults={}, unknown=UnknownFields())
    return [
        {name: value for name, value in message.for_template().items() if name != "reasoning"}
        for message in request.messages
    ]


def call_message(*calls, content="", **more):
    tool_calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": tool_calls} | more


def test_items_become_messages():
    history = [
        {"role": "developer", "content": "be kind"},
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "one "}, {"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "short"}],
         "encrypted_content": sealed("long é")},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "phase": "commentary",
         "content": [{"type": "output_text", "text": "Wait.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c0", "name": "f", "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "call_id": "c1", "name": "g", "input": "x"},
        {"type": "function_call_output", "call_id": "c0", "output": [{"type": "input_text", "text": "1"}]},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "2"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "then"}]},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "three"},
    ]  # fmt: skip
    assert messages(input=history, instructions="first") == [
        {"role": "system", "content": "first\n\nbe kind"},
        {"role": "user", "content": "one two"},
        call_message(("f", {"a": 1}), ("g", {"input": "x"}), content="Wait.", reasoning_content="long é"),
        {"role": "tool", "content": "1", "tool_call_id": "c0"},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Done.", "reasoning_content": "then"},
        {"role": "assistant", "content": "Really."},
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "three"},
    ]
    assert messages(input="hi") == [{"role": "user", "content": "hi"}]
    other = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "gAAAAB"}
    assert messages(input=[other, {"role": "assistant", "content": "a"}]) == [
        {"role": "assistant", "content": "a", "reasoning_content": "s"}
    ]


@over_streams
def test_an_answer_goes_back_as_it_came(client_of, stream):
    client = client_of("thinks")
    fields = {"tools": [WEATHER, PATCH], "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}
    call = FORMS["hermes"].write([("weather", {"city": "Ulm"}), ("apply_patch", {"input": "x"})])
    first = say(client, f"hm</think>Wait. {call}", stream=stream, **fields)
    outputs = [
        {"type": item["type"] + "_output", "call_id": item["call_id"], "output": "ok"} for item in first["output"][2:]
    ]
    second = say(client, [{"role": "user", "content": "go"}, *first["output"], *outputs], stream=stream, **fields)
    assert second["status"] == "completed"
    assert "omniserve" not in second
    assert [m["role"] for m in messages(input=[*first["output"], *outputs])] == ["assistant", "tool", "tool"]


WRONG = [
    ({"model": None, "input": "a"}, "model"),
    ({}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": "a" * 40_000}, "input"),
    ({"input": [{"type": "mesage", "role": "user"}]}, "input.0"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0.type"),
    ({"input": "a", "max_tokens": 5}, "max_tokens"),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "a", "max_output_tokens": 100_000}, "input"),
    ({"input": "a", "messages": []}, "messages"),
    ({"input": "a", "conversation": "conv_1"}, "conversation"),
    ({"input": "a", "prompt": {"id": "p"}}, "prompt"),
    ({"input": "a", "model": "other"}, "model"),
    ({"input": "a", "n": 2}, "n"),
    ({"input": "a", "include": ["x"]}, "include.0"),
    ({"input": "a", "temperature": 3}, "temperature"),
    ({"input": "a", "metadata": {"a": 1}}, "metadata.a"),
    ({"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    ({"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format"),
    ({"input": "a", "text": {"format": {"type": "json_object"}}, "ignore_eos": True}, "ignore_eos"),
    ({"input": "a", "tool_choice": "required"}, "tool_choice"),
    ({"input": "a", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"input": "a", "tools": [WEATHER, WEATHER]}, "tools"),
    ({"input": "a", "slo": {"ttft": 1}}, "slo.ttft"),
    ({"input": "a", "seed": "x"}, "seed"),
    ({"input": "a", "service_tier": "none"}, "service_tier"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: value if isinstance(value, str) else None)
def test_what_is_wrong_is_named(client_of, fields, param):
    client = client_of()
    answer = httpx.post(f"{client.base_url}responses", json={"model": "fake"} | fields, timeout=60)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param, answer.text
    assert "response_format" not in answer.text


TAKEN = {
    "input": "a", "instructions": "b", "stream_options": {"include_obfuscation": False},
    "max_tool_calls": 3, "tool_choice": "auto", "text": {"format": {"type": "text"}, "verbosity": "low"},
    "reasoning": {"effort": "low", "generate_summary": "concise"}, "temperature": 0.5, "top_p": 0.5, "user": "u",
    "safety_identifier": "s", "prompt_cache_key": "k", "client_metadata": {"a": "b"}, "prompt_cache_options": None,
    "top_k": 5, "min_p": 0.1, "seed": 3, "stop": "x", "logit_bias": {"5": 1}, "presence_penalty": 0.5,
    "frequency_penalty": 0.5, "repetition_penalty": 1.5, "min_tokens": 1, "cache_salt": "x", "speculation": True,
    "service_tier": "flex", "slo": {"ttft_s": 5}, "chat_template_kwargs": {"a": 1}, "store": False, "stream": False,
}  # fmt: skip


def test_a_header_stands_for_the_tier(client_of):
    client = client_of()
    answer = client.responses.create(
        model="fake", input="a", max_output_tokens=1, extra_headers={"x-omniserve-service-tier": "flex"}
    )
    assert answer.service_tier == "flex"


def test_all_fields_are_taken_and_repeated(client_of):
    fields = TAKEN | {"max_output_tokens": 3, "ignore_eos": None, "stop_token_ids": None}
    response = say(client_of(), fields.pop("input"), **fields)
    assert "omniserve" not in response
    for name in ("instructions", "max_tool_calls", "text", "temperature", "top_p", "user", "safety_identifier",
                 "prompt_cache_key", "presence_penalty", "frequency_penalty", "service_tier"):  # fmt: skip
        assert response[name] == TAKEN[name], name
    assert response["reasoning"] == {"effort": "low", "summary": "concise"}


def test_documented_fields_are_known():
    documented = set()
    for kind in (ResponseCreateParamsNonStreaming, ResponseCreateParamsStreaming):
        documented |= kind.__required_keys__ | kind.__optional_keys__
    assert documented <= {*CreateResponse.model_fields, *CreateResponse.fates, *NOT_HONOURED}


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_steps_of_any_size_and_whole_answers_are_the_same_items(name):
    """Drafts bring several tokens a step, and what a reader has not read is merged."""
    call = FORMS[name].write([("weather", {"city": "Köln"}), ("weather", {"city": "Ulm", "days": 2})])
    token_ids = TOKENIZER(f"hm < x\n</think>\n\nhello bye {call}\n so {call} end").input_ids
    codec, dialect = TextCodec(TOKENIZER), choose("", thinking="qwen3", calls=name)
    rng = random.Random(0)
    results = set()
    for at_once in (False, True, False, False, False, False):
        schemas = {"weather": {"properties": {"days": {"type": "integer"}}}}
        parser = functools.partial(dialect.parser, schemas, opening=Opening("<think>"), streams=not at_once)
        request = Request(request_id="r", prompt_token_ids=[5], sampling=SamplingParams(max_tokens=1000))
        form = TextForm(at_once=at_once, parser=parser)
        choice = Choice(0, request, codec, slo=SLO(), arrival_s=0.0, form=form, echo=None)
        deltas, at = [], 0
        while at < len(token_ids):
            size = rng.randint(1, 9)
            reason = FinishReason.STOP if at + size >= len(token_ids) else None
            new = tuple(token_ids[at : at + size]) + ((ASSISTANT,) if reason else ())
            at += size
            output = RequestOutput(request_id="r", service_class="LS", new_token_ids=new, finish_reason=reason)
            if (delta := choice.advance(output)) is not None:
                deltas.append(delta)
        for each in (deltas, [merge(deltas)]):
            items = OutputItems("k", custom_tools=frozenset(), with_summary=False, with_seal=True, logprob=None)
            events = [event for delta in each for event in items.add(delta)] + items.end()
            assert put_together(events) == items.items
            num_pieces = sum(event["type"] == "response.function_call_arguments.delta" for event in events)
            assert num_pieces == 4 if each is not deltas or at_once else num_pieces > 12
            found = json.loads(json.dumps(items.items))
            for item in found:
                item.pop("call_id", None)
            results.add(json.dumps(found))
    [whole] = results
    call, message = "function_call", "message"
    kinds = ["reasoning", message, call, call, message, call, call, message]
    assert [item["type"] for item in json.loads(whole)] == kinds
    texts = [item["content"][0]["text"].strip() for item in json.loads(whole) if "content" in item]
    assert texts == ["hm < x", "hello bye", "so", "end"]


def test_sealed_reasoning_is_read_by_the_server_that_sealed_it():
    for text in ("", "why", "é\n" * 100):
        assert unsealed(sealed(text)) == text
    assert unsealed("gAAAAABo") is None and unsealed("omniserve-1:%%%") is None


def test_a_constraint_names_the_field_of_responses():
    fields = {"model": "fake", "input": "a", "text": {"format": {"type": "json_object"}}}
    asked = validate(CreateResponse, fields, UnknownFields())
    request = chat_of(asked, fields, asked.input, defaults={"temperature": 0.25}, unknown=UnknownFields())
    assert (request.constraint.param, request.temperature, request.prompt_field) == ("text.format", 0.25, "input")
    fields |= {"tools": [WEATHER]}
    asked = validate(CreateResponse, fields, UnknownFields())
    request = chat_of(asked, fields, asked.input, defaults={}, unknown=UnknownFields())
    assert (request.constraint.param, request.constraint.otherwise.param) == ("tools", "text.format")


def test_lines_of_batches_are_responses(client_of):
    client = client_of()
    body = {"input": "hello", "reasoning": {"summary": "auto"}, **SAY}
    wrong = {"max_tokens": 5}, {"background": True}
    lines = [
        line("a", body, "/v1/responses"),
        *(line(f"b{i}", body | one, "/v1/responses") for i, one in enumerate(wrong)),
    ]
    batch = wait_for(client, submit(client, lines, endpoint="/v1/responses").id)
    [answer] = results(client, batch.output_file_id)
    response = answer["response"]["body"]
    Response.model_validate(response)
    assert (texts_of(response), response["service_tier"]) == ([("message", "hello")], "flex")
    refused = results(client, batch.error_file_id)
    assert {each["response"]["body"]["error"]["param"] for each in refused} == {"max_tokens", "background"}


def create(client, text, **fields):
    return client.responses.create(model="fake", input=text, extra_body=SAY, **fields)


def test_stored_responses_are_read_and_deleted(client_of):
    client = client_of()
    response = create(client, [{"role": "user", "content": "one"}, {"role": "user", "content": "hello"}])
    assert (response.to_dict()["store"], response.status) == (True, "completed")
    assert client.responses.retrieve(response.id) == response
    page = client.responses.input_items.list(response.id, limit=1)
    key = response.id.removeprefix("resp_")
    assert [item.id for item in page] == [f"msg_{key}_i1", f"msg_{key}_i0"]  # newest first, over all pages
    [one, _] = client.responses.input_items.list(response.id, order="asc").data
    assert (one.role, one.content[0].type, one.content[0].text) == ("user", "input_text", "one")
    client.responses.delete(response.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match=response.id):
            call(response.id)
    unstored = create(client, "hello", store=False)
    assert unstored.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)
    with pytest.raises(openai.NotFoundError, match="msg_none"):
        client.responses.input_items.list(create(client, "a").id, after="msg_none")


@over_streams
def test_a_response_goes_on_with_another_one(client_of, stream):
    client = client_of("thinks")
    call = FORMS["hermes"].write([("weather", {"city": "Ulm"})])
    fields = {"tools": [WEATHER], "store": True}
    first = say(client, f"hm</think>Wait. {call}", stream=stream, instructions="now", **fields)
    assert first["store"] is True
    output = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "sun"}
    second = say(client, [output], stream=stream, previous_response_id=first["id"], **fields)
    third = say(client, "bye", stream=stream, previous_response_id=second["id"], **fields)
    assert third["previous_response_id"] == second["id"]
    asked = [{"role": "user", "content": f"hm</think>Wait. {call}"}, *first["output"], output, *second["output"]]
    whole = say(client, [*asked, {"role": "user", "content": "bye"}], **fields)
    assert whole["usage"]["input_tokens"] == third["usage"]["input_tokens"]
    items = client.responses.input_items.list(third["id"]).data
    assert [item.content[0].text for item in items] == ["bye"]
    references = [{"type": "item_reference", "id": item["id"]} for item in (*first["output"], *second["output"])]
    references.insert(3, {"id": f"fco_{second['id'].removeprefix('resp_')}_i0"})
    again = say(client, [asked[0], *references, {"role": "user", "content": "bye"}], **fields)
    assert again["usage"]["input_tokens"] == third["usage"]["input_tokens"]
    client.responses.delete(first["id"])
    with pytest.raises(openai.BadRequestError, match=first["id"]) as error:
        create(client, "a", previous_response_id=second["id"])
    assert (error.value.param, error.value.code) == ("previous_response_id", "previous_response_not_found")
    with pytest.raises(openai.BadRequestError, match="no item"):
        create(client, references[:1])


def test_responses_belong_to_a_key_and_expire(start_server, tmp_path, tokenizer_folder):
    keys = [{"name": "ann", "key": "ann", "tier": "flex"}, {"name": "bob", "key": "bob", "requests_per_minute": 3}]
    (tmp_path / "keys.yaml").write_text(json.dumps(keys))
    flags = ("--api-key-file", str(tmp_path / "keys.yaml"), "--limit", "response_days=0.0005")
    server = start_server(*flags).wait_until_ready()
    ann, bob = (server.client().with_options(api_key=name) for name in ("ann", "bob"))
    given = {"model": "fake", "input": "hi", "max_output_tokens": 3}
    response = ann.responses.create(**given)
    assert response.service_tier == "flex" and response.usage.output_tokens == 3
    with pytest.raises(openai.NotFoundError):
        bob.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        bob.responses.delete(response.id)
    with pytest.raises(openai.BadRequestError):
        bob.responses.create(**given, previous_response_id=response.id)
    with pytest.raises(openai.BadRequestError):
        bob.responses.create(model="fake", input=[{"type": "item_reference", "id": response.output[0].id}])
    assert ann.responses.retrieve(response.id).id == response.id
    bob.responses.create(**given)
    with pytest.raises(openai.RateLimitError, match="3 requests a minute"):
        bob.with_options(max_retries=0).responses.create(**given)
    with server.batches_database.write() as connection:
        connection.execute(update(RESPONSES).values(expires_at=RESPONSES.c.expires_at - 60))
    with pytest.raises(openai.NotFoundError):
        ann.responses.retrieve(response.id)


def test_a_server_without_a_database_stores_nothing(start_server, tmp_path):
    (tmp_path / "data").write_text("no folder")
    server = start_server(data_home=tmp_path / "data").wait_until_ready()
    client = server.client()
    given = {"model": "fake", "input": "hi", "max_output_tokens": 3}
    response = client.responses.create(**given).to_dict()
    assert response["store"] is False and "omniserve" not in response
    assert client.responses.create(**given, store=True).to_dict()["omniserve"] == {"ignored_fields": ["store"]}
    for fields in ({"background": True}, {"previous_response_id": "resp_1"}, {"input": [{"id": "msg_1"}]}):
        with pytest.raises(openai.BadRequestError, match="stores no responses"):
            client.responses.create(**given | fields)
    with pytest.raises(openai.InternalServerError, match="stores no responses"):
        client.with_options(max_retries=0).responses.retrieve("resp_1")


def test_an_answer_that_cannot_be_stored_says_so(start_server, monkeypatch):
    server = start_server().wait_until_ready()

    def fail(*_):
        raise StorageError("the disk is full", status=507)

    monkeypatch.setattr(ResponseStore, "_put", fail)
    given = {"model": "fake", "input": "hi", "max_output_tokens": 3}
    response = server.client().responses.create(**given).to_dict()
    assert (response["store"], response["omniserve"]) == (False, {"not_stored": "the disk is full"})
    [*_, last] = raw_events(server.client(), given)
    assert last["response"]["omniserve"] == {"not_stored": "the disk is full"}


SLOW_TEXT = TOKENIZER.decode([fake_engine.SLOW]) + " hello"


def wait_until_done(client, response_id):
    while (response := client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        time.sleep(0.02)
    return response


def test_a_background_response_runs_without_a_connection(client_of):
    client = client_of()
    response = create(client, "hello", background=True)
    assert (response.status, response.background, response.output) == ("queued", True, [])
    done = wait_until_done(client, response.id)
    assert (done.output_text, done.status, done.to_dict()["store"]) == ("hello", "completed", True)
    assert create(client, "bye", previous_response_id=response.id).status == "completed"
    events = list(client.responses.retrieve(response.id, stream=True))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    after = list(client.responses.retrieve(response.id, stream=True, starting_after=3))
    assert [event.sequence_number for event in after] == [event.sequence_number for event in events[4:]]
    streamed = list(create(client, "hello", background=True, stream=True))
    assert {event.type for event in streamed} == {event.type for event in events}
    assert client.responses.retrieve(streamed[-1].response.id) == streamed[-1].response
    with pytest.raises(openai.BadRequestError, match="background needs store"):
        create(client, "a", background=True, store=False)
    with pytest.raises(openai.BadRequestError, match="events of this response"):
        client.responses.retrieve(create(client, "a").id, stream=True)


def test_a_background_response_can_be_cancelled_or_deleted(client_of):
    client = client_of()
    assert TOKENIZER(SLOW_TEXT).input_ids[0] == fake_engine.SLOW
    endless = {"model": "fake", "input": SLOW_TEXT, "background": True, "extra_body": {"ignore_eos": True}}
    first = client.responses.create(**endless)
    with client.responses.retrieve(first.id, stream=True) as stream:
        assert next(iter(stream)).type == "response.created"
    assert client.responses.cancel(first.id).status == "cancelled"
    assert client.responses.cancel(first.id).status == client.responses.retrieve(first.id).status == "cancelled"
    second = client.responses.create(**endless)
    with pytest.raises(openai.BadRequestError, match="still runs"):
        create(client, "a", previous_response_id=second.id)
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel(second.id)
    with pytest.raises(openai.BadRequestError, match="does not run in the background"):
        client.responses.cancel(create(client, "a").id)
    bad = TOKENIZER.decode([fake_engine.BAD_OUTPUT]) + " hello"
    failed = wait_until_done(client, create(client, bad, background=True).id)
    assert (failed.status, failed.error.code) == ("failed", "server_error")


def test_a_background_response_of_a_dead_server_has_failed(start_server):
    server = start_server().wait_until_ready()
    client = server.client()
    response = client.responses.create(model="fake", input="hi", max_output_tokens=3)
    with server.batches_database.write() as connection:
        told = json.dumps(response.to_dict() | {"status": "in_progress", "background": True})
        connection.execute(update(RESPONSES).values(alive_until=1.0, response=told))
    assert client.responses.retrieve(response.id).error.message.startswith("the server that worked on this")


def test_the_tokens_of_an_input_are_counted(client_of):
    client = client_of()
    fields = {"input": [{"role": "user", "content": "hello"}], "tools": [WEATHER], "instructions": "a"}
    found = client.responses.input_tokens.count(**fields)
    assert found.object == "response.input_tokens"
    assert found.input_tokens == client.responses.create(model="fake", **fields).usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="more than"):
        client.responses.input_tokens.count(model="fake", input="a" * 1_600_000)
    assert httpx.post(f"{client.base_url}responses/compact", json={}).status_code == 404


def test_the_oldest_turns_are_left_out_of_a_long_input(client_of):
    client = client_of()
    turns = [{"role": "developer", "content": "stay"}]
    for i in range(40):
        turns += [{"role": "user", "content": f"question {i} " * 5}, {"role": "assistant", "content": f"answer {i}"}]
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        create(client, turns)
    found = create(client, turns, truncation="auto", max_output_tokens=100, store=False)
    assert found.output_text.startswith("stay")
    limit = 512  # of the fake engine
    assert limit - 100 - 2 * 90 < found.usage.input_tokens <= limit - 100
    short = create(client, turns[:4], truncation="auto", store=False)
    assert short.usage.input_tokens == create(client, turns[:4], store=False).usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        create(client, "a" * 40_000, truncation="auto")


@pytest.mark.slow
def test_the_end_of_the_server_is_the_end_of_a_background_response(start_server, tmp_path):
    server = start_server(data_home=tmp_path, shutdown_timeout_s=0.1).wait_until_ready()
    endless = {"model": "fake", "input": "a", "instructions": SLOW_TEXT, "extra_body": {"ignore_eos": True}}
    response = server.client().responses.create(**endless, background=True)
    server.stop()
    again = start_server(data_home=tmp_path).wait_until_ready()
    failed = again.client().responses.retrieve(response.id)
    assert (failed.status, failed.error.code) == ("failed", "server_error")
    assert "shutting down" in failed.error.message
