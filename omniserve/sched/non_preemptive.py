"""``non-preemptive``: LS requests are admitted first, but none stops a BE request that runs.

Paper: conserve 6.1, "Non-Preemptive (Throughput Optimal)": online requests go before offline ones, which fill what is
left of a chunked prefill's fixed budget, and those that run are not preempted when online ones arrive. As in vLLM,
which the paper built it on, running requests get tokens and memory before waiting ones, in the order of admission. So
an LS prompt waits until BE requests leave it both: its latency pays for their throughput.

Departures: the paper does not say which request is preempted when running ones outgrow the memory together. Here, as
in vLLM without priorities, it is the one that was admitted last, LS or BE. The request limit does not count BE requests
against LS ones, as everywhere in this engine.
"""

from __future__ import annotations

import itertools

from omniserve.core.plan import Bound, StepPlan
from omniserve.sched.batch import Batch
from omniserve.sched.policy import SCHEDULERS, Policy
from omniserve.sched.state import BE, LS, Phase, RequestState


@SCHEDULERS.register("non-preemptive")
class NonPreemptivePolicy(Policy):
    """Running requests in the order of admission, then waiting LS, then waiting BE, under a fixed token budget."""

    def set_up(self) -> None:
        self._running: list[RequestState] = []
        """In the order of admission; those that ended or were preempted leave it as the next step begins."""

    def schedule(self, now_s: float) -> StepPlan:
        batch, requests = Batch(self.requests, now_s), self.requests
        preemptions = requests.num_preemptions
        self._running = [state for state in self._running if state.phase is Phase.DEVICE]
        for state in self._running:
            self._run(batch, state)
        if requests.num_preemptions == preemptions:
            known = {state.request_id for state in self._running}
            if batch.admit_waiting(LS) is None:
                batch.admit_waiting(BE)
            on_device = itertools.chain(requests.device[LS], requests.device[BE])
            self._running += [state for state in on_device if state.request_id not in known]
        return batch.plan()

    def _run(self, batch: Batch, state: RequestState) -> None:
        """Schedule a running request; if blocks are short, those admitted last are recomputed until it fits."""
        while state.phase is Phase.DEVICE and batch.add(state) is Bound.MEMORY:
            self.requests.preempt(next(last for last in reversed(self._running) if last.phase is Phase.DEVICE))
