"""The latency profile of a model: read from a file or the cache folder, or measured now, within a time limit."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import torch
from transformers import PreTrainedModel

from omniserve.core.config import EngineConfig
from omniserve.core.upkeep import Others
from omniserve.engine.checks import check_disk, check_policy
from omniserve.engine.fingerprint import fingerprint_of, has_constant_steps
from omniserve.latency.features import AlphaBeta, ModelShape
from omniserve.latency.profile import Profile, default_folder, load_matching, path_in
from omniserve.latency.shared_profile import SharedProfile
from omniserve.layers.patching import patched_model
from omniserve.ops.collectives import alone
from omniserve.parallel.group import RankGroup
from omniserve.profiling.collectives import measure_collectives, measure_hand_overs
from omniserve.profiling.host import measure_host
from omniserve.profiling.modules import measure_modules
from omniserve.profiling.steps import measure_mixed_steps
from omniserve.profiling.timer import Progress, Surroundings, Timer

logger = logging.getLogger(__name__)

# Longest sample of a coarse profile, as a share of the time limit.
_COARSE_SAMPLE = 0.04


def profile_model(
    model: PreTrainedModel,
    config: EngineConfig,
    *,
    time_limit_s: float = 60.0,
    progress: Progress = lambda what, spent: None,
    is_coarse: bool = False,
    in_grid: bool = False,
    longest_s: float = math.inf,
    others: Others | None = None,
    group: RankGroup | None = None,
) -> Profile:
    """Measure a model on its device.

    Args:
        model: A Hugging Face causal language model; it is patched in place if it is not yet.
        config: The settings it will be served with.
        time_limit_s: Seconds of measuring after compiling, about. The smallest set of points is measured however
            long it takes. On a GPU first calls, which choose and compile kernels, capture of CUDA graphs and starts
            of engines do not count: they take minutes at times, and samples of a few milliseconds are to be had after.
        is_coarse: Say in the profile that it is coarse, and take few samples of whole steps.
        in_grid: Whole steps are those of a grid of rows and contexts, without the host tier, as the papers fit the
            latency models ``conserve`` and ``bros``; else of a mixed load.
        longest_s: Take no sample that is predicted to last longer; times of more rows and keys are then extrapolated.
        group: The other ranks of a model with several, connected.
        others: Work that goes on between samples whenever there is any; its time does not count.

    Raises:
        UnsupportedModelError: No layer family fits the model.
        ValueError: The settings do not fit it, or the limit is not positive.
    Paper: omniserve 3.3.1.
    """
    if not time_limit_s > 0:
        raise ValueError(f"time_limit_s must be > 0, got {time_limit_s}")
    patched = patched_model(
        model, compile=config.execution.compile, lora=config.lora, latent_kv=config.execution.latent_kv
    )
    check_policy(config, patched.spec)  # now, not when an engine is made for the steps
    check_disk(config, patched.spec)
    fingerprint = fingerprint_of(model, config)
    progress("compiling", 0.0)
    patched.warm_up(fused=has_constant_steps(config, patched.device))
    on_cpu = patched.device.type == "cpu"  # on a GPU one thread waits for it
    most_threads = max(fingerprint.device_threads, fingerprint.shared_threads + fingerprint.host_threads)
    surroundings = Surroundings(most_threads if on_cpu else 1 + fingerprint.host_threads)
    timer = Timer(
        patched.device,
        time_limit_s,
        counts_preparing=on_cpu,
        while_preparing=surroundings.left_out,
        longest_s=longest_s,
        others=others,
    )
    threads_before = torch.get_num_threads()
    try:
        with torch.inference_mode(), alone():
            modules = measure_modules(patched, config, fingerprint, timer, progress)
            host = measure_host(patched, config, fingerprint, timer, progress)
        tensor_parallel = pipeline_parallel = AlphaBeta()
        if group is not None:
            rows = config.max_num_batched_tokens
            if group.place.num_shards > 1:
                tensor_parallel = measure_collectives(patched, group, timer, progress, max_rows=rows)
            if group.place.num_stages > 1:
                pipeline_parallel = measure_hand_overs(group, timer, progress, max_rows=rows)
        rows, seconds = modules["dense"]["alone"][-1]
        row_s = patched.num_layers * seconds / rows  # a row passes all stages
        steps = measure_mixed_steps(
            model, config, timer, progress, row_s=row_s, is_coarse=is_coarse, in_grid=in_grid, group=group
        )
    finally:
        torch.set_num_threads(threads_before)
    return Profile(
        fingerprint=fingerprint,
        shape=ModelShape.of(patched.spec),
        seconds=timer.seconds,
        steps=steps,
        conditions=surroundings.conditions(timer.spread()),
        is_coarse=is_coarse,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        **modules,
        **host,
    )


def find_or_make_profile(
    model: PreTrainedModel,
    config: EngineConfig,
    *,
    path: Path | None = None,
    folder: Path | None = None,
    time_limit_s: float = 60.0,
    progress: Progress = lambda what, spent: None,
    is_coarse: bool = False,
    group: RankGroup | None = None,
    shared_since_s: float | None = None,
) -> Profile:
    """Return a profile that holds for this model, these settings and this machine, as ``profile_model`` would make.

    A profile that is measured now is kept for the next time, unless other processes kept the machine busy meanwhile.

    Args:
        path: Read this file and nothing else; None looks into the folder, and measures if nothing there fits.
        folder: Where profiles are kept; None: ``default_folder()``.
        group: As of ``profile_model``.
        is_coarse: If one must be measured, a coarse one will do, which is not kept.
        shared_since_s: Unix time since when engines of one server share what they measure (``SharedProfile``); None:
            there is one engine.

    Raises:
        OSError: ``path`` cannot be read.
        ProfileMismatch: ``path`` holds a profile of something else.
        ValueError: ``path`` holds no profile; or the settings do not fit the model; or the limit is not positive.
        UnsupportedModelError: No layer family fits the model.
    """
    fingerprint = fingerprint_of(model, config)
    if path is not None:
        return Profile.read(path).require(fingerprint)
    kept_at = path_in(default_folder() if folder is None else folder, fingerprint)
    found = load_matching(kept_at.parent, fingerprint)
    if found is not None:
        logger.info("latency profile %s", kept_at)
        return found
    shared = None if shared_since_s is None else SharedProfile(kept_at.parent, fingerprint, shared_since_s)
    if shared is not None and (found := shared.find()) is not None:
        logger.info("the latency profile is that of another engine of this server")
        return found
    longest_s = _COARSE_SAMPLE * time_limit_s if is_coarse else math.inf
    profile = profile_model(
        model,
        config,
        time_limit_s=time_limit_s,
        progress=progress,
        is_coarse=is_coarse,
        longest_s=longest_s,
        group=group,
    )
    if not is_coarse:
        keep_profile(profile, folder)
    if shared is not None:
        shared.tell(profile)
    return profile


def keep_profile(profile: Profile, folder: Path | None = None) -> None:
    """Write a profile to where ``find_or_make_profile`` finds it, unless others kept the machine busy; log which.

    ``folder`` is where profiles are kept; None: ``default_folder()``.
    """
    kept_at = path_in(default_folder() if folder is None else folder, profile.fingerprint)
    if profile.disturbances:
        logger.warning(
            "the machine was busy while latencies were measured (%s), so predictions are too long when it is not: the "
            "profile is used for this start only, and the next one measures again; stop what else runs here first, or "
            "give a profile that was made with `python -m omniserve.profile --output FILE`",
            "; ".join(profile.disturbances),
        )
        return
    try:
        profile.write(kept_at)
    except OSError as error:
        # A home that cannot be written to is no reason not to serve.
        logger.warning(
            "the latency profile is used but not kept, so the next start measures again: %s; "
            "set XDG_CACHE_HOME to a folder that can be written to",
            error,
        )
    else:
        logger.info("measured in %.0f s: latency profile %s", profile.seconds, kept_at)
