"""What fits into an engine: blocks of its pools and its context. Plain numbers, no tensors."""

from __future__ import annotations

from omniserve.core.config import EngineConfig
from omniserve.core.spec import ModelSpec
from omniserve.kv import KV_MANAGERS, CanEvict, CanMove


def has_host_tier(config: EngineConfig) -> bool:
    """Return whether an engine with this configuration has a host tier.

    Raises:
        ValueError: There is no such KV manager.
    """
    return config.host_kv_bytes > 0 and issubclass(KV_MANAGERS.get(config.kv), CanMove)


def max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    """Return the longest prompt plus output in tokens.

    Raises:
        ValueError: The settings ask for more than the model has positions for.
    """
    if config.max_model_len is None:
        return spec.max_model_len
    if config.max_model_len > spec.max_model_len:
        raise ValueError(
            f"max_model_len is {config.max_model_len}, but the model has positions for {spec.max_model_len} tokens"
        )
    return config.max_model_len


def num_blocks(config: EngineConfig, spec: ModelSpec, *, has_hosts: bool = True) -> tuple[int, int]:
    """Return the blocks of the device pool and of the host pool, 0 without a host tier or a machine that can have one.

    Raises:
        ValueError: A pool is smaller than a block, or the KV manager needs a host pool and there is none.
    """
    num_device_blocks = _num_blocks(config.device_kv_bytes, spec.kv_block_bytes(config.block_size), "device_kv_bytes")
    if not has_hosts:
        return num_device_blocks, 0
    block_bytes = spec.host_block_bytes(config.block_size, config.host_kv_dtype)
    if issubclass(KV_MANAGERS.get(config.kv), CanEvict) and config.host_kv_bytes < block_bytes:
        raise ValueError(
            f"kv={config.kv!r} keeps checkpoints in host memory, but host_kv_bytes is {config.host_kv_bytes}; "
            f"give at least {block_bytes}, or set kv to paged"
        )
    if not has_host_tier(config):
        return num_device_blocks, 0
    return num_device_blocks, _num_blocks(config.host_kv_bytes, block_bytes, "host_kv_bytes")


def _num_blocks(num_bytes: int, block_bytes: int, name: str) -> int:
    if num_bytes < block_bytes:
        raise ValueError(f"{name} is {num_bytes}, less than one KV block of this model ({block_bytes} bytes); raise it")
    return num_bytes // block_bytes
