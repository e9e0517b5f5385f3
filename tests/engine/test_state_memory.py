"""Memory for recurrent states: as many requests run as it holds the states of."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from omniserve import Engine, Request, SamplingParams, patch
from omniserve.core.config import EngineConfig
from omniserve.core.spec import AttentionSpec, ModelSpec
from omniserve.engine.capacity import fit_states, num_blocks, pool_bytes
from omniserve.sched.options import num_state_slots
from tests.parity.zoo import tiny

SPEC = ModelSpec(
    num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, head_size=4, vocab_size=9, max_model_len=64,
    eos_token_ids=(), dtype_bytes=4, attention=(AttentionSpec(scale=0.5),) * 2,
)  # fmt: skip


@pytest.mark.parametrize("num_bytes", [4_250, 9_990, 50_000, 76_700])
@pytest.mark.parametrize("host_kv_bytes", [0, 1 << 20])
def test_limits_are_lowered_to_what_fits(num_bytes: int, host_kv_bytes: int) -> None:
    spec = dataclasses.replace(SPEC, state_bytes=100)
    config = EngineConfig(device_kv_bytes=2 * num_bytes, host_kv_bytes=host_kv_bytes)
    lowered = fit_states(config, spec)
    num_slots = num_state_slots(lowered, spec, has_host_tier=host_kv_bytes > 0)
    left = min(num_bytes, 100 * num_state_slots(config, spec, has_host_tier=host_kv_bytes > 0)) - 100 * num_slots
    assert 0 <= left < 300, "what is left would not do for one more of each kind"
    assert lowered.max_num_seqs >= 1 and lowered.max_host_requests >= 1
    num_blocks_left, _ = num_blocks(lowered, spec)
    block_bytes = spec.kv_block_bytes(config.block_size)
    assert 0 <= 2 * num_bytes - 100 * num_slots - num_blocks_left * block_bytes < block_bytes


def test_what_fits_and_what_has_no_states_keeps_its_limits() -> None:
    config = EngineConfig(device_kv_bytes=2 * 76_800)
    assert fit_states(config, dataclasses.replace(SPEC, state_bytes=100)) is config
    small = dataclasses.replace(config, device_kv_bytes=1)
    assert fit_states(small, SPEC) is small


def test_too_little_memory_is_refused_with_what_to_do() -> None:
    config = EngineConfig(device_kv_bytes=599)
    with pytest.raises(ValueError, match="take 100 bytes each; give at least 600"):
        fit_states(config, dataclasses.replace(SPEC, state_bytes=100))


def test_an_engine_runs_no_more_requests_than_it_has_states_for(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("lfm2")
    spec = patch(model, compile=False).omniserve.spec
    num_bytes = max(8 * spec.state_bytes, 2 * spec.kv_block_bytes(16))
    config = EngineConfig(device_kv_bytes=num_bytes, block_size=16, max_model_len=16)
    most = num_bytes // 2 // spec.state_bytes
    with caplog.at_level(logging.WARNING), Engine(model, config) as engine:
        assert f"holds the recurrent states of {most} requests: max_num_seqs is lowered from 256 to" in caplog.text
        assert 2 * engine.config.max_num_seqs + engine.config.max_host_requests <= most
        requests = [Request(prompt_token_ids=[3, 4], sampling=SamplingParams(max_tokens=3))] * 5
        assert engine.stats().scheduler.state_slots_total <= most
        assert len({completion.token_ids for completion in engine.generate(requests)}) == 1
        assert engine.stats().scheduler.state_slots_used == 0


@pytest.mark.parametrize("kv_bytes", [4_096, 20_000, 1 << 20])
@pytest.mark.parametrize("state_bytes", [0, 100, 30_000])
def test_a_pool_for_so_much_kv_holds_it(kv_bytes: int, state_bytes: int) -> None:
    spec, config = dataclasses.replace(SPEC, state_bytes=state_bytes), EngineConfig()
    pool = dataclasses.replace(config, device_kv_bytes=pool_bytes(kv_bytes, config, spec))
    num_device_blocks, _ = num_blocks(fit_states(pool, spec), spec)
    assert num_device_blocks >= kv_bytes // spec.kv_block_bytes(config.block_size)
    assert state_bytes or pool.device_kv_bytes == kv_bytes
