"""BackgroundStartup: what a server that began early does beside its requests, until it is as one that took its time.

It began with uncompiled halves, if they had never been compiled, and with a coarse latency profile, if there was no
other. A child process compiles the halves, which are taken when it is done. Then a refined profile is measured, sample
by sample, while the engine has no request; a sample is short enough for one that comes meanwhile.

Before each sample ``profile_model`` asks whether requests wait, and serves them. A sample is predicted to last no
longer than a quarter of the shortest TTFT. The predictions of a coarse profile are multiplied by a margin. Measuring
has KV pools of its own. Of several engines of a server one measures, and the others take what it has measured.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from transformers import PreTrainedModel

from omniserve.core.config import EngineConfig
from omniserve.core.request import ClassSpec, ServiceClass
from omniserve.core.upkeep import Others
from omniserve.engine.compiling import BackgroundCompile
from omniserve.engine.engine import Engine
from omniserve.engine.fingerprint import fingerprint_of, has_constant_steps
from omniserve.latency.profile import Profile, default_folder
from omniserve.latency.shared_profile import SharedProfile
from omniserve.profiling.measure import keep_profile, profile_model

logger = logging.getLogger(__name__)

_SHARE_OF_TTFT = 0.25
"""Largest share of a sample in the TTFT of a request that comes as the sample begins."""
_MOST_WAIT_S = 10.0
"""Seconds that compiled halves wait for a quiet moment to be taken; then they are taken between two steps."""
_TURN_EVERY_S = 1.0
"""Seconds after which an engine asks again whether another one has measured a profile, or has ended measuring."""


class BackgroundStartup:
    """Keeps an engine's halves and profile up, as ``server/engines/process.py`` tells it when to.

    Args:
        model: The engine's.
        config: The settings that the engine was made with.
        compiling: Compiles its halves; None: they are compiled.
        refines: Measure a profile, as the engine's is coarse.
        time_limit_s: Seconds that measuring it may take.
        folder: Where it is kept; None: ``default_folder()``.
        shared_since_s: As ``find_or_make_profile`` takes it.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        engine: Engine,
        model: PreTrainedModel,
        config: EngineConfig,
        *,
        compiling: BackgroundCompile | None,
        refines: bool,
        time_limit_s: float,
        folder: Path | None = None,
        shared_since_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._model, self._config = engine, model, config
        self._patched = engine.model
        self._compiling = compiling
        self._compiled_at_s: float | None = None
        self._else_compile = False
        self._refines, self._time_limit_s, self._folder = refines, time_limit_s, folder
        self._clock = clock
        self._shared: SharedProfile | None = None
        self._refines_at_s = -math.inf
        if refines and shared_since_s is not None:
            fingerprint = fingerprint_of(model, config)
            self._shared = SharedProfile(folder or default_folder(), fingerprint, shared_since_s, clock=clock)

    @property
    def is_done(self) -> bool:
        """The start-up has nothing left to do."""
        return self._compiling is None and self._compiled_at_s is None and not self._refines

    @property
    def is_due(self) -> bool:
        """The start-up has something to do in a quiet moment."""
        if self._compiled_at_s is not None:
            return True
        return self._refines and self._compiling is None and self._clock() >= self._refines_at_s

    def poll(self) -> None:
        """Look after the child; to be called between steps."""
        if self._compiling is not None and (succeeded := self._compiling.poll()) is not None:
            self._compiling, self._compiled_at_s = None, self._clock()
            if not succeeded:
                self._else_compile = True
                logger.error(
                    "the halves could not be compiled beside serving: this process compiles them when it is idle"
                )
        waited_s = self._clock() - self._compiled_at_s if self._compiled_at_s is not None else 0.0
        if waited_s > _MOST_WAIT_S and not self._else_compile:
            self._take_halves()

    def run(self, others: Others) -> None:
        """Do what is due, giving way to ``others``.

        A profile that cannot be measured is logged, and the coarse one stays.
        """
        if self._compiled_at_s is not None:
            self._take_halves()
        elif self._shared is None:
            self._refine(others)
        elif self._shared.begin():
            try:
                self._take_or_refine(self._shared, others)
            finally:
                self._shared.end()
        else:
            self._refines_at_s = self._clock() + _TURN_EVERY_S

    def close(self) -> None:
        """End the child process, if there is one."""
        if self._compiling is not None:
            self._compiling.stop()
            self._compiling = None

    def _take_halves(self) -> None:
        fused = has_constant_steps(self._config, self._patched.device)
        began_s = self._clock()
        if self._patched.find_compiled(else_compile=self._else_compile, fused=fused):
            self._compiled_at_s = None
            logger.info("compiled halves are in use, after %.2f s", self._clock() - began_s)
        else:
            # One that cannot be kept: it is in torch's own cache.
            self._else_compile = True

    def _take_or_refine(self, shared: SharedProfile, others: Others) -> None:
        """Take a profile that another engine has refined; else measure one."""
        profile = shared.find()
        if profile is None or profile.is_coarse:
            self._refine(others)
            return
        self._refines = False
        self._engine.use_profile(profile)
        logger.info("the latency profile is refined: another engine of this server has measured it")

    def _refine(self, others: Others) -> None:
        """Measure a profile; one that cannot be measured is logged."""
        self._refines = False
        try:
            profile = self._measure(others)
        except (RuntimeError, ValueError):
            logger.exception("the latency profile stays coarse: it could not be refined")
            return
        self._engine.use_profile(profile)
        keep_profile(profile, self._folder)
        if self._shared is not None:
            self._shared.tell(profile)
        logger.info("the latency profile is refined, after %.0f s of measuring", profile.seconds)

    def _measure(self, others: Others) -> Profile:
        logger.info("refining the latency profile whenever there are no requests")
        return profile_model(
            self._model,
            self._config,
            time_limit_s=self._time_limit_s,
            others=others,
            longest_s=longest_sample_s(self._config.classes),
        )


def longest_sample_s(classes: Iterable[ClassSpec]) -> float:
    """Return how long a request that comes at the beginning of a sample can wait for its end; infinite without LS."""
    ttfts_s = [each.slo.ttft_s for each in classes if each.kind is ServiceClass.LS and each.slo.ttft_s is not None]
    return _SHARE_OF_TTFT * min(ttfts_s, default=math.inf)
