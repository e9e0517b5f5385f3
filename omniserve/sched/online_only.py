"""``online-only``: BE requests run in steps in which no LS request is unfinished, and in no other.

Paper: conserve 6.1, "Online-Only (Latency Optimal)": vLLM that is given the online requests alone, for the best
latency there can be. Departure: an engine that was given BE requests must end them, so here they have the time in which
there is no LS request at all. An LS request then waits at most for the step that runs as it comes, and for nothing
after it: what BE requests hold is theirs only until an LS one needs it. For the paper's own numbers, send none of them.
"""

from __future__ import annotations

from omniserve.core.plan import StepPlan
from omniserve.sched.base import SCHEDULERS
from omniserve.sched.batch import Batch
from omniserve.sched.policy import BE, LS, RequestScheduler


@SCHEDULERS.register("online-only")
class OnlineOnlyScheduler(RequestScheduler):
    """LS alone, decodes before prefills, under a fixed token budget; BE while there is no LS request."""

    def schedule(self, now_s: float) -> StepPlan:
        batch = Batch(self.kv, self.limits.max_step_tokens)
        kind, victims = (LS, (BE, LS)) if self.device[LS] or self.waiting[LS] else (BE, (BE,))
        self.run_admitted(batch, kind, victims=victims)
        self.admit_waiting(batch, kind, victims=(BE,) if kind is LS else ())
        return self.make_plan(batch, now_s)
