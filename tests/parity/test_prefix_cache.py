"""Requests that find the KV of their first tokens on the device say what Hugging Face says."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from omniserve import Engine, Request, SamplingParams, patch
from omniserve.kv.base import Tier
from omniserve.sched import SCHEDULERS
from tests.engine_settings import flat_config
from tests.kv.free_blocks import free_block_ids
from tests.pairwise import pairwise
from tests.parity.engine_histories import Reference, run_histories
from tests.parity.models import tiny_model
from tests.parity.test_engine import BOTH, DEVICES, HOST_FAULTS, UNLIKE_LLAMA, crowded, flat
from tests.quick import slow_except
from tests.rotation import chosen_of, rotating
from tests.sched import preemptible

_SHARED = 19  # of which two blocks are full


@cache
def model_and_reference(family: str, device: str) -> tuple[PreTrainedModel, Reference]:
    model = tiny_model(family).to(device)
    reference = Reference(model, num_shared=_SHARED)
    return patch(model, compile=False), reference


@pytest.fixture
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let prefixes of a block be worth copying from the host."""
    monkeypatch.setattr("omniserve.sched.prefixes_on_host.LEAST_RESTORED_TOKENS", 8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "scheduler", slow_except(("omniserve", *chosen_of(("sarathi", "conserve", "neo"), 1)), SCHEDULERS.names())
)
def test_schedulers_over_random_histories(scheduler: str, device: str, short_prefixes: None) -> None:
    """Prefixes are on the device, or, with kv="tiered", come back from the host."""
    model, reference = model_and_reference("llama", device)
    reach: tuple[str, ...] = ("cached_tokens", "preemptions", "sessions")
    rows: list[dict[str, Any]] = [{"kv": "paged", "async_steps": True}, {"kv": "tiered", "drafts": True}]
    if scheduler == "omniserve":
        reach += ("resumed_tokens", "restored_tokens")
        rows = flat(pairwise(kv=("tiered", "paged"), async_steps=BOTH, host=HOST_FAULTS, drafts=BOTH))
    run_histories(
        model, reference, range(900, 901), reach=reach, rows=rows, scheduler=scheduler, prefix_cache=True,
        **crowded(model),
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", rotating(UNLIKE_LLAMA, 1))
def test_models_over_random_histories(family: str, device: str) -> None:
    model, reference = model_and_reference(family, device)
    run_histories(
        model, reference, range(920, 921), reach=("cached_tokens", "shared_on_host", "swaps_out"), prefix_cache=True,
        kv="tiered", async_steps=lambda seed: seed % 2 == 0, **crowded(model),
    )  # fmt: skip


def test_a_prefix_that_the_device_has_forgotten_comes_back_from_the_host() -> None:
    model, _ = model_and_reference("llama", "cpu")
    prompts = [[*range(first, first + 80), 7] for first in (1, 3, 5)]
    expected = [tiny_model("llama").generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False,
                eos_token_id=None)[0, 81:].tolist() for prompt in prompts]  # fmt: skip
    for host_prefixes in (True, False):
        settings = {"device_kv_bytes": 15 * model.omniserve.spec.kv_block_bytes(8), "host_kv_bytes": 1 << 20}
        with _engine(model, host_prefixes=host_prefixes, **settings) as engine:
            found = []
            for _ in range(4):  # the device has room for one of them
                for prompt, tokens in zip(prompts, expected, strict=True):
                    (done,) = engine.generate([_request(*prompt)])
                    assert list(done.token_ids) == tokens
                    engine.scheduler.check_integrity()
                    found.append(done.num_cached_tokens)
            restored = engine.scheduler.requests.prefixes_on_host.num_restored_tokens["LS"]
        if host_prefixes:
            assert found[3:] == [80] * 9 and restored > 0
        else:
            assert max(found) < 80 and restored == 0


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_leave_between_layers_publish_nothing_that_is_not_there(device: str) -> None:
    model, reference = model_and_reference("llama", device)
    run_histories(
        model, reference, range(940, 941), reach=("cached_tokens", "halted"), prefix_cache=True, kv="tiered",
        scheduler=preemptible.NAME,
    )  # fmt: skip


