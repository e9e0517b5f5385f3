"""EngineParts: what an engine is made of, in the order in which it is made, and what no engine can have.

This is the one place that knows which features there are. Modules of a feature are imported if the settings ask for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, Self, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from omniserve.core.config import GIB, EngineConfig
from omniserve.core.lora import LoadLoRA
from omniserve.core.setup import HostTierSetup, RunnerSetup
from omniserve.core.spec import ModelSpec, eos_token_ids
from omniserve.core.work import CancelPrefill, DiskCopy, HostEvent, RemotePrefill, SideWork
from omniserve.engine.capacity import (
    fit_states,
    largest_part,
    max_model_len,
    num_blocks,
    prefix_settings,
    rows_per_host_request,
)
from omniserve.engine.checks import check_disk, check_policy, check_ranks, require_shared_kv
from omniserve.engine.fingerprint import fingerprint_of
from omniserve.engine.step_log import StepLog
from omniserve.host.arrived_results import StageEvents
from omniserve.host.cores import default_host_threads
from omniserve.host.tier import HostTier
from omniserve.kv import KV_MANAGERS, KVManager
from omniserve.latency import LATENCY_MODELS, CorrectedModel, LatencyModel, ModelShape
from omniserve.latency.profile import Profile, cache_folder
from omniserve.latency.trace import StepTracer
from omniserve.layers.kv_fingerprint import kv_fingerprint
from omniserve.layers.patched_model import PatchedModel
from omniserve.layers.patching import patched_model
from omniserve.runner.executors import Executor
from omniserve.runner.runner import EventSource, ModelRunner, RunnerParts
from omniserve.runner.strategies import MakeStrategies, make_strategies
from omniserve.sampling.sampler import Sampler
from omniserve.sched import Forecast, Scheduler, SchedulerLimits, policy_of
from omniserve.sched.late_joins import late_layers
from omniserve.sched.options import LayerPreemptionOptions, num_state_slots

if TYPE_CHECKING:
    from omniserve.engine.preemption import Preemption
    from omniserve.host.disk import DiskTier
    from omniserve.parallel.group import RankGroup
    from omniserve.parallel.host_tier import GroupHostTier
    from omniserve.remote.network_hosts import NetworkHosts
    from omniserve.remote.prefill_engines import PrefillEngines
    from omniserve.runner.lora_loads import LoRALoads

logger = logging.getLogger(__name__)

NO_STATES_OF_RANKS: Final = (
    "recurrent states are not handed over from ranks to ranks: prefill engines of such a model have one rank"
)


class _Closable(Protocol):
    def close(self) -> None: ...


P = TypeVar("P", bound=_Closable | None)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineParts:
    """The parts of an engine."""

    model: PatchedModel
    spec: ModelSpec
    """The model's sizes, with the end-of-sequence tokens of the tokenizer, too."""
    setup: RunnerSetup
    """The settings and what follows from them; its ``config`` is lowered to what recurrent states allow."""
    host_tier: HostTier | None
    disk: DiskTier | None
    kv: KVManager
    latency: CorrectedModel | None
    """The latency model of the engine's profile; None: there is no profile."""
    scheduler: Scheduler
    preemption: Preemption | None
    sampler: Sampler
    log: StepLog
    hosts: NetworkHosts | None
    prefills: PrefillEngines | None
    loras: LoRALoads | None
    runner: ModelRunner

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        model: PreTrainedModel,
        *,
        profile: Profile | None,
        tokenizer: PreTrainedTokenizerBase | None,
        clock: Callable[[], float],
        group: RankGroup | None,
    ) -> Self:
        """Make the parts; if one cannot be made, those before it are closed.

        Arguments, and what is raised, as in ``Engine``.
        """
        check_ranks(config, model, group)
        patched = patched_model(
            model, compile=config.execution.compile, lora=config.lora, latent_kv=config.execution.latent_kv
        )
        ends = {*patched.spec.eos_token_ids, *eos_token_ids(patched.spec.vocab_size, tokenizer)}
        spec = dataclasses.replace(patched.spec, eos_token_ids=tuple(sorted(ends)))
        setup = runner_setup(config, patched)
        latency = make_latency(setup.config, patched, profile)
        sampler = Sampler(
            vocab_size=spec.vocab_size, device=patched.device, seed=config.seed, eos_token_ids=spec.eos_token_ids
        )
        with contextlib.ExitStack() as undo:
            tier = _until_done(undo, make_host_tier(setup, patched, group))
            disk = _until_done(undo, open_disk(setup.config, patched, tier))
            kv = make_kv(setup, patched.spec, disk)
            scheduler = make_scheduler(setup, spec, kv, latency, profile, num_late_layers(setup, patched))
            preemption = make_preemption(setup, scheduler)
            log = _until_done(undo, make_log(setup.config, spec, latency))
            hosts = _until_done(undo, connect_hosts(setup, tier))
            prefills = _until_done(undo, connect_prefill_engines(setup.config, patched, tier, kv, clock))
            loras = _until_done(undo, make_lora_loads(patched, tier))
            executors, sources = side_workers(tier, disk, hosts, prefills, loras)
            parts = RunnerParts(
                model=patched,
                sampler=sampler,
                tier=tier,
                executors=executors,
                sources=sources,
                strategies=strategies_with(preemption, clock),
            )
            runner = make_runner(setup, parts, group)
            undo.pop_all()
        return cls(
            model=patched,
            spec=spec,
            setup=setup,
            host_tier=tier,
            disk=disk,
            kv=kv,
            latency=latency,
            scheduler=scheduler,
            preemption=preemption,
            sampler=sampler,
            log=log,
            hosts=hosts,
            prefills=prefills,
            loras=loras,
            runner=runner,
        )


