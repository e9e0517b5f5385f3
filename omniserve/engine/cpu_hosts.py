"""The CPU hosts on the network that an engine's settings ask for."""

from __future__ import annotations

import logging

import torch

from omniserve.core.config import EngineConfig
from omniserve.core.spec import ModelSpec
from omniserve.host.remote import NetworkHosts
from omniserve.host.tier import HostTier
from omniserve.kv import KV_MANAGERS, CanShare, CanSpread
from omniserve.sched import policy_of

logger = logging.getLogger(__name__)


def connect_hosts(
    config: EngineConfig, spec: ModelSpec, tier: HostTier | None, dtype: torch.dtype
) -> NetworkHosts | None:
    """Connect the host tier to the hosts; None if none are wanted.

    Raises:
        ValueError, OSError: The settings cannot have hosts, or see ``NetworkHosts``.
    """
    if not config.hosts.cpu_hosts:
        return None
    manager = KV_MANAGERS.get(config.kv)
    if tier is None or not issubclass(manager, CanSpread) or issubclass(manager, CanShare):
        raise ValueError(f"kv={config.kv!r} moves nothing to cpu_hosts: set kv to tiered or incremental")
    if policy_of(config)[0].offloads is False:
        logger.warning("scheduler=%r moves no request to a host: cpu_hosts are of no use", config.scheduler)
    return NetworkHosts(
        config.hosts, tier, spec=spec, dtype=dtype, block_size=config.block_size, kv_dtype=config.host_kv_dtype,
        num_slots=config.max_host_requests,
    )  # fmt: skip
