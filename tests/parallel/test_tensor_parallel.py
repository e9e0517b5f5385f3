"""A model on several ranks: exact tokens for every family with a plan, any policy, and any history."""

from __future__ import annotations

import functools
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from omniserve import (
    Engine,
    EngineConfig,
    ExecutionConfig,
    FinishReason,
    Request,
    SamplingParams,
    UnsupportedModelError,
)
from omniserve.core.config import DiskKVConfig, ParallelConfig
from omniserve.core.errors import PeerLost
from omniserve.core.lora import LoRAError
from omniserve.layers.weights.int8_modules import Int8Linear
from omniserve.layers.weights.quantized_modules import QuantizedLinear
from omniserve.layers.weights.sharding import RowParallelLinear, shard
from omniserve.parallel.place import Place
from omniserve.sched import SCHEDULERS
from tests.parallel.ranks import ForkedRanks, load_tiny, ranks_of, reference_of, whole_model
from tests.parity.engine_histories import Tally, run_histories, run_history
from tests.parity.formats import in_int8, of_codes
from tests.parity.models import tiny_model
from tests.parity.reference import Reference
from tests.parity.test_lora import LORA, saved, with_adapters
from tests.parity.test_quantized import INT8_NEAR_TIE
from tests.quick import slow_except
from tests.sched import hybrid, preemptible

FAMILIES = (
    "llama", "llama_tied", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gpt_neox", "mixtral", "qwen3_moe",
    "mixtral_batched", "cohere2", "deepseek_v3", "gemma3", "gemma4", "granitemoe", "llama4", "ministral3", "smollm3",
)  # fmt: skip
_BLOCK = 8


def _sizes(model: nn.Module) -> dict[str, Any]:
    """Return a small device pool and a large host pool."""
    block_bytes = model.omniserve.spec.kv_block_bytes(_BLOCK)
    return {"device_kv_bytes": 9 * block_bytes, "host_kv_bytes": 1 << 20, "max_host_requests": 16}


@pytest.mark.parametrize("family", slow_except(("qwen3_moe",), FAMILIES))
def test_tokens_of_two_ranks_equal_hugging_face(family: str) -> None:
    with ranks_of(family) as (model, group, parallel):
        run_histories(
            model, reference_of(family), range(2), reach=("host_tokens", "swaps_out"), has_profile=False, group=group,
            parallel=parallel, faults=lambda seed: seed % 2 == 1, **_sizes(model),
        )  # fmt: skip


def test_kv_of_int8_on_two_ranks() -> None:
    with ranks_of("llama") as (model, group, parallel):
        sizes = _sizes(model) | {"device_kv_bytes": 9 * model.omniserve.spec.kv_block_bytes(_BLOCK, "int8")}
        run_histories(
            model, Reference(whole_model("llama"), int8_kv=True), range(2), reach=("host_tokens", "swaps_out"),
            has_profile=False, group=group, parallel=parallel, kv_dtype="int8", **sizes,
        )  # fmt: skip


def _load_codes(family: str, is_tied: bool, in_order: bool, place: Place) -> Any:
    return shard(_of_codes(family, is_tied, in_order), place.shard, place.num_shards)


def _of_codes(family: str, is_tied: bool, in_order: bool) -> Any:
    return of_codes(tiny_model(family, tie_word_embeddings=is_tied), in_order=in_order)


@pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="this CPU has no vector kernel")
@pytest.mark.parametrize(
    ("family", "is_tied", "in_order"),
    slow_except(
        [("llama", True, True)],
        [
            ("llama", True, True), ("llama", False, True), ("llama", False, False), ("phi3", False, True),
            ("qwen3_moe", True, True),
        ],
    ),
)  # fmt: skip
def test_ranks_read_their_parts_of_codes(family: str, is_tied: bool, in_order: bool) -> None:
    """Only inputs in another order are dense: no form has a part of them."""
    load = functools.partial(_load_codes, family, is_tied, in_order)
    with ranks_of(family, load=load) as (model, group, parallel):
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        dense = [each for each in linears if not isinstance(each, QuantizedLinear)]
        assert linears and (all(each in _row_parallel(model) for each in dense) if not in_order else not dense)
        run_histories(
            model, Reference(_of_codes(family, is_tied, in_order)), range(2), reach=("host_tokens", "swaps_out"),
            has_profile=False, group=group, parallel=parallel, **_sizes(model),
        )  # fmt: skip


def _load_int8(is_static: bool, place: Place) -> Any:
    return shard(in_int8(tiny_model("llama"), is_static=is_static), place.shard, place.num_shards)


