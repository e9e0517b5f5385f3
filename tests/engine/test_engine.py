"""The engine's face: what it takes, what it refuses, how requests end."""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from omniserve import Engine, EngineConfig, EngineStopped, ExecutionConfig, FinishReason, Request, SamplingParams
from omniserve.engine.fingerprint import fingerprint_of
from omniserve.kv import PagedKVManager
from tests.engine_settings import flat_config
from tests.host.helpers import host_threads
from tests.parity.models import VOCAB_SIZE, tiny_model

MakeEngine = Callable[..., Engine]


def request(prompt: int = 5, output: int = 8, service_class: str = "LS", **sampling: object) -> Request:
    return Request(
        prompt_token_ids=list(range(1, prompt + 1)),
        sampling=SamplingParams(max_tokens=output, **sampling),  # type: ignore[arg-type]
        service_class=service_class,
    )


_continuations: dict[int, list[int]] = {}


@functools.cache
def _hugging_face() -> PreTrainedModel:
    return tiny_model("llama")


def hf_tokens(prompt: int, output: int) -> list[int]:
    """Return Hugging Face's continuation, which goes on from what an earlier call has generated."""
    known = _continuations.setdefault(prompt, [])
    if (missing := output - len(known)) > 0:
        ids = torch.tensor([[*range(1, prompt + 1), *known]])
        out = _hugging_face().generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=missing, do_sample=False
        )  # fmt: skip
        known += out[0, ids.shape[1] :].tolist()
    return known[:output]


def test_generate_returns_completions_in_order_of_the_requests(make_engine: MakeEngine) -> None:
    requests = [request(3 + i, 12 - i, "BE" if i % 2 else "LS") for i in range(8)]
    completions = make_engine().generate(requests)
    for i, completion in enumerate(completions):
        assert list(completion.token_ids) == hf_tokens(3 + i, 12 - i)
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.num_prompt_tokens == 3 + i
        times = completion.times
        assert times.first_scheduled_s is not None and times.first_token_s is not None and times.finished_s is not None
        assert times.arrival_s <= times.first_scheduled_s <= times.first_token_s <= times.finished_s


def test_a_stop_token_ends_the_output_and_is_reported(make_engine: MakeEngine) -> None:
    tokens = hf_tokens(5, 12)
    stop = tokens[6]
    (completion,) = make_engine().generate([request(5, 12, stop_token_ids=(stop,))])
    assert list(completion.token_ids) == tokens[: tokens.index(stop) + 1]
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, stop)


def test_logprobs_are_those_of_hugging_face(make_engine: MakeEngine) -> None:
    (completion,) = make_engine().generate([request(5, 10, logprobs=3)])
    ids = torch.tensor([[1, 2, 3, 4, 5, *completion.token_ids]])
    with torch.inference_mode():
        want = tiny_model("llama")(ids).logits[0, 4:-1].log_softmax(-1)
    for row, entry in zip(want, completion.logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)  # fp32 rounding over 3 layers
        assert [token_id for token_id, _ in entry.top] == row.topk(3).indices.tolist()


def test_the_same_seed_gives_the_same_sample_alone_and_in_a_crowd(make_engine: MakeEngine) -> None:
    wanted = request(6, 20, temperature=1.0, seed=3)
    (alone,) = make_engine().generate([wanted])
    crowd = [request(4 + i, 20, "BE", temperature=0.7, seed=i) for i in range(6)]
    crowded = make_engine(device_blocks=12).generate([*crowd, wanted])[-1]
    assert crowded.token_ids == alone.token_ids
    assert list(alone.token_ids) != hf_tokens(6, 20), "it never left the greedy path"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: request(60, 60), "context is 100 tokens"),
        (lambda: request(40, 50), "device KV pool holds 64"),
        (lambda: Request(prompt_token_ids=[VOCAB_SIZE]), "outside the vocabulary"),
        (lambda: request(stop=("x",)), "tokenizer"),
        (lambda: request(logit_bias=((VOCAB_SIZE, 1.0),)), "logit_bias's token"),
    ],
)
def test_what_can_never_fit_is_refused_at_add(
    make_engine: MakeEngine, bad: Callable[[], Request], message: str
) -> None:
    engine = make_engine(device_blocks=8, max_model_len=100)
    with pytest.raises(ValueError, match=message):
        engine.add(bad())
    assert not engine.has_unfinished


