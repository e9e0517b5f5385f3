"""Answers of both endpoints, through the real client over a real socket. The fake engine repeats the prompt."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from tokenizers_for_tests import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
END = TOKENIZER.eos_token_id


def ids(text):
    return TOKENIZER(text).input_ids


def chat(client, text, **kwargs):
    kwargs = {"max_tokens": 8} | kwargs
    return client.chat.completions.create(model="fake", messages=[{"role": "user", "content": text}], **kwargs)


def complete(client, prompt, **kwargs):
    return client.completions.create(model="fake", prompt=prompt, **kwargs)


def chat_prompt(text):
    return ids(f"<|user|>{text}<|end|><|assistant|>")


def test_completion(client):
    answer = complete(client, "the list ", max_tokens=len(ids("the list ")))
    assert (answer.object, answer.model, answer.service_tier) == ("text_completion", "fake", "default")
    assert answer.id.startswith("cmpl-")
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("the list ", "length", None)
    num = len(ids("the list "))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        num,
        num,
        2 * num,
    )


def test_completion_gives_16_tokens_if_not_told(client):
    assert complete(client, "a").usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("zx", ["zxzx"]),
        (["zx", "qk"], ["zxzx", "qkqk"]),
        (ids("zx"), ["zxzx"]),
        ([ids("zx"), ids("qk")], ["zxzx", "qkqk"]),
    ],
)
def test_every_form_of_prompt(client, prompt, texts):
    answer = complete(client, prompt, max_tokens=4)
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))


def test_chat(client):
    answer = chat(client, "hi", extra_body={"ignore_eos": True})
    assert (answer.object, answer.choices[0].message.role) == ("chat.completion", "assistant")
    assert answer.id.startswith("chatcmpl-")
    prompt = chat_prompt("hi")
    expected = TOKENIZER.decode((prompt * 8)[:8], skip_special_tokens=True)
    assert answer.choices[0].message.content == expected
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 8)


def test_chat_takes_parts_system_messages_and_earlier_answers(client):
    first = chat(client, "hi").choices[0].message
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        first,
        {"role": "user", "content": "more"},
    ]
    answer = client.chat.completions.create(model="fake", messages=messages, max_completion_tokens=1)
    text = f"<|system|>be kind<|end|><|user|>one two<|end|><|assistant|>{first.content}<|end|><|user|>more<|end|>"
    assert answer.usage.prompt_tokens == len(ids(text + "<|assistant|>"))


def test_chat_without_a_limit_ends_at_the_context(client):
    answer = chat(client, "abcdef", max_tokens=None, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 512


@pytest.mark.parametrize("stop", [None, ["text"]])
def test_streamed_text_is_the_same(client, stop):
    prompt = "日本語の文章 🙂🚀 text "
    whole = complete(client, prompt, max_tokens=60, stop=stop).choices[0]
    chunks = list(complete(client, prompt, max_tokens=60, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [whole.finish_reason]
    assert all("\N{REPLACEMENT CHARACTER}" not in chunk.choices[0].text for chunk in chunks[:-1])
    assert whole.finish_reason == ("length" if stop is None else "stop")


def test_streamed_chat_events_are_as_openai_sends_them(server):
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "service_tier": "flex",
    }
    with server.http() as http:
        response = http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {(c["id"], c["object"], c["service_tier"]) for c in chunks} == {
        (chunks[0]["id"], "chat.completion.chunk", "flex")
    }
    assert all(c["usage"] is None for c in chunks[:-1])
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks[:-2])
    assert chunks[-2]["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]
    assert chunks[-1]["choices"] == []
    num_prompt = len(chat_prompt("hi"))
    assert chunks[-1]["usage"] == {
        "prompt_tokens": num_prompt, "completion_tokens": 2, "total_tokens": num_prompt + 2,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


def test_stream_helper_of_the_client(client):
    whole = chat(client, "hello you", max_tokens=64)
    messages = [{"role": "user", "content": "hello you"}]
    with client.chat.completions.stream(model="fake", messages=messages, max_tokens=64) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_stop_string_over_tokens_cuts_and_frees(server, client):
    answer = complete(client, "one STOP two ", max_tokens=400, stop=["nothing", "STOP"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one ", "stop")
    assert answer.usage.completion_tokens == len(ids("one STOP")), "counted up to the match"
    server.wait_for_metric('omniserve_requests_running{service_class="LS"}', 0)


def test_held_text_comes_out_at_the_end(client):
    num = len(ids("one STO"))
    chunks = list(complete(client, "one STO", max_tokens=num, stop="STOP", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "one STO"


def test_end_of_sequence_and_stop_tokens_are_no_text(client):
    ended = complete(client, [*ids("zx"), END, *ids("q")], max_tokens=9, logprobs=0)
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("zx", "stop")
    assert ended.choices[0].logprobs.tokens == ["z", "x"]
    [c] = ids("q")
    stopped = complete(client, ids("zxqk"), max_tokens=9, extra_body={"stop_token_ids": [c]})
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("zx", "stop")
    going_on = complete(client, [*ids("zx"), END], max_tokens=6, extra_body={"ignore_eos": True})
    assert (going_on.choices[0].text, going_on.choices[0].finish_reason) == ("zxzx", "length")


def test_n_choices_have_seeds_of_their_own(client):
    [a] = ids("a")
    answer = complete(client, [[a], [a + 1]], max_tokens=1, n=3, seed=5)
    assert [choice.index for choice in answer.choices] == list(range(6))
    expected = [TOKENIZER.decode([a + prompt + 5 + i]) for prompt in (0, 1) for i in range(3)]
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage.prompt_tokens == 2 and answer.usage.completion_tokens == 6
    streamed = {}
    for chunk in complete(client, [[a], [a + 1]], max_tokens=1, n=3, seed=5, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert streamed == dict(enumerate(expected))


def test_best_of_keeps_the_likeliest(client):
    [a] = ids("a")
    answer = complete(client, [[a], [a + 1]], max_tokens=1, n=2, best_of=5, seed=7)
    # The fake engine's log-probability is -0.5 - seed % 3, and the seeds are 7 to 11.
    expected = [TOKENIZER.decode([a + prompt + seed]) for prompt in (0, 1) for seed in (9, 7)]
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(expected))
    assert all(choice.logprobs is None for choice in answer.choices)
    assert answer.usage.completion_tokens == 10, "what was generated, not what is shown"


def test_logit_bias_reaches_the_engine(client):
    [a] = ids("a")
    answer = complete(client, "zx", max_tokens=3, logit_bias={str(a): 100, "7": -1.5})
    assert answer.choices[0].text == "aaa"


def test_tokenize_and_detokenize(server):
    text = "the list 🚀<|end|>"
    with server.http() as http:
        answer = http.post("/tokenize", json={"model": "fake", "prompt": text, "return_token_strs": True}).json()
        assert answer["tokens"] == ids(text) and answer["count"] == len(ids(text))
        assert answer["max_model_len"] == 512
        assert answer["token_strs"][-1] == "<|end|>"
        back = http.post("/detokenize", json={"model": "fake", "tokens": answer["tokens"]}).json()
        assert back == {"prompt": text}
        messages = [{"role": "user", "content": "hi"}]
        answer = http.post("/tokenize", json={"messages": messages}).json()
        assert answer["tokens"] == chat_prompt("hi") and answer["token_strs"] is None
        answer = http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
        assert answer["tokens"] == ids("<|user|>hi<|end|>")
        long = "word " * 3000
        answer = http.post("/tokenize", json={"prompt": long, "add_special_tokens": False}).json()
        assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": long}
        assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []


def test_completion_logprobs(client):
    answer = complete(client, "zx qk", max_tokens=5, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["z", "x", " ", "q", "k"]
    assert logprobs.token_logprobs == [-0.5] * 5
    assert logprobs.text_offset == [0, 1, 2, 3, 4]
    assert [len(table) for table in logprobs.top_logprobs] == [2] * 5
    assert logprobs.top_logprobs[0]["z"] == -0.5
    chunks = list(complete(client, "zx qk", max_tokens=5, logprobs=2, stream=True))
    assert [i for chunk in chunks for i in chunk.choices[0].logprobs.text_offset] == [0, 1, 2, 3, 4]


def test_echo_puts_the_prompt_before_the_text(client):
    for prompt in (["zx", "qk"], [ids("zx"), ids("qk")]):
        answer = complete(client, prompt, max_tokens=2, echo=True)
        assert [choice.text for choice in answer.choices] == ["zxzx", "qkqk"]
    chunks = list(complete(client, "zx", max_tokens=2, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "zxzx"
    assert chunks[0].choices[0].text.startswith("zx")
    assert complete(client, "zx", max_tokens=0, echo=True).choices[0].text == "zx"


@pytest.mark.parametrize("stream", [False, True])
def test_echoed_logprobs_begin_with_the_prompts(client, stream):
    answer = complete(client, ids("zx qk"), max_tokens=2, echo=True, logprobs=2, stream=stream)
    parts = [chunk.choices[0].logprobs for chunk in answer] if stream else [answer.choices[0].logprobs]
    assert [token for part in parts for token in part.tokens] == ["z", "x", " ", "q", "k", "z", "x"]
    assert [lp for part in parts for lp in part.token_logprobs] == [None] + [-0.25] * 4 + [-0.5] * 2
    assert [at for part in parts for at in part.text_offset] == list(range(7))
    tops = [top for part in parts for top in part.top_logprobs]
    assert tops[0] is None and [len(top) for top in tops[1:]] == [2] * 6


def test_prompt_is_scored_without_output(server, client):
    """Evaluations ask for scores so: token arrays, echo, log-probabilities, no or one token that is thrown away."""
    counter = 'omniserve_requests_total{finish_reason="length",service_class="BE"}'
    before = server.metric(counter)
    for max_tokens in (0, 1):
        answer = complete(
            client, [ids("zx"), ids("qk ")], max_tokens=max_tokens, echo=True, logprobs=1, seed=1234, temperature=0,
            extra_body={"service_tier": "flex"},
        )  # fmt: skip
        assert [len(choice.logprobs.token_logprobs) for choice in answer.choices] == [2 + max_tokens, 3 + max_tokens]
        assert [choice.finish_reason for choice in answer.choices] == ["length"] * 2
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 2 * max_tokens)
    whole_context = complete(client, [5] * 512, max_tokens=0, echo=True, logprobs=0)
    assert len(whole_context.choices[0].logprobs.tokens) == 512
    assert server.metric(counter) == before + 4


def test_chat_logprobs_tell_bytes_of_half_characters(client):
    answer = chat(client, "🚀", max_tokens=len(chat_prompt("🚀")), logprobs=True, top_logprobs=1,
                  extra_body={"ignore_eos": True})  # fmt: skip
    content = answer.choices[0].logprobs.content
    assert len(content) == len(chat_prompt("🚀"))
    assert b"".join(bytes(entry.bytes) for entry in content) == "<|user|>🚀<|end|><|assistant|>".encode()
    halves = [entry for entry in content if entry.token.startswith("bytes:\\x")]
    assert halves, "a rocket is more than one token here"
    assert all(entry.top_logprobs[0].logprob == -0.5 for entry in content)
    plain = chat(client, "hi", logprobs=True).choices[0].logprobs.content
    assert plain[0].top_logprobs == []


@pytest.mark.parametrize(
    ("tier", "answered", "service_class"),
    [
        (None, "default", "LS"),
        ("auto", "default", "LS"),
        ("default", "default", "LS"),
        ("priority", "priority", "LS"),
        ("scale", "scale", "LS"),
        ("fast", "fast", "LS"),
        ("flex", "flex", "BE"),
    ],
)
def test_service_tier_chooses_the_class_and_is_echoed(server, client, tier, answered, service_class):
    counter = f'omniserve_requests_total{{finish_reason="length",service_class="{service_class}"}}'
    before = server.metric(counter)
    assert chat(client, "hi", max_tokens=1, service_tier=tier).service_tier == answered
    extra = {} if tier is None else {"service_tier": tier}
    assert complete(client, "a", max_tokens=1, extra_body=extra).service_tier == answered
    chunks = list(chat(client, "hi", max_tokens=1, service_tier=tier, stream=True))
    assert {chunk.service_tier for chunk in chunks} == {answered}
    server.wait_for_metric(counter, before + 3)


def test_header_stands_for_the_service_tier_of_a_request_that_brings_none(client):
    header = {"x-omniserve-service-tier": "flex"}
    assert complete(client, "a", max_tokens=1, extra_headers=header).service_tier == "flex"
    assert chat(client, "a", max_tokens=1, extra_headers=header).service_tier == "flex"
    answer = complete(client, "a", max_tokens=1, extra_headers=header, extra_body={"service_tier": "priority"})
    assert answer.service_tier == "priority"
    with pytest.raises(openai.BadRequestError, match="service_tier: must be one of"):
        complete(client, "a", max_tokens=1, extra_headers={"x-omniserve-service-tier": "gold"})


def test_harmless_fields_are_taken(client):
    answer = chat(
        client,
        "hi",
        user="me",
        metadata={"job": "1"},
        store=False,
        parallel_tool_calls=True,
        tools=[],
        response_format={"type": "text"},
        logit_bias={},
        n=1,
        top_p=0.5,
        stop=None,
        extra_body={"top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "slo": {"ttft_s": 2, "tpot_s": 0.5}},
    )
    assert answer.choices[0].message.content == "hi"
    assert complete(client, "a", best_of=2, n=2, echo=False, suffix="").choices[1].index == 1


def test_many_calls_at_a_time_keep_their_texts(client):
    def one(i):
        text = f"number {i} "
        num = len(ids(text))
        if i % 2:
            return text, complete(client, text, max_tokens=num).choices[0].text
        return text, "".join(c.choices[0].text for c in complete(client, text, max_tokens=num, stream=True))

    with ThreadPoolExecutor(16) as pool:
        for text, answer in pool.map(one, range(64)):
            assert answer == text


def test_models_and_health(client, server):
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    with server.http() as http:
        assert http.get("/health").json() == {"status": "ok"}