def _until_done(undo: contextlib.ExitStack, part: P) -> P:
    """Have a part closed, if there is one, unless all the others can be made: its threads would go on."""
    if part is not None:
        undo.callback(part.close)
    return part


# -- the parts, in the order in which they are made --------------------------------------------------------------------


def runner_setup(config: EngineConfig, model: PatchedModel) -> RunnerSetup:
    """Return what the runner of each rank is made with.

    Raises:
        ValueError: The settings do not fit the model, or one another.
    """
    config = fit_states(config, model.spec)
    check_policy(config, model.spec)
    check_disk(config, model.spec)
    manager, (policy, options) = KV_MANAGERS.get(config.kv), policy_of(config)
    num_device_blocks, num_host_blocks = num_blocks(config, largest_part(config, model.spec))
    has_stages, overlaps = config.parallel.pipeline_parallel_size > 1, config.execution.async_steps
    if overlaps is None:
        overlaps = model.device.type == "cuda" or has_stages
    return RunnerSetup(
        config=config,
        max_model_len=max_model_len(config, model.spec),
        num_device_blocks=num_device_blocks,
        num_host_blocks=num_host_blocks,
        num_state_slots=num_state_slots(config, model.spec, has_host_tier=num_host_blocks > 0),
        host_tier=_host_tier_setup(config, model) if num_host_blocks > 0 else None,
        engine_id=secrets.token_hex(16),
        is_directed=manager.abilities.sharing,
        keeps_halted=not isinstance(options, LayerPreemptionOptions) or options.keep_halted,
        # A chunk that began anew after it left would find the states of some layers ahead of it.
        has_safepoints=not model.spec.state_bytes and options.preempts,
        safepoint_every=options.safepoint_every if isinstance(options, LayerPreemptionOptions) else 1,
        awaits_host=policy.awaits_host_with(options),
        overlaps=overlaps and not has_stages,
        in_stages=overlaps and has_stages,
    )


def _host_tier_setup(config: EngineConfig, model: PatchedModel) -> HostTierSetup:
    return HostTierSetup.of(
        config,
        num_threads=config.host_threads or default_host_threads(model.device),
        max_rows=rows_per_host_request(config, model.spec, has_own_memory=model.device.type != "cpu"),
        pin_memory=model.device.type == "cuda",
        mailbox=model.device.type == "cuda" or config.execution.step_graphs == "on",
    )


