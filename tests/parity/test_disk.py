"""Requests whose first tokens have their KV on disk say what Hugging Face says, whatever happens to the file."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from omniserve import Engine, EngineConfig, Request, SamplingParams, patch, unpatch
from omniserve.core.config import DiskKVConfig, ExecutionConfig
from omniserve.host.disk_file import DiskFile
from omniserve.kv.base import Tier
from omniserve.layers.kv_fingerprint import kv_fingerprint
from omniserve.sched import SCHEDULERS
from tests.parity.engine_histories import run_histories
from tests.parity.models import tiny_model
from tests.parity.test_engine import DEVICES
from tests.parity.test_prefix_cache import model_and_reference
from tests.quick import slow_except

GIB = 1 << 30


@pytest.fixture
def damages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files be damaged now and then, writes fail, and prefixes of a block be worth reading."""
    monkeypatch.setattr("omniserve.sched.prefixes_on_host.LEAST_RESTORED_TOKENS", 8)
    monkeypatch.setattr(DiskFile, "write", damaging_write(0))


def damaging_write(seed: int) -> Callable[..., None]:
    """Return a ``DiskFile.write`` that fails at times, and at times writes something else."""
    rng, write = random.Random(seed), DiskFile.write

    def damaging(file: DiskFile, slot: int, key: bytes, parts: Sequence[memoryview]) -> None:
        if (chance := rng.random()) < 0.05:
            raise OSError(28, "No space left on device")
        write(file, slot, key, parts)
        if chance < 0.2:
            os.pwrite(file._descriptor, rng.randbytes(8), file._at(slot) + rng.randrange(file.block_bytes - 8))

    return damaging


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheduler", slow_except(("omniserve",), SCHEDULERS.names()))
def test_schedulers_over_random_histories(scheduler: str, device: str, tmp_path: Path, damages: None) -> None:
    model, reference = model_and_reference("llama", device)
    block_bytes = model.omniserve.spec.kv_block_bytes(8)
    run_histories(
        model, reference, range(1000, 1004), reach=("disk_tokens", "disk_failures", "restored_tokens", "preemptions"),
        scheduler=scheduler, prefix_cache=True, kv="tiered", async_steps=lambda seed: seed // 2 % 2 == 0,
        max_host_requests=16, device_kv_bytes=9 * block_bytes, host_kv_bytes=12 * block_bytes,
        disk_kv=lambda seed: DiskKVConfig(
            gib=random.Random(seed).choice([4, 40]) * (block_bytes + 4096) / GIB, dir=str(tmp_path), keep=seed % 2 == 0
        ),
        faults=lambda seed: seed % 3 == 0, deaths=lambda seed: seed % 4 == 3, most_requests=32,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", slow_except(("gemma2",), ["gemma2", "opt", "qwen3_moe"]))
def test_models_over_random_histories(family: str, device: str, tmp_path: Path, damages: None) -> None:
    model, reference = model_and_reference(family, device)
    block_bytes = model.omniserve.spec.kv_block_bytes(8)
    run_histories(
        model, reference, range(1020, 1022), reach=("disk_tokens", "disk_failures", "host_tokens"), kv="tiered",
        prefix_cache=True, device_kv_bytes=9 * block_bytes, host_kv_bytes=20 * block_bytes, max_host_requests=16,
        disk_kv=DiskKVConfig(gib=100 * (block_bytes + 4096) / GIB, dir=str(tmp_path), keep=True),
    )  # fmt: skip


def _config(folder: Path, **disk: object) -> EngineConfig:
    return EngineConfig(
        block_size=8, device_kv_bytes=1 << 20, host_kv_bytes=1 << 20, max_model_len=160,
        execution=ExecutionConfig(compile=False),
        disk_kv=DiskKVConfig(**{"gib": 0.01, "dir": str(folder), "keep": True, **disk}),
    )  # fmt: skip


_PROMPT = [*range(1, 97), 7]


def _generate(engine: Engine) -> tuple[list[int], int]:
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    (done,) = engine.generate([Request(prompt_token_ids=_PROMPT, sampling=sampling)])
    engine.scheduler.check_integrity()
    return list(done.token_ids), done.num_cached_tokens


@cache
def _expected() -> list[int]:
    tokens = tiny_model("llama").generate(
        torch.tensor([_PROMPT]), max_new_tokens=4, do_sample=False, eos_token_id=None
    )  # fmt: skip
    return tokens[0, len(_PROMPT) :].tolist()


def test_a_restart_finds_what_the_last_engine_has_computed(tmp_path: Path) -> None:
    expected = _expected()
    for life in range(3):
        with Engine(patch(tiny_model("llama"), compile=False), _config(tmp_path)) as engine:
            assert _generate(engine) == (expected, 96 if life else 0)
            assert sum(engine.stats().scheduler.loaded_from("disk").values()) == (96 if life else 0)
            assert _generate(engine) == (expected, 96)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_that_is_not_kept_is_gone(tmp_path: Path) -> None:
    for _ in range(2):
        with Engine(patch(tiny_model("llama"), compile=False), _config(tmp_path, keep=False)) as engine:
            assert _generate(engine)[1] == 0
            assert list(tmp_path.iterdir()) == []


def test_other_weights_find_nothing(tmp_path: Path) -> None:
    with Engine(patch(tiny_model("llama"), compile=False), _config(tmp_path)) as engine:
        _generate(engine)
    other = tiny_model("llama")
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight[3, 5] += 1e-3
    with Engine(patch(other, compile=False), _config(tmp_path)) as engine:
        assert _generate(engine)[1] == 0


def test_the_fingerprint_of_weights_does_not_depend_on_how_they_are_held(tmp_path: Path) -> None:
    config = _config(tmp_path)
    model = tiny_model("llama")
    plain = kv_fingerprint(model, config)
    assert kv_fingerprint(patch(model, compile=False), config) == plain
    assert kv_fingerprint(unpatch(model), config) == plain
    assert kv_fingerprint(tiny_model("llama").to(torch.bfloat16), config) != plain
    assert kv_fingerprint(model, EngineConfig(block_size=16)) != plain


def test_a_restart_after_the_file_was_damaged_computes_what_it_does_not_find(tmp_path: Path) -> None:
    expected = _expected()
    with Engine(patch(tiny_model("llama"), compile=False), _config(tmp_path)) as engine:
        _generate(engine)
    at = engine.disk.file._at(engine.disk.file.entries[5][1])  # what is written last is written at the end
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[at + 11] ^= 4
    path.write_bytes(data)
    with Engine(patch(tiny_model("llama"), compile=False), _config(tmp_path)) as engine:
        assert _generate(engine) == (expected, 0), "a copy with a damaged block brings nothing"
        assert engine.stats().disk.failures == 1
        assert _generate(engine) == (expected, 96)
    with Engine(patch(tiny_model("llama"), compile=False), _config(tmp_path)) as engine:
        assert _generate(engine) == (expected, 96), "it was written anew"


def test_requests_that_begin_alike_wait_for_one_read(tmp_path: Path) -> None:
    expected = _expected()
    with Engine(patch(tiny_model("llama"), compile=False), _config(tmp_path)) as engine:
        _generate(engine)
    with Engine(patch(tiny_model("llama"), compile=False), _config(tmp_path)) as engine:
        requests = [
            Request(
                prompt_token_ids=[*_PROMPT[:96], last], service_class=name,
                sampling=SamplingParams(max_tokens=4, ignore_eos=True),
            )
            for last, name in zip((7, 8, 9, 10), ("BE", "LS", "BE", "LS"), strict=True)
        ]  # fmt: skip
        done = engine.generate(requests)
        assert [each.num_cached_tokens for each in done] == [96] * 4 and list(done[0].token_ids) == expected
        stats = engine.stats()
        assert sum(stats.scheduler.loaded_from("disk").values()) == 96
        assert stats.disk.bytes_read == 12 * engine.disk.file.block_bytes


def test_a_request_that_ends_while_it_is_read_is_forgotten(tmp_path: Path) -> None:
    with Engine(patch(tiny_model("llama"), compile=False), _config(tmp_path)) as engine:
        _generate(engine)
    with Engine(patch(tiny_model("llama"), compile=False), _config(tmp_path)) as engine:
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        request = Request(prompt_token_ids=_PROMPT, sampling=sampling, request_id="same")
        engine.add(request)
        engine.step()
        assert engine.stats().scheduler.waiting["LS"] == 1 and engine.stats().scheduler.running["LS"] == 0
        assert engine.abort("same") and not engine.has_unfinished
        engine.scheduler.check_integrity()
        assert _generate(engine) == (_expected(), 96)
        assert engine.kv.usage().host_used == 0 and engine.kv.num_free(Tier.HOST) > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv": "paged"}, "kv='paged' keeps nothing on disk"),
        ({"kv": "incremental"}, "no prefix cache|there is none"),
        ({"host_kv_bytes": 0}, "give host_kv_bytes"),
        ({"host_kv_dtype": "int8"}, "host_kv_dtype to auto"),
        ({"execution": ExecutionConfig(compile=False, host_prefixes=False)}, "host_prefixes to True"),
        ({"execution": ExecutionConfig(compile=False, prefix_cache=False)}, "there is none"),
        ({"disk_kv": DiskKVConfig(gib=1e-6)}, "give at least"),
    ],
)
def test_settings_that_allow_no_disk_tier_are_refused(
    settings: dict[str, object], message: str, tmp_path: Path
) -> None:
    disk = DiskKVConfig(gib=0.01, dir=str(tmp_path))
    usual = {"device_kv_bytes": 1 << 20, "host_kv_bytes": 1 << 20, "disk_kv": disk}
    with pytest.raises(ValueError, match=message):
        Engine(patch(tiny_model("llama"), compile=False), EngineConfig(**{**usual, **settings}))


