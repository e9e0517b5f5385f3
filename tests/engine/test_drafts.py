"""Speculative decoding in the engine: every way of sampling and of ending gives just what it gives without drafts."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from omniserve import ClassSpec, Engine, EngineConfig, ExecutionConfig, FinishReason, Request, SamplingParams, patch
from omniserve.core.request import Completion
from omniserve.kv import KV_MANAGERS
from tests.engine.test_async_steps import SAMPLINGS, run
from tests.engine.test_engine import hf_tokens, request
from tests.pairwise import pairwise
from tests.parity.models import VOCAB_SIZE, tiny_model
from tests.server.tokenizers_for_tests import byte_level_tokenizer

MakeEngine = Callable[..., Engine]


def guessed(request: Request, tokens: Sequence[int], *, share_wrong: float = 0.2, seed: int = 0) -> Request:
    """Return the request with guesses of its tokens, of which some are wrong."""
    rng = random.Random(seed)
    predicted = [rng.randrange(VOCAB_SIZE) if rng.random() < share_wrong else token for token in tokens]
    return dataclasses.replace(request, predicted_token_ids=predicted, speculation=True)


def check_same(want: Completion, got: Completion) -> None:
    """Assert that two completions differ in nothing but their drafts, times and the rounding of log-probabilities."""
    assert got.token_ids == want.token_ids and got.text == want.text
    assert (got.finish_reason, got.stop_reason) == (want.finish_reason, want.stop_reason)
    for one, other in zip(want.logprobs, got.logprobs, strict=True):
        assert other.token_id == one.token_id and other.logprob == pytest.approx(one.logprob, abs=1e-4)  # fp32 rounding
        assert [token_id for token_id, _ in other.top] == [token_id for token_id, _ in one.top]


@pytest.mark.parametrize("service_class", ["LS", "BE"])
def test_greedy_tokens_are_hugging_faces_in_fewer_steps(make_engine: MakeEngine, service_class: str) -> None:
    engine = make_engine()
    tokens = hf_tokens(5, 40)
    (completion,) = engine.generate([guessed(request(5, 40, service_class), tokens, share_wrong=0.1)])
    assert list(completion.token_ids) == tokens
    stats, counted = engine.stats(), engine.stats().scheduler
    assert stats.steps < 25
    assert counted.output_tokens[service_class] == 40
    assert completion.num_accepted_drafts == counted.accepted_drafts == 40 - stats.steps
    assert completion.num_rejected_drafts == counted.rejected_drafts > 0
    assert stats.device_tokens == 5 + 39 + counted.rejected_drafts


def test_every_way_of_sampling_gives_what_it_gives_without_drafts(make_engine: MakeEngine) -> None:
    requests = [
        request(4 + i, 20, "BE" if i % 2 else "LS", **{"seed": 5, **sampling}) for i, sampling in enumerate(SAMPLINGS)
    ]
    want = make_engine(scheduler="sarathi").generate(requests)
    drafted = [guessed(r, c.token_ids, seed=i) for i, (r, c) in enumerate(zip(requests, want, strict=True))]
    for row in pairwise(kv=KV_MANAGERS.names(), async_steps=(False, True), device_blocks=(64, 12)):
        host_blocks = 8 if row["kv"] in ("incremental", "bidirectional") else 0
        engine = make_engine(scheduler="sarathi", host_blocks=host_blocks, **row)
        for one, other in zip(want, engine.generate(drafted), strict=True):
            check_same(one, other)
        assert engine.stats().scheduler.accepted_drafts > 20 and engine.stats().scheduler.rejected_drafts > 0
        assert (engine.stats().scheduler.preemptions > 0) == (row["device_blocks"] == 12)


def test_a_repeating_text_is_drafted_from_itself(make_engine: MakeEngine) -> None:
    prompt = [7, 8, 9, 10, 11, 12] * 4
    asked = Request(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=60, logit_bias=((7, 50.0), (8, 50.0))))
    engine = make_engine()
    (want,) = make_engine().generate([asked])
    (got,) = engine.generate([dataclasses.replace(asked, speculation=True)])
    check_same(want, got)
    assert len(set(want.token_ids)) <= 2, "the bias makes it repeat itself"
    assert got.num_accepted_drafts > 30


@pytest.mark.parametrize("number", [1, 2, 3, 5, 8, 11])
def test_an_end_inside_a_run_drops_what_is_behind_it(make_engine: MakeEngine, number: int) -> None:
    tokens = hf_tokens(5, 24)
    for asked in (request(5, 24, stop_token_ids=(tokens[number],), logprobs=1), request(5, number, logprobs=1)):
        (want,) = make_engine().generate([asked])
        engine = make_engine()
        (got,) = engine.generate([guessed(asked, tokens, share_wrong=0.0)])
        check_same(want, got)
        stats, counted = engine.stats(), engine.stats().scheduler
        assert counted.output_tokens["LS"] == len(want.token_ids)
        assert got.num_accepted_drafts == counted.accepted_drafts <= len(want.token_ids) - 1
        assert stats.device_tokens == 5 + stats.steps - 1 + counted.accepted_drafts + counted.rejected_drafts
        assert engine.kv.usage().device_used == 0


def test_the_context_ends_a_request_at_the_same_token(make_engine: MakeEngine) -> None:
    for length in (7, 8, 9, 11, 14, 19):
        engine = make_engine(max_model_len=length)
        (got,) = engine.generate([guessed(request(5, length - 5), hf_tokens(5, 24), share_wrong=0.0)])
        assert list(got.token_ids) == hf_tokens(5, length - 5) and got.finish_reason is FinishReason.LENGTH


def test_stop_strings_end_inside_a_run(model: PreTrainedModel) -> None:
    tokenizer = byte_level_tokenizer()
    made = tiny_model("llama", vocab_size=len(tokenizer) + 8)
    patch(made, compile=False)
    config = EngineConfig(execution=ExecutionConfig(compile=False), device_kv_bytes=1 << 20, host_kv_bytes=0)

    def complete(asked: Request) -> tuple[Completion, Engine]:
        with Engine(made, config, tokenizer=tokenizer) as engine:
            (completion,) = engine.generate([asked])
        return completion, engine

    asked = Request(prompt_token_ids=[4, 5, 6], sampling=SamplingParams(max_tokens=30, ignore_eos=True, logprobs=0))
    whole, _ = complete(asked)
    assert whole.text is not None
    num_cut = 0
    for start in range(2, len(whole.text) - 2, 5):
        stop = dataclasses.replace(asked.sampling, stop=(whole.text[start : start + 2],))
        stopping = dataclasses.replace(asked, sampling=stop)
        want, _ = complete(stopping)
        got, engine = complete(guessed(stopping, whole.token_ids, share_wrong=0.1, seed=start))
        check_same(want, got)
        stats, counted = engine.stats(), engine.stats().scheduler
        assert counted.output_tokens["LS"] == len(want.token_ids) == len(want.logprobs)
        assert (got.num_accepted_drafts, got.num_rejected_drafts) == (counted.accepted_drafts, counted.rejected_drafts)
        num_cut += got.num_accepted_drafts + stats.steps > len(want.token_ids)
        assert stats.kv.device_used == 0
    assert want.finish_reason is FinishReason.STOP


def test_a_grammar_is_kept_with_drafts() -> None:
    tokenizer = byte_level_tokenizer()
    vocab, end = len(tokenizer) + 8, tokenizer.eos_token_id
    made = tiny_model("llama", vocab_size=vocab, eos_token_id=end)
    made.generation_config.eos_token_id = end
    patch(made, compile=False)
    config = EngineConfig(execution=ExecutionConfig(compile=False), device_kv_bytes=1 << 20, host_kv_bytes=0)
    grammar = SamplingParams(max_tokens=30, grammar='start: "abcabcabc" /[0-9]{1,4}/')
    with Engine(made, config, tokenizer=tokenizer) as engine:
        (want,) = engine.generate([Request(prompt_token_ids=[1, 2, 3], sampling=grammar)])
        for predicted in (want.token_ids, (*want.token_ids, *want.token_ids), want.token_ids[:3] * 9):
            asked = Request(prompt_token_ids=[1, 2, 3], sampling=grammar, predicted_token_ids=predicted)
            (got,) = engine.generate([asked])
            assert (got.token_ids, got.finish_reason) == (want.token_ids, want.finish_reason)
            assert got.num_accepted_drafts > 0


def test_who_wants_no_drafts_gets_none(make_engine: MakeEngine) -> None:
    tokens = hf_tokens(5, 20)
    engine = make_engine()
    engine.generate([dataclasses.replace(guessed(request(5, 20), tokens), speculation=False)])
    assert engine.stats().scheduler.accepted_drafts == engine.stats().scheduler.rejected_drafts == 0


def test_a_class_says_who_is_drafted_unless_the_request_does(make_engine: MakeEngine) -> None:
    classes = (ClassSpec(name="LS", kind="LS", speculation=True), ClassSpec(name="BE", kind="BE"))
    tokens = hf_tokens(5, 20)
    predicted = {"predicted_token_ids": tokens}
    cases: tuple[tuple[str, dict[str, Any], bool], ...] = (
        ("LS", predicted, True), ("LS", {**predicted, "speculation": False}, False),
        ("BE", predicted, True), ("BE", {**predicted, "speculation": False}, False), ("BE", {}, False),
    )  # fmt: skip
    for name, fields, is_drafted in cases:
        engine = make_engine(classes=classes)
        (got,) = engine.generate([dataclasses.replace(request(5, 20, name), **fields)])
        assert list(got.token_ids) == tokens and (got.num_accepted_drafts > 0) == is_drafted


def test_a_prediction_outside_the_vocabulary_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ValueError, match="predicted token 999999 is outside the vocabulary"):
        make_engine().add(dataclasses.replace(request(5, 4), predicted_token_ids=[1, 999999]))


def test_non_finite_logits_behind_a_right_draft_fail_the_request_at_the_same_token() -> None:
    model = tiny_model("llama", seed=9)
    config = EngineConfig(execution=ExecutionConfig(compile=False), device_kv_bytes=1 << 20, host_kv_bytes=0)
    asked = Request(prompt_token_ids=[5, 7, 6], sampling=SamplingParams(max_tokens=12))
    with Engine(model, config) as engine:
        (whole,) = engine.generate([asked])
        bad = whole.token_ids[6]
        num_before = whole.token_ids.index(bad) + 1
        with torch.no_grad():
            model.get_input_embeddings().weight[bad] = torch.nan
        (want,) = engine.generate([asked])
        assert want.finish_reason is FinishReason.ERROR and len(want.token_ids) == num_before
        (got,) = engine.generate([guessed(asked, whole.token_ids, share_wrong=0.0)])
        check_same(want, got)
        assert got.num_accepted_drafts > 0


def test_steps_overlap_unless_a_draft_would_be_right(make_engine: MakeEngine) -> None:
    tokens = hf_tokens(5, 40)
    engine = make_engine(async_steps=True)
    engine.add(guessed(request(5, 40), tokens, share_wrong=0.0))
    got = [token for output in run(engine) for token in output.new_token_ids]
    assert got == tokens
    assert engine.stats().scheduler.accepted_drafts > 20
