"""find_or_make_profile: the profile of a model, from a file, from the cache folder, or measured now."""

from __future__ import annotations

import logging
from pathlib import Path

from transformers import PreTrainedModel

from omniserve.core.config import EngineConfig
from omniserve.engine.fingerprint import fingerprint_of
from omniserve.latency.profile import Profile, default_folder, load_matching, path_in
from omniserve.profiling.measure import profile_model
from omniserve.profiling.timer import Progress

logger = logging.getLogger(__name__)


def find_or_make_profile(
    model: PreTrainedModel,
    config: EngineConfig,
    *,
    path: Path | None = None,
    folder: Path | None = None,
    time_limit_s: float = 60.0,
    progress: Progress = lambda what, spent: None,
) -> Profile:
    """Return a profile that holds for this model, these settings and this machine.

    One that is measured is kept for the next time, unless others kept the machine busy meanwhile.

    Args:
        model: A Hugging Face causal language model; measuring patches it in place if it is not yet.
        config: The settings it will be served with.
        path: Read this file and nothing else; None looks into the folder, and measures if nothing there fits.
        folder: Where profiles are kept; None: ``default_folder()``.
        time_limit_s: Of measuring.
        progress: Told what is measured.

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
    profile = profile_model(model, config, time_limit_s=time_limit_s, progress=progress)
    if profile.disturbances:
        logger.warning(
            "the machine was busy while latencies were measured (%s), so predictions are too long when it is not: the "
            "profile is used for this start only, and the next one measures again; stop what else runs here first, or "
            "give a profile that was made with `python -m omniserve.profile --output FILE`",
            "; ".join(profile.disturbances),
        )
        return profile
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
    return profile