def _engine(model: PreTrainedModel, **settings: object) -> Engine:
    usual = {
        "device_kv_bytes": 64 * model.omniserve.spec.kv_block_bytes(8), "host_kv_bytes": 0, "block_size": 8,
        "max_model_len": 128, "prefix_cache": True,
    }  # fmt: skip
    return Engine(model, flat_config({**usual, **settings}))


def _request(*token_ids: int, max_tokens: int = 4, **fields: object) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=fields.pop("logprobs", None))
    return Request(prompt_token_ids=token_ids, sampling=sampling, **fields)


def test_as_many_full_blocks_are_found_as_begin_alike_and_one_token_is_always_computed() -> None:
    model, _ = model_and_reference("llama", "cpu")
    with _engine(model) as engine:

        def cached(*token_ids: int, **fields: object) -> int:
            (done,) = engine.generate([_request(*token_ids, **fields)])
            return done.num_cached_tokens

        prompt = range(1, 41)
        assert cached(*prompt) == 0
        assert cached(*prompt) == 32, "the last token is computed, and with it its block"
        assert cached(*prompt, 50) == 40
        assert cached(*prompt[:20], 60, *prompt[20:]) == 16, "what comes behind another token is another text"
        assert cached(60, *prompt) == 0
        assert cached(*prompt, cache_salt="mine") == 0, "another salt"
        assert cached(*prompt, cache_salt="mine") == 32
        assert cached(*prompt, logprobs=0) == 0, "each token has to tell the next one's log-probability"


@pytest.mark.parametrize("budget", [128, 32])
def test_requests_that_begin_in_one_step_share_what_it_computes(budget: int) -> None:
    """Prompts that begin alike, in one step or, where the first one takes all of it, behind that one."""
    model, _ = model_and_reference("llama", "cpu")
    prompts = [[*range(1, 42), number] for number in range(50, 54)]
    reference = tiny_model("llama")
    with _engine(model, max_num_batched_tokens=budget) as engine:
        done = engine.generate([_request(*prompt) for prompt in prompts])
        engine.scheduler.check_integrity()
        again = engine.generate([_request(*prompts[0])])
    assert [output.num_cached_tokens for output in (*done, *again)] == [0, 40, 40, 40, 40]
    for prompt, output in zip(prompts, done, strict=True):
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False, eos_token_id=None)
        assert expected[0, len(prompt) :].tolist() == list(output.token_ids)


def test_rows_that_may_leave_a_step_are_shared_when_they_have_passed_it() -> None:
    model, _ = model_and_reference("llama", "cpu")
    with _engine(model, scheduler=preemptible.NAME) as engine:
        done = engine.generate([_request(*range(1, 42), number) for number in (50, 51)])
        assert [output.num_cached_tokens for output in done] == [0, 0]


def test_an_output_is_found_as_the_beginning_of_the_next_turn() -> None:
    model, _ = model_and_reference("llama", "cpu")
    with _engine(model) as engine:
        first = _request(*range(1, 11), max_tokens=30)
        (done,) = engine.generate([first])
        (second,) = engine.generate([_request(*first.prompt_token_ids, *done.token_ids, 7, 8, 9)])
        assert second.num_cached_tokens == 32, "of 40 tokens the last one was sampled, but never computed"


def test_memory_comes_before_what_nobody_uses() -> None:
    model, _ = model_and_reference("llama", "cpu")
    with _engine(model, device_kv_bytes=9 * model.omniserve.spec.kv_block_bytes(8)) as engine:
        engine.generate([_request(*range(1, 41))])
        assert engine.stats().kv.device_used == 0, "idle blocks count as free"
        assert len(free_block_ids(engine.kv, Tier.DEVICE)) == 4, "but five of nine have their KV"
        engine.generate([_request(*range(101, 149))])  # takes seven blocks
        (again,) = engine.generate([_request(*range(1, 41))])
        assert again.num_cached_tokens == 16, "the end of the prefix was forgotten first"


