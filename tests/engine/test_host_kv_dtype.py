"""An int8 host pool: about twice the blocks, and every request ends, however often its KV goes there and back."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from omniserve import Engine, EngineConfig, FinishReason, Request, SamplingParams
from omniserve.kv import Tier
from tests.kv.free_blocks import free_block_ids

BLOCK = 8


def test_int8_blocks_take_a_byte_per_value_and_a_scale_per_row(make_engine: Callable[..., Engine]) -> None:
    spec = make_engine().spec
    rows = 2 * spec.num_layers * spec.num_kv_heads * BLOCK
    assert spec.kv_block_bytes(BLOCK, "int8") == rows * (spec.head_size + 4)
    assert spec.kv_block_bytes(BLOCK, "auto") == spec.kv_block_bytes(BLOCK)
    with pytest.raises(ValueError, match="must be one of auto, int8, got 'fp8'"):
        spec.kv_block_bytes(BLOCK, "fp8")
    with pytest.raises(ValueError, match="host_kv_dtype must be one of auto, int8, got 'fp8'"):
        EngineConfig(host_kv_dtype="fp8")
    engine = make_engine(host_blocks=50, host_kv_dtype="int8")
    assert engine.host_tier is not None
    tier = engine.host_tier
    assert tier.num_blocks == 50 * spec.kv_block_bytes(BLOCK) // spec.kv_block_bytes(BLOCK, "int8") > 100
    assert tier.scales_LBK2S is not None
    assert tier.pool_LBK2SH.nbytes + tier.scales_LBK2S.nbytes <= engine.config.host_kv_bytes
    assert engine.stats().kv.host_total == tier.num_blocks


@pytest.mark.parametrize("seed", range(2))
def test_an_int8_engine_runs_to_the_end(model: PreTrainedModel, make_engine: Callable[..., Engine], seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(
        device_blocks=12,
        host_blocks=30,
        max_model_len=80,
        host_kv_dtype="int8",
        scheduler_options={"swap_in_delay_s": 0.002 * seed, "min_residence_s": 0.0},
        max_host_requests=8,
        host_threads=2,
    )
    ids = [
        engine.add(
            Request(
                prompt_token_ids=[rng.randrange(1, model.config.vocab_size) for _ in range(rng.randint(1, 40))],
                sampling=SamplingParams(max_tokens=24, ignore_eos=True),
                service_class=rng.choice(["LS", "BE", "BE", "BE"]),
            )
        )
        for _ in range(12)
    ]
    tokens: dict[str, list[int]] = {request_id: [] for request_id in ids}
    reasons = {}
    tier = engine.host_tier
    assert tier is not None and tier.scales_LBK2S is not None
    while engine.has_unfinished:
        free = torch.tensor(free_block_ids(engine.kv, Tier.HOST), dtype=torch.long)
        tier.scales_LBK2S[:, free] = torch.nan  # who reads a free block would end with an error
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
        if engine.last_plan_was_empty:
            engine.wait(0.01)
    assert set(reasons.values()) == {FinishReason.LENGTH} and all(len(tokens[i]) == 24 for i in ids)
    stats = engine.stats()
    assert stats.scheduler.host_output_tokens > 0 and stats.scheduler.swaps_out > 0 and stats.host.failures == 0
    assert stats.host.kv_bytes_read > 0 and stats.host.busy_seconds > 0
