"""Sessions: how requests name one, whose it is, and the call that clears the prefix cache."""

from __future__ import annotations

import json

import openai
import pytest
from batch_inputs import line, submit, wait_for

from omniserve.server.fields import IGNORED_FIELDS_HEADER

COMPLETIONS, CHAT, CLEAR = "/v1/completions", "/v1/chat/completions", "/v1/cache/clear"
RIGHT = {
    COMPLETIONS: {"prompt": [5, 6, 7], "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
}


@pytest.fixture
def http(server):
    with server.http() as session:
        assert session.post(CLEAR, json={}).status_code == 200
        yield session


def cleared(http, body=None, **kwargs) -> dict:
    """Clear sessions; the fake engine tells of a block for each, and of one on disk for each hour of its TTL."""
    response = http.post(CLEAR, json={} if body is None else body, **kwargs)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("path", RIGHT)
def test_requests_name_a_session_in_their_body_or_a_header(http, path):
    bodies = [{"prompt_cache_key": "a"}, {"session_id": "b"}, {"prompt_cache_key": "a", "session_id": "c"}]
    for more in (*bodies, {"prompt_cache_key": ""}, {}, {"prompt_cache_key": "x" * 9000, "stream": True}):
        assert http.post(path, json=RIGHT[path] | more).status_code == 200
    for name in ("x-session-id", "session_id", "session-id", "x-claude-code-session-id"):
        assert http.post(path, json=RIGHT[path], headers={name: f"of {name}"}).status_code == 200
    assert http.post(path, json=RIGHT[path] | {"session_id": "b"}, headers={"x-session-id": "d"}).status_code == 200
    for key, count in (("a", 1), ("a", 0), ("b", 1), ("c", 0), ("d", 0), ("of session_id", 1), ("x" * 9000, 1)):
        assert cleared(http, {"prompt_cache_key": key})["freed_blocks"]["device"] == count, key
    assert cleared(http) == {
        "object": "cache.cleared", "prompt_cache_key": None, "freed_blocks": {"device": 3, "host": 0, "disk": 0},
        "freed_tokens": {"device": 48, "host": 0, "disk": 0},
    }  # fmt: skip
    assert http.post(CLEAR).json()["freed_blocks"]["device"] == 0, "an empty body is one without fields"


def test_a_session_may_be_unused_for_a_day_if_its_request_says_so(http):
    for more, hours, ignored in (
        ({"prompt_cache_key": "a", "prompt_cache_retention": "24h"}, 24, None),
        ({"prompt_cache_key": "a", "prompt_cache_retention": "in_memory"}, 0, None),
        ({"prompt_cache_retention": "24h"}, 0, "prompt_cache_retention"),
        ({"prompt_cache_retention": "in_memory"}, 0, None),
    ):
        response = http.post(COMPLETIONS, json=RIGHT[COMPLETIONS] | more)
        assert response.headers.get(IGNORED_FIELDS_HEADER) == ignored
        assert cleared(http)["freed_blocks"]["disk"] == hours
    response = http.post(COMPLETIONS, json=RIGHT[COMPLETIONS] | {"prompt_cache_retention": "1h"})
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt_cache_retention"


@pytest.mark.parametrize("body", [{"prompt_cache_key": ""}, {"prompt_cache_key": 5}, []])
def test_a_bad_call_to_clear_is_refused(http, body):
    response = http.post(CLEAR, json=body)
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_a_session_is_of_one_key_and_admins_clear(start_server, tmp_path):
    file = tmp_path / "keys.json"
    file.write_text(
        json.dumps([{"name": name, "key": name, "admin": name == "root"} for name in ("ann", "bob", "root")])
    )
    server = start_server("--api-key-file", str(file)).wait_until_ready()
    as_root = {"headers": {"authorization": "Bearer root"}}
    with server.http() as http:
        for name in ("ann", "bob"):
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=name, max_retries=0)
            for _ in range(2):
                client.completions.create(model="fake", prompt="a", max_tokens=1, extra_body={"prompt_cache_key": "k"})
            body = {"prompt": [5, 6], "max_tokens": 1, "prompt_cache_key": "of a batch"}
            wait_for(client, submit(client, [line("a", body)]).id)
            refused = http.post(CLEAR, json={}, headers={"authorization": f"Bearer {name}"})
            assert refused.status_code == 403 and "admin" in refused.json()["error"]["message"]
        assert http.post(CLEAR, json={}).status_code == 401
        assert cleared(http, {"prompt_cache_key": "k"}, **as_root)["freed_blocks"]["device"] == 2, "one of each key"
        assert cleared(http, {"prompt_cache_key": "of a batch"}, **as_root)["freed_blocks"]["device"] == 2
        assert cleared(http, **as_root)["freed_blocks"]["device"] == 0
