"""The order of tokens at the edges: of equal ones the lowest id is first, in every dtype, beside any other rows."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from omniserve.core.request import SamplingParams
from omniserve.sampling.draw import draw, kept_probs
from omniserve.sampling.order import first_tokens, likeliest
from omniserve.sampling.sampler import Sampler

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VOCAB = 600

pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.parametrize("dtype", DTYPES)]


def tied(dtype: torch.dtype, device: str, rows: int = 24) -> Tensor:
    """Return rows of few values, so that most of the best are equal; some are 0 and -0."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-3, 4, (rows, VOCAB), generator=generator).float() * 0.5
    values[::5] *= -0.0
    return values.to(device, dtype)


def in_order(logits_V: Tensor) -> list[int]:
    """Return all ids: by logit, equal ones by id."""
    values = logits_V.float().tolist()
    return sorted(range(len(values)), key=lambda token_id: (-values[token_id], token_id))


def kept(logits_V: Tensor, **params: float) -> list[int]:
    probs_RV = kept_probs(logits_V[None], [SamplingParams(**({"temperature": 1.0} | params))])  # type: ignore[arg-type]
    return probs_RV[0].nonzero()[:, 0].tolist()


def greedy(logits_V: Tensor, **params: object) -> int:
    made = Sampler(vocab_size=VOCAB, device=logits_V.device, seed=0)
    made.add("a", SamplingParams(**params), [1])  # type: ignore[arg-type]
    return made.sample(logits_V[None], ["a"])[0]["a"].token_id


STRICTEST = [
    {"temperature": 0.0}, {"temperature": 1e-6}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "top_p": 1e-9}, {"temperature": 100.0, "top_k": 1}, {"temperature": 1e-5, "top_p": 1e-9},
    {"temperature": 0.7, "top_k": 40, "top_p": 1e-9, "seed": 5}, {"temperature": 0.0, "logit_bias": {599: 0.0}},
    {"temperature": 0.0, "presence_penalty": 0.1}, {"temperature": 2.0, "min_p": 1.0, "logit_bias": {599: 0.0}},
]  # fmt: skip


@pytest.mark.parametrize("params", STRICTEST, ids=str)
def test_the_strictest_of_each_parameter_is_greedy_and_takes_the_first_of_equal_tokens(
    dtype: torch.dtype, device: str, params: dict[str, object]
) -> None:
    for logits_V in tied(dtype, device):
        assert greedy(logits_V, **params) == in_order(logits_V)[0]


@pytest.mark.parametrize("top_k", [1, 2, 7, 100, VOCAB - 1])
def test_top_k_keeps_exactly_k_the_first_of_equal_tokens(dtype: torch.dtype, device: str, top_k: int) -> None:
    for logits_V in tied(dtype, device):
        assert kept(logits_V, top_k=top_k) == sorted(in_order(logits_V)[:top_k])


@pytest.mark.parametrize("top_p", [1e-9, 0.01, 0.1, 0.5, 0.999])
def test_top_p_keeps_as_few_as_reach_it_the_first_of_equal_tokens(
    dtype: torch.dtype, device: str, top_p: float
) -> None:
    for logits_V in tied(dtype, device):
        ids = kept(logits_V, top_p=top_p)
        assert ids == sorted(in_order(logits_V)[: len(ids)])
        probs_V = logits_V.double().softmax(-1)
        assert float(probs_V[ids].sum()) >= top_p - 1e-6, "they reach it"
        assert len(ids) == 1 or float(probs_V[ids].sum() - probs_V[ids].min()) < top_p + 1e-6, "one less does not"


def test_min_p_takes_equal_tokens_alike_below_1(dtype: torch.dtype, device: str) -> None:
    for logits_V in tied(dtype, device):
        best = logits_V.float() == logits_V.float().max()
        assert kept(logits_V, min_p=0.999) == best.nonzero()[:, 0].tolist()


def test_a_temperature_that_makes_logits_equal_changes_no_order(dtype: torch.dtype, device: str) -> None:
    """Quotients and probabilities of neighbouring numbers are often equal."""
    near = torch.tensor([1e-7, 2e-7, 3e-7, 2e-7] if dtype is torch.float32 else [1.0, 1.0, 2.0, 2.0])
    logits_V = torch.full((VOCAB,), -1.0)
    logits_V[10:14] = near
    logits_V = logits_V.to(device, dtype)
    assert kept(logits_V, temperature=100.0, top_k=3) == sorted(in_order(logits_V)[:3])
    assert kept(logits_V, temperature=100.0, top_p=1e-9) == [12]


