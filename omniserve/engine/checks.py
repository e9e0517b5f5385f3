"""Checks of what no engine can have, whatever its parts: settings that do not fit the model, or one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from omniserve.core.config import EngineConfig
from omniserve.core.spec import ModelSpec
from omniserve.engine.capacity import caches_prefixes
from omniserve.host.tier import HostTier
from omniserve.kv import KV_MANAGERS, KVManager
from omniserve.layers.weights.loaded_model import language_model
from omniserve.layers.weights.sharding import num_shards
from omniserve.sched import policy_of
from omniserve.sched.options import CoServingOptions

if TYPE_CHECKING:
    from omniserve.parallel.group import RankGroup


def check_ranks(config: EngineConfig, model: PreTrainedModel, group: RankGroup | None) -> None:
    """Raise ValueError unless a model is rank 0's part of as many ranks as the settings ask for."""
    num_ranks, shards = config.parallel.num_ranks, config.parallel.tensor_parallel_size
    if num_ranks != (group.size if group is not None else 1) or shards != num_shards(language_model(model)):
        raise ValueError(
            f"the settings ask for {num_ranks} ranks, but the model is not rank 0's part of {num_ranks}: make the "
            "engine with omniserve.launch.loading.EngineLoader, which loads the parts and starts the other ranks"
        )


def check_policy(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ValueError if the policy is not for this KV manager, this model or several stages."""
    _, options = policy_of(config)
    if options.checkpoint_kv and not KV_MANAGERS.get(config.kv).abilities.moves:
        raise ValueError("checkpoint_kv needs a KV manager with a host tier: set kv to tiered or incremental")
    if isinstance(options, CoServingOptions) and options.leaves_steps and spec.state_bytes:
        name = "defer_classes" if options.defer_classes else "defer_tokens"
        raise ValueError(f"{name} is not for models with recurrent states: their rows cannot leave a step")
    if config.parallel.pipeline_parallel_size > 1:
        from omniserve.sched.stages import check_stages

        check_stages(config)


def check_disk(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ValueError if a disk tier is wanted and this KV manager or model cannot have one."""
    if not config.disk_kv.gib:
        return
    if not KV_MANAGERS.get(config.kv).abilities.disk:
        raise ValueError(f"kv={config.kv!r} keeps nothing on disk: set kv to tiered, or disk_kv.gib to 0")
    if spec.state_bytes or not caches_prefixes(config, spec):
        raise ValueError("the disk tier keeps what the prefix cache has, and there is none: set disk_kv.gib to 0")


def require_shared_kv(config: EngineConfig, tier: HostTier | None, kv: KVManager, what: str) -> None:
    """See that an engine can give KV of prompts to others, or take it from them.

    Raises:
        ValueError: It cannot.
    """
    if tier is None or kv.prefixes is None:
        raise ValueError(
            f"{what} need a host tier and a prefix cache: set kv to tiered, host_kv_bytes above 0, and prefix_cache to "
            "True"
        )
    if config.host_pool_dtype != "auto" or not config.execution.host_prefixes:
        raise ValueError(
            f"{what} need host_prefixes, and KV in the model's dtype: set host_kv_dtype and kv_dtype to auto"
        )
