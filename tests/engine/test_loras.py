"""Adapters by name in an engine: loads beside the steps, their failures, and names that come and go."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from omniserve import Engine, EngineConfig, FinishReason, Request, SamplingParams
from omniserve.core.config import LoRAConfig, ParallelConfig
from omniserve.core.lora import LoRAError
from tests.engine_settings import flat_config
from tests.layers.weights.test_lora import save
from tests.parity.models import tiny_model

CONFIG = flat_config(dict(compile=False, device_kv_bytes=1 << 20, host_kv_bytes=0, block_size=8))
PROMPT = tuple(range(1, 25))


def request(lora: str | None = None) -> Request:
    return Request(prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=6, ignore_eos=True), lora=lora)


def engine_with(slots: int) -> Engine:
    config = dataclasses.replace(CONFIG, lora=LoRAConfig(max_loras=slots, max_lora_rank=8))
    return Engine(tiny_model("llama"), config)


def tokens(engine: Engine, lora: str | None = None) -> tuple[int, ...]:
    (done,) = engine.generate([request(lora)])
    assert done.finish_reason is FinishReason.LENGTH
    return done.token_ids


def test_adapters_take_turns_in_one_slot_without_a_host_tier(tmp_path: Path) -> None:
    with engine_with(1) as engine:
        model = engine.model.family.model
        for seed, name in enumerate("abc"):
            engine.load_lora(name, save(tmp_path / name, model, "q_proj", "v_proj", "up_proj", seed=seed))
        assert [lora.name for lora in engine.loras.known] == ["a", "b", "c"]
        alone = {name: tokens(engine, name) for name in (None, "a", "b", "c")}
        assert len(set(alone.values())) == 4
        names = [None, "a", "b", "c", "b", "a", None, "c"] * 2
        together = engine.generate([request(name) for name in names])
        assert [done.token_ids for done in together] == [alone[name] for name in names]


def test_an_adapter_that_is_gone_ends_its_requests_with_an_error(tmp_path: Path) -> None:
    with engine_with(1) as engine:
        model = engine.model.family.model
        engine.load_lora("gone", save(tmp_path / "gone", model))
        engine.load_lora("changed", save(tmp_path / "changed", model, seed=1))
        shutil.rmtree(tmp_path / "gone")
        save(tmp_path / "changed", model, seed=9)
        expected = tokens(engine)
        gone, changed, fine = engine.generate([request("gone"), request("changed"), request()])
        assert gone.finish_reason is changed.finish_reason is FinishReason.ERROR
        assert "LoRA gone:" in str(gone.stop_reason) and "have changed" in str(changed.stop_reason)
        assert fine.token_ids == expected
        engine.scheduler.check_integrity()
        assert not engine.has_unfinished


def test_a_name_that_is_replaced_or_removed(tmp_path: Path) -> None:
    with engine_with(2) as engine:
        model = engine.model.family.model
        engine.load_lora("x", save(tmp_path / "one", model, seed=1))
        first = tokens(engine, "x")
        engine.load_lora("x", save(tmp_path / "two", model, seed=2))
        second = tokens(engine, "x")
        assert first != second, "nothing of the first is found in the prefix cache"
        engine.load_lora("x", tmp_path / "one")
        assert tokens(engine, "x") == first
        engine.loras.remove("x")
        with pytest.raises(LoRAError, match="no LoRA adapter 'x'"):
            engine.add(request("x"))


def test_an_engine_without_slots_takes_no_adapters(tmp_path: Path) -> None:
    with Engine(tiny_model("llama"), CONFIG) as engine:
        with pytest.raises(LoRAError, match="max_loras"):
            engine.load_lora("x", tmp_path)
        with pytest.raises(LoRAError, match="loaded are: none"):
            engine.add(request("x"))


def test_what_cannot_have_adapters_says_so() -> None:
    with pytest.raises(ValueError, match="host tiers of ranks"):
        EngineConfig(host_kv_bytes=0, lora=LoRAConfig(max_loras=1), parallel=ParallelConfig(tensor_parallel_size=2))
    with pytest.raises(ValueError, match="from 0 to 255"):
        LoRAConfig(max_loras=256)


def test_requests_that_wait_for_an_adapter_can_be_aborted(tmp_path: Path) -> None:
    with engine_with(1) as engine:
        model = engine.model.family.model
        for name in "ab":
            engine.load_lora(name, save(tmp_path / name, model))
        ids = [engine.add(request(name)) for name in "abab"]
        assert all(engine.abort(request_id) for request_id in ids)
        assert not engine.has_unfinished or engine.step() == []
        torch.manual_seed(0)
        assert len(tokens(engine, "b")) == 6
        engine.scheduler.check_integrity()