def test_no_tie_depends_on_the_place_in_the_batch(dtype: torch.dtype, device: str) -> None:
    rng = random.Random(0)
    rows_RV = tied(dtype, device, rows=70)
    some = [{"top_k": 5}, {"top_p": 0.1}, {"top_k": 90, "top_p": 0.5}, {"min_p": 0.5}, {}, {"top_k": 1}]
    params = [SamplingParams(temperature=1.0, **rng.choice(some)) for _ in rows_RV]  # type: ignore[arg-type]
    numbers = [rng.random() for _ in rows_RV]
    want = [int(draw(rows_RV[i : i + 1], params[i : i + 1], numbers[i : i + 1])) for i in range(70)]
    order = rng.sample(range(70), 70)
    got = draw(rows_RV[order], [params[i] for i in order], [numbers[i] for i in order]).tolist()
    assert got == [want[i] for i in order]


@pytest.mark.parametrize("num", [0, 1, 5, 20, VOCAB + 3])
def test_the_likeliest_tokens_are_told_in_that_order(dtype: torch.dtype, device: str, num: int) -> None:
    rows_RV = tied(dtype, device)
    want = [in_order(row)[:num] for row in rows_RV]
    assert likeliest(rows_RV.float(), num).tolist() == want
    if not 0 < num <= 20:
        return
    made = Sampler(vocab_size=VOCAB, device=rows_RV.device, seed=0)
    made.add("a", SamplingParams(logprobs=num), [1])
    for logits_V, ids in zip(rows_RV, want, strict=True):
        token = made.sample(logits_V[None], ["a"])[0]["a"]
        assert token.logprob is not None and [token_id for token_id, _ in token.logprob.top] == ids
        assert token.token_id == ids[0], "the greedy token is the first that is told"


def test_first_tokens_of_rows_with_other_numbers(dtype: torch.dtype, device: str) -> None:
    rows_RV = tied(dtype, device).float()
    num_R1 = torch.arange(1, len(rows_RV) + 1, device=device)[:, None]
    first_RV = first_tokens(rows_RV, rows_RV.topk(40).values, num_R1)
    for row, (is_first_V, logits_V) in enumerate(zip(first_RV, rows_RV, strict=True)):
        assert is_first_V.nonzero()[:, 0].tolist() == sorted(in_order(logits_V)[: row + 1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_of_minus_100_bans_and_of_100_forces_however_far_logits_are_apart(
    dtype: torch.dtype, device: str, temperature: float
) -> None:
    logits_V = torch.full((VOCAB,), -3e4)
    logits_V[3], logits_V[4] = 3e4, 2.0
    logits_V = logits_V.to(device, dtype)

    def tokens(bias: dict[int, float], **more: object) -> set[int]:
        params = {"temperature": temperature, "logit_bias": bias} | more
        return {greedy(logits_V, seed=seed, **params) for seed in range(8)}

    assert tokens({3: -100.0}) == {4}
    assert tokens({3: -100.0, 4: -100.0, 5: -99.0}).isdisjoint({3, 4})
    assert tokens({7: 100.0}) == {7}
    assert tokens({7: 100.0}, repetition_penalty=100.0, presence_penalty=2.0) == {7}
    assert tokens({7: 100.0, 3: 99.0}) == {7}
    assert tokens({7: 100.0, 9: 100.0}) <= {7, 9}
    assert tokens({3: -100.0}, repetition_penalty=0.01) == {4}


def test_a_request_that_bans_every_token_fails_alone(dtype: torch.dtype, device: str) -> None:
    rows_RV = tied(dtype, device)[:4].clone()
    rows_RV[3, 5] = math.nan
    everything = {token_id: -100.0 for token_id in range(VOCAB)}
    made = Sampler(vocab_size=VOCAB, device=rows_RV.device, seed=0)
    made.add("greedy", SamplingParams(logit_bias=everything), [1])  # type: ignore[arg-type]
    made.add("drawn", SamplingParams(logit_bias=everything, temperature=1.0), [1])  # type: ignore[arg-type]
    made.add("other", SamplingParams(), [1])
    made.add("nan", SamplingParams(logit_bias=everything), [1])  # type: ignore[arg-type]
    tokens, failed = made.sample(rows_RV, ["greedy", "drawn", "other", "nan"])
    assert tokens["other"].token_id == in_order(rows_RV[2])[0]
    assert set(failed) == {"greedy", "drawn", "nan"}
    assert "logit_bias" in failed["greedy"] and failed["greedy"] == failed["drawn"]
