"""Schedulers that lack one part, to see what that part does."""

from __future__ import annotations

from omniserve.core.request import SLO, Request
from omniserve.sched.conserve import ConServePolicy


class NoSafepoints(ConServePolicy):
    """``conserve`` without layer-wise preemption: an LS request waits for the end of the running step (6.5)."""

    def must_preempt(self, request: Request, slo: SLO, waited_s: float, now_s: float) -> bool:
        return False
