"""The parts of an engine that depend on the device and on how many ranks there are, and what no engine can have."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

from transformers import PreTrainedModel

from omniserve.core.config import EngineConfig
from omniserve.core.spec import ModelSpec
from omniserve.engine.capacity import rows_per_host_request
from omniserve.host.remote import HostUser
from omniserve.host.tier import HostTier
from omniserve.kv import KV_MANAGERS, CanMove, CanShare
from omniserve.layers.loaded import language_model
from omniserve.layers.patching import PatchedModel
from omniserve.layers.sharding import num_shards
from omniserve.parallel.group import RankGroup
from omniserve.parallel.host_tier import GroupHostTier
from omniserve.parallel.lead import LastStageRunner, LeadLockstep, LeadRunner
from omniserve.parallel.messages import Setup
from omniserve.runner.runner import ModelRunner
from omniserve.sched import check_stages, policy_of
from omniserve.sched.late_joins import late_layers
from omniserve.sched.options import CoServingOptions, LayerPreemptionOptions


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
    if options.checkpoint_kv and not issubclass(KV_MANAGERS.get(config.kv), CanMove):
        raise ValueError("checkpoint_kv needs a KV manager with a host tier: set kv to tiered or incremental")
    if isinstance(options, CoServingOptions) and options.defer_classes and spec.state_bytes:
        raise ValueError("defer_classes is not for models with recurrent states: their rows cannot leave a step")
    check_stages(config)


def make_host_tier(
    config: EngineConfig, model: PatchedModel, group: RankGroup | None, *, num_threads: int
) -> HostTier:  # fmt: skip
    """Make this rank's host tier; with a group, it takes in what the tiers of the other ranks tell."""
    kind = HostTier if group is None else GroupHostTier
    tier = kind.of(
        config, model.spec, dtype=model.dtype, device=model.device, num_threads=num_threads, layers=model.layers,
        mailbox=_has_mailbox(config, model),
        max_rows=rows_per_host_request(config, model.spec, has_own_memory=model.device.type != "cpu"),
    )  # fmt: skip
    if group is not None:
        assert isinstance(tier, GroupHostTier)
        tier.follow(group.place, group.news, group.tell, group.tell_each)
    return tier


def num_late_layers(config: EngineConfig, model: PatchedModel, group: RankGroup | None) -> int:
    """Return at how many layers a step can take results that come while it runs (``late_layers``), with a host tier."""
    has_mailbox = _has_mailbox(config, model)
    # The devices of several ranks may see different results, and a stage's ranks plan ahead of them.
    if config.parallel.pipeline_parallel_size > 1 or (group is not None and has_mailbox):
        return 0
    return late_layers(model.spec.num_layers, device_looks=has_mailbox, has_between=model.has_between)


def _has_mailbox(config: EngineConfig, model: PatchedModel) -> bool:
    """Return whether steps take results of a host tier from a mailbox."""
    return model.device.type == "cuda" or config.execution.step_graphs == "on"


def make_runner(
    config: EngineConfig, group: RankGroup | None, *, model: PatchedModel, tier: HostTier | None, user: HostUser,
    host_threads: int, max_model_len: int, num_device_blocks: int, num_state_slots: int, overlaps: bool,
    ask_who_must_leave: Callable[[], Set[str]], **parts: Any,
) -> ModelRunner:  # fmt: skip
    """Make what runs steps; with a group, on the other ranks, too, and wait for these.

    Args:
        user: What this engine is to CPU hosts.
        overlaps: A step may be launched before the one before it has been collected.
        ask_who_must_leave: ``ModelRunner``'s ``safepoint``, of policies whose steps have such points.
        parts: More arguments of ``ModelRunner``, which only this rank has.
    """
    _, options = policy_of(config)
    # A chunk that began anew after it left would find the states of some layers ahead of it.
    has_safepoints = not model.spec.state_bytes and options.preempts
    settings: dict[str, Any] = dict(
        host_threads=host_threads, max_model_len=max_model_len,
        is_directed=issubclass(KV_MANAGERS.get(config.kv), CanShare),
        keep_halted=not isinstance(options, LayerPreemptionOptions) or options.keep_halted,
        num_state_slots=num_state_slots,
    )  # fmt: skip
    parts |= dict(model=model, tier=tier, safepoint=ask_who_must_leave if has_safepoints else None)
    if group is None:
        return ModelRunner(config, **settings, **parts)
    has_stages = config.parallel.pipeline_parallel_size > 1
    group.begin_engine(Setup(
        config=config, num_device_blocks=num_device_blocks, has_host_tier=tier is not None,
        has_mailbox=tier is not None and tier.mailbox_SW is not None,
        max_host_rows=tier.max_rows if tier is not None else 1, has_safepoints=has_safepoints,
        shares_tokens=overlaps and not has_stages, host_user=user.engine, **settings,
    ))  # fmt: skip
    runner: ModelRunner
    if has_stages:
        runner = LastStageRunner(config, group=group, stage=group.stage, **settings, **parts)
    else:
        lockstep = LeadLockstep(group, shares_tokens=overlaps)
        runner = LeadRunner(config, group=group, lockstep=lockstep, **settings, **parts)
    group.await_engine()
    return runner
