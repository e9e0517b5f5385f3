"""Sampling: each parameter does what it says, and a request's tokens do not depend on its neighbours."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from omniserve.core.request import SamplingParams
from omniserve.sampling.sampler import Sampler

VOCAB = 50
CPU = torch.device("cpu")


def sampler(**requests: SamplingParams) -> Sampler:
    made = Sampler(vocab_size=VOCAB, device=CPU, seed=0)
    for request_id, params in requests.items():
        made.add(request_id, params, [1, 2, 3])
    return made


def draws(params: SamplingParams, logits_V: torch.Tensor, count: int = 400) -> Counter[int]:
    made = sampler(a=params)
    return Counter(made.sample(logits_V[None], ["a"])[0]["a"].token_id for _ in range(count))


def logits(**values: float) -> torch.Tensor:
    row = torch.full((VOCAB,), -20.0)
    for name, value in values.items():
        row[int(name.removeprefix("t"))] = value
    return row


def test_greedy_takes_the_maximum() -> None:
    rows = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    tokens, failed = sampler(a=SamplingParams(), b=SamplingParams(), c=SamplingParams()).sample(rows, ["a", "b", "c"])
    assert [tokens[name].token_id for name in "abc"] == rows.argmax(-1).tolist()
    assert not failed


def test_same_seed_gives_same_tokens_whatever_shares_the_batch() -> None:
    params = SamplingParams(temperature=1.0, seed=7)
    rows = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(0))
    alone = sampler(a=params)
    crowded = sampler(x=SamplingParams(temperature=0.5, seed=7), a=params, y=SamplingParams())
    for row in rows:
        want = alone.sample(row[None], ["a"])[0]["a"]
        got = crowded.sample(torch.stack([row.flip(0), row, row]), ["x", "a", "y"])[0]["a"]
        assert got == want


def test_different_seeds_and_no_seed_give_different_tokens() -> None:
    rows = torch.zeros(1, VOCAB)
    made = sampler(
        a=SamplingParams(temperature=1.0, seed=1),
        b=SamplingParams(temperature=1.0, seed=2),
        c=SamplingParams(temperature=1.0),
        d=SamplingParams(temperature=1.0),
    )
    streams = {name: tuple(made.sample(rows, [name])[0][name].token_id for _ in range(10)) for name in "abcd"}
    assert len(set(streams.values())) == 4


def test_draws_follow_the_distribution() -> None:
    counts = draws(SamplingParams(temperature=1.0, seed=0), logits(t0=math.log(0.7), t1=math.log(0.3)), 4000)
    # Standard deviation of the share is sqrt(.7 * .3 / 4000) = 0.007; five of them.
    assert counts[0] / 4000 == pytest.approx(0.7, abs=0.036)
    assert counts[0] + counts[1] == 4000


def test_low_temperature_sharpens() -> None:
    row = logits(t0=1.0, t1=0.0)
    assert draws(SamplingParams(temperature=0.05, seed=0), row)[0] == 400
    assert draws(SamplingParams(temperature=2.0, seed=0), row)[1] > 80


def test_top_k_top_p_and_min_p_cut_the_tail() -> None:
    row = logits(t0=math.log(0.5), t1=math.log(0.3), t2=math.log(0.15), t3=math.log(0.05))
    assert set(draws(SamplingParams(temperature=1.0, seed=0, top_k=2), row)) == {0, 1}
    assert set(draws(SamplingParams(temperature=1.0, seed=0, top_p=0.7), row)) == {0, 1}
    assert set(draws(SamplingParams(temperature=1.0, seed=0, top_p=0.001), row)) == {0}
    assert set(draws(SamplingParams(temperature=1.0, seed=0, min_p=0.25), row)) == {0, 1, 2}


def test_repetition_penalty_is_hugging_faces() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    made = sampler(a=SamplingParams(repetition_penalty=1.8, max_tokens=30))
    context = [1, 2, 3]
    for _ in range(12):
        want = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([context]), row[None].clone())
        token = made.sample(row[None], ["a"])[0]["a"].token_id
        assert token == int(want.argmax())
        context.append(token)


def test_presence_counts_once_and_frequency_each_time_of_the_output_only() -> None:
    row = logits(t1=1.0, t5=0.9, t6=0.2)
    presence = sampler(a=SamplingParams(presence_penalty=0.5))
    got = [presence.sample(row[None], ["a"])[0]["a"].token_id for _ in range(4)]
    assert got == [1, 5, 1, 1], "token 1 is in the prompt, which does not count"
    frequency = sampler(a=SamplingParams(frequency_penalty=0.5))
    got = [frequency.sample(row[None], ["a"])[0]["a"].token_id for _ in range(4)]
    assert got == [1, 5, 1, 5]


def test_logit_bias_is_hugging_faces() -> None:
    from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

    rows = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(4))
    bias = {5: 2.5, 9: -100.0, 2: 1.5}
    made = sampler(a=SamplingParams(logit_bias=bias, repetition_penalty=1.5, logprobs=0))  # type: ignore[arg-type]
    theirs = LogitsProcessorList(
        [SequenceBiasLogitsProcessor({(i,): value for i, value in bias.items()}), RepetitionPenaltyLogitsProcessor(1.5)]
    )
    context = [1, 2, 3]
    for row in rows:
        token = made.sample(row[None], ["a"])[0]["a"]
        assert token.token_id == int(theirs(torch.tensor([context]), row[None].clone()).argmax())
        assert token.logprob is not None
        assert token.logprob.logprob == pytest.approx(float(row.log_softmax(-1)[token.token_id])), "the model's own"
        context.append(token.token_id)


def test_bias_bans_and_forces() -> None:
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(6))
    best = int(row.argmax())
    assert draws(SamplingParams(temperature=1.0, seed=0, logit_bias=((best, -100.0),)), row)[best] == 0
    for bias in (100.0, 100):
        assert set(draws(SamplingParams(temperature=1.0, seed=0, logit_bias=((7, bias),)), row)) == {7}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_that_ends_an_output_comes_before_its_least_length(temperature: float) -> None:
    made = Sampler(vocab_size=VOCAB, device=CPU, seed=0, eos_token_ids=(5, 6, VOCAB + 3))
    shared = {"temperature": temperature, "seed": 1, "min_tokens": 3}
    made.add("a", SamplingParams(stop_token_ids=(7,), **shared), [1])
    made.add("b", SamplingParams(stop_token_ids=(7,), ignore_eos=True, **shared), [1])
    made.add("c", SamplingParams(temperature=temperature, seed=1), [1])
    row = logits(t5=60.0, t7=40.0, t8=20.0)
    got = [made.sample(torch.stack([row] * 3), ["a", "b", "c"])[0] for _ in range(5)]
    assert [tokens["a"].token_id for tokens in got] == [8, 8, 8, 5, 5]
    assert [tokens["b"].token_id for tokens in got] == [5] * 5, "the end-of-sequence token ends nothing"
    assert [tokens["c"].token_id for tokens in got] == [5] * 5
    only_7 = logits(t7=40.0, t8=20.0)
    made.add("d", SamplingParams(stop_token_ids=(7,), ignore_eos=True, **shared), [1])
    assert [made.sample(only_7[None], ["d"])[0]["d"].token_id for _ in range(4)] == [8, 8, 8, 7]


def test_where_only_an_end_is_left_the_least_length_gives_way() -> None:
    made = Sampler(vocab_size=VOCAB, device=CPU, seed=0, eos_token_ids=(5,))
    made.add("a", SamplingParams(min_tokens=3, logit_bias=((5, 1.0),)), [1])
    row = torch.full((VOCAB,), -math.inf)  # as a grammar at its end leaves it
    row[5] = 0.0
    tokens, failed = made.sample(row[None], ["a"])
    assert tokens["a"].token_id == 5 and not failed


def test_logprobs_are_the_models_own() -> None:
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5))
    made = sampler(a=SamplingParams(temperature=0.3, top_k=3, seed=0, logprobs=2), b=SamplingParams(logprobs=0))
    tokens, _ = made.sample(torch.stack([row, row]), ["a", "b"])
    want = row.log_softmax(-1)
    got = tokens["a"].logprob
    assert got is not None and got.logprob == pytest.approx(float(want[got.token_id]), abs=1e-6)
    assert [token_id for token_id, _ in got.top] == want.topk(2).indices.tolist()
    assert tokens["b"].logprob is not None and tokens["b"].logprob.top == ()


def test_non_finite_logits_fail_that_request_only() -> None:
    rows = torch.randn(3, VOCAB)
    rows[1, 7] = math.nan
    rows[2, 7] = math.inf
    tokens, failed = sampler(a=SamplingParams(), b=SamplingParams(), c=SamplingParams()).sample(rows, ["a", "b", "c"])
    assert set(tokens) == {"a"} and set(failed) == {"b", "c"}
    assert "non-finite" in failed["b"]


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0}, {"temperature": -1.0}, {"temperature": math.nan}, {"top_p": 0.0}, {"top_p": 1.5},
        {"top_k": -1}, {"min_p": 2.0}, {"repetition_penalty": 0.0}, {"presence_penalty": 3.0}, {"logprobs": 21},
        {"logit_bias": {-1: 1.0}}, {"logit_bias": {1: 101.0}}, {"prompt_logprobs": 21},
        {"stop": ("",)}, {"stop_token_ids": (-1,)}, {"max_tokens": True}, {"seed": 1.5},
        {"min_tokens": -1}, {"min_tokens": 17},
    ],
)  # fmt: skip
def test_bad_parameters_are_refused_by_name(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tiny",
    [
        {"temperature": 1e-38}, {"temperature": 5e-324}, {"temperature": 1.0, "top_p": 1e-300},
        {"temperature": 1e-320, "top_p": 1e-300, "top_k": 2, "min_p": 1.0},
        {"temperature": 1e-38, "repetition_penalty": 0.01},
    ],
)  # fmt: skip
def test_the_smallest_parameters_are_greedy(tiny: dict[str, float]) -> None:
    """Regression: quotients that overflow float32 made all probabilities nan, and token 0 was drawn."""
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) * 10
    row[1:4] = -5.0  # the prompt's, which the penalty changes
    assert draws(SamplingParams(**tiny), row, 10) == {int(row.argmax()): 10}  # type: ignore[arg-type]
