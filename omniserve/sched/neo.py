"""``neo``: asymmetric pipelining. BE decodes without device memory run in a second sub-batch that the device waits for.

Sources: NEO (Jiang et al., MLSys 2025), sections 3 and 4; its role as a baseline: omniserve 5.1.3.
"""

from __future__ import annotations

from omniserve.sched.batch import Batch, HostRows
from omniserve.sched.omniserve import OmniServePolicy
from omniserve.sched.policy import SCHEDULERS
from omniserve.sched.second_batch import SecondBatch


@SCHEDULERS.register("neo")
class NEOPolicy(OmniServePolicy):
    """LS before BE under the latency control that the paper added to NEO; then the load-aware choice of a sub-batch.

    With predicted times, as many host residents join as let most requests advance a second, none if a step without
    them brings more. Without a latency model all of them join, up to ``max_piggyback_seats``.

    What differs from NEO: LS requests stay on the device (NEO knows no classes, and sends their attention to the CPU
    too, which only slows them down); the first sub-batch has no host rows; prompts are computed into device memory.
    """

    def set_up(self) -> None:
        super().set_up()
        self._second = SecondBatch(self.requests)

    def reserve_for_host_rows(self, batch: Batch, bound_s: float) -> float:
        return self._second.reserve_s(batch, bound_s)

    def host_rows(self, batch: Batch, bound_s: float, *, num_be_tokens: int) -> HostRows:
        states = self._second.candidates()
        count = len(states)
        if batch.cost is not None and states:
            if not batch.chunks:  # an idle machine works, whatever the bound
                bound_s = max(bound_s, self._second.seconds_with(batch.cost, states[:1]))
            count = self._second.most_per_second(batch.cost, states, num_requests=len(batch.chunks), bound_s=bound_s)
        return self._second.run_through(batch, states, count)
