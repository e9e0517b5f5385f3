"""Every refusal has OpenAI's shape, names the field and says what to do."""

from __future__ import annotations

import json

import openai
import pytest
from fake_engine import BAD_OUTPUT, REFUSE, REJECT, REJECT_WITHOUT_HINT
from tokenizers_for_tests import byte_level_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NAN, INFINITY = float("nan"), float("inf")

# Endpoint, fields, the field that is blamed, a part of the message.
BAD_FIELDS = [
    (COMPLETIONS, {}, "prompt", "missing"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": []}, "prompt", "not empty"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", "must be a string"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt", "must be a string"),
    (COMPLETIONS, {"prompt": [True]}, "prompt", "must be a string"),
    (COMPLETIONS, {"prompt": 3}, "prompt", "must be a string"),
    (COMPLETIONS, {"prompt": [400]}, "prompt", "token id 400, but this model's ids are 0 to 399"),
    (COMPLETIONS, {"prompt": [5, -1]}, "prompt", "token id -1"),
    (COMPLETIONS, {"prompt": [5] * 600}, "prompt", "this model's maximum context length is 512 tokens"),
    (COMPLETIONS, {"prompt": [5] * 500, "max_tokens": 13}, "prompt", "set max_tokens to at most 12"),
    (CHAT, {"messages": USER, "max_tokens": 1000}, "messages", "shorten the prompt or set max_tokens to at most"),
    (CHAT, {"messages": []}, "messages", "at least 1 item"),
    (CHAT, {}, "messages", "missing"),
    (CHAT, {"messages": [{"role": "critic", "content": "x"}]}, "messages.0.role", "'system'"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0", "content is missing"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages.0", "tool_call_id belongs"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages.0", "tool_call_id belongs"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages.0", "role 'assistant'"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
     "messages.0.content.0.type", "must be 'text': this server serves text only"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens", "may be 0 with echo=true"),
    (CHAT, {"messages": USER, "max_tokens": 0}, "max_tokens", "must be at least 1"),
    (COMPLETIONS, {"prompt": [5] * 513, "max_tokens": 0, "echo": True}, "prompt", "513 tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": "5"}, "max_tokens", "valid integer"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 5.0}, "max_tokens", "valid integer"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "give one"),
    (COMPLETIONS, {"prompt": "a", "temperature": NAN}, "temperature", "finite"),
    (COMPLETIONS, {"prompt": "a", "temperature": INFINITY}, "temperature", "finite"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature", "greater than or equal to 0"),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature", "valid number"),
    (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p", "greater than 0"),
    (COMPLETIONS, {"prompt": "a", "frequency_penalty": 3}, "frequency_penalty", "less than or equal to 2"),
    (COMPLETIONS, {"prompt": "a", "seed": 2**63}, "seed", "less than or equal"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n", "greater than or equal to 1"),
    (COMPLETIONS, {"prompt": "a", "n": 129}, "n", "less than or equal to 128"),
    (COMPLETIONS, {"prompt": ["a"] * 100, "n": 100}, "n", "several requests"),
    (COMPLETIONS, {"prompt": "a", "stop": [5]}, "stop", "must be a string"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 4, "min_tokens": 5}, "min_tokens", "more than max_tokens, which is 4"),
    (COMPLETIONS, {"prompt": "a", "min_tokens": 17}, "min_tokens", "at most 16 tokens"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 17}, "stop", "at most 16"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids.0", "greater than or equal to 0"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs", "less than or equal to 20"),
    (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs", "valid integer"),
    (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
    (CHAT, {"messages": USER, "logprobs": 5}, "logprobs", "valid boolean"),
    (COMPLETIONS, {"prompt": "a", "service_tier": "gold"}, "service_tier", "'flex', 'LS', 'BE'; got 'gold'"),
    (COMPLETIONS, {"prompt": "a", "slo": {"ttft_s": 0}}, "slo.ttft_s", "greater than 0"),
    (COMPLETIONS, {"prompt": "a", "slo": {"ttft": 1}}, "slo.ttft", "unknown field"),
    (COMPLETIONS, {"prompt": "a", "n": 3, "best_of": 2}, "best_of", "at least n, which is 3"),
    (COMPLETIONS, {"prompt": "a", "best_of": 129}, "best_of", "less than or equal to 128"),
    (CHAT, {"messages": USER, "echo": True}, "echo", "is a field of completions"),
    (CHAT, {"messages": USER, "documents": [{"text": "a"}]}, "documents", "does not read documents"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "'tokenize'"),
    (CHAT, {"messages": USER, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message",
     "contradicts add_generation_prompt"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"z": 1}}, "logit_bias", "token ids in decimal"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": [5]}, "logit_bias", "must be an object"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias.0.1", "less than or equal to 100"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"400": 1}}, "logit_bias", "ids are 0 to 399"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024"),
    (CHAT, {"messages": USER, "tools": [TOOL]}, "tools", "chat template has no tools"),
    (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools.0.function", "missing"),
    (CHAT, {"messages": USER, "tools": [{"type": "web"}]}, "tools.0.type", "'function'"),
    (CHAT, {"messages": USER, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name",
     "match pattern"),
    (CHAT, {"messages": USER, "tools": [TOOL, TOOL]}, "tools", "the same name"),
    (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice", "there are no tools"),
    (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": "must"}, "tool_choice", "must be 'none'"),
    (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
     "tool_choice", "names 'g'"),
    (CHAT, {"messages": USER, "functions": [{"name": "f"}]}, "functions", "use tools"),
    (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, "response_format.type", "'json_object'"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, "response_format", "json_schema belongs"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
     "response_format.json_schema.schema", "missing"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos",
     "contradicts"),
    (COMPLETIONS, {"prompt": "a",
     "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "unsupported"}}}},
     "response_format", "there is no type 'unsupported'"),
    (CHAT, {"messages": USER, "audio": {"voice": "x"}}, "audio", "not supported"),
    (CHAT, {"messages": USER, "modalities": ["audio"]}, "modalities", "only text"),
    (CHAT, {"messages": USER, "store": True}, "store", "not stored"),
]  # fmt: skip


def post(server, path, content):
    with server.http() as http:
        return http.post(path, content=content, headers={"content-type": "application/json"})


def error_of(response):
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize(("path", "fields", "param", "message"), BAD_FIELDS)
def test_bad_field(server, path, fields, param, message):
    for stream in (False, True):
        body = {"model": "fake", **fields, "stream": stream}
        response = post(server, path, json.dumps(body))  # json.dumps writes NaN, as many clients do
        assert response.status_code == 400, response.text
        error = error_of(response)
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
        assert message in error["message"]


def test_best_of_cannot_be_streamed(server):
    response = post(server, COMPLETIONS, json.dumps({"prompt": "a", "best_of": 2, "stream": True}))
    assert response.status_code == 400
    assert error_of(response)["param"] == "best_of"


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/tokenize", {}, "give prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "give prompt or messages"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "is for messages"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "the model's own chat template is used"),
        ("/tokenize", {"prompt": 5}, "valid string"),
        ("/detokenize", {"tokens": [400]}, "ids are 0 to 399"),
        ("/detokenize", {"tokens": [-1]}, "greater than or equal to 0"),
        ("/detokenize", {}, "tokens is missing"),
    ],
)
def test_bad_field_of_the_tokenizer(server, path, fields, message):
    response = post(server, path, json.dumps(fields))
    assert response.status_code == 400, response.text
    assert message in error_of(response)["message"]


def test_chat_with_a_model_without_a_chat_template_says_what_to_do(start_server, tmp_path):
    tokenizer = byte_level_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    server = start_server("--tokenizer", str(tmp_path)).wait_until_ready()
    for path in (CHAT, "/tokenize"):
        response = post(server, path, json.dumps({"messages": USER}))
        assert response.status_code == 400
        error = error_of(response)
        assert error["code"] == "no_chat_template" and error["param"] == "messages"
        assert "/v1/completions" in error["message"]
    assert post(server, COMPLETIONS, json.dumps({"prompt": "a"})).status_code == 200


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"', "null", '{"prompt": "a"', b"\xff\xfe{}", "[" * 100_000])
def test_body_that_is_no_json_object(server, content):
    response = post(server, COMPLETIONS, content)
    assert response.status_code == 400
    assert "JSON" in error_of(response)["message"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_body_in_another_encoding_is_told_plainly(server, encoding):
    response = post(server, COMPLETIONS, '{"prompt": "a"}'.encode(encoding))
    assert response.status_code == 400
    assert f"the text is {encoding[:6].upper()}; send UTF-8" in error_of(response)["message"]


@pytest.mark.parametrize("mark", ["\ufeff", " \r\n\ufeff", "\ufeff\ufeff "])
@pytest.mark.parametrize(("path", "body"), [
    (COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER}), ("/tokenize", {"prompt": "a"}),
    ("/detokenize", {"tokens": [5]}),
])  # fmt: skip
def test_byte_order_marks_before_a_body_are_skipped(server, path, body, mark):
    assert post(server, path, (mark + json.dumps(body)).encode()).status_code == 200


def test_body_that_is_too_large(server):
    response = post(server, COMPLETIONS, b" " * ((32 << 20) + 1))
    assert response.status_code == 413
    assert "32 MiB" in error_of(response)["message"]


def test_unknown_paths_methods_and_models(server, client):
    with server.http() as http:
        response = http.get("/v1/nothing")
        assert response.status_code == 404 and "/v1/nothing" in error_of(response)["message"]
        response = http.get(COMPLETIONS)
        assert response.status_code == 405 and "method not allowed" in error_of(response)["message"]
    for call in (lambda: client.models.retrieve("gpt-9"), lambda: client.completions.create(model="gpt-9", prompt="a")):
        with pytest.raises(openai.NotFoundError, match="this server has 'fake'") as caught:
            call()
        assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("first_token", "retry_after", "predicted_ms", "required_ms"),
    [(REJECT, "3", 3250, 500), (REJECT_WITHOUT_HINT, None, None, None)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_rejection_under_load(server, client, first_token, retry_after, predicted_ms, required_ms, stream):
    before = server.metric('omniserve_requests_rejected_total{service_class="BE"}')
    with pytest.raises(openai.RateLimitError, match="too many requests") as caught:
        client.completions.create(
            model="fake", prompt=[first_token], stream=stream, extra_body={"service_tier": "flex"}
        )
    headers = caught.value.response.headers
    assert headers.get("retry-after") == retry_after
    assert headers.get("x-should-retry") == ("false" if retry_after is None else None), "no retry can succeed"
    error = caught.value.response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert (error["predicted_ttft_ms"], error["required_ttft_ms"]) == (predicted_ms, required_ms)
    assert server.metric('omniserve_requests_rejected_total{service_class="BE"}') == before + 1


@pytest.mark.parametrize(
    ("first_token", "error", "message"),
    [
        (REFUSE, openai.BadRequestError, "does not like this prompt"),
        (REJECT, openai.RateLimitError, "too many requests"),
    ],
)
def test_a_prompt_that_is_not_taken_frees_the_others(server, client, first_token, error, message):
    with pytest.raises(error, match=message):
        client.completions.create(model="fake", prompt=[[5], [first_token], [6]], max_tokens=400)
    server.wait_for_metric('omniserve_requests_running{service_class="LS"}', 0)


def test_output_that_cannot_go_on(client):
    with pytest.raises(openai.InternalServerError, match="fake logits are not finite"):
        client.completions.create(model="fake", prompt=[BAD_OUTPUT])
    with pytest.raises(openai.APIError, match="fake logits are not finite"):
        list(client.completions.create(model="fake", prompt=[BAD_OUTPUT], stream=True))
