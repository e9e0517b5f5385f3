"""A model in stages: exact tokens for every family, with several steps in flight and any history."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torch import nn

from omniserve import Engine, EngineConfig, ExecutionConfig, Request, SamplingParams
from omniserve.core.config import DiskKVConfig, ParallelConfig
from omniserve.core.work import AttentionResult, Done
from omniserve.host.tier import CANCELLED
from omniserve.parallel.host_tier import EventMerge
from omniserve.parallel.place import Place
from omniserve.sched import SCHEDULERS
from tests.parallel.ranks import ranks_of, reference_of
from tests.parity.engine_histories import run_histories
from tests.quick import slow_except

FAMILIES = (
    "llama", "llama_tied", "opt", "gpt2", "gpt_oss", "gemma2", "gemma3", "gemma4", "mixtral", "deepseek_v3", "cohere2",
    "llama4", "bloom", "falcon", "phi3", "gpt_neox", "smollm3", "jamba", "falcon_h1", "qwen3_next", "nemotron_h",
)  # fmt: skip
FAMILIES_OF_BOTH = (
    "llama", "qwen3", "phi3", "gemma2", "gemma3", "gpt_neox", "mixtral", "qwen3_moe", "cohere2", "deepseek_v3",
    "llama4", "smollm3",
)  # fmt: skip
"""Families that are tested in stages of two ranks."""
_BLOCK = 8
LATE = ("late_joins", "missed_joins")
MOST_ON_HOST = {
    "max_num_seqs": 32, "max_num_batched_tokens": 64, "max_piggyback_seats": 8, "max_piggyback_rows": None,
    "prefix_cache": False, "checkpoint_kv": False, "swap_in_delay_s": 1.0, "most_requests": 24,
}  # fmt: skip
"""Settings with which most requests of a history come to the host tier."""
OVERLAPPED = {"strategy": "overlapped", "min_host_per_device": 0}
"""Options with which the steps of `apex` do not wait for the host tier."""


def _sizes(model: nn.Module) -> dict[str, Any]:
    """Return a small device pool and a large host pool; with recurrent states beside it, sizes are drawn."""
    spec = model.omniserve.spec
    if spec.state_bytes:
        return {}
    block_bytes = spec.kv_block_bytes(_BLOCK)
    return {"device_kv_bytes": 9 * block_bytes, "host_kv_bytes": 1 << 20, "max_host_requests": 16}


def _config(parallel: ParallelConfig, **settings: Any) -> EngineConfig:
    sizes = {"block_size": _BLOCK, "device_kv_bytes": 1 << 20, "host_kv_bytes": 1 << 20}
    return EngineConfig(parallel=parallel, execution=ExecutionConfig(compile=False), **sizes, **settings)


@pytest.mark.parametrize("family", slow_except(("opt",), FAMILIES))
def test_tokens_of_two_stages_equal_hugging_face(family: str) -> None:
    with ranks_of(family, 1, num_stages=2) as (model, group, parallel):
        run_histories(
            model, reference_of(family), range(2), reach=("host_tokens", "in_stages"), has_profile=False,
            group=group, parallel=parallel, faults=lambda seed: seed % 2 == 1, async_steps=lambda seed: seed != 1,
            **_sizes(model),
        )  # fmt: skip


@pytest.mark.parametrize("scheduler", slow_except(("omniserve",), ("omniserve", "apex")))
def test_results_join_late_in_every_stage(scheduler: str) -> None:
    """Most requests decode on the host tier, whose results often come too late."""
    with ranks_of("llama", 1, num_stages=2) as (model, group, parallel):
        tally = run_histories(
            model, reference_of("llama"), range(701, 705), reach=("in_stages", *LATE), scheduler=scheduler, kv="tiered",
            has_profile=False, faults=True, group=group, parallel=parallel, async_steps=True, **MOST_ON_HOST,
            **(OVERLAPPED if scheduler == "apex" else {}), **_sizes(model),
        )  # fmt: skip
    assert tally.late_joins > 20 and tally.missed_joins > 5, tally


@pytest.mark.parametrize(
    ("family", "num_shards", "num_stages"),
    slow_except([("llama", 2, 2)], [*[(family, 2, 2) for family in FAMILIES_OF_BOTH], ("gpt_neox", 1, 3)]),
)
def test_stages_of_several_ranks(family: str, num_shards: int, num_stages: int) -> None:
    with ranks_of(family, num_shards, num_stages=num_stages) as (model, group, parallel):
        run_histories(
            model, reference_of(family), range(1), reach=(*LATE, "host_tokens", "in_stages"), has_profile=False,
            group=group, parallel=parallel, faults=lambda seed: seed % 2 == 0, async_steps=True, kv="tiered",
            **MOST_ON_HOST, **_sizes(model),
        )  # fmt: skip


@pytest.mark.parametrize(
    "scheduler",
    slow_except(
        ("omniserve", "apex"), sorted({*SCHEDULERS.names()} - {"neo", "neo-paper", "conserve", "conserve-paper"})
    ),
)
def test_every_policy_that_can_runs_in_stages(scheduler: str) -> None:
    with ranks_of("llama", 1, num_stages=2) as (model, group, parallel):
        run_histories(
            model, reference_of("llama"), range(400, 403), reach=("in_stages",), scheduler=scheduler,
            faults=lambda seed: seed % 2 == 0, deaths=lambda seed: seed % 4 == 2, drafts=lambda seed: seed % 3 == 0,
            async_steps=lambda seed: seed % 4 != 1, has_profile=lambda seed: seed % 2 == 1,
            kv=lambda seed: ("tiered", "incremental", "bidirectional")[seed % 3],
            group=group, parallel=parallel, **(OVERLAPPED if scheduler == "apex" else {}), **_sizes(model),
        )  # fmt: skip


@pytest.mark.slow
def test_compiled_halves_of_a_stage() -> None:
    with ranks_of("qwen3", 1, num_stages=2, compile=True) as (model, group, parallel):
        run_histories(
            model, reference_of("qwen3"), range(440, 442), reach=("host_tokens", "in_stages"), has_profile=False,
            group=group, compile=True, parallel=parallel, async_steps=True, **_sizes(model),
        )  # fmt: skip


def test_decodes_are_dealt_out_to_the_steps_in_flight() -> None:
    """Eight requests that decode: two steps in flight have four of them each, all the time."""
    seen: list[int] = []
    with ranks_of("llama", 1, num_stages=2) as (model, group, parallel):
        config = _config(parallel)
        with Engine(model, config, group=group) as engine:
            engine.on_step = lambda plan, host_works, seconds: seen.append(len(plan.chunks))
            sampling = SamplingParams(max_tokens=20, ignore_eos=True)
            requests = [Request(prompt_token_ids=[1, 2, index], sampling=sampling) for index in range(8)]
            engine.generate(requests)
    decodes = seen[1:-2]  # the first step has all prompts
    assert len(decodes) > 30 and decodes.count(4) > 0.8 * len(decodes), seen


def test_steps_in_flight_of_an_engine_that_is_closed_do_not_reach_the_next_one() -> None:
    reference = reference_of("llama")
    with ranks_of("llama", 1, num_stages=2) as (model, group, parallel):
        config = _config(parallel)
        sampling = SamplingParams(max_tokens=8, ignore_eos=True)
        requests = [Request(prompt_token_ids=prompt, sampling=sampling) for prompt in reference.prompts]
        for _ in range(3):
            with Engine(model, config, group=group) as engine:
                for request in requests:
                    engine.add(request)
                for _ in range(5):
                    engine.step()
                assert engine._stepper.is_in_flight
        with Engine(model, config, group=group) as engine:
            told = [completion.token_ids for completion in engine.generate(requests)]
    assert [list(each) for each in told] == [list(each[:8]) for each in reference.tokens]


def test_a_mean_takes_nothing_from_an_aborted_request_of_the_same_id() -> None:
    """The step in flight pools rows of a request that has ended meanwhile."""
    sampling = SamplingParams(max_tokens=0, pooling="mean")
    first, second = ([*range(seed, seed + 40)] for seed in (1, 50))
    with ranks_of("llama", 1, num_stages=2) as (model, group, parallel):
        with Engine(model, _config(parallel, max_num_batched_tokens=8), group=group) as engine:
            (expected,) = engine.generate([Request(prompt_token_ids=second, sampling=sampling)])
            engine.add(Request(prompt_token_ids=first, sampling=sampling, request_id="again"))
            for _ in range(3):
                engine.step()
            assert engine._stepper.is_in_flight
            engine.abort("again")
            request = Request(prompt_token_ids=second, sampling=sampling, request_id="again")
            (found,) = engine.generate([request])
    assert found.embedding == pytest.approx(expected.embedding, abs=2e-5)


# -- places ----------------------------------------------------------------------------------------------------------


def test_rank_0_is_in_the_last_stage() -> None:
    places = [Place.of(rank, ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3)) for rank in range(6)]
    assert [(place.stage, place.shard) for place in places] == [(2, 0), (2, 1), (0, 0), (0, 1), (1, 0), (1, 1)]
    assert [(place.before, place.behind) for place in places] == [
        (4, None), (5, None), (None, 4), (None, 5), (2, 0), (3, 1),
    ]  # fmt: skip
    assert [place.layers(8) for place in places[::2]] == [range(6, 8), range(3), range(3, 6)]


def test_a_rank_alone_has_all_layers() -> None:
    place = Place.of(0, ParallelConfig())
    assert (place.stage, place.before, place.behind, place.layers(5)) == (0, None, None, range(5))


def _result(layer: int, *, message: str = "") -> AttentionResult:
    return AttentionResult(slot=1, epoch=3, layer=layer, position=4, ok=not message, message=message)


def test_an_event_counts_when_all_ranks_that_have_its_layer_have_told_it() -> None:
    merge = EventMerge(num_shards=2, num_stages=2)
    done = _result(5)
    assert merge.add([done]) == [] and merge.add([done]) == [done]
    moved = Done(move_id=7, ok=True)
    assert [len(merge.add([moved])) for _ in range(4)] == [0, 0, 0, 1]


def test_a_cancelled_slot_is_free_when_every_rank_says_so_whatever_it_did_last() -> None:
    merge = EventMerge(num_shards=2, num_stages=2)
    assert merge.add([_result(2)]) == []  # of one rank before it was told to cancel
    told = [merge.add([_result(layer, message=CANCELLED)]) for layer in (2, 2, 0, 1)]
    assert [len(events) for events in told] == [0, 0, 0, 1]
    assert not told[-1][0].ok
    assert not merge._results and not merge._cancelled


# -- what cannot be in stages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheduler", "why"),
    [("neo", "its steps wait for the host tier"), ("apex", "set it to 'overlapped'"), ("conserve", "rows may leave")],
)
def test_policies_that_stop_between_layers_are_refused(scheduler: str, why: str) -> None:
    with ranks_of("llama", 1, num_stages=2) as (model, group, parallel):
        config = _config(parallel, scheduler=scheduler)
        with pytest.raises(ValueError, match=f"pipeline_parallel_size is not for scheduler='{scheduler}': .*{why}"):
            Engine(model, config, group=group)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 layers .* too few for 4 stages"), ranks_of("llama", 1, num_stages=4):
        pass


def test_settings_that_do_not_fit_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="pipeline_parallel_size must be >= 1"):
        ParallelConfig(pipeline_parallel_size=0)
    with pytest.raises(ValueError, match="disk_kv"):
        EngineConfig(parallel=ParallelConfig(pipeline_parallel_size=2), disk_kv=DiskKVConfig(gib=1.0))


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
