"""BackgroundStartup: what a server that began early does beside its requests, until it is as one that took its time.

It began with uncompiled halves, if they had never been compiled, and with a coarse latency profile, if there was no
other. A child process compiles the halves, which are taken when it is done. Then a refined profile is measured, sample
by sample, while the engine has no request; a sample is short enough for one that comes meanwhile.

Before each sample ``profile_model`` asks whether requests wait, and serves them. A sample is predicted to last no
longer than a quarter of the shortest TTFT. The predictions of a coarse profile are multiplied by a margin. Measuring
has KV pools of its own.
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
from omniserve.engine.fingerprint import has_constant_steps
from omniserve.profiling.measure import keep_profile, profile_model

logger = logging.getLogger(__name__)

_SHARE_OF_TTFT = 0.25
"""Largest share of a sample in the TTFT of a request that comes as the sample begins."""
_MOST_WAIT_S = 10.0
"""Seconds that compiled halves wait for a quiet moment to be taken; then they are taken between two steps."""


class BackgroundStartup:
    """Keeps an engine's halves and profile up, as ``server/engines/process.py`` tells it when to.

    Args:
        model: The engine's.
        config: The settings that the engine was made with.
        compiling: Compiles its halves; None: they are compiled.
        refines: Measure a profile, as the engine's is coarse.
        time_limit_s: Seconds that measuring it may take.
        folder: Where it is kept; None: ``default_folder()``.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._model, self._config = engine, model, config
        self._patched = engine.model
        self._compiling = compiling
        self._compiled_at_s: float | None = None
        self._else_compile = False
        self._refines, self._time_limit_s, self._folder = refines, time_limit_s, folder
        self._clock = clock

    @property
    def is_done(self) -> bool:
        """The start-up has nothing left to do."""
        return self._compiling is None and self._compiled_at_s is None and not self._refines

    @property
    def is_due(self) -> bool:
        """The start-up has something to do in a quiet moment."""
        return self._compiled_at_s is not None or (self._refines and self._compiling is None)

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
        elif self._refines:
            self._refines = False
            try:
                self._refine(others)
            except (RuntimeError, ValueError):
                logger.exception("the latency profile stays coarse: it could not be refined")

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

    def _refine(self, others: Others) -> None:
        logger.info("refining the latency profile whenever there are no requests")
        profile = profile_model(
            self._model,
            self._config,
            time_limit_s=self._time_limit_s,
            others=others,
            longest_s=longest_sample_s(self._config.classes),
        )
        self._engine.use_profile(profile)
        keep_profile(profile, self._folder)
        logger.info("the latency profile is refined, after %.0f s of measuring", profile.seconds)


def longest_sample_s(classes: Iterable[ClassSpec]) -> float:
    """Return how long a request that comes at the beginning of a sample can wait for its end; infinite without LS."""
    ttfts_s = [each.slo.ttft_s for each in classes if each.kind is ServiceClass.LS and each.slo.ttft_s is not None]
    return _SHARE_OF_TTFT * min(ttfts_s, default=math.inf)
