"""KV of int8 on the device: what fits, what goes with it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from omniserve import Engine, EngineConfig, ExecutionConfig
from omniserve.core.work import SlotCopy
from omniserve.engine.fingerprint import fingerprint_of
from omniserve.kv.storage import DeviceKVStorage, parts_of_rows

BLOCK = 8


@pytest.mark.parametrize("host_kv_dtype", ["auto", "int8"])
def test_both_pools_hold_as_many_blocks_as_their_bytes(make_engine: Callable[..., Engine], host_kv_dtype: str) -> None:
    engine = make_engine(device_blocks=20, host_blocks=30, kv_dtype="int8", host_kv_dtype=host_kv_dtype)
    spec, stats = engine.spec, engine.stats().kv
    full, small = spec.kv_block_bytes(BLOCK), spec.kv_block_bytes(BLOCK, "int8")
    assert small == 2 * spec.num_layers * spec.num_kv_heads * BLOCK * (spec.head_size + 4)
    assert (stats.device_total, stats.host_total) == (20 * full // small, 30 * full // small)
    storage, tier = engine.runner._storage, engine.host_tier
    assert (
        storage.k_LBKSH.nbytes + storage.v_LBKSH.nbytes == stats.device_total * small <= engine.config.device_kv_bytes
    )
    assert tier is not None and tier.scales_LBK2S is not None
    assert tier.pool_LBK2SH.nbytes + tier.scales_LBK2S.nbytes == stats.host_total * small


def test_what_the_host_keeps_is_never_rounded_twice() -> None:
    for kv_dtype, host_kv_dtype, pool, keeps in (
        ("auto", "auto", "auto", True), ("auto", "int8", "int8", False), ("int8", "auto", "int8", True),
        ("int8", "int8", "int8", True),
    ):  # fmt: skip
        config = EngineConfig(execution=ExecutionConfig(kv_dtype=kv_dtype), host_kv_dtype=host_kv_dtype)
        assert (config.host_pool_dtype, config.keeps_host_prefixes) == (pool, keeps)


def test_what_cannot_be_is_refused_by_name(model: PreTrainedModel, make_engine: Callable[..., Engine]) -> None:
    with pytest.raises(ValueError, match="kv_dtype must be one of auto, int8, got 'fp8'"):
        ExecutionConfig(kv_dtype="fp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'sdpa' on cpu cannot read KV of int8"):
        make_engine(kv_dtype="int8", attention="sdpa")
    configs = [EngineConfig(execution=ExecutionConfig(kv_dtype=kv_dtype)) for kv_dtype in ("auto", "int8")]
    differences = fingerprint_of(model, configs[0]).differences(fingerprint_of(model, configs[1]))
    assert [difference.split()[0].rstrip(":") for difference in differences] == ["host_kv_dtype", "kv_dtype"]


def test_slots_are_copied_with_their_scales(model: PreTrainedModel) -> None:
    storage = DeviceKVStorage(
        model.omniserve.spec, num_blocks=3, block_size=BLOCK, dtype=torch.float32, device=torch.device("cpu"),
        kv_dtype="int8",
    )  # fmt: skip
    for pool in (storage.k_LBKSH, storage.v_LBKSH):
        pool.copy_(torch.randint(-100, 100, pool.shape, dtype=torch.int8))
    before = [[part.clone() for part in parts_of_rows(pool)] for pool in (storage.k_LBKSH, storage.v_LBKSH)]
    storage.copy_slots(SlotCopy(source_block=2, target_block=0, begin=3, end=6))
    for pool, was in zip((storage.k_LBKSH, storage.v_LBKSH), before, strict=True):
        for part, old in zip(parts_of_rows(pool), was, strict=True):
            old[:, 0, :, 3:6] = old[:, 2, :, 3:6]
            assert torch.equal(part.contiguous().view(torch.int8), old.contiguous().view(torch.int8))
