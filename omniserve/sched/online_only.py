"""``online-only``: BE requests run in steps in which no LS request is unfinished, and in no other.

Paper: conserve 6.1, "Online-Only (Latency Optimal)": vLLM that is given the online requests alone, for the best
latency there can be. Departure: an engine that was given BE requests must end them, so here they have the time in which
there is no LS request at all. An LS request then waits at most for the step that runs as it comes, and for nothing
after it: what BE requests hold is theirs only until an LS one needs it. For the paper's own numbers, send none of them.
"""

from __future__ import annotations

from omniserve.core.plan import StepPlan
from omniserve.sched.batch import Batch
from omniserve.sched.policy import SCHEDULERS, Policy
from omniserve.sched.state import BE, LS


@SCHEDULERS.register("online-only")
class OnlineOnlyPolicy(Policy):
    """LS alone, decodes before prefills, under a fixed token budget; BE while there is no LS request."""

    def schedule(self, now_s: float) -> StepPlan:
        batch, requests = Batch(self.requests, now_s), self.requests
        kind, victims = (LS, (BE, LS)) if requests.device[LS] or requests.waiting[LS] else (BE, (BE,))
        batch.run_admitted(kind, victims=victims)
        batch.admit_waiting(kind, victims=(BE,) if kind is LS else ())
        return batch.plan()
