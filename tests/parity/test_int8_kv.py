"""KV of int8 on the device: what Hugging Face says with a cache that is rounded alike, over any history."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from omniserve import Engine, EngineConfig, ExecutionConfig, Request, SamplingParams, patch
from omniserve.core.config import GIB, DiskKVConfig
from omniserve.kv import KV_MANAGERS
from omniserve.layers.kv_fingerprint import kv_fingerprint
from tests.engine_settings import flat_config
from tests.pairwise import pairwise
from tests.parity.engine_histories import BLOCK, Reference, run_histories
from tests.parity.models import tiny_model
from tests.parity.reference import NEAR_TIE
from tests.parity.test_engine import BOTH, HOST_FAULTS, UNLIKE_LLAMA, flat
from tests.parity.test_network import hosts_behind_proxies, small_pools
from tests.rotation import rotating
from tests.sched import preemptible

_SHARED = 19


@cache
def model_and_reference(family: str, **overrides: Any) -> tuple[PreTrainedModel, Reference]:
    model = tiny_model(family, **overrides)
    reference = Reference(model, num_shared=_SHARED, int8_kv=True)
    return patch(model, compile=False), reference


@pytest.fixture
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let prefixes of a block be worth copying from the host."""
    monkeypatch.setattr("omniserve.sched.prefixes_on_host.LEAST_RESTORED_TOKENS", BLOCK)


def crowded(model: PreTrainedModel, **settings: Any) -> dict[str, Any]:
    """Return settings with int8 on both tiers, and sizes of pools that let many requests move to the host."""
    num_bytes = 9 * model.omniserve.spec.kv_block_bytes(BLOCK, "int8")
    return {
        "kv_dtype": "int8", "device_kv_bytes": num_bytes, "host_kv_bytes": 1 << 20, "max_host_requests": 16, **settings,
    }  # fmt: skip


def _rows() -> list[dict[str, Any]]:
    rows = flat(pairwise(kv=KV_MANAGERS.names(), host=HOST_FAULTS, async_steps=BOTH, drafts=BOTH))
    budgets = (3, 16, 64)
    return [{**row, "max_num_batched_tokens": budgets[number % 3]} for number, row in enumerate(rows)]


@pytest.mark.parametrize("kv", KV_MANAGERS.names())
def test_random_histories(kv: str, short_prefixes: None) -> None:
    """Chunks of many lengths, requests on both tiers, moves, checkpoints, drafts, and, with two directions, copies."""
    model, reference = model_and_reference("llama")
    reach = {
        "paged": ("cached_tokens", "accepted_drafts"),
        "tiered": ("host_tokens", "swaps_in", "swaps_out", "restored_tokens", "accepted_drafts", "failures"),
        "incremental": ("host_tokens", "checkpoints", "resumed_tokens"),
        "bidirectional": ("host_tokens", "overwritten_tokens"),
    }[kv]
    settings = crowded(model, swap_in_delay_s=0.0)
    if kv in ("paged", "tiered"):
        settings["prefix_cache"] = True
    rows = [row for row in _rows() if row["kv"] == kv]
    run_histories(model, reference, range(1100, 1101), reach=reach, rows=rows, **settings)


@pytest.mark.parametrize("family", rotating(UNLIKE_LLAMA, 1))
def test_models_over_random_histories(family: str) -> None:
    model, reference = model_and_reference(family)
    run_histories(
        model, reference, range(1120, 1121), reach=("host_tokens", "swaps_out"), kv="tiered", **crowded(model)
    )


@pytest.mark.parametrize("head_size", rotating([12, 20, 80], 1))
def test_heads_of_odd_sizes(head_size: int) -> None:
    model, reference = model_and_reference("llama", head_dim=head_size)
    run_histories(model, reference, range(1140, 1141), reach=("host_tokens",), kv="tiered", **crowded(model))


def test_rows_that_leave_between_layers() -> None:
    model, reference = model_and_reference("llama")
    run_histories(
        model, reference, range(1160, 1161), reach=("halted",), kv="tiered", scheduler=preemptible.NAME,
        prefix_cache=True, **crowded(model),
    )  # fmt: skip


def test_a_prompt_in_chunks_of_any_length_has_the_same_tokens_and_logprobs() -> None:
    model, _ = model_and_reference("llama")
    prompt = [1 + 7 * i % 90 for i in range(61)]
    told = []
    for budget in (64, 1, 7, 16):
        settings = crowded(model, block_size=BLOCK, max_num_batched_tokens=budget, kv="paged", compile=False)
        with Engine(model, flat_config(settings)) as engine:
            sampling = SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=0)
            (done,) = engine.generate([Request(prompt_token_ids=prompt, sampling=sampling)])
            assert done.prompt_logprobs is not None
            told.append((done.token_ids, [entry.logprob for entry in done.prompt_logprobs]))
    for tokens, logprobs in told:
        assert tokens == told[0][0]
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(told[0][1]), rtol=0, atol=NEAR_TIE)


def test_prefixes_come_back_from_disk(tmp_path: Path, short_prefixes: None) -> None:
    model, reference = model_and_reference("llama")
    block_bytes = model.omniserve.spec.kv_block_bytes(BLOCK, "int8")
    run_histories(
        model, reference, range(1180, 1182), reach=("disk_tokens", "restored_tokens"), kv="tiered", prefix_cache=True,
        **crowded(model, host_kv_bytes=12 * block_bytes),
        disk_kv=DiskKVConfig(gib=40 * (block_bytes + 4096) / GIB, dir=str(tmp_path), keep=True),
    )  # fmt: skip


def test_requests_on_a_host_on_the_network(secret_file: str) -> None:
    model, reference = model_and_reference("llama")
    block_bytes = model.omniserve.spec.kv_block_bytes(BLOCK, "int8")
    settings = small_pools(model) | {"kv_dtype": "int8", "host_kv_bytes": 6 * block_bytes}
    settings["device_kv_bytes"] = 9 * block_bytes
    with hosts_behind_proxies(model, 1, secret_file) as (hosts, _):
        run_histories(
            model, reference, range(1200, 1201), reach=("network_tasks", "network_moves"), kv="tiered", hosts=hosts,
            has_profile=False, **settings,
        )  # fmt: skip


def test_kv_on_disk_is_for_engines_with_the_same_dtype(tmp_path: Path) -> None:
    found = []
    for kv_dtype in ("int8", "auto", "int8"):
        config = EngineConfig(
            block_size=BLOCK, device_kv_bytes=1 << 20, host_kv_bytes=1 << 20, max_model_len=160,
            execution=ExecutionConfig(compile=False, kv_dtype=kv_dtype),
            disk_kv=DiskKVConfig(gib=0.01, dir=str(tmp_path), keep=True),
        )  # fmt: skip
        with Engine(patch(tiny_model("llama"), compile=False), config) as engine:
            sampling = SamplingParams(max_tokens=4, ignore_eos=True)
            (done,) = engine.generate([Request(prompt_token_ids=[*range(1, 97), 7], sampling=sampling)])
            found.append((kv_dtype, done.num_cached_tokens))
    assert found[:2] == [("int8", 0), ("auto", 0)]
    model = patch(tiny_model("llama"), compile=False)
    fingerprints = {
        kv_fingerprint(model, EngineConfig(execution=ExecutionConfig(kv_dtype=kv_dtype)))
        for kv_dtype in ("auto", "int8")
    }
    assert len(fingerprints) == 2