@pytest.mark.parametrize(("kv", "host_kv_bytes"), [("paged", 0), ("tiered", 0), ("tiered", 1 << 20)])
@pytest.mark.parametrize("share", [0.0, 0.25])
def test_a_flood_of_best_effort_prompts_leaves_latency_sensitive_prefixes_their_share(
    kv: str, host_kv_bytes: int, share: float
) -> None:
    """A chat beside a flood, of which always more wait than there is memory for: its next turn finds the last one.

    With a host tier, BE requests come back from there at once.
    """
    model, _ = model_and_reference("llama", "cpu")
    rng = random.Random(0)
    found = []
    settings = {"swap_in_delay_s": 0.0, "min_residence_s": 0.0}
    with _engine(
        model, kv=kv, host_kv_bytes=host_kv_bytes, host_prefixes=False, ls_prefix_share=share, max_num_seqs=16,
        max_num_batched_tokens=64,
        **settings,
    ) as engine:  # fmt: skip

        def flood() -> None:
            prompt = [rng.randrange(1, 90) for _ in range(48)]
            engine.add(_request(*prompt, max_tokens=8, service_class="BE"))

        chat = list(range(1, 41))
        for turn in range(6):
            for _ in range(20):
                flood()
            request_id = engine.add(_request(*chat, max_tokens=8))
            is_running = True
            while is_running or engine.stats().scheduler.waiting["BE"] > 2:
                for output in engine.step():
                    if output.request_id == request_id:
                        chat += output.new_token_ids
                        is_running = is_running and not output.finished
                        found.append(output.num_cached_tokens) if output.finished else None
                engine.scheduler.check_integrity()
            chat += [turn, 50, 51]
    assert found[0] == 0 and len(found) == 6
    if share:
        assert found[1:] == [(40 + 11 * turn + 7) // 8 * 8 for turn in range(5)], "all but the last token of a turn"
    else:
        assert found[1:] == [0] * 5, "the flood took all of it"


@pytest.mark.parametrize("service_class", ["LS", "BE"])
def test_the_older_branch_of_a_session_gives_way_to_others(service_class: str) -> None:
    model, _ = model_and_reference("llama", "cpu")
    found = {}
    for session in ("", "agent"):
        with _engine(model, device_kv_bytes=14 * model.omniserve.spec.kv_block_bytes(8)) as engine:

            def cached(*token_ids: int, session: str = session, **fields: object) -> int:
                request = _request(*token_ids, session=session, service_class=service_class, **fields)
                (done,) = engine.generate([request])
                return done.num_cached_tokens

            cached(*range(100, 148), session="")
            cached(*range(1, 17), *range(20, 52))  # six blocks, four of which the next one leaves
            assert cached(*range(1, 17), *range(60, 84)) == 16
            found[session] = cached(*range(1, 17), *range(60, 84), 85), cached(*range(100, 148), 149, session="")
            engine.scheduler.check_integrity()
            assert cached(1, 2, 3) == 0
            freed = engine.clear_prefixes(["agent"])
            assert freed.block_size == 8 and (freed.device > 0) == bool(session)
            assert engine.clear_prefixes().device > 0
            assert cached(*range(1, 17), *range(60, 84), 85) == cached(*range(100, 148), 149, session="") == 0
    assert found == {"": (40, 32), "agent": (40, 48)}, "without a name the one that was used longest ago gives way"


def test_a_manager_without_one_refuses_it() -> None:
    model, _ = model_and_reference("llama", "cpu")
    with pytest.raises(ValueError, match="kv='bidirectional' has no prefix cache: set kv to tiered, paged or incre"):
        _engine(model, kv="bidirectional", host_kv_bytes=1 << 20)


@pytest.mark.parametrize("scheduler", slow_except(("conserve",), SCHEDULERS.names()))
def test_checkpoints_of_preempted_requests_are_prefixes(scheduler: str) -> None:
    model, reference = model_and_reference("llama", "cpu")
    run_histories(
        model, reference, range(980, 982), reach=("cached_tokens", "checkpoints", "preemptions", "resumed_tokens"),
        scheduler=scheduler, prefix_cache=True, kv="incremental", async_steps=lambda seed: seed % 2 == 0,
        faults=lambda seed: seed % 3 == 0, **crowded(model),
    )  # fmt: skip
