"""NoSafepoints: ``conserve`` whose steps run to their end, to see what layer-wise preemption does (conserve 6.5)."""

from __future__ import annotations

from omniserve.request import SLO
from omniserve.sched.conserve import ConServeScheduler


class NoSafepoints(ConServeScheduler):
    """An LS request waits for the end of the step that runs."""

    def must_preempt(self, num_prompt_tokens: int, slo: SLO, waited_s: float, now_s: float) -> bool:
        return False
