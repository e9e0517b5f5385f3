"""StagedScheduler: a scheduler whose steps in flight run side by side, each in another stage of the model.

A request that a step in flight samples a token for, or scores the prompt of, is *in flight* until that step is settled:
no other step can have it, nor can it give way. So every plan is certain, whatever it has: no step in flight has a
request of another one. Decodes are dealt out evenly, so that each step in flight has its share of them.

A token on the host tier may be in all steps in flight, one layer further in each: late joins are booked as if they
joined (``HostBooking``), and one at the last layer when its step is settled.

Policies need not know: the queues do not yield what the step that is planned cannot have (``RequestTable.hidden``).
"""

from __future__ import annotations

from typing import Any

from omniserve.core.config import EngineConfig
from omniserve.core.plan import StepOutput, StepPlan
from omniserve.core.request import RequestOutput
from omniserve.sched.options import APEXOptions
from omniserve.sched.policy import policy_of
from omniserve.sched.request_queue import RequestQueue
from omniserve.sched.scheduler import Scheduler
from omniserve.sched.state import RequestState


class StagedScheduler(Scheduler):
    """A scheduler for as many steps in flight as ``pipeline_parallel_size`` says, all of them advanced."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.requests.residents.tokens.num_stages = self._limits.config.parallel.pipeline_parallel_size

    def _ask_policy(self, now_s: float) -> StepPlan:
        hidden = self.requests.hidden
        others = {state for queue in self.requests.device.values() for state in self._of_other_steps(queue)}
        hidden.update(others)
        try:
            plan = super()._ask_policy(now_s)
            taken = [row.request_id for row in plan.chunks if self.requests.states[row.request_id] in hidden]
            assert not taken, f"the policy must leave out {taken}, which other steps have"
            return plan
        finally:
            hidden.difference_update(others)

    def _of_other_steps(self, queue: RequestQueue) -> list[RequestState]:
        """Return the decodes that the next step leaves to others: its share are those that have waited longest."""
        decodes = [state for state in queue.everyone() if state.decodes]
        share = -(-len(decodes) // self._limits.config.parallel.pipeline_parallel_size)
        free = sorted((state for state in decodes if state not in self.requests.pinned), key=_last_token_s)
        return free[share:]

    def is_certain(self, plan: StepPlan) -> bool:
        """Return True: what a step decides is known before another one has its requests."""
        return True

    def advance(self, plan: StepPlan, output: StepOutput | None = None) -> None:
        super().advance(plan, output)
        in_flight = {row.state for row in self._in_flight[plan.step_id]}
        self.requests.hidden.update(in_flight)
        self.requests.pinned.update(in_flight)

    def settle(self, plan: StepPlan, output: StepOutput, now_s: float) -> list[RequestOutput]:
        settled = {row.state for row in self._in_flight[plan.step_id]}
        self.requests.hidden.difference_update(settled)
        self.requests.pinned.difference_update(settled)
        return super().settle(plan, output, now_s)

    def check_integrity(self) -> None:
        super().check_integrity()
        in_flight = {row.state for told in self._in_flight.values() for row in told}
        assert self.requests.hidden == self.requests.pinned == in_flight


def _last_token_s(state: RequestState) -> float:
    return state.last_token_s or 0.0


def check_stages(config: EngineConfig) -> None:
    """Raise ValueError if the policy cannot have a step in flight in each of several stages."""
    policy, options = policy_of(config)
    reason = "rows may leave its steps between two layers" if options.preempts else ""
    if policy.awaits_host_with(options):
        reason = "its steps wait for the host tier in each layer"
        if isinstance(options, APEXOptions):
            reason += f" with strategy={options.strategy!r}; set it to 'overlapped'"
    if reason:
        raise ValueError(f"pipeline_parallel_size is not for scheduler={config.scheduler!r}: {reason}")