def make_latency(config: EngineConfig, model: PatchedModel, profile: Profile | None) -> CorrectedModel | None:
    """Fit the latency model that the settings name to a profile; None without one.

    Raises:
        ValueError: There is no such latency model.
        ProfileMismatch: The profile was made for something else.
    """
    latency_model = latency_model_of(config)
    if profile is None:
        return None
    profile.require(fingerprint_of(model.family.model, config))
    learns = policy_of(config)[1].correct_model
    return CorrectedModel(latency_model.from_profile(profile), is_coarse=profile.is_coarse, learns=learns)


def latency_model_of(config: EngineConfig) -> type[LatencyModel]:
    """Return the latency model that the settings name.

    Raises:
        ValueError: There is none of this name.
    """
    return LATENCY_MODELS.get(policy_of(config)[1].latency_model)


def make_host_tier(setup: RunnerSetup, model: PatchedModel, group: RankGroup | None) -> HostTier | None:
    """Make this rank's host tier, if there is one; with a group, it takes in what the tiers of the other ranks tell."""
    if setup.host_tier is None:
        return None
    spec, dtype, device, layers = model.spec, model.dtype, model.device, model.layers
    if group is None:
        return HostTier(setup.host_tier, spec=spec, dtype=dtype, device=device, layers=layers)
    from omniserve.parallel.host_tier import GroupHostTier

    tier = GroupHostTier(setup.host_tier, spec=spec, dtype=dtype, device=device, layers=layers)
    tier.follow(group.place, group.news, group.tell, group.tell_each)
    return tier


def open_disk(config: EngineConfig, model: PatchedModel, tier: HostTier | None) -> DiskTier | None:
    """Open the disk tier below a host tier; None if none is wanted.

    Raises:
        ValueError, OSError: See ``DiskFile``.
    """
    if tier is None or not config.disk_kv.gib:
        return None
    from omniserve.host.disk import DiskTier
    from omniserve.host.disk_file import DiskFile

    fingerprint = None
    if config.disk_kv.keep:
        began_s = time.monotonic()
        fingerprint = kv_fingerprint(model.family.model, config)
        logger.info("disk tier: the weights were compared in %.1f s", time.monotonic() - began_s)
    file = DiskFile(
        Path(config.disk_kv.dir) if config.disk_kv.dir is not None else cache_folder() / "kv",
        num_bytes=int(config.disk_kv.gib * GIB),
        block_bytes=model.spec.host_block_bytes(config.block_size, config.host_pool_dtype),
        fingerprint=fingerprint,
    )
    pools = (tier.pool_LBK2SH,) if tier.scales_LBK2S is None else (tier.pool_LBK2SH, tier.scales_LBK2S)
    return DiskTier(file, pools)


def make_kv(setup: RunnerSetup, spec: ModelSpec, disk: DiskTier | None) -> KVManager:
    """Make the books of the KV pools."""
    config, num_device_blocks, num_host_blocks = setup.config, setup.num_device_blocks, setup.num_host_blocks
    manager = KV_MANAGERS.get(config.kv)
    extras = prefix_settings(config, spec, num_device_blocks=num_device_blocks, num_host_blocks=num_host_blocks)
    if disk is not None:
        from omniserve.kv.disk_prefixes import DiskPrefixes

        extras["disk"] = DiskPrefixes(disk.file.num_slots, disk.file.entries)
    if config.hosts.cpu_hosts and manager.abilities.network:
        extras["cpu_hosts"] = True
    return manager(
        num_device_blocks=num_device_blocks, num_host_blocks=num_host_blocks, block_size=config.block_size, **extras
    )


