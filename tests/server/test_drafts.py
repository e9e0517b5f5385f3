"""Requests that get several tokens in a step: fields that ask for it, and answers that do not show it."""

from __future__ import annotations

import openai
import pytest
from fake_engine import TOKENS_OF_A_STEP
from tokenizers_for_tests import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
END = TOKENIZER.eos_token_id
SPECULATING = {"speculation": True}


def complete(client, prompt, **kwargs):
    return client.completions.create(model="fake", prompt=prompt, **kwargs)


def told(answer):
    choices = [
        (c.index, c.text, c.finish_reason, None if c.logprobs is None else c.logprobs.model_dump())
        for c in answer.choices
    ]  # fmt: skip
    return choices, answer.usage.prompt_tokens, answer.usage.completion_tokens


@pytest.mark.parametrize("number", range(1, 10))
@pytest.mark.parametrize("end", ["length", "stop string", "stop token", "end of sequence"])
def test_an_end_inside_a_step_cuts_text_log_probabilities_and_usage(client, end, number):
    prompt = [*TOKENIZER("zxqkvjwyfp").input_ids]
    fields = {"max_tokens": 20, "logprobs": 1, "n": 2, "seed": 0}
    if end == "length":
        fields["max_tokens"] = number
    elif end == "stop string":
        fields |= {"stop": ["zxqkvjwyfp"[number - 1]], "n": 1}
    elif end == "stop token":
        fields["extra_body"] = {"stop_token_ids": [prompt[number]]}
    else:
        prompt.insert(number, END)
    want = complete(client, prompt, **fields)
    body = fields.pop("extra_body", {})
    got = complete(client, prompt, **fields, extra_body=body | SPECULATING)
    assert told(got) == told(want)
    details = got.usage.completion_tokens_details
    if end in ("length", "stop string"):  # of the others the last token is not in the text
        full, rest = divmod(got.usage.completion_tokens // fields["n"], TOKENS_OF_A_STEP)
        accepted = full * (TOKENS_OF_A_STEP - 1) + (max(0, rest - 1) if end == "length" else rest)
        assert details.accepted_prediction_tokens == fields["n"] * accepted
        num_drafts = (full + (rest > 0)) * (TOKENS_OF_A_STEP - 1)
        assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == fields["n"] * num_drafts
    assert want.usage.completion_tokens_details is None


def test_streams_are_the_same_text(client):
    prompt = "some words of a longer text "
    fields = {"max_tokens": 60, "stop": ["text"], "stream": True, "stream_options": {"include_usage": True}}
    plain, drafted = (list(complete(client, prompt, **fields, extra_body=body)) for body in ({}, SPECULATING))
    texts = ["".join(c.text for chunk in chunks for c in chunk.choices) for chunks in (plain, drafted)]
    assert texts[0] == texts[1] and "longer" in texts[1]
    usage, want = drafted[-1].usage, plain[-1].usage
    assert usage.completion_tokens == want.completion_tokens
    assert usage.completion_tokens_details.accepted_prediction_tokens > 0


@pytest.mark.parametrize("content", ["a text", [{"type": "text", "text": "a "}, {"type": "text", "text": "text"}]])
def test_a_prediction_is_taken(client, content):
    answer = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=4,
        prediction={"type": "content", "content": content},
    )  # fmt: skip
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (3, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prediction", "a text"),
        ("prediction", {"type": "content"}),
        ("prediction", {"type": "other", "content": "a"}),
        ("prediction", {"type": "content", "content": [{"type": "image_url", "text": "a"}]}),
        ("speculation", "yes"),
    ],
)
def test_other_forms_are_refused_by_name(client, field, value):
    with pytest.raises(openai.BadRequestError) as refusal:
        complete(client, "a", extra_body={field: value})
    assert refusal.value.param is not None and refusal.value.param.startswith(field)
