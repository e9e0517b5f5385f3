"""``neo``: asymmetric pipelining. BE decodes without device memory run in a second sub-batch that the device waits for.

Sources: NEO (Jiang et al., MLSys 2025), sections 3 and 4; its role as a baseline: omniserve 5.1.3. For what a second
sub-batch is, see ``StepPlan.pipelined``.
"""

from __future__ import annotations

from omniserve.sched.batch import Batch
from omniserve.sched.best_effort import BestEffortWork
from omniserve.sched.co_serving import CoServingPolicy, CoServingStep
from omniserve.sched.host_rows import HostRows
from omniserve.sched.options import PipeliningOptions
from omniserve.sched.second_batch import SecondBatch


class NEOPolicy(CoServingPolicy):
    """LS before BE under the latency control that the paper added to NEO; then the load-aware choice of a sub-batch.

    With predicted times, as many host residents join as let most requests advance a second, none if a step without
    them brings more. Without a latency model all of them join, up to ``max_piggyback_seats``.

    What differs from NEO: LS requests stay on the device (NEO knows no classes, and sends their attention to the CPU
    too, which only slows them down: see ``neo-paper``); the first sub-batch has no host rows; prompts are computed into
    device memory.
    """

    options_type = PipeliningOptions
    options: PipeliningOptions
    awaits_host = True

    def set_up(self) -> None:
        best_effort = BestEffortWork.of(self.view, self.options, self.forecast)
        rows = PipelinedRows(SecondBatch(self.view, furthest_first=self.options.partial_progress_first))
        self.step = CoServingStep.of(self.view, self.options, self.forecast, best_effort, rows)


class PipelinedRows:
    """Chooses the second sub-batch of a step by the requests that advance a second (``HostRowChoice``)."""

    def __init__(self, second: SecondBatch) -> None:
        self.second = second

    def reserve_s(self, batch: Batch, bound_s: float) -> float:
        """Return the seconds that device work leaves for the candidates."""
        return self.second.reserve_s(batch, bound_s)

    def choose(self, batch: Batch, bound_s: float) -> HostRows:
        """Choose as many candidates as pay within the bound."""
        states = self.second.candidates()
        count = len(states)
        if batch.cost is not None and states:
            if not batch.chunks:  # an idle machine works, whatever the bound
                bound_s = max(bound_s, self.second.seconds_with(batch.cost, states[:1]))
            count = self.second.most_per_second(batch.cost, states, num_requests=len(batch.chunks), bound_s=bound_s)
        return self.second.run_through(batch, states, count)