@pytest.mark.parametrize(
    ("is_static", "compile"), slow_except([(False, False)], [(False, False), (True, False), (False, True)])
)
def test_ranks_round_their_rows_by_the_largest_value_of_all(is_static: bool, compile: bool) -> None:
    load = functools.partial(_load_int8, is_static)
    with ranks_of("llama", load=load, compile=compile) as (model, group, parallel):
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        assert linears and all(isinstance(each, Int8Linear) for each in linears)
        ranks = {each.row_ranks for each in linears}, {each.row_ranks for each in _row_parallel(model)}
        assert ranks == ({1, 2}, {2})
        whole = in_int8(tiny_model("llama"), is_static=is_static)
        run_histories(
            model, Reference(whole, num_prompts=6, max_tokens=6, near_tie=INT8_NEAR_TIE), range(2),
            reach=("host_tokens",), has_profile=False, group=group, parallel=parallel, **_sizes(model),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("num_shards", "num_stages", "in_codes"),
    slow_except([(2, 1, False), (1, 2, False)], [(2, 1, False), (1, 2, False), (2, 1, True), (2, 2, False)]),
)
def test_requests_name_adapters(num_shards: int, num_stages: int, in_codes: bool, tmp_path: Path) -> None:
    """There are more adapters than slots: all ranks read one into the same slot before a row names it."""
    model = _of_codes("llama", False, True) if in_codes else tiny_model("llama")
    targets = {"target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]} if in_codes else {}
    reference = with_adapters(model, tmp_path, **targets)
    load = functools.partial(_load_codes, "llama", False, True) if in_codes else None
    with ranks_of("llama", num_shards, num_stages=num_stages, load=load, lora=LORA) as (part, group, parallel):
        run_histories(
            part, reference, range(3), reach=("host_tokens", "loras_left"), lora=LORA, has_profile=False, group=group,
            parallel=parallel, **_sizes(part),
        )  # fmt: skip


def test_an_adapter_that_one_rank_cannot_read_ends_its_requests_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tiny_model("llama"), tmp_path / "a", r=4)
    with ranks_of("llama", lora=LORA) as (model, group, parallel):
        config = EngineConfig(parallel=parallel, execution=ExecutionConfig(compile=False), lora=LORA, **_sizes(model))
        with Engine(model, config, group=group) as engine:
            engine.load_lora("a", tmp_path / "a")
            requests = [
                Request(prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=4, ignore_eos=True), lora=lora)
                for lora in ("a", None)
            ]
            with monkeypatch.context() as patched:
                patched.setattr("omniserve.runner.lora_loads.read_lora", _unreadable)
                adapted, alone = engine.generate(requests)
            assert adapted.finish_reason is FinishReason.ERROR and "no disk" in str(adapted.stop_reason)
            assert alone.finish_reason is FinishReason.LENGTH
            again, _ = engine.generate(requests)
            assert again.finish_reason is FinishReason.LENGTH and again.token_ids != alone.token_ids


def _unreadable(folder: str) -> Any:
    raise LoRAError(f"{folder}: no disk")


def _row_parallel(model: nn.Module) -> list[nn.Module]:
    return [module.inner for module in model.modules() if isinstance(module, RowParallelLinear)]


@pytest.mark.parametrize(("family", "num_ranks"), slow_except((), [("llama", 6), ("gpt_neox", 3)]))
def test_more_ranks_than_kv_heads_have_them_several_times(family: str, num_ranks: int) -> None:
    with ranks_of(family, num_ranks) as (model, group, parallel):
        assert model.omniserve.spec.num_kv_heads == {"llama": 1, "gpt_neox": 2}[family]
        run_histories(
            model, reference_of(family), range(2), reach=("host_tokens",), has_profile=False, group=group,
            parallel=parallel, **_sizes(model),
        )  # fmt: skip


@pytest.mark.parametrize(
    "scheduler", slow_except(("omniserve", "neo"), [*SCHEDULERS.names(), preemptible.NAME, hybrid.NAME])
)
def test_every_policy_runs_on_ranks(scheduler: str) -> None:
    """Histories have late, failing and dying host threads on one rank or all, drafts, and steps that overlap."""
    tally, reference = Tally(), reference_of("llama")
    with ranks_of("llama") as (model, group, parallel):
        for seed in range(300, 303):  # each option is on and off
            run_history(
                model, reference, seed, scheduler=scheduler, faults=seed % 2 == 0, deaths=seed % 4 == 2,
                drafts=seed % 3 == 0 and scheduler != preemptible.NAME, async_steps=seed % 4 == 1,
                kv=("tiered", "incremental", "bidirectional")[seed % 3],
                has_profile=False, tally=tally, group=group, parallel=parallel, **_sizes(model),
            )  # fmt: skip
    assert tally.finished > 0


def test_rows_leave_a_step_on_all_ranks_at_the_same_layer() -> None:
    with ranks_of("llama") as (model, group, parallel):
        run_histories(
            model, reference_of("llama"), range(500, 501), reach=("halted",), scheduler=preemptible.NAME, group=group,
            parallel=parallel,
        )  # fmt: skip


