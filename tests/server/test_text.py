"""Texts of any length become tokens as in transformers, and keep nothing waiting."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import threading
import time
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers_for_tests import CHAT_TEMPLATE, byte_level_tokenizer, sentencepiece_tokenizer, tokenizer_with
from transformers import PreTrainedTokenizerFast

from omniserve.server.tokenizing.lanes import Lane
from omniserve.server.tokenizing.text import TextCodec, TooManyTokens
from omniserve.server.tokenizing.token_bound import TokenBound

USER = {"role": "user", "content": "hi there"}


def _qwen_like() -> PreTrainedTokenizerFast:
    tokenizer = tokenizer_with(CHAT_TEMPLATE)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _lowering() -> PreTrainedTokenizerFast:
    tokenizer = tokenizer_with(CHAT_TEMPLATE)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def _stripping() -> PreTrainedTokenizerFast:
    tokenizer = tokenizer_with(CHAT_TEMPLATE)
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    return tokenizer


def _gemma_like() -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(sentencepiece_tokenizer())
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


BOUNDED = {
    "byte level": byte_level_tokenizer, "NFC": _qwen_like, "lower case": _lowering, "swallows space": _stripping,
    "byte tokens": _gemma_like,
}  # fmt: skip


@cache
def bounded(kind: str) -> tuple[PreTrainedTokenizerFast, TokenBound]:
    """Return a tokenizer and its bound."""
    tokenizer = BOUNDED[kind]()
    return tokenizer, TokenBound(tokenizer.backend_tokenizer)


_TEXTS = st.text(st.sampled_from("aehst. \n\tZ<>|▁e\u0301\u0308éΣİ日🚀") | st.characters(exclude_categories=["Cs"]))


@pytest.mark.parametrize("kind", BOUNDED)
@settings(max_examples=200, deadline=None)
@given(content=_TEXTS | st.builds(lambda a, n: a * n, _TEXTS, st.integers(1, 50)))
@example("e\u0301" * 50)
@example("\u1100\u1161\u11a8" * 20)
@example("<mask>" + " " * 300 + "<mask>")
@example("▁the▁cat" * 30)
@example("<|user|>" * 20)
@example(" the cat" * 30)
@example("\u2126K" * 30)
def test_the_bound_is_never_above_the_number_of_tokens(kind, content):
    tokenizer, bound = bounded(kind)
    assert not bound.exceeds(content, len(tokenizer(content, add_special_tokens=False).input_ids))


@pytest.mark.parametrize("kind", BOUNDED)
def test_the_bound_of_a_long_text_is_of_use(kind):
    assert bounded(kind)[1].exceeds("sat the cat " * 20_000, 2048)


def test_tokenizers_whose_tokens_may_have_any_length_have_no_bound():
    for model in (
        models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"),
        models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"),
        models.BPE({"[UNK]": 0, "a": 1}, [], unk_token="[UNK]", fuse_unk=True),
    ):
        raw = Tokenizer(model)
        raw.pre_tokenizer = pre_tokenizers.Whitespace()
        assert not TokenBound(raw).exceeds("z" * 100_000, 10)
    assert not TokenBound(None).exceeds("z" * 100_000, 10)


@pytest.mark.parametrize("make", [byte_level_tokenizer, sentencepiece_tokenizer])
def test_ids_and_texts_are_those_of_transformers(make):
    tokenizer = make()
    texts = ["", " the cat sat", "Grüße 🚀\n\n<|end|> x", "the " * 3000, "日本" * 3000]

    async def encoded() -> None:
        codec = TextCodec(tokenizer)
        for is_urgent in (False, True):
            for special in (False, True):
                expected = [tokenizer(one, add_special_tokens=special).input_ids for one in texts]
                assert await codec.encode_all(texts, add_special_tokens=special, is_urgent=is_urgent) == expected
                assert [await codec.encode(one, add_special_tokens=special) for one in texts] == expected
        for ids in expected:
            assert await codec.decode(ids) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    asyncio.run(encoded())


def test_a_tokenizer_with_code_of_its_own_is_asked_itself():
    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, text, *args, **kwargs):
            encoding = super()._encode_plus(text, *args, **kwargs)
            encoding["input_ids"] = [7, *encoding["input_ids"]]
            return encoding

    tokenizer = Own(tokenizer_object=byte_level_tokenizer().backend_tokenizer)
    assert asyncio.run(TextCodec(tokenizer).encode("a", add_special_tokens=False))[0] == 7


def test_what_is_certainly_too_long_is_not_encoded(monkeypatch):
    codec = TextCodec(byte_level_tokenizer())
    monkeypatch.setattr(codec, "_encode_all", lambda *_: pytest.fail("encoded"))
    with pytest.raises(TooManyTokens) as caught:
        asyncio.run(codec.encode("hello world " * 700_000, add_special_tokens=False, most=2048))
    assert not caught.value.is_exact


def test_an_urgent_text_does_not_wait_for_others(monkeypatch):
    """The others are in the middle of being encoded as long as the test wants."""
    codec = TextCodec(byte_level_tokenizer())
    go_on, encode = threading.Event(), codec._encode_all

    def held(texts, *args):
        if texts[0].startswith("long"):
            assert go_on.wait(30)
        return encode(texts, *args)

    monkeypatch.setattr(codec, "_encode_all", held)

    async def race() -> None:
        waiting = [asyncio.ensure_future(codec.encode("long " * 4000, add_special_tokens=False)) for _ in range(3)]
        waiting.append(asyncio.ensure_future(codec.encode("long " * 40_000, add_special_tokens=False, is_urgent=True)))
        await asyncio.sleep(0.05)
        chat = [USER | {"content": "What does it do? " * 300}]
        for _ in range(3):
            assert await codec.encode("cat " * 2000, add_special_tokens=False, is_urgent=True)
            assert await codec.encode_chat(chat, options={}, is_urgent=True)
        assert not any(future.done() for future in waiting)
        go_on.set()
        assert all(await asyncio.gather(*waiting))

    asyncio.run(race())


def test_work_whose_caller_has_gone_is_not_done():
    async def race() -> list[int]:
        lane, done, go_on = Lane("test"), [], threading.Event()
        first = asyncio.ensure_future(lane.run(go_on.wait, 30))
        second = asyncio.ensure_future(lane.run(done.append, 2))
        third = asyncio.ensure_future(lane.run(done.append, 3))
        await asyncio.sleep(0.05)
        second.cancel()
        go_on.set()
        await asyncio.gather(first, third)
        return done

    assert asyncio.run(race()) == [3]


def test_interrupted_work_ends():
    threads = []

    def spin() -> None:
        threads.append(threading.current_thread())
        while True:
            pass

    async def interrupt() -> None:
        with pytest.raises(TimeoutError):
            await Lane("test").run(spin, limit_s=0.05)

    asyncio.run(interrupt())
    threads[0].join(30)
    assert not threads[0].is_alive()


def test_a_lane_survives_interrupted_work_of_any_length():
    def spin(seconds: float) -> float:
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            pass
        return seconds

    async def race() -> None:
        lane, draw = Lane("test"), random.Random(0)
        durations = [draw.choice([0.0, 0.019, 0.02, 0.021, 30.0]) for _ in range(40)]
        results = await asyncio.gather(*(lane.run(spin, s, limit_s=0.02) for s in durations), return_exceptions=True)
        for seconds, result in zip(durations, results, strict=True):
            assert isinstance(result, TimeoutError) or result == seconds
            assert seconds < 1 or isinstance(result, TimeoutError)

    asyncio.run(race())


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "hello world " * 100_000}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "hello world " * 100_000]}, "prompt"),
        (
            "/v1/completions",
            {"prompt": "a", "prediction": {"type": "content", "content": "hello " * 100_000}},
            "prediction",
        ),
        ("/v1/chat/completions", {"messages": [USER | {"content": "hello world " * 100_000}]}, "messages"),
        ("/tokenize", {"prompt": "hello world " * 700_000}, "prompt"),
        ("/tokenize", {"messages": [USER | {"content": "hello world " * 700_000}]}, "messages"),
    ],
)
@pytest.mark.parametrize("tier", ["priority", "flex"])
def test_a_text_that_is_far_too_long_is_refused(server, path, fields, param, tier):
    more = {} if path == "/tokenize" else {"service_tier": tier}
    with server.http() as http:
        response = http.post(path, content=json.dumps(fields | more))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and "tokens" in error["message"]
    if param == "prompt" and path == "/v1/completions":
        assert error["code"] == "context_length_exceeded" and "at least 513 tokens" in error["message"]


def test_how_much_too_long_a_text_is_can_be_asked_for(server):
    with server.http() as http:
        response = http.post("/tokenize", content=json.dumps({"prompt": "\n" * 1500})).json()
    assert response["count"] == len(response["tokens"]) > response["max_model_len"]
