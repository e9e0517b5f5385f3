"""Tests of what calls say of the prefix cache, and of what they may ask of it. The engine behind has as many tokens as
the salt."""

from __future__ import annotations

import json

import openai
import pytest
from batch_inputs import line, results, submit, wait_for


def usage(client, prompt, salt, **kwargs):
    body = {} if salt is None else {"cache_salt": salt}
    return client.completions.create(model="fake", prompt=prompt, max_tokens=2, extra_body=body, **kwargs).usage


def test_usage_tells_how_many_tokens_were_cached_once_for_each_prompt(client):
    assert usage(client, [5, 6, 7], "xx").prompt_tokens_details.cached_tokens == 2
    several = usage(client, [[5, 6, 7], [8, 9, 5, 6]], "xx", n=3)
    assert several.prompt_tokens_details.cached_tokens == 4, "samples of a prompt share it"
    assert several.prompt_tokens == 7
    assert usage(client, [5, 6, 7], None).prompt_tokens_details.cached_tokens == 0


def test_so_do_chats_and_streams(client):
    fields = {
        "model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2,
        "extra_body": {"cache_salt": "abc"},
    }  # fmt: skip
    assert client.chat.completions.create(**fields).usage.prompt_tokens_details.cached_tokens == 3
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 3
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options=options))
    assert {chunk.usage.prompt_tokens_details.cached_tokens for chunk in chunks} == {3}


@pytest.mark.parametrize("salt", ["x" * 257, 7, ["x"]])
def test_a_bad_salt_is_refused(client, salt):
    with pytest.raises(openai.BadRequestError, match="cache_salt"):
        usage(client, [5, 6, 7], salt)


def test_private_prefixes_have_a_salt_that_no_other_key_can_have(start_server, tmp_path):
    file = tmp_path / "keys.json"
    keys = [{"name": name, "key": name, "private_prefixes": name != "bob"} for name in ("ann", "3 ann", "bob")]
    file.write_text(json.dumps(keys))
    server = start_server("--api-key-file", str(file)).wait_until_ready()
    for name, asked, salt in (
        ("ann", None, "3 ann "), ("ann", "xx", "3 ann xx"), ("3 ann", "ann", "5 3 ann ann"), ("bob", "ann", "0  ann")
    ):  # fmt: skip
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=name, max_retries=0)
        assert usage(client, [5, 6, 7], asked).prompt_tokens_details.cached_tokens == len(salt)
        body = {"prompt": [5, 6, 7], "max_tokens": 2} | ({} if asked is None else {"cache_salt": asked})
        batch = wait_for(client, submit(client, [line("a", body)]).id)
        assert batch.usage.input_tokens_details.cached_tokens == len(salt)
        (result,) = results(client, batch.output_file_id)
        found = result["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert found == len(salt), "a batch is its key's"