@pytest.mark.parametrize("uses_sockets", [False, True])
def test_results_join_late_on_all_ranks_or_on_none(uses_sockets: bool) -> None:
    with ranks_of("llama", uses_sockets=uses_sockets) as (model, group, parallel):
        run_histories(
            model, reference_of("llama"), range(320, 321), reach=("late_joins", "missed_joins"), kv="tiered",
            faults=True, group=group, parallel=parallel, **_sizes(model),
        )  # fmt: skip


@pytest.mark.slow
def test_recorded_steps_hold_the_collectives() -> None:
    with ranks_of("llama") as (model, group, parallel):
        run_histories(
            model, reference_of("llama"), range(330, 334), reach=("constant_decodes", "host_tokens"), group=group,
            step_graphs="on", async_steps=lambda seed: seed % 2 == 0, parallel=parallel,
            kv=lambda seed: ("tiered", "bidirectional")[seed % 2], max_num_batched_tokens=64, **_sizes(model),
        )  # fmt: skip


@pytest.mark.slow
def test_compiled_halves_hold_the_collectives() -> None:
    with ranks_of("qwen3", compile=True) as (model, group, parallel):
        run_histories(
            model, reference_of("qwen3"), range(340, 342), reach=("host_tokens",), has_profile=False, group=group,
            compile=True, parallel=parallel, **_sizes(model),
        )  # fmt: skip


# -- ranks that fail -------------------------------------------------------------------------------------------------


def _fail_to_load(place: Place) -> Any:
    if place.rank:
        raise OSError("the disk is full")
    return load_tiny("llama", place)


def test_a_rank_that_cannot_load_the_model_says_why() -> None:
    with pytest.raises(PeerLost, match="rank 1: the disk is full"), ranks_of("llama", load=_fail_to_load):
        pass


def _load_another(place: Place) -> Any:
    return load_tiny("qwen3" if place.rank else "llama", place)


def test_a_rank_with_another_model_is_refused() -> None:
    another = pytest.raises(ValueError, match="rank 1 has another model: Qwen3ForCausalLM")
    with another, ranks_of("llama", load=_load_another):
        pass


def test_ranks_that_wait_notice_one_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omniserve.parallel.group._GRACE_S", 0.1)
    told: list[str] = []
    parallel = ParallelConfig(tensor_parallel_size=2)
    config = EngineConfig(parallel=parallel, execution=ExecutionConfig(compile=False))
    load = functools.partial(load_tiny, "llama")
    group = ForkedRanks(config, load, progress=lambda what: None, shares_cores=False, on_lost=told.append)
    try:
        os.kill(group.pids[0], signal.SIGKILL)
        for _ in range(200):
            if told:
                break
            time.sleep(0.05)
    finally:
        group.close()
    assert told == ["rank 1 is gone"]


# -- what cannot be split --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "num_ranks", "what"),
    [
        ("opt", 2, "transformers has no tensor-parallel plan for the layers of the type 'opt'"),
        ("gpt_oss", 2, "no tensor-parallel plan"),
        ("llama", 4, "6 heads .* cannot be split over 4 ranks"),
        ("llama", 3, "2 KV heads .* cannot be split over 3 ranks"),
        ("gpt_neox", 4, "6 heads .* cannot be split over 4 ranks"),
    ],
)
def test_models_that_cannot_be_split_are_refused_by_name(family: str, num_ranks: int, what: str) -> None:
    with pytest.raises((UnsupportedModelError, ValueError), match=what):
        shard(tiny_model(family), 0, num_ranks)


def test_a_quantised_weight_cannot_be_split() -> None:
    class Quantised(nn.Linear):
        pass

    model = tiny_model("llama")
    model.model.layers[0].self_attn.q_proj = Quantised(48, 48)
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.self_attn\.q_proj is a Quantised"):
        shard(model, 0, 2)


def test_a_part_of_a_model_is_not_served_alone() -> None:
    model = shard(tiny_model("llama"), 0, 2)
    with pytest.raises(ValueError, match="EngineLoader"):
        Engine(model, EngineConfig(execution=ExecutionConfig(compile=False)))
    with pytest.raises(RuntimeError, match="no other ranks are connected"), torch.inference_mode():
        model(torch.tensor([[1, 2, 3]]))


def test_settings_that_do_not_fit_ranks_are_refused() -> None:
    two = ParallelConfig(tensor_parallel_size=2)
    with pytest.raises(ValueError, match="disk_kv"):
        EngineConfig(parallel=two, disk_kv=DiskKVConfig(gib=1.0))
    with pytest.raises(ValueError, match="host_cores"):
        EngineConfig(parallel=two, host_cores=(0,))
    with pytest.raises(ValueError, match="rank_secret_file"):
        ParallelConfig(tensor_parallel_size=2, rank_listen="127.0.0.1:0")
    with pytest.raises(ValueError, match="EngineLoader"):
        Engine(tiny_model("llama"), EngineConfig(parallel=two, execution=ExecutionConfig(compile=False)))


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
