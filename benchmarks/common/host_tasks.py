"""Host tiers and their tasks, without an engine."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from omniserve.core.setup import HostTierSetup
from omniserve.core.spec import AttentionSpec, ModelSpec
from omniserve.core.work import AttentionResult
from omniserve.host.tier import HostTier


def host_tier_of(
    shape: str, context: int, *, dtype: torch.dtype, block_size: int, num_blocks: int, kv_dtype: str = "auto",
    cold_bytes: int = 1, least_layers: int = 1, **setup: Any,
) -> tuple[HostTier, int]:  # fmt: skip
    """Return a host tier, and its number of layers: as many as fill ``cold_bytes``.

    Args:
        shape: Query heads / KV heads / head size.
        context: Longest context.
        dtype: Of the rows.
        block_size, num_blocks: Of each layer.
        kv_dtype: Of the KV.
        cold_bytes: Bytes of KV of all layers, at least.
        least_layers: The smallest number of layers.
        **setup: More fields of HostTierSetup.
    """
    num_heads, kv_heads, head_size = map(int, shape.split("/"))

    def spec_of(num_layers: int) -> ModelSpec:
        return ModelSpec(
            num_layers=num_layers, hidden_size=num_heads * head_size, num_heads=num_heads, num_kv_heads=kv_heads,
            head_size=head_size, vocab_size=1, max_model_len=context, eos_token_ids=(), dtype_bytes=dtype.itemsize,
            attention=(AttentionSpec(scale=head_size**-0.5),) * num_layers,
        )  # fmt: skip

    layer_bytes = num_blocks * spec_of(1).kv_block_bytes(block_size, kv_dtype)
    num_layers = max(least_layers, -(-cold_bytes // layer_bytes))
    settings = HostTierSetup(block_size=block_size, kv_bytes=num_layers * layer_bytes, kv_dtype=kv_dtype, **setup)
    return HostTier(settings, spec=spec_of(num_layers), dtype=dtype), num_layers


def seconds_of_tasks(
    tier: HostTier, num_tasks: int, layer: int, slots: Tensor, q_RNH: Tensor, k_RKH: Tensor, v_RKH: Tensor
) -> float:
    """Send rows, and return the seconds until all tasks that they make have their results.

    Raises:
        RuntimeError: A task failed.
    """
    left, began_s = num_tasks, time.perf_counter()
    tier.submit(layer, slots, q_RNH, k_RKH, v_RKH)
    while left > 0:
        tier.wait(1.0)
        for event in tier.poll():
            if not (isinstance(event, AttentionResult) and event.ok):
                raise RuntimeError(f"host attention failed: {event}")
            left -= 1
    return time.perf_counter() - began_s
