"""Tests of a model's generation config: defaults for requests that do not set a field; a request's own value has the
word."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from tokenizers_for_tests import byte_level_tokenizer

from omniserve.server.completions.protocol import ChatRequest, CompletionRequest, parse
from omniserve.server.errors import ApiError
from omniserve.server.fields import UnknownFields
from omniserve.server.generation_defaults import GenerationDefaults, find_generation_defaults

Z = 65
SAID = {
    "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.05, "max_new_tokens": 7,
    "eos_token_id": [2, 1], "pad_token_id": 0, "do_sample": True, "transformers_version": "4.51.0",
}  # fmt: skip


def write(folder: Path, **values: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_auto_reads_the_models_own_file(tmp_path: Path) -> None:
    assert find_generation_defaults("auto", str(tmp_path)) == GenerationDefaults(), "there is none"
    defaults = find_generation_defaults("auto", str(write(tmp_path, **SAID)))
    assert defaults == GenerationDefaults(
        fields={"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.05}, max_tokens=7
    )
    assert find_generation_defaults("none", str(tmp_path)) == GenerationDefaults()


def test_a_path_is_another_file_whose_ends_count_too(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir(), other.mkdir()
    write(own, **SAID)
    write(other, top_k=3, temperature=None, eos_token_id=9, stop_strings=["<turn>"])
    want = GenerationDefaults(fields={"top_k": 3}, stop=("<turn>",), stop_token_ids=(9,))
    assert find_generation_defaults(str(other), str(own)) == want
    assert find_generation_defaults(str(other / "generation_config.json"), str(own)) == want
    with pytest.raises(OSError, match="nowhere"):
        find_generation_defaults(str(tmp_path / "nowhere"), str(own))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"temperature": -1}', "temperature"), ('{"top_p": 1.5}', "top_p"), ('{"top_k": "many"}', "top_k"),
        ('{"repetition_penalty": 0}', "repetition_penalty"), ("[1]", "JSON object"), ("{", "generation_config.json"),
        ('{"max_new_tokens": -3}', "max_tokens"), ('{"stop_strings": [7]}', "stop"),
    ],
)  # fmt: skip
def test_a_file_that_says_what_no_request_may_is_refused_with_its_path(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=f"{tmp_path}.*{what}.*--generation-config none"):
        find_generation_defaults("auto", str(tmp_path))


def test_what_no_request_can_ask_for_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, num_beams=4, no_repeat_ngram_size=3, min_length=0, suppress_tokens=[], temperature=0.5)
    find_generation_defaults("auto", str(tmp_path))
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "no_repeat_ngram_size, num_beams" in warning
    assert "min_length" not in warning and "suppress_tokens" not in warning, "these ask for nothing"


@pytest.mark.parametrize(
    ("kind", "body"),
    [(CompletionRequest, {"prompt": "a"}), (ChatRequest, {"messages": [{"role": "user", "content": "a"}]})],
)
def test_a_request_that_says_it_has_the_word(kind: type[CompletionRequest | ChatRequest], body: dict) -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.2}

    def asked(**said: object) -> dict[str, object]:
        request = parse(kind, json.dumps(body | said).encode(), UnknownFields(), defaults=defaults)
        return {name: getattr(request, name) for name in defaults}

    assert asked() == asked(temperature=None, top_k=None, repetition_penalty=None) == defaults
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert asked(**neutral) == neutral, "also what asks for nothing"
    assert asked(temperature=0) == defaults | {"temperature": 0.0}
    with pytest.raises(ApiError, match="temperature"):
        asked(temperature=-1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def lengths(client: openai.OpenAI, **options: object) -> tuple[int, int]:
    """Return the tokens of an answer to a chat and to a completion that do not say how many."""
    chat = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "zzz"}], logit_bias={str(Z): 100}, **options
    )  # type: ignore[call-overload]
    text = client.completions.create(model="fake", prompt="zzz", logit_bias={str(Z): 100}, **options)  # type: ignore[call-overload]
    return chat.usage.completion_tokens, text.usage.completion_tokens


def test_a_length_holds_for_requests_that_do_not_say_theirs(start_server: Callable, folder: Path) -> None:
    write(folder, max_new_tokens=9, temperature=0.25)
    server = start_server("--tokenizer", str(folder)).wait_until_ready()
    client = server.client()
    assert lengths(client) == (9, 9)
    assert lengths(client, max_tokens=20) == (20, 20)
    (line,) = [line for line in server.log if "requests that do not say" in line]
    assert "temperature 0.25, max_tokens 9" in line and "--generation-config none" in line
    without = start_server("--tokenizer", str(folder), "--generation-config", "none").wait_until_ready()
    chat, completion = lengths(without.client())
    assert chat > 100 and completion == 16, "OpenAI's"
    assert not any("requests that do not say" in line for line in without.log)


def test_strings_that_end_a_turn_end_it(start_server: Callable, folder: Path) -> None:
    write(folder, stop_strings=["xy"])
    client = start_server("--tokenizer", str(folder)).wait_until_ready().client()
    ask = {"model": "fake", "prompt": "wvxyz", "max_tokens": 9}
    text = client.completions.create(**ask)
    assert (text.choices[0].text, text.choices[0].finish_reason) == ("wv", "stop")
    assert client.completions.create(**ask, stop=["v"]).choices[0].text == "w", "beside the request's own"
    ignoring = client.completions.create(**ask, extra_body={"ignore_eos": True})
    assert ignoring.choices[0].text == "wvxyzwvxy"


def test_a_bad_file_keeps_the_server_from_starting(start_server: Callable, folder: Path) -> None:
    write(folder, temperature=-1)
    server = start_server("--tokenizer", str(folder))
    assert server.wait() == 1
    assert any("cannot start" in line and "generation_config.json" in line for line in server.log)
