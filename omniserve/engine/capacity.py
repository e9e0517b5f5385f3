"""The sizes that fit into an engine: blocks of its pools and its context. Plain numbers, no tensors."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from omniserve.core.config import EngineConfig
from omniserve.core.plan import MAX_DRAFTS
from omniserve.core.spec import ModelSpec
from omniserve.kv import KV_MANAGERS
from omniserve.sched.options import num_state_slots

logger = logging.getLogger(__name__)

_ROWS_SHARE, _ROWS_BYTES = 64, 16 << 20  # one part in so many of the device pool, or so many bytes, if they are more


def has_host_tier(config: EngineConfig) -> bool:
    """Return whether an engine with this configuration has a host tier.

    Raises:
        ValueError: There is no such KV manager.
    """
    return config.host_kv_bytes > 0 and KV_MANAGERS.get(config.kv).abilities.moves


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


def largest_part(config: EngineConfig, spec: ModelSpec) -> ModelSpec:
    """Return the spec of the layers of the stage that has most of them: its pools have the fewest blocks."""
    return spec.part(range(-(-spec.num_layers // config.parallel.pipeline_parallel_size)))


def num_blocks(config: EngineConfig, spec: ModelSpec, *, has_hosts: bool = True) -> tuple[int, int]:
    """Return the blocks of the device pool and of the host pool, 0 without a host tier or a machine that can have one.

    What recurrent states take of the device pool holds no blocks; see ``fit_states``.

    Raises:
        ValueError: A pool is smaller than a block, or the KV manager needs a host pool and there is none.
    """
    num_states = num_state_slots(config, spec, has_host_tier=has_host_tier(config))
    kv_bytes = config.device_kv_bytes - num_states * spec.state_bytes
    name = "device_kv_bytes without its recurrent states" if num_states else "device_kv_bytes"
    num_device_blocks = _num_blocks(kv_bytes, spec.kv_block_bytes(config.block_size, config.execution.kv_dtype), name)
    if not has_hosts:
        return num_device_blocks, 0
    block_bytes = spec.host_block_bytes(config.block_size, config.host_pool_dtype)
    if KV_MANAGERS.get(config.kv).abilities.evictions and config.host_kv_bytes < block_bytes:
        raise ValueError(
            f"kv={config.kv!r} keeps checkpoints in host memory, but host_kv_bytes is {config.host_kv_bytes}; "
            f"give at least {block_bytes}, or set kv to paged"
        )
    if not has_host_tier(config):
        return num_device_blocks, 0
    return num_device_blocks, _num_blocks(config.host_kv_bytes, block_bytes, "host_kv_bytes")


def caches_prefixes(config: EngineConfig, spec: ModelSpec) -> bool:
    """Return whether there is a prefix cache.

    Raises:
        ValueError: One is wanted, but the KV manager has none, or the model has states that no block holds.
    """
    is_wanted = config.execution.prefix_cache
    if is_wanted is False:
        return False
    abilities = KV_MANAGERS.get(config.kv).abilities
    if is_wanted and not abilities.prefixes:
        raise ValueError(
            f"kv={config.kv!r} has no prefix cache: set kv to tiered, paged or incremental, or prefix_cache to False"
        )
    # No request of such a model finds KV of another one: only that of its own prompt, with the states behind it.
    is_useless = spec.state_bytes > 0 and not (config.prefill.prefill_engines or config.prefill.is_prefill_engine)
    if is_wanted and is_useless:
        raise ValueError("prefix_cache is not for models with recurrent states, which no block holds: set it to False")
    # Managers that evict have their own way to keep what a preempted request has computed.
    return abilities.prefixes and not is_useless and (is_wanted or not abilities.evictions)


def prefix_settings(
    config: EngineConfig, spec: ModelSpec, *, num_device_blocks: int, num_host_blocks: int
) -> dict[str, Any]:
    """Return the arguments of the KV manager's constructor about the prefix cache; none if there is no cache.

    Raises:
        ValueError: As ``caches_prefixes``.
    """
    if not caches_prefixes(config, spec):
        return {}
    num_protected = int(config.execution.ls_prefix_share * num_device_blocks)
    settings: dict[str, Any] = {"prefix_cache": True, "num_protected_blocks": num_protected}
    if num_host_blocks > 0:
        # What is rounded on its way to the host must not serve requests that are exact.
        settings["host_prefixes"] = config.keeps_host_prefixes
    return settings


def rows_per_host_request(config: EngineConfig, spec: ModelSpec, *, has_own_memory: bool) -> int:
    """Return how many rows the host tier has for each request: one for its token, and one for each draft beside it.

    A device with memory of its own holds the residuals and results of all of them there; they may take a small share of
    its pool.
    """
    if spec.state_bytes:
        return 1  # recurrent states cannot go back to the last right token
    most = 1 + MAX_DRAFTS
    if not has_own_memory:
        return most
    row_bytes = (spec.hidden_size + spec.num_heads * spec.head_size) * spec.dtype_bytes
    num_bytes = max(config.device_kv_bytes // _ROWS_SHARE, _ROWS_BYTES)
    return max(1, min(most, num_bytes // (config.max_host_requests * row_bytes)))


def fit_states(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """Return a configuration whose recurrent states, of all its requests, fit into half the device pool.

    Raises:
        ValueError: The states do not fit even for one request of each kind.
    """
    has_hosts = has_host_tier(config)
    wanted = num_state_slots(config, spec, has_host_tier=has_hosts) * spec.state_bytes
    num_bytes = config.device_kv_bytes // 2
    if wanted <= num_bytes:
        return config
    most, least = num_bytes // spec.state_bytes, 2 + has_hosts
    if most < least:
        raise ValueError(
            f"device_kv_bytes is {config.device_kv_bytes}, and half of it is for the recurrent states of {least} "
            f"requests or more, which take {spec.state_bytes} bytes each; give at least {2 * least * spec.state_bytes}"
        )
    on_host = min(config.max_host_requests, max(most // 2, most - 2 * config.max_num_seqs)) if has_hosts else 0
    lowered = dataclasses.replace(
        config,
        max_num_seqs=min(config.max_num_seqs, (most - on_host) // 2),
        max_host_requests=on_host or config.max_host_requests,
    )
    logger.warning(
        "half of device_kv_bytes=%d holds the recurrent states of %d requests: max_num_seqs is lowered from %d to %d, "
        "max_host_requests from %d to %d; device_kv_bytes=%d would do for all",
        config.device_kv_bytes,
        most,
        config.max_num_seqs,
        lowered.max_num_seqs,
        config.max_host_requests,
        lowered.max_host_requests,
        2 * wanted,
    )
    return lowered


def pool_bytes(kv_bytes: int, config: EngineConfig, spec: ModelSpec) -> int:
    """Return the ``device_kv_bytes`` of a pool with at least ``kv_bytes`` of KV beside the states of its requests."""
    has_hosts = has_host_tier(config)
    wanted = num_state_slots(config, spec, has_host_tier=has_hosts) * spec.state_bytes
    states = min(wanted, max(kv_bytes, (2 + has_hosts) * spec.state_bytes))
    return states + max(states, kv_bytes)


def _num_blocks(num_bytes: int, block_bytes: int, name: str) -> int:
    if num_bytes < block_bytes:
        raise ValueError(f"{name} is {num_bytes}, less than one KV block of this model ({block_bytes} bytes); raise it")
    return num_bytes // block_bytes
