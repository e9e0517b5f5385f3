"""``priority``: vLLM's priority policy, with classes for priorities.

What vLLM (v1) does, and this file does with it: requests that hold KV are served before any that wait; those that wait
are admitted by (priority, arrival), and stop at the first that lacks memory, tokens or room. Admission never
preempts, so an LS request waits for BE requests that run. Only a running request that finds no block for its next token
preempts: the running request that is last by (priority, arrival), perhaps itself, is recomputed. A step that preempts a
request admits none. Prefill is chunked, and prompts and decodes share one token budget.

Departures: running requests take tokens by (class, arrival), where vLLM keeps the order of their admission, so here an
LS decode is never left out of a full step for a BE one. The request limit does not count BE requests against LS ones,
as everywhere in this engine. Kinds (LS, BE) count only through the order of the classes.
"""

from __future__ import annotations

from omniserve.core.plan import StepPlan
from omniserve.sched.batch import Batch
from omniserve.sched.policy import SCHEDULERS, Policy
from omniserve.sched.state import BE, LS, Phase


@SCHEDULERS.register("priority")
class PriorityPolicy(Policy):
    """Continuous batching by (class, arrival); the last by that order is recomputed when a running one lacks memory."""

    def schedule(self, now_s: float) -> StepPlan:
        batch, requests = Batch(self.requests, now_s), self.requests
        preemptions = requests.num_preemptions
        for kind, victims in ((LS, (BE, LS)), (BE, (BE,))):  # classes of kind LS come before those of kind BE
            for state in requests.device[kind]:
                if state.phase is Phase.DEVICE:
                    batch.run_or_preempt(state, victims)
        if requests.num_preemptions == preemptions and batch.admit_waiting(LS) is None:
            batch.admit_waiting(BE)
        return batch.plan()
