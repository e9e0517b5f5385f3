"""``neo``: asymmetric pipelining. BE decodes without device memory run in a second sub-batch that the device waits for.

Sources: NEO (Jiang et al., MLSys 2025), sections 3 and 4; its role as a baseline: omniserve 5.1.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from omniserve.core.plan import Bound
from omniserve.sched import second_batch
from omniserve.sched.base import SCHEDULERS
from omniserve.sched.batch import Batch
from omniserve.sched.omniserve import OmniServeScheduler
from omniserve.sched.policy import HostRows
from omniserve.sched.state import Phase, RequestState

_MOST_FOR_HOST_ROWS = 0.5


@SCHEDULERS.register("neo")
class NEOScheduler(OmniServeScheduler):
    """LS before BE under the latency control that the paper added to NEO; then the load-aware choice of a sub-batch.

    With predicted times, as many host residents join as let most requests advance a second, none if a step without
    them brings more. Without a latency model all of them join, up to ``max_piggyback_slots``.

    What differs from NEO: LS requests stay on the device (NEO knows no classes, and sends their attention to the CPU
    too, which only slows them down); the first sub-batch has no host rows; prompts are computed into device memory.
    """

    def reserve_for_host_rows(self, batch: Batch, bound_s: float) -> float:
        if batch.load is None or bound_s == math.inf:
            return 0.0
        states = second_batch.candidates(self.residents)[: self.limits.max_piggyback_slots]
        if not states or not self.host_is_up:
            return 0.0
        load_s = batch.load.seconds()
        with_s = second_batch.seconds_with(batch.load, states, num_layers=self.limits.num_layers)
        # Device work is the better half of a step: it is never kept out for more host rows than that.
        return min(with_s - load_s, _MOST_FOR_HOST_ROWS * max(0.0, bound_s - load_s))

    def host_rows(self, batch: Batch, bound_s: float, device_tokens: int) -> HostRows:
        states = second_batch.candidates(self.residents)[: self.limits.max_piggyback_slots] if self.host_is_up else []
        count = len(states)
        if batch.load is not None and states:
            num_layers = self.limits.num_layers
            if not batch.chunks:  # an idle machine works, whatever the bound
                bound_s = max(bound_s, second_batch.seconds_with(batch.load, states[:1], num_layers=num_layers))
            count = second_batch.most_per_second(
                batch.load, states, num_layers=num_layers, num_requests=len(batch.chunks), bound_s=bound_s
            )
        return self.run_through(batch, states, count)

    def run_through(self, batch: Batch, states: Sequence[RequestState], count: int) -> HostRows:
        """Make a second sub-batch of the first ``count`` of ``states`` (those of them that get host blocks)."""
        rows = second_batch.rows_of(self.residents, states[:count], self.host_blocks_for)
        self.leave_out("pipelined row", count - len(rows), "", Bound.HOST_MEMORY)
        self.leave_out("pipelined row", len(states) - count, "", Bound.TIME)
        if count > 0 and not rows and all(state.phase is Phase.HOST for state in states[:count]):
            # Those with seats are the oldest, and wait for blocks: who gives way is the youngest, which has no seat.
            self.preempt(next(state for state in reversed(self.residents.queue) if state.away is None))
        if batch.load is not None:
            taken = {row.request_id for row in rows}
            second_batch.put(
                batch.load, [s for s in states if s.request_id in taken], num_layers=self.limits.num_layers
            )
        return HostRows(pipelined=rows)
