"""Rows of drafts: each is sampled as it would be if the drafts before it were the output."""

from __future__ import annotations

import random

import pytest
import torch

from omniserve.core.plan import SampledToken
from omniserve.core.request import SamplingParams
from omniserve.sampling.sampler import Sampler
from tests.sampling.test_sampling import VOCAB, sampler

PARAMS = (
    {},
    {"logprobs": 2},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "seed": 4, "top_k": 9, "top_p": 0.9, "logprobs": 1},
    {"repetition_penalty": 1.9},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": ((4, 1.0), (5, -3.0))},
    {"min_tokens": 15, "stop_token_ids": tuple(range(0, VOCAB, 2))},
    {"temperature": 1.2, "seed": 5, "repetition_penalty": 1.5, "frequency_penalty": 0.7},
)


def logits_after(text: tuple[int, ...]) -> torch.Tensor:
    """A 'model': its logits depend on the text."""
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(hash(text) % 2**31))


def one_by_one(made: Sampler, count: int) -> list[SampledToken]:
    text: tuple[int, ...] = ()
    tokens: list[SampledToken] = []
    for _ in range(count):
        tokens.append(made.sample(logits_after(text)[None], ["a"])[0]["a"])
        text += (tokens[-1].token_id,)
    return tokens


@pytest.mark.parametrize("params", PARAMS)
def test_any_drafts_change_no_token_and_no_log_probability(params: dict[str, object]) -> None:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    want = one_by_one(sampler(a=sampling), 60)
    other = SamplingParams(temperature=1.0, seed=9)
    other_wants = one_by_one(sampler(a=other), 60)
    made, rng = sampler(a=sampling, b=other), random.Random(0)
    got: list[SampledToken] = []
    other_got: list[SampledToken] = []
    num_right = num_wrong = 0
    while len(got) < 40:
        text = tuple(token.token_id for token in got)
        right = [token.token_id for token in want[len(got) : len(got) + rng.randrange(6)]]
        drafts = tuple(token if rng.random() < 0.8 else rng.randrange(VOCAB) for token in right)
        rows = [logits_after(text + drafts[:i]) for i in range(len(drafts) + 1)]
        other_text = tuple(token.token_id for token in other_got)
        logits_RV = torch.stack([*rows, logits_after(other_text)])
        given = {"a": drafts} if drafts else {}
        tokens, failed = made.launch(logits_RV, ["a"] * len(rows) + ["b"], given).result()
        assert not failed
        got += tokens["a"]
        other_got += tokens["b"]
        num_right += len(tokens["a"]) - 1
        num_wrong += len(drafts) - len(tokens["a"]) + 1
    assert num_right > 5 and num_wrong > 5
    for one, token in zip(got, want, strict=False):
        assert one.token_id == token.token_id
        assert (one.logprob is None) == (token.logprob is None)
        if one.logprob is not None and token.logprob is not None:
            assert one.logprob.logprob == pytest.approx(token.logprob.logprob, abs=1e-6)  # sums of other shapes
    assert other_got == other_wants[: len(other_got)]


def test_rows_that_are_not_finite_end_the_run_and_are_no_failure() -> None:
    rows = torch.zeros(4, VOCAB)
    rows[0, 7] = rows[1, 8] = rows[2, 9] = rows[3, 10] = 1.0
    for bad in range(4):
        logits_RV = rows.clone()
        logits_RV[bad, 3] = torch.nan
        tokens, failed = sampler(a=SamplingParams()).launch(logits_RV, ["a"] * 4, {"a": (7, 8, 9)}).result()
        assert not failed and [token.token_id for token in tokens["a"]] == [7, 8, 9, 10][:bad]