def make_scheduler(
    setup: RunnerSetup,
    spec: ModelSpec,
    kv: KVManager,
    latency: CorrectedModel | None,
    profile: Profile | None,
    late_layers: int,
) -> Scheduler:
    """Make the scheduler with the policy that the settings name; ``late_layers`` as in ``SchedulerLimits``."""
    policy, options = policy_of(setup.config)
    limits = SchedulerLimits.of(
        setup.config,
        options,
        spec,
        kv,
        max_model_len=setup.max_model_len,
        late_layers=late_layers,
        max_host_drafts=setup.host_tier.max_rows - 1 if setup.host_tier is not None else 0,
    )
    if limits.num_state_slots:
        num_bytes = limits.num_state_slots * spec.state_bytes
        logger.info("recurrent states of %d requests take %d bytes", limits.num_state_slots, num_bytes)
    forecast: Forecast | None = None
    if profile is not None and latency is not None:
        forecast = Forecast.of_profile(profile, latency)
    scheduler = Scheduler
    if setup.in_stages:
        from omniserve.sched.stages import StagedScheduler as scheduler
    return scheduler(policy, options, limits=limits, kv=kv, forecast=forecast)


def make_preemption(setup: RunnerSetup, scheduler: Scheduler) -> Preemption | None:
    """Make what asks the policy which rows must leave a step; None: rows never leave the policy's steps."""
    if not setup.has_safepoints:
        return None
    from omniserve.engine.preemption import Preemption

    return Preemption(scheduler.policy, setup.config.classes)


def strategies_with(preemption: Preemption | None, clock: Callable[[], float]) -> MakeStrategies:
    """Return what makes a runner's strategies; ``preemption`` is asked between two layers, if there is one."""
    if preemption is None:
        return make_strategies
    return partial(make_strategies, safepoint=lambda: preemption.must_leave(clock()))


def num_late_layers(setup: RunnerSetup, model: PatchedModel) -> int:
    """Return at how many layers a step can take results that come while it runs (``late_layers``)."""
    if setup.host_tier is None:
        return 0
    if setup.config.parallel.num_ranks > 1 and setup.host_tier.mailbox:
        return 0  # the devices of several ranks may see different results
    return late_layers(model.spec.num_layers, device_looks=setup.host_tier.mailbox, has_between=model.has_between)


def make_log(config: EngineConfig, spec: ModelSpec, latency: CorrectedModel | None) -> StepLog:
    """Make what counts and traces steps.

    Raises:
        OSError: The trace cannot be written.
    """
    tracer = StepTracer(config.trace_steps, classes=config.classes) if config.trace_steps is not None else None
    return StepLog(ModelShape.of(spec), latency=latency, tracer=tracer)


def connect_hosts(setup: RunnerSetup, tier: HostTier | None) -> NetworkHosts | None:
    """Connect the host tier to the CPU hosts on the network; None if none are wanted.

    Raises:
        ValueError, OSError: The settings cannot have hosts, or see ``NetworkHosts``.
    """
    config = setup.config
    if not config.hosts.cpu_hosts:
        return None
    from omniserve.remote.network_hosts import HostUser, NetworkHosts

    if tier is None or not KV_MANAGERS.get(config.kv).abilities.network:
        raise ValueError(f"kv={config.kv!r} moves nothing to cpu_hosts: set kv to tiered or incremental")
    if policy_of(config)[0].offloads is False:
        logger.warning("scheduler=%r moves no request to a host: cpu_hosts are of no use", config.scheduler)
    user = HostUser(setup.engine_id, num_ranks=config.parallel.num_ranks)
    hosts = NetworkHosts(config.hosts, tier, user=user)
    if (of_ranks := _of_ranks(tier)) is not None:
        of_ranks.use(hosts)
    return hosts


