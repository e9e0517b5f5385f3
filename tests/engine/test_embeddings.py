"""Embeddings of prompts: Hugging Face's hidden states, pooled, whatever happens while the prompt is computed."""

from __future__ import annotations

import math
import random

import pytest
import torch

from omniserve import Engine, Pooling, Request, SamplingParams, patch
from omniserve.core.plan import StepPlan
from omniserve.sampling.pooler import Pooler
from tests.engine_settings import flat_config
from tests.parity.models import MODELS, VOCAB_SIZE, tiny_model
from tests.quick import slow_except

# Sums of fp32 in other orders, of hidden states behind a norm, which are about 1.
CLOSE = {"rtol": 0.0, "atol": 2e-5}


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).randrange(1, VOCAB_SIZE) for _ in range(length))


def embedding_of(model, prompt: tuple[int, ...], pooling: str) -> torch.Tensor:
    with torch.inference_mode():
        hidden_TD = model.model(torch.tensor([prompt])).last_hidden_state[0]
    return hidden_TD[-1] if pooling == "last" else hidden_TD.mean(0)


def embedding(prompt: tuple[int, ...], pooling: str, **fields: object) -> Request:
    sampling = SamplingParams(max_tokens=0, pooling=pooling)
    return Request(prompt_token_ids=prompt, sampling=sampling, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("pooling", Pooling)
def test_chunked_prompts_among_others_have_hugging_faces_embeddings(model, make_engine, pooling: str) -> None:
    prompts = [prompt_of(length, seed=length) for length in (1, 2, 3, 8, 40)]
    engine = make_engine(max_num_batched_tokens=7)
    plans: list[StepPlan] = []
    engine.on_step = lambda plan, *_: plans.append(plan)
    chats = [Request(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=4)) for prompt in prompts[:2]]
    embeds = [embedding(prompt, pooling, service_class=("LS", "BE")[i % 2]) for i, prompt in enumerate(prompts)]
    done = engine.generate([*chats, *embeds])
    for prompt, completion in zip(prompts, done[2:], strict=True):
        torch.testing.assert_close(torch.tensor(completion.embedding), embedding_of(model, prompt, pooling), **CLOSE)
        assert completion.token_ids == () and completion.finish_reason == "length"
        assert completion.times.first_token_s is not None
    assert all(completion.embedding == () for completion in done[:2])
    assert engine.stats().kv.device_used == 0
    pooled = [chunk for plan in plans for chunk in plan.chunks if chunk.pooled is not None]
    assert pooled and all(chunk.num_sampled_rows == 0 for chunk in pooled), "their rows become no logits"


# Gemma 2 caps its logits, so its hidden states come from its own forward; OPT's come from its norm alone.
@pytest.mark.parametrize("family", slow_except(("gemma2", "opt"), tuple(MODELS)))
def test_families_have_hugging_faces_embeddings(family: str) -> None:
    model, prompt = tiny_model(family), prompt_of(22)
    found: list[torch.Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda head, args: found.append(args[0]))
    with torch.inference_mode():
        model(torch.tensor([prompt]))
    hook.remove()
    patch(model, compile=False)
    spec = model.omniserve.spec
    pool = 100 * (spec.kv_block_bytes(8) + spec.state_bytes)
    config = flat_config({"block_size": 8, "compile": False, "device_kv_bytes": pool, "max_num_batched_tokens": 7})
    with Engine(model, config) as engine:
        last, mean = engine.generate([embedding(prompt, pooling) for pooling in Pooling])
    torch.testing.assert_close(torch.tensor(last.embedding), found[0][0, -1], **CLOSE)
    torch.testing.assert_close(torch.tensor(mean.embedding), found[0][0].mean(0), **CLOSE)


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("kv", ["paged", "incremental"])
def test_prompt_that_is_preempted_and_recomputed_is_pooled_once(model, make_engine, kv: str, pooling: str) -> None:
    """A best-effort prompt gives way, half computed, to one that needs the memory."""
    prompt = prompt_of(60)
    engine = make_engine(scheduler="sarathi", max_num_batched_tokens=9, device_blocks=9, host_blocks=32, kv=kv)
    rows: list[int] = []

    def note(plan: StepPlan, *_: object) -> None:
        for chunk in plan.chunks:
            if chunk.pooled is not None:
                rows.extend(range(chunk.start + chunk.pooled.first_row, chunk.start + len(chunk.token_ids)))

    engine.on_step = note
    victim = engine.add(embedding(prompt, pooling, service_class="BE"))
    for _ in range(3):
        engine.step()
    engine.add(Request(prompt_token_ids=prompt_of(40, seed=1), sampling=SamplingParams(max_tokens=8, ignore_eos=True)))
    told: list[tuple[float, ...]] = []
    while engine.has_unfinished:
        told += [output.embedding for output in engine.step() if output.request_id == victim and output.embedding]
        if engine.last_plan_was_empty:
            engine.wait(0.01)
    assert engine.stats().scheduler.preemptions > 0, "it was never preempted"
    assert rows == (list(range(len(prompt))) if pooling == "mean" else [len(prompt) - 1])
    torch.testing.assert_close(torch.tensor(told), embedding_of(model, prompt, pooling)[None], **CLOSE)


@pytest.mark.parametrize(("pooling", "num_cached"), [("last", 24), ("mean", 0)])
def test_prefix_cache_helps_where_one_row_is_enough(model, make_engine, pooling: str, num_cached: int) -> None:
    prompt = prompt_of(30)
    engine = make_engine(prefix_cache=True)
    engine.generate([Request(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1))])
    first, second = engine.generate([embedding(prompt, pooling), embedding((*prompt[:28], 5), pooling)])
    assert first.num_cached_tokens == second.num_cached_tokens == num_cached
    torch.testing.assert_close(torch.tensor(first.embedding), embedding_of(model, prompt, pooling), **CLOSE)
    other = embedding_of(model, (*prompt[:28], 5), pooling)
    torch.testing.assert_close(torch.tensor(second.embedding), other, **CLOSE)
    [chat] = engine.generate([Request(prompt_token_ids=(*prompt, 1), sampling=SamplingParams(max_tokens=1))])
    assert chat.num_cached_tokens == 24


def test_embedding_that_ends_early_leaves_no_sum(make_engine) -> None:
    engine = make_engine(max_num_batched_tokens=5)
    request_id = engine.add(embedding(prompt_of(30), "mean"))
    engine.step()
    engine.step()
    assert engine.runner._pooler._sums
    engine.abort(request_id)
    assert not engine.runner._pooler._sums


def test_prompt_with_non_finite_hidden_states_fails() -> None:
    rows = torch.zeros(3, 4)
    rows[1, 0] = math.nan
    pending = Pooler(lambda rows: rows).launch(rows, [("a", range(0, 2), 2), ("b", range(2, 3), 1)])
    assert pending is not None
    embeddings, failed = pending.result()
    assert embeddings == {"b": (0.0,) * 4} and "non-finite" in failed["a"]


def test_parameters_that_contradict_an_embedding_are_refused() -> None:
    for fields in ({"max_tokens": 1}, {"max_tokens": 0, "prompt_logprobs": 0}):
        with pytest.raises(ValueError, match="pooling gives an embedding alone"):
            SamplingParams(pooling="last", **fields)
    with pytest.raises(ValueError, match="pooling must be 'last', 'mean' or None, got 'cls'"):
        SamplingParams(max_tokens=0, pooling="cls")