def test_an_empty_prompt_and_a_wrong_class_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Request(prompt_token_ids=[])
    with pytest.raises(ValueError, match="name of a class"):
        Request(prompt_token_ids=[1], service_class="")


def test_a_class_that_the_engine_does_not_have_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=r"no class 'fast'; this engine has LS, BE"):
        engine.add(Request(prompt_token_ids=[1], service_class="fast"))


def test_an_id_is_unique_among_unfinished_requests(make_engine: MakeEngine) -> None:
    engine = make_engine()
    named = Request(prompt_token_ids=[1, 2], request_id="mine")
    engine.add(named)
    with pytest.raises(ValueError, match="in use"):
        engine.add(named)
    engine.abort("mine")
    assert engine.add(named) == "mine"


def test_abort_at_any_step_frees_everything(make_engine: MakeEngine) -> None:
    for step in (0, 1, 2, 4, 8, 16, 33, 57):
        engine = make_engine(device_blocks=10, host_blocks=60)
        ids = [engine.add(request(12, 40, "BE")) for _ in range(5)]
        for _ in range(step):
            engine.step()
        assert any([engine.abort(request_id) for request_id in ids])
        while engine.has_unfinished:
            assert engine.step() == []
            engine.wait(0.01)
        stats = engine.stats()
        assert stats.kv.device_used == stats.kv.host_used == stats.scheduler.host_requests == 0
        assert not engine.abort(ids[0])


def test_an_error_in_generate_leaves_nothing_behind(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="request 1"):
        engine.generate([request(), Request(prompt_token_ids=[VOCAB_SIZE + 5])])
    assert not engine.has_unfinished


def test_non_finite_logits_end_one_request_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama", seed=9)
    with torch.no_grad():
        model.get_input_embeddings().weight[77] = torch.nan
    with Engine(
        model, EngineConfig(execution=ExecutionConfig(compile=False), device_kv_bytes=1 << 20, host_kv_bytes=0)
    ) as engine:
        bad = Request(prompt_token_ids=[5, 77, 6], sampling=SamplingParams(max_tokens=4))
        good = Request(prompt_token_ids=[5, 7, 6], sampling=SamplingParams(max_tokens=4))
        failed, fine = engine.generate([bad, good])
    assert failed.finish_reason is FinishReason.ERROR and "non-finite" in str(failed.stop_reason)
    assert fine.finish_reason is FinishReason.LENGTH and len(fine.token_ids) == 4
    (line,) = [record for record in caplog.records if "failed" in record.getMessage()]
    assert vars(line)["engine_request_id"] == failed.request_id


