"""Every field that OpenAI's or vLLM's API documents: its default is taken, other values are honoured or refused."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
from openai.types import completion_create_params as openai_completions
from openai.types.chat import completion_create_params as openai_chats
from tokenizers_for_tests import TOOL_CHAT_TEMPLATE, byte_level_tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from omniserve.server.api import DetokenizeRequest, TokenizeRequest
from omniserve.server.completions.protocol import RESERVED_VARIABLES, ChatRequest, CompletionRequest
from omniserve.server.fields import IGNORED_FIELDS_HEADER, NOT_HONOURED

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
RIGHT = {COMPLETIONS: {"prompt": "a", "max_tokens": 3}, CHAT: {"messages": USER, "max_tokens": 3}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}

TAKEN, DROPPED, REFUSED = "taken", "dropped", "refused"
# Name -> a value that asks for nothing (... : none but null), another one, and what becomes of that on both endpoints.
FIELDS = {
    # OpenAI's.
    "audio": (..., {"voice": "x", "format": "wav"}, REFUSED, REFUSED),
    "best_of": (1, 2, REFUSED, TAKEN),
    "echo": (False, True, REFUSED, TAKEN),
    "frequency_penalty": (0.0, 1.5, TAKEN, TAKEN),
    "function_call": ("none", {"name": "f"}, REFUSED, REFUSED),
    "functions": ([], [{"name": "f"}], REFUSED, REFUSED),
    "logit_bias": ({}, {"5": 1}, TAKEN, TAKEN),
    "max_completion_tokens": (3, 2, REFUSED, REFUSED),  # beside another max_tokens
    "max_tokens": (3, 2, TAKEN, TAKEN),
    "metadata": ({}, {"a": "b"}, TAKEN, TAKEN),
    "modalities": (["text"], ["audio"], REFUSED, REFUSED),
    "model": ("fake", "other", REFUSED, REFUSED),
    "moderation": (..., {"model": "x"}, REFUSED, REFUSED),
    "n": (1, 2, TAKEN, TAKEN),
    "parallel_tool_calls": (True, False, TAKEN, TAKEN),
    "prediction": (..., {"type": "content", "content": "a"}, TAKEN, TAKEN),
    "presence_penalty": (0.0, 1.5, TAKEN, TAKEN),
    "prompt_cache_key": ("", "k", TAKEN, TAKEN),
    "prompt_cache_options": (..., {"mode": "explicit"}, DROPPED, DROPPED),
    "prompt_cache_retention": ("in_memory", "24h", DROPPED, DROPPED),  # without a session
    "reasoning_effort": ("none", "high", TAKEN, TAKEN),
    "response_format": ({"type": "text"}, {"type": "json_object"}, TAKEN, TAKEN),
    "safety_identifier": ("", "s", TAKEN, TAKEN),
    "seed": (0, 5, TAKEN, TAKEN),
    "service_tier": ("auto", "flex", TAKEN, TAKEN),
    "stop": ([], "x", TAKEN, TAKEN),
    "store": (False, True, REFUSED, REFUSED),
    "stream": (False, True, TAKEN, TAKEN),
    "stream_options": ({}, {"include_usage": True, "continuous_usage_stats": True}, TAKEN, TAKEN),
    "suffix": ("", "b", REFUSED, REFUSED),
    "temperature": (1.0, 0.5, TAKEN, TAKEN),
    "tool_choice": ("none", "required", REFUSED, REFUSED),  # there are no tools
    "tools": ([], [TOOL], TAKEN, REFUSED),
    "top_p": (1.0, 0.5, TAKEN, TAKEN),
    "user": ("", "u", TAKEN, TAKEN),
    "verbosity": ("medium", "low", TAKEN, TAKEN),
    "web_search_options": (..., {}, REFUSED, REFUSED),
    # vLLM's.
    "add_generation_prompt": (True, False, TAKEN, REFUSED),
    "allowed_token_ids": ([], [5], REFUSED, REFUSED),
    "bad_words": ([], ["x"], REFUSED, REFUSED),
    "cache_salt": (..., "x", TAKEN, TAKEN),
    "chat_template": (..., "{{ messages }}", REFUSED, REFUSED),
    "chat_template_kwargs": ({}, {"enable_thinking": False}, TAKEN, REFUSED),
    "continue_final_message": (False, True, TAKEN, REFUSED),
    "documents": ([], [{"title": "t", "text": "x"}], TAKEN, REFUSED),
    "ec_transfer_params": ({}, {"a": 1}, REFUSED, REFUSED),
    "ignore_eos": (False, True, TAKEN, TAKEN),
    "include_reasoning": (True, False, TAKEN, REFUSED),
    "include_stop_str_in_output": (False, True, TAKEN, TAKEN),
    "kv_transfer_params": ({}, {"a": 1}, REFUSED, REFUSED),
    "length_penalty": (1.0, 0.5, REFUSED, REFUSED),
    "logprob_token_ids": (..., [5], REFUSED, REFUSED),
    "media_io_kwargs": ({}, {"image": {}}, TAKEN, TAKEN),
    "min_p": (0.0, 0.5, TAKEN, TAKEN),
    "min_tokens": (0, 2, TAKEN, TAKEN),
    "mm_processor_kwargs": ({}, {"a": 1}, TAKEN, TAKEN),
    "priority": (0, 1, TAKEN, TAKEN),
    "prompt_embeds": (..., "AAAA", REFUSED, REFUSED),
    "prompt_logprobs": (..., 1, REFUSED, REFUSED),
    "repetition_detection": (..., {"min_count": 2}, REFUSED, REFUSED),
    "repetition_penalty": (1.0, 1.5, TAKEN, TAKEN),
    "request_id": (..., "r", DROPPED, DROPPED),
    "return_mm_kwargs": (True, False, TAKEN, TAKEN),
    "return_prompt_text": (False, True, REFUSED, REFUSED),
    "return_token_ids": (False, True, TAKEN, TAKEN),
    "return_token_offsets": (False, True, TAKEN, TAKEN),
    "return_tokens_as_token_ids": (False, True, TAKEN, TAKEN),
    "routed_experts_prompt_start": (0, 1, REFUSED, REFUSED),
    "session_id": ("", "s", TAKEN, TAKEN),
    "skip_special_tokens": (True, False, TAKEN, TAKEN),
    "spaces_between_special_tokens": (True, False, REFUSED, REFUSED),
    "stop_token_ids": ([], [5], TAKEN, TAKEN),
    "stream_interval": (..., 4, DROPPED, DROPPED),
    "structured_outputs": ({}, {"json": SCHEMA}, REFUSED, REFUSED),
    "thinking_token_budget": (-1, 5, REFUSED, REFUSED),  # this template marks no thinking
    "top_k": (0, 5, TAKEN, TAKEN),
    "truncate_prompt_tokens": (..., 5, REFUSED, REFUSED),
    "truncation_side": ("left", "right", TAKEN, TAKEN),
    "use_beam_search": (False, True, REFUSED, REFUSED),
    "vllm_xargs": ({}, {"a": 1}, REFUSED, REFUSED),
    "watermarking": (False, True, REFUSED, REFUSED),
    # vLLM's until lately.
    "early_stopping": (False, True, REFUSED, REFUSED),
    "guided_choice": ([], ["a", "b"], REFUSED, REFUSED),
    "guided_decoding_backend": ("auto", "x", TAKEN, TAKEN),
    "guided_grammar": ("", "root ::= x", REFUSED, REFUSED),
    "guided_json": (..., SCHEMA, REFUSED, REFUSED),
    "guided_regex": ("", "a+", REFUSED, REFUSED),
    "guided_whitespace_pattern": ("", " ", REFUSED, REFUSED),
}
# Fields whose type or default is not the same on both endpoints: path, name, value, what becomes of it.
MORE = [
    (CHAT, "add_special_tokens", False, TAKEN),
    (CHAT, "add_special_tokens", True, TAKEN),
    (COMPLETIONS, "add_special_tokens", True, TAKEN),
    (COMPLETIONS, "add_special_tokens", False, TAKEN),
    (CHAT, "logprobs", False, TAKEN),
    (CHAT, "logprobs", 0, TAKEN),
    (CHAT, "logprobs", True, TAKEN),
    (COMPLETIONS, "logprobs", False, TAKEN),
    (COMPLETIONS, "logprobs", 0, TAKEN),
    (COMPLETIONS, "logprobs", 2, TAKEN),
    (CHAT, "top_logprobs", 0, TAKEN),
    (CHAT, "top_logprobs", 2, REFUSED),  # without logprobs
    (COMPLETIONS, "top_logprobs", 0, TAKEN),
    (COMPLETIONS, "top_logprobs", 2, REFUSED),
    (COMPLETIONS, "messages", USER, REFUSED),
    (CHAT, "prompt", "a", REFUSED),
    (CHAT, "stop", "", TAKEN),
    (COMPLETIONS, "stop", [""], TAKEN),
    (CHAT, "tool_choice", "auto", TAKEN),
    (COMPLETIONS, "tool_choice", "auto", TAKEN),
    (CHAT, "function_call", "auto", TAKEN),
    (CHAT, "length_penalty", 1, TAKEN),
    (CHAT, "best_of", True, REFUSED),  # which is no number
    (CHAT, "response_format", {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, TAKEN),
    (CHAT, "response_format", {"type": "json_object", "schema": SCHEMA}, TAKEN),
    (CHAT, "response_format", {"type": "json_schema", "schema": SCHEMA}, TAKEN),
    (CHAT, "response_format", {"type": "text", "schema": SCHEMA}, REFUSED),
    (CHAT, "stream_options", {"include_usage": True}, TAKEN),
    (COMPLETIONS, "stream_options", {"include_usage": None, "continuous_usage_stats": None}, TAKEN),
    (COMPLETIONS, "slo", {"ttft_s": None}, TAKEN),
    (COMPLETIONS, "slo", {"ttft": 1}, "slo.ttft"),
]
CASES = {
    name: [
        (path, value, fate)
        for path, fate_of_other in zip((CHAT, COMPLETIONS), fates, strict=True)
        for value, fate in ((None, TAKEN), (default, TAKEN), (other, fate_of_other))
        if value is not ...
    ]
    for name, (default, other, *fates) in FIELDS.items()
}
for path_, name_, *case in MORE:
    CASES.setdefault(name_, []).append((path_, *case))


@pytest.fixture(scope="module")
def server(start_module_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("templates")
    byte_level_tokenizer().save_pretrained(folder)
    template = TOOL_CHAT_TEMPLATE + "{% for d in documents or [] %}{{ d.text }}{% endfor %}{{ reasoning_effort }}"
    template += "{{ enable_thinking }}{{ verbosity }}"
    (folder / "chat_template.jinja").write_text(template)
    server = start_module_server("--tokenizer", str(folder)).wait_until_ready()
    with server.http() as server.session:
        yield server


@pytest.mark.parametrize("name", CASES)
def test_a_documented_field_is_taken_or_refused_by_its_name(server, name):
    for path, value, fate in CASES[name]:
        response = server.session.post(path, json=RIGHT[path] | {name: value})
        what = path, value, fate, response.text
        if fate in (TAKEN, DROPPED):
            assert response.status_code == 200, what
            assert response.headers.get(IGNORED_FIELDS_HEADER) == (name if fate == DROPPED else None), what
            continue
        error = response.json()["error"]
        assert response.status_code in (400, 404), what  # 404: another model
        assert error["param"] in ({name, fate} if name != "max_completion_tokens" else {"max_tokens"}), what
        assert error["message"], what


def test_the_table_has_every_field():
    openais = {*openai_chats.CompletionCreateParamsBase.__annotations__}
    openais |= {*openai_completions.CompletionCreateParamsBase.__annotations__}
    models = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    tried = set(CASES)
    assert openais - tried == set(), "say in NOT_HONOURED what becomes of it, or honour it"
    assert {name for name in NOT_HONOURED if "." not in name} - tried == set()
    assert models - tried == {"speculation"}, "fields that are this server's own"


def test_the_documentation_names_every_field_that_is_not_honoured():
    text = (Path(__file__).parents[2] / "docs" / "requests.md").read_text()
    assert [name for name in NOT_HONOURED if "." not in name and f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    ("path", "right", "fields"),
    [
        ("/tokenize", {"prompt": "a"}, {
            "model": "fake", "add_special_tokens": False, "return_token_strs": True, "add_generation_prompt": True,
            "continue_final_message": False, "chat_template_kwargs": {}, "tools": [], "media_io_kwargs": {}}),
        ("/tokenize", {"messages": USER}, {
            "model": "fake", "add_special_tokens": True, "return_token_strs": None, "add_generation_prompt": False,
            "continue_final_message": True, "chat_template_kwargs": {"a": 1}, "tools": [TOOL], "chat_template": None,
            "mm_processor_kwargs": {"a": 1}}),
        ("/detokenize", {"tokens": [5]}, {"model": "fake"}),
    ],
)  # fmt: skip
def test_fields_of_the_tokenizer_are_taken(server, path, right, fields):
    for some in ({}, fields, *({name: value} for name, value in fields.items())):
        response = server.session.post(path, json=right | some)
        assert response.status_code == 200, response.text
        assert IGNORED_FIELDS_HEADER not in response.headers
    kind = TokenizeRequest if path == "/tokenize" else DetokenizeRequest
    assert set(right) | set(fields) <= set(kind.model_fields) | set(NOT_HONOURED)


UNKNOWN = [
    ({"zzz": 1, "extra_body": {"a": 1}}, "zzz, extra_body"),
    ({"temprature": 1}, "temprature"),
    ({"zzz": 1, "": 1}, 'zzz, ""'),  # a header that ended in a space cut the answer off
    ({"stream_options": {"colour": 1}}, "stream_options.colour"),
    ({"a\r\nb: ü": 1}, "a%0D%0Ab%3A%20%C3%BC"),
    ({f"{i:02}": 1 for i in range(20)}, ", ".join(f"{i:02}" for i in range(16)) + ", and 4 more"),
    ({"q" * 200: 1}, "q" * 77 + "..."),
    ({"zzz": None}, None),
]


@pytest.mark.parametrize(("fields", "header"), UNKNOWN)
@pytest.mark.parametrize("stream", [False, True])
def test_what_no_api_knows_is_dropped_and_named_in_the_answer(server, fields, header, stream):
    response = server.session.post(COMPLETIONS, json=RIGHT[COMPLETIONS] | fields | {"stream": stream})
    assert response.status_code == 200, response.text
    assert response.headers.get(IGNORED_FIELDS_HEADER) == header


def test_below_messages_and_tools_unknown_fields_are_dropped_too(server):
    message = {"role": "user", "content": [{"type": "text", "text": "a", "hue": 1}], "colour": 1}
    tool = {**TOOL, "tint": 1, "function": TOOL["function"] | {"shade": 1}}
    right = {"messages": [message, message], "max_tokens": 1}
    response = server.session.post(CHAT, json=right | {"tools": [tool]})
    assert response.status_code == 200, response.text
    assert set(response.headers[IGNORED_FIELDS_HEADER].split(", ")) == {
        "messages.content.hue", "messages.colour", "tools.tint", "tools.function.shade",
    }  # fmt: skip
    # They do not change the prompt, either.
    assert response.json()["usage"] == server.session.post(CHAT, json={
        "messages": [{"role": "user", "content": "a"}] * 2, "max_tokens": 1, "tools": [TOOL],
    }).json()["usage"]  # fmt: skip


def test_a_name_is_warned_of_once(start_server):
    server = start_server().wait_until_ready()
    with server.http() as http:
        for fields in ({"temprature": 1}, {"temprature": 2}, {"hue": 1}):
            for path in (COMPLETIONS, "/tokenize"):
                assert http.post(path, json={"prompt": "a"} | fields).status_code == 200
    server.stop()
    warnings = [line for line in server.log if "has no effect here" in line]
    assert len(warnings) == 2
    assert "'temprature' of a request has no effect here (did you mean 'temperature'?)" in "".join(warnings)


def test_a_strict_server_refuses_what_no_api_knows(start_server):
    server = start_server("--unknown-fields", "refuse").wait_until_ready()
    with server.http() as http:
        for path, fields, param, message in (
            (COMPLETIONS, {"temprature": 1}, "temprature", "did you mean 'temperature'"),
            (COMPLETIONS, {"zzz": 1}, "zzz", "unknown field 'zzz': remove it; known fields: "),
            (CHAT, {"messages": [USER[0] | {"colour": 1}]}, "messages.0.colour", "unknown field"),
            ("/tokenize", {"zzz": 1}, "zzz", "unknown field"),
        ):
            response = http.post(path, json=RIGHT.get(path, {"prompt": "a"}) | fields)
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["param"], error["code"]) == (param, "unknown_parameter")
            assert message in error["message"]
        # What is documented elsewhere is no unknown field.
        assert http.post(COMPLETIONS, json=RIGHT[COMPLETIONS] | {"request_id": "r", "best_of": 1}).status_code == 200


def test_variables_reach_the_template_and_cannot_be_arguments_of_its_renderer(server):
    def length(**fields):
        return server.session.post("/tokenize", json={"messages": USER} | fields).json()["count"]

    assert length(chat_template_kwargs={"verbosity": "x" * 50}) > length() + 10
    assert length(reasoning_effort="x" * 50) > length() + 10
    assert length(reasoning_effort="none", chat_template_kwargs={"enable_thinking": "y" * 50}) > length() + 10
    assert length(documents=[{"text": "x" * 50}]) > length() + 10
    for function in (type(byte_level_tokenizer()).apply_chat_template, render_jinja_template):
        named = {n for n, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD}
        assert named <= RESERVED_VARIABLES


def test_a_last_message_goes_on(server):
    chat = {"messages": [*USER, {"role": "assistant", "content": "It is"}], "continue_final_message": True}
    tokens = server.session.post("/tokenize", json=chat).json()["tokens"]
    text = server.session.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text.endswith("<|assistant|>It is")
    answer = server.session.post(CHAT, json=chat | {"max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == len(tokens)


def test_allowed_tools_are_those_that_are_offered(server):
    other = {"type": "function", "function": {"name": "g" * 200}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
        {"type": "function", "function": {"name": "f"}}]}}  # fmt: skip

    def usage(**fields):
        return server.session.post(CHAT, json=RIGHT[CHAT] | fields).json()["usage"]["prompt_tokens"]

    assert usage(tools=[TOOL, other], tool_choice=allowed) == usage(tools=[TOOL]) < usage(tools=[TOOL, other])
    allowed["allowed_tools"]["mode"] = "required"
    assert usage(tools=[TOOL, other], tool_choice=allowed) == usage(tools=[TOOL])
    allowed["allowed_tools"]["tools"][0]["function"]["name"] = "h"
    response = server.session.post(CHAT, json=RIGHT[CHAT] | {"tools": [TOOL], "tool_choice": allowed})
    assert response.status_code == 400 and "names 'h'" in response.json()["error"]["message"]


def stream(server, path, fields):
    response = server.session.post(path, json=RIGHT[path] | fields | {"stream": True})
    assert response.status_code == 200, response.text
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_grows_in_every_chunk(server, path):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(server, path, {"max_tokens": 6, "ignore_eos": True, "n": 2, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and 0 < counts[0] < 12 and counts[-2:] == [12, 12]
    whole = chunks[-1]["usage"]
    assert chunks[-1]["choices"] == []
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {whole["prompt_tokens"]}
    assert all(
        chunk["usage"]["total_tokens"] == whole["prompt_tokens"] + n for chunk, n in zip(chunks, counts, strict=True)
    )
    # It needs include_usage, as in vLLM.
    assert not any("usage" in chunk for chunk in stream(server, path, {"stream_options": options | {
        "include_usage": False}}))  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stop", [{}, {"stop": ["fox"]}])
def test_token_ids_are_those_of_the_text(server, path, stop):
    text = "The quick brown fox jumps over the lazy dog"
    fields = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    fields |= {"return_token_ids": True, "max_tokens": 30, "n": 2, "ignore_eos": True, **stop}
    answer = server.session.post(path, json=RIGHT[path] | fields).json()
    prompt = (answer["choices"][0] if path == COMPLETIONS else answer)["prompt_token_ids"]
    assert len(prompt) == answer["usage"]["prompt_tokens"]
    outputs = [choice["token_ids"] for choice in answer["choices"]]
    assert sum(map(len, outputs)) == answer["usage"]["completion_tokens"]
    assert outputs[0] == [prompt[i % len(prompt)] for i in range(len(outputs[0]))], "what the fake engine says"
    chunks = stream(server, path, fields)
    streamed = {0: [], 1: []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice.get("token_ids", [])
    assert [streamed[0], streamed[1]] == outputs
    told = [chunk for chunk in chunks if "prompt_token_ids" in chunk] if path == CHAT else [
        choice for chunk in chunks for choice in chunk["choices"] if choice["prompt_token_ids"] is not None
    ]  # fmt: skip
    assert [part["prompt_token_ids"] for part in told] == [prompt] * (1 if path == CHAT else 2)


@pytest.mark.parametrize("stream_it", [False, True])
def test_what_ends_an_output_can_be_a_part_of_it(server, stream_it):
    fields = {"prompt": "The quick brown fox jumps", "max_tokens": 50, "ignore_eos": True}

    def said(**more):
        if stream_it:
            return "".join(chunk["choices"][0]["text"] for chunk in stream(server, COMPLETIONS, fields | more))
        return server.session.post(COMPLETIONS, json=RIGHT[COMPLETIONS] | fields | more).json()["choices"][0]["text"]

    assert said(stop="brown") == "The quick "
    assert said(stop="brown", include_stop_str_in_output=True) == "The quick brown"
    # Nothing that is complete within the first tokens counts: the next "brown" is in the prompt's second round.
    size = len(byte_level_tokenizer()("The quick brown").input_ids)
    assert said(stop="brown", min_tokens=size) == "The quick brown fox jumpsThe quick "
    assert said(stop="brown", min_tokens=size - 1) == "The quick "
    [space_x] = byte_level_tokenizer()("x").input_ids
    assert said(stop_token_ids=[space_x]).endswith("fo")
    assert said(stop_token_ids=[space_x], include_stop_str_in_output=True).endswith("fox")


def test_special_tokens_can_be_a_part_of_the_text(server):
    fields = {"prompt": "a<|user|>b", "max_tokens": 3, "ignore_eos": True}

    def said(**more):
        return server.session.post(COMPLETIONS, json=fields | more).json()["choices"][0]["text"]

    assert said() == "ab"
    assert said(skip_special_tokens=False) == "a<|user|>b"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_log_probabilities_can_name_tokens_by_id(server, path):
    logprobs = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1}
    fields = RIGHT[path] | logprobs | {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = server.session.post(path, json=fields).json()["choices"][0]
    told = choice["logprobs"]
    names = told["tokens"] if path == COMPLETIONS else [entry["token"] for entry in told["content"]]
    assert names == [f"token_id:{i}" for i in choice["token_ids"]]
