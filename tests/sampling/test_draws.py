"""Draws: the filters are Hugging Face's, and no row's token depends on the rows beside it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from omniserve.core.request import SamplingParams
from omniserve.sampling.draw import draw, kept_probs

ALMOST_1 = 1 - 2**-52
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def any_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.3, 0.7, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 1, 2, 40, vocab_size - 1, vocab_size, vocab_size + 5]),
        top_p=rng.choice([1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.999999]),
        min_p=rng.choice([0.0, 0.0, 0.01, 0.3, 1.0]),
    )


def hugging_faces(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Return the probabilities that `generate` draws from."""
    ids, scores = torch.zeros(1, 1, dtype=torch.int64), logits_V[None].clone()
    scores = TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return scores[0].softmax(-1)


def logits_of(seed: int, rows: int, vocab_size: int, *, spread: float, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab_size, generator=generator) * spread).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spread", [0.01, 3.0, 12.0])
@pytest.mark.parametrize("vocab_size", [7, 3000])
def test_filters_are_hugging_faces(vocab_size: int, spread: float, device: str) -> None:
    rng = random.Random(vocab_size)
    logits_RV = logits_of(0, 40, vocab_size, spread=spread, dtype=torch.float32)
    params = [any_params(rng, vocab_size) for _ in logits_RV]
    kept_RV = kept_probs(logits_RV.to(device), params).cpu()
    for kept_V, logits_V, own in zip(kept_RV, logits_RV, params, strict=True):
        theirs_V = hugging_faces(logits_V, own)
        differing = (kept_V > 0) != (theirs_V > 0)
        # They add up from the least likely token on, in float32: a token at the very boundary may fall to either side.
        assert int(differing.sum()) <= (1 if own.top_p < 1.0 else 0), own
        if differing.any():
            assert abs(likelier_than(differing, logits_V, own) - own.top_p) < 3e-6, own
        else:
            torch.testing.assert_close(kept_V / kept_V.sum(), theirs_V, msg=lambda m, own=own: f"{own}: {m}")


def likelier_than(one_V: Tensor, logits_V: Tensor, params: SamplingParams) -> float:
    """Return the probability of all tokens before one, top-k applied, in float64."""
    kept_V = kept_probs(logits_V[None], [SamplingParams(temperature=params.temperature, top_k=params.top_k)])[0] > 0
    probs_V = (logits_V.double() / params.temperature).masked_fill(~kept_V, -math.inf).softmax(-1)
    return float(probs_V[probs_V > probs_V[one_V]].sum())


@pytest.mark.parametrize("device", DEVICES)
def test_of_equal_tokens_top_p_keeps_the_first_that_it_needs(device: str) -> None:
    logits_RV = torch.tensor([[0.0] * 10, [0.0, 5.0, 0.0, 5.0, 5.0, 0.0, 5.0, 5.0, 0.0, 0.0]], device=device)
    params = [SamplingParams(temperature=1.0, top_p=0.35), SamplingParams(temperature=1.0, top_p=0.5)]
    kept = [row.nonzero()[:, 0].tolist() for row in kept_probs(logits_RV, params).cpu()]
    assert kept == [[0, 1, 2, 3], [1, 3, 4]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_row_depends_on_those_beside_it(dtype: torch.dtype, device: str) -> None:
    """bf16 has few values, so many tokens are equal; and more rows than are sorted at a time."""
    rng = random.Random(1)
    logits_RV = logits_of(1, 70, 500, spread=2.0, dtype=dtype).to(device)
    params = [any_params(rng, 500) for _ in logits_RV]
    numbers = [rng.random() * ALMOST_1 for _ in logits_RV]
    together = draw(logits_RV, params, numbers).tolist()
    alone = [int(draw(logits_RV[i : i + 1], params[i : i + 1], numbers[i : i + 1])) for i in range(70)]
    assert together == alone
    order = rng.sample(range(70), 70)
    shuffled = draw(logits_RV[order], [params[i] for i in order], [numbers[i] for i in order]).tolist()
    assert [shuffled[order.index(i)] for i in range(70)] == together


def test_a_row_that_keeps_nearly_all_keeps_no_more_beside_a_flat_one() -> None:
    for seed in range(6):
        rows_RV = logits_of(seed, 2, 50_000, spread=8.0, dtype=torch.float32)
        rows_RV[1] = 0.0
        params = [SamplingParams(temperature=1.0, top_p=1 - 1e-9)] * 2
        assert torch.equal(kept_probs(rows_RV, params)[0], kept_probs(rows_RV[:1], params[:1])[0])


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_are_drawn_by_their_shares(device: str) -> None:
    shares = [0.0, 0.25, 0.0, 0.5, 0.25, 0.0]
    row_V = torch.tensor([math.log(share) if share else -math.inf for share in shares], device=device)
    numbers = [0.0, 0.24, 0.26, 0.5, 0.74, 0.76, ALMOST_1]

    def drawn(**filters: float) -> Sequence[int]:
        params = [SamplingParams(temperature=1.0, **filters)] * len(numbers)  # type: ignore[arg-type]
        return draw(row_V.repeat(len(numbers), 1), params, numbers).tolist()

    assert drawn() == [1, 1, 3, 3, 3, 4, 4], "no token without probability, not even at the ends"
    assert drawn(top_p=0.6) == [1, 1, 1, 3, 3, 3, 3], "of two equal ones the first"
    assert drawn(top_k=1) == [3] * 7


@pytest.mark.parametrize("device", DEVICES)
def test_logits_that_are_not_finite_give_some_token(device: str) -> None:
    """The request fails by its maximum; its row must not break those beside it."""
    logits_RV = torch.zeros(4, 9, device=device)
    logits_RV[0, 3], logits_RV[1], logits_RV[2, 4] = math.nan, -math.inf, math.inf
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1)):
        tokens = draw(logits_RV, [params] * 4, [0.5] * 4).tolist()
        assert all(0 <= token < 9 for token in tokens)
        assert tokens[3] == draw(logits_RV[3:], [params], [0.5]).tolist()[0]


def test_given_logits_are_not_changed() -> None:
    logits_RV = torch.arange(18.0).view(2, 9)
    before = logits_RV.clone()
    for params in (SamplingParams(temperature=0.5, top_k=3), SamplingParams(temperature=2.0, top_p=0.5, min_p=0.1)):
        draw(logits_RV, [params, SamplingParams(temperature=0.7)], [0.5] * 2)
        draw(logits_RV, [params] * 2, [0.5] * 2)
    assert torch.equal(logits_RV, before)