def test_a_closed_engine_says_so(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.close()
    engine.close()
    with pytest.raises(EngineStopped):
        engine.add(request())


def test_close_ends_the_host_threads(model: PreTrainedModel) -> None:
    before = host_threads("omni-")
    engine = Engine(
        model,
        EngineConfig(
            execution=ExecutionConfig(compile=False), host_threads=3, device_kv_bytes=1 << 20, host_kv_bytes=1 << 20
        ),
    )
    assert len(host_threads()) == 3
    engine.close()
    assert set(host_threads("omni-")) <= set(before)  # the one that touches the pool's pages ends, too


@pytest.mark.parametrize(
    "settings",
    [
        {"scheduler": "nobody"}, {"kv": "nothing"}, {"attention": "nowhere"}, {"max_model_len": 100_000},
        {"device_kv_bytes": 10}, {"kv": "incremental", "host_kv_bytes": 10},
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(model: PreTrainedModel, settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(settings.values())))):
        Engine(model, flat_config({"compile": False, **settings}))


def test_options_must_be_the_policys(model: PreTrainedModel) -> None:
    config = EngineConfig(
        execution=ExecutionConfig(compile=False), scheduler="fcfs", scheduler_options={"slack": "step"}
    )
    with pytest.raises(ValueError, match="scheduler 'fcfs' has no option 'slack'; it has ls_reserve_fraction"):
        Engine(model, config)
    config = EngineConfig(
        execution=ExecutionConfig(compile=False), kv="paged", scheduler_options={"checkpoint_kv": True}
    )
    with pytest.raises(ValueError, match="checkpoint_kv needs a KV manager with a host tier"):
        Engine(model, config)


# -- asynchrony --------------------------------------------------------------------------------------------------


def ls_tokens_per_step(engine: Engine, num_be: int, steps: int) -> list[int]:
    """Run one LS request under BE load; return the LS tokens of each step that computed anything."""
    for i in range(num_be):
        engine.add(request(12 + i, 40, "BE"))
    for _ in range(40):  # until BE decodes on the host
        engine.step()
    assert engine.stats().scheduler.host_requests > 0
    ls = engine.add(request(6, steps))
    return [sum(len(o.new_token_ids) for o in engine.step() if o.request_id == ls) for _ in range(steps)]


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_ls_gets_a_token_each_step_however_slow_the_host_is(make_engine: MakeEngine, delay_s: float) -> None:
    # The reserve holds the LS request, so that it never waits for memory either.
    engine = make_engine(device_blocks=16, host_blocks=200, scheduler_options={"ls_reserve_fraction": 0.35})
    assert engine.host_tier is not None
    engine.host_tier.inject(delay_s=delay_s)
    assert ls_tokens_per_step(engine, 8, 30) == [1] * 30


def test_with_the_host_stopped_ls_goes_on_and_be_ends_with_the_same_tokens_afterwards(make_engine: MakeEngine) -> None:
    engine = make_engine(device_blocks=16, host_blocks=200)
    assert engine.host_tier is not None
    be = {engine.add(request(12 + i, 30, "BE")): 12 + i for i in range(8)}
    got: dict[str, list[int]] = {request_id: [] for request_id in be}

    def step() -> None:
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.new_token_ids)
        if engine.last_plan_was_empty:
            engine.wait(0.01)

    while engine.stats().scheduler.host_output_tokens < 10:
        step()
    engine.host_tier.inject(delay_s=3600.0)
    frozen_from = engine.stats().scheduler.host_output_tokens
    ls = engine.add(request(6, 40))
    while len(got.get(ls, [])) < 40:
        step()
    # Tokens whose last layer was done when the host stopped may still have come through.
    assert engine.stats().scheduler.host_output_tokens <= frozen_from + engine.stats().scheduler.host_requests + len(be)
    engine.host_tier.inject(delay_s=0.0)
    while engine.has_unfinished:
        step()
    for request_id, prompt in be.items():
        assert got[request_id] == hf_tokens(prompt, 30)


def test_checkpoints_are_made_and_restored_beside_steps_that_have_all_cores(make_engine: MakeEngine) -> None:
    engine = make_engine(
        kv="incremental", scheduler="sarathi", device_blocks=8, host_blocks=32, max_num_batched_tokens=16
    )
    worked = []
    engine.on_step = lambda plan, host_works, seconds: worked.append(host_works)
    completions = engine.generate([request(20, 24, "BE"), request(20, 24, "BE"), request(20, 24, "LS")])
    assert all(list(completion.token_ids) == hf_tokens(20, 24) for completion in completions)
    stats = engine.stats()
    assert stats.scheduler.checkpoints > 0 and stats.scheduler.preemptions > 0 and stats.scheduler.resumed_tokens > 0
    assert not any(worked)


class DeviceOnly(PagedKVManager):
    """A KV manager of somebody's own that uses no host memory."""


def test_a_manager_that_uses_no_host_memory_has_no_host_tier(model: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(kv=f"{__name__}:DeviceOnly")
    assert engine.host_tier is None
    assert fingerprint_of(model, engine.config).host_threads == 0
    assert fingerprint_of(model, dataclasses.replace(engine.config, kv="tiered")).host_threads > 0


def test_a_host_pool_of_less_than_a_block_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="host_kv_bytes is 7, less than one KV block"):
        Engine(model, EngineConfig(host_kv_bytes=7, execution=ExecutionConfig(compile=False)))


def test_a_closed_engine_gives_its_memory_back_at_once(model: PreTrainedModel) -> None:
    config = EngineConfig(
        block_size=8,
        device_kv_bytes=1 << 20,
        host_kv_bytes=1 << 20,
        execution=ExecutionConfig(compile=False, step_graphs="on"),
    )
    engine = Engine(model, config)
    engine.generate([request()])
    gc.collect()
    gc.disable()
    try:
        held = [weakref.ref(engine), weakref.ref(engine.runner), weakref.ref(engine.host_tier)]
        engine.close()
        del engine
        assert [ref() for ref in held] == [None, None, None], "a cycle keeps the KV until a garbage collection"
    finally:
        gc.enable()
