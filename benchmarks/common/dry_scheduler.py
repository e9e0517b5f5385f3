"""A scheduler with the latency model of a measured profile, driven without a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.common.models import SMOLLM_135M, random_llama
from omniserve import SLO, EngineConfig, Request
from omniserve.core.plan import SampledToken, StepOutput, StepPlan
from omniserve.kv import TieredKVManager
from omniserve.latency import LATENCY_MODELS, Profile, features_of
from omniserve.profiling import find_or_make_profile
from omniserve.sched import SCHEDULERS, Forecast, Scheduler, SchedulerLimits


def smollm_profile() -> Profile:
    """Return a profile of SmolLM-135M's shape: the cached one, or one that is measured now."""
    return find_or_make_profile(random_llama(**SMOLLM_135M), EngineConfig(device_kv_bytes=2 << 30))


class DryScheduler:
    """Takes requests and makes steps, each of which ends 10 ms after it began; notes what the scheduler takes.

    Args:
        name: Of the policy.
        profile: Of the device that is not there.
        max_model_len: Longest request.
        kv: The settings of a TieredKVManager.
        config: Settings of the engine that is not there.
    """

    def __init__(self, name: str, profile: Profile, *, max_model_len: int, kv: dict[str, Any], **config: Any) -> None:
        self._shape = profile.shape
        self._forecast = Forecast(LATENCY_MODELS.get("omniserve").from_profile(profile), profile.shape)
        limits = SchedulerLimits(
            config=EngineConfig(block_size=kv["block_size"], **config), num_layers=profile.shape.num_layers,
            max_model_len=max_model_len, num_host_slots=256,
        )  # fmt: skip
        self._scheduler = Scheduler(
            SCHEDULERS.get(name), limits=limits, kv=TieredKVManager(**kv), forecast=self._forecast
        )
        self._now_s = 0.0
        self.adds_s: list[float] = []
        """Seconds of each request's arrival."""

    def add(self, name: str, request: Request, slo: SLO) -> None:
        """Add a request."""
        began_s = time.perf_counter()
        self._scheduler.add(name, request, slo, self._now_s)
        self.adds_s.append(time.perf_counter() - began_s)

    def step(self, token: Callable[[], int] = lambda: 1) -> tuple[StepPlan, float, float, float]:
        """Return the plan of a step, the seconds of its ``schedule()`` and ``update()``, and those that it would take.

        Args:
            token: Returns what a row samples.
        """
        began_s = time.perf_counter()
        plan = self._scheduler.schedule(self._now_s)
        schedule_s = time.perf_counter() - began_s
        tokens = {chunk.request_id: (SampledToken(token_id=token()),) for chunk in plan.chunks if chunk.samples}
        self._now_s += 0.01
        began_s = time.perf_counter()
        self._scheduler.update(plan, StepOutput(tokens=tokens), self._now_s)
        update_s = time.perf_counter() - began_s
        return plan, schedule_s, update_s, self._forecast.predictor.step_s(features_of(plan, self._shape))
