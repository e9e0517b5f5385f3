"""Log-probabilities of prompts: Hugging Face's, once for each token, whatever happens while the prompt is computed."""

from __future__ import annotations

import math
import random

import pytest
import torch

from omniserve import Request, SamplingParams, TokenLogprob
from omniserve.core.plan import PromptScores, StepPlan
from omniserve.sampling.prompt_scores import score_prompts
from tests.parity.engine_histories import check_prompt_logprobs
from tests.parity.models import VOCAB_SIZE


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).randrange(1, VOCAB_SIZE) for _ in range(length))


def logprobs_of(model, prompt: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)


def scoring(prompt: tuple[int, ...], *, max_tokens: int = 0, num_top: int = 2, **fields: object) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, prompt_logprobs=num_top, ignore_eos=True)
    return Request(prompt_token_ids=prompt, sampling=sampling, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_chunked_prompts_are_scored_as_hugging_face_does(model, make_engine, max_tokens: int) -> None:
    prompts = [prompt_of(length, seed=length) for length in (1, 2, 3, 40)]
    engine = make_engine(max_num_batched_tokens=7)
    done = engine.generate([scoring(prompt, max_tokens=max_tokens, num_top=3) for prompt in prompts])
    for prompt, completion in zip(prompts, done, strict=True):
        check_prompt_logprobs(list(completion.prompt_logprobs), prompt, logprobs_of(model, prompt))
        assert len(completion.token_ids) == max_tokens and completion.finish_reason == "length"
    assert engine.stats().kv.device_used == 0


def test_requests_that_do_not_ask_get_none_and_cost_no_logits(make_engine) -> None:
    engine = make_engine()
    plans: list[StepPlan] = []
    engine.on_step = lambda plan, *_: plans.append(plan)
    [completion] = engine.generate([Request(prompt_token_ids=prompt_of(9), sampling=SamplingParams(max_tokens=3))])
    assert completion.prompt_logprobs == ()
    assert all(chunk.scores is None for plan in plans for chunk in plan.chunks)


@pytest.mark.parametrize("kv", ["paged", "incremental"])
def test_prompt_that_is_preempted_and_recomputed_is_scored_once(model, make_engine, kv: str) -> None:
    """A best-effort prompt gives way, half computed, to one that needs the memory."""
    prompt = prompt_of(60)
    engine = make_engine(scheduler="sarathi", max_num_batched_tokens=9, device_blocks=9, host_blocks=32, kv=kv)
    rows: list[int] = []

    def note(plan: StepPlan, *_: object) -> None:
        for chunk in plan.chunks:
            if chunk.scores is not None:
                first = chunk.start + chunk.scores.first_row
                rows.extend(range(first, first + len(chunk.scores.token_ids)))

    engine.on_step = note
    victim = engine.add(scoring(prompt, max_tokens=4, service_class="BE"))
    for _ in range(3):
        engine.step()
    engine.add(Request(prompt_token_ids=prompt_of(40, seed=1), sampling=SamplingParams(max_tokens=8, ignore_eos=True)))
    told: list[TokenLogprob] = []
    num_told = 0
    while engine.has_unfinished:
        for output in engine.step():
            if output.request_id == victim and output.prompt_logprobs:
                told += output.prompt_logprobs
                num_told += 1
        if engine.last_plan_was_empty:
            engine.wait(0.01)
    assert engine.stats().scheduler.preemptions > 0, "it was never preempted"
    assert num_told == 1 and rows == list(range(len(prompt) - 1))
    check_prompt_logprobs(told, prompt, logprobs_of(model, prompt))


def test_long_chunks_are_scored_in_pieces() -> None:
    hidden_TD = torch.randn(300, 6, generator=torch.Generator().manual_seed(0))
    targets = tuple(i % 6 for i in range(290))
    sizes: list[int] = []

    def logits(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return rows

    told, failed = score_prompts(
        logits, hidden_TD, [("a", 10, PromptScores(first_row=0, token_ids=targets, num_top=9))]
    )  # fmt: skip
    assert not failed and sizes == [128, 128, 34]
    want = hidden_TD[10:].log_softmax(-1)[torch.arange(290), list(targets)]
    assert [entry.logprob for entry in told["a"]] == pytest.approx(want.tolist())
    assert all(len(entry.top) == 6 for entry in told["a"]), "no more than the vocabulary has"


def test_prompt_with_non_finite_logits_fails() -> None:
    rows = torch.zeros(2, 4)
    rows[1, 0] = math.nan
    wanted = PromptScores(first_row=0, token_ids=(1, 2), num_top=0)
    told, failed = score_prompts(lambda rows: rows, rows, [("a", 0, wanted)])
    assert told == {} and "non-finite" in failed["a"]