def connect_prefill_engines(
    config: EngineConfig, model: PatchedModel, tier: HostTier | None, kv: KVManager, clock: Callable[[], float]
) -> PrefillEngines | None:
    """Connect to the prefill engines; None if none are wanted.

    Raises:
        ValueError, OSError: The settings cannot have any, or see ``PrefillEngines``.
    """
    if not config.prefill.prefill_engines:
        return None
    from omniserve.remote.prefill_engines import PrefillEngines

    require_shared_kv(config, tier, kv, "prefill_engines")
    assert tier is not None
    if model.spec.state_bytes and config.parallel.num_ranks > 1:
        raise ValueError(NO_STATES_OF_RANKS)
    prefills = PrefillEngines(
        config.prefill,
        tier.pool_LBK2SH,
        fingerprint=kv_fingerprint(model.family.model, config),
        state_bytes=model.spec.state_bytes,
        classes=[spec.name for spec in config.classes],
        parallel=config.parallel,
        clock=clock,
    )
    if (of_ranks := _of_ranks(tier)) is not None:
        of_ranks.use_prefills(prefills)
    return prefills


def make_lora_loads(model: PatchedModel, tier: HostTier | None) -> LoRALoads | None:
    """Make what reads adapters beside the steps; None: the model was made for none."""
    if model.lora is None:
        return None
    from omniserve.runner.lora_loads import LoRALoads

    loads = LoRALoads(model.lora, model.device)
    if tier is not None and (of_ranks := _of_ranks(tier)) is not None:
        of_ranks.use_loras(loads)
    return loads


def side_workers(
    tier: HostTier | None,
    disk: DiskTier | None,
    hosts: NetworkHosts | None,
    prefills: PrefillEngines | None,
    loras: LoRALoads | None,
) -> tuple[dict[type[SideWork], Executor], list[EventSource]]:
    """Return the executors of side work that only some engines have, and the sources of events (``RunnerParts``)."""
    executors: dict[type[SideWork], Executor] = {}
    sources: list[EventSource] = []
    if tier is not None:
        sources.append(tier)
        if hosts is not None and _of_ranks(tier) is None:  # else the tier asks them itself
            sources[0] = _TierWithHosts(tier, hosts)
    if disk is not None:
        executors[DiskCopy] = disk.start
        sources.append(disk)
    if prefills is not None:
        assert tier is not None
        executors |= {RemotePrefill: prefills.start, CancelPrefill: prefills.cancel}
        if _of_ranks(tier) is None:
            sources.append(prefills)
    if loras is not None:
        executors[LoadLoRA] = loras.start
        if tier is None or _of_ranks(tier) is None:
            sources.append(loras)
    return executors, sources


@dataclass(frozen=True, slots=True)
class _TierWithHosts:
    """The events of a host tier, which CPU hosts on the network see, and add their own to."""

    tier: HostTier
    hosts: NetworkHosts

    def poll(self) -> list[HostEvent]:
        return self.hosts.poll(self.tier.poll())


def _of_ranks(tier: HostTier) -> GroupHostTier | None:
    """Return a host tier that speaks for several ranks; None if it does not."""
    from omniserve.parallel.host_tier import GroupHostTier

    return tier if isinstance(tier, GroupHostTier) else None


def _stage_events(tier: HostTier) -> StageEvents:
    """Return what rank 0's host tier has told; the events of all ranks come with it."""
    of_ranks = _of_ranks(tier)
    assert of_ranks is not None
    return StageEvents(of_ranks.arrived, of_ranks.poll)


def make_runner(setup: RunnerSetup, parts: RunnerParts, group: RankGroup | None) -> ModelRunner:
    """Make what runs steps; with a group, on the other ranks, too, and wait for these."""
    if group is None:
        return ModelRunner(setup, parts)
    from omniserve.parallel.lead import LastStageRunner, LeadBroadcast, LeadRunner
    from omniserve.runner.staged_loop import loop_of_stage

    group.begin_engine(setup)
    runner: ModelRunner
    if setup.config.parallel.pipeline_parallel_size > 1:
        events = _stage_events(parts.tier) if parts.tier is not None else None
        staged = dataclasses.replace(parts, make_loop=loop_of_stage(group.stage), stage_events=events)
        runner = LastStageRunner(setup, staged, group)
    else:
        broadcast = LeadBroadcast(group, shares_tokens=setup.overlaps)
        runner = LeadRunner(setup, dataclasses.replace(parts, broadcast=broadcast), group)
    group.await_engine()
    return runner
