"""What calls say of the prefix cache, and what they may ask of it. The engine behind has as many tokens as the salt."""

from __future__ import annotations

import openai
import pytest


def usage(client, prompt, salt, **kwargs):
    body = {} if salt is None else {"cache_salt": salt}
    return client.completions.create(model="fake", prompt=prompt, max_tokens=2, extra_body=body, **kwargs).usage


def test_usage_tells_how_many_tokens_were_cached_once_for_each_prompt(client):
    assert usage(client, [5, 6, 7], "xx").prompt_tokens_details.cached_tokens == 2
    several = usage(client, [[5, 6, 7], [8, 9, 5, 6]], "xx", n=3)
    assert several.prompt_tokens_details.cached_tokens == 4, "samples of a prompt share it"
    assert several.prompt_tokens == 7
    assert usage(client, [5, 6, 7], None).prompt_tokens_details is None


def test_so_do_chats_and_streams(client):
    fields = {
        "model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2,
        "extra_body": {"cache_salt": "abc"},
    }  # fmt: skip
    assert client.chat.completions.create(**fields).usage.prompt_tokens_details.cached_tokens == 3
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 3


@pytest.mark.parametrize("salt", ["x" * 257, 7, ["x"]])
def test_a_bad_salt_is_refused(client, salt):
    with pytest.raises(openai.BadRequestError, match="cache_salt"):
        usage(client, [5, 6, 7], salt)
