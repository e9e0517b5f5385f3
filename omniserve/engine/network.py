"""The CPU hosts and prefill engines on the network that an engine's settings ask for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from transformers import PreTrainedModel

from omniserve.core.config import EngineConfig
from omniserve.core.spec import ModelSpec
from omniserve.host.prefill_engines import PrefillEngines
from omniserve.host.remote import HostUser, NetworkHosts
from omniserve.host.tier import HostTier
from omniserve.kv import KV_MANAGERS, CanCache, CanShare, CanSpread, KVManager
from omniserve.layers.kv_fingerprint import kv_fingerprint
from omniserve.layers.patching import PatchedModel
from omniserve.parallel.host_tier import GroupHostTier
from omniserve.sched import policy_of

logger = logging.getLogger(__name__)

NO_STATES_OF_RANKS: Final = (
    "recurrent states are not handed over from ranks to ranks: prefill engines of such a model have one rank"
)


def connect_hosts(
    config: EngineConfig, model: PatchedModel, tier: HostTier | None, user: HostUser
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
    hosts = NetworkHosts.of(config, tier, model.spec, dtype=model.dtype, layers=model.layers, user=user)
    if isinstance(tier, GroupHostTier):
        tier.use(hosts)
    return hosts


def connect_prefill_engines(
    config: EngineConfig, spec: ModelSpec, tier: HostTier | None, kv: KVManager, model: PreTrainedModel,
    clock: Callable[[], float],
) -> PrefillEngines | None:  # fmt: skip
    """Connect to the prefill engines; None if none are wanted.

    Raises:
        ValueError, OSError: The settings cannot have any, or see ``PrefillEngines``.
    """
    if not config.prefill.prefill_engines:
        return None
    require_shared_kv(config, tier, kv, "prefill_engines")
    assert tier is not None
    if spec.state_bytes and config.parallel.num_ranks > 1:
        raise ValueError(NO_STATES_OF_RANKS)
    prefills = PrefillEngines(
        config.prefill, tier.pool_LBK2SH, fingerprint=kv_fingerprint(model, config), state_bytes=spec.state_bytes,
        classes=[spec.name for spec in config.classes], parallel=config.parallel, clock=clock,
    )  # fmt: skip
    if isinstance(tier, GroupHostTier):
        tier.use_prefills(prefills)
    return prefills


def require_shared_kv(config: EngineConfig, tier: HostTier | None, kv: KVManager, what: str) -> None:
    """See that an engine can give KV of prompts to others, or take it from them.

    Raises:
        ValueError: It cannot.
    """
    if tier is None or not isinstance(kv, CanCache) or not kv.caches_prefixes():
        raise ValueError(
            f"{what} need a host tier and a prefix cache: set kv to tiered, host_kv_bytes above 0, and prefix_cache to "
            "True"
        )
    if config.host_kv_dtype != "auto" or not config.execution.host_prefixes:
        raise ValueError(f"{what} need host_kv_dtype='auto' and host_prefixes")