def test_a_step_that_fails_leaves_nothing_to_the_next_engine(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="injected"), Engine(
        patch(tiny_model("llama"), compile=False), _config(tmp_path)
    ) as engine:  # fmt: skip
        engine.runner._run_layers = _fail  # type: ignore[method-assign]
        _generate(engine)
    with Engine(patch(tiny_model("llama"), compile=False), _config(tmp_path)) as engine:
        assert _generate(engine) == (_expected(), 0)


def _fail(*_: object) -> None:
    raise RuntimeError("injected")


def test_after_a_step_that_failed_nothing_is_found_any_more(tmp_path: Path) -> None:
    with Engine(patch(tiny_model("llama"), compile=False), _config(tmp_path)) as engine:
        run_layers = engine.runner._run_layers
        assert _generate(engine) == (_expected(), 0)
        engine.runner._run_layers = _fail  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="injected"):
            engine.generate([Request(prompt_token_ids=[9] * 40, sampling=SamplingParams(max_tokens=4))])
        engine.runner._run_layers = run_layers  # type: ignore[method-assign]
        assert _generate(engine) == (_expected(), 0)


def test_the_fingerprint_tells_what_an_adapter_does(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")

    def adapted(alpha: int) -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj"], init_lora_weights=False)
        return peft.get_peft_model(tiny_model("llama"), config).eval()

    config, model = _config(tmp_path), adapted(4)
    first = kv_fingerprint(model, config)
    assert kv_fingerprint(adapted(4), config) == first
    assert kv_fingerprint(adapted(64), config) != first
    model.base_model.disable_adapter_layers()
    assert kv_fingerprint(model, config) != first


def test_two_reads_bring_no_block_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request finds its first blocks in memory and reads the others; then they are forgotten, and one reads them."""
    with Engine(patch(tiny_model("llama"), compile=False), _config(tmp_path)) as engine:
        _generate(engine)
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    with Engine(patch(tiny_model("llama"), compile=False), _config(tmp_path)) as engine:
        engine.generate([Request(prompt_token_ids=_PROMPT[:17], sampling=sampling)])  # reads nothing: it is too short
        assert sum(engine.stats().scheduler.loaded_from("disk").values()) == 0
        monkeypatch.setattr("omniserve.sched.prefixes_on_host.LEAST_RESTORED_TOKENS", 8)
        kv, disk = engine.kv, engine.disk
        engine.add(Request(prompt_token_ids=_PROMPT, sampling=sampling, request_id="behind"))
        poll, disk.poll = disk.poll, lambda: []  # the first copy does not end
        engine.step()
        assert list(engine.scheduler.requests.states) == ["behind"]
        kv._copies.prefixes.reclaim(99)
        for block in list(kv.prefixes._pool._idle) + list(kv.prefixes._pool._idle_marked):
            kv.prefixes._pool._forget(block)
        engine.add(Request(prompt_token_ids=_PROMPT, sampling=sampling, request_id="all"))
        assert engine.step() == [] and engine.stats().scheduler.waiting["LS"] == 2
        disk.poll = poll
        tokens: dict[str, list[int]] = {"behind": [], "all": []}
        while engine.has_unfinished:
            for output in engine.step():
                tokens[output.request_id] += output.new_token_ids
            engine.scheduler.check_integrity()
            if engine.last_plan_was_empty:
                engine.wait(0.01)
        assert tokens == {"behind": _expected(), "all": _expected()}
        assert sum(engine.stats().scheduler.loaded_from("disk").values()) == 96, "each block was read once"
