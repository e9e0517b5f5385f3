"""Rank 0's runner: it tells the others each step before it runs it, and decides what has to be decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from omniserve.core.errors import PeerLost
from omniserve.core.plan import StepOutput, StepPlan
from omniserve.core.setup import RunnerSetup
from omniserve.core.work import HostEvent, HostLost, PrefillEngineLost
from omniserve.ops import collectives
from omniserve.parallel import messages
from omniserve.parallel.group import RankGroup
from omniserve.parallel.host_tier import GroupHostTier
from omniserve.runner.rank_broadcast import RankBroadcast
from omniserve.runner.runner import LaunchedStep, ModelRunner, RunnerParts

T = TypeVar("T")


class LeadBroadcast(RankBroadcast):
    """Decides, and tells the other ranks."""

    def __init__(self, group: RankGroup, *, shares_tokens: bool) -> None:
        self._group, self._shares_tokens = group, shares_tokens

    def agree(self, decide: Callable[[], T]) -> T:
        value = decide()
        self._group.tell(messages.Decided(value))
        return value

    def share(self, tokens_R: Tensor) -> None:
        if self._shares_tokens:
            collectives.broadcast(tokens_R)


class LeadRunner(ModelRunner):
    """Runs steps on all ranks.

    Raises:
        PeerLost: In any method, that another rank is gone, has failed, or does not answer.
    """

    def __init__(self, setup: RunnerSetup, parts: RunnerParts, group: RankGroup) -> None:
        self._group = group
        self._lost: list[tuple[HostLost | PrefillEngineLost, frozenset[int]]] = []
        """Losses that all ranks have told, each with the steps before whose end no rank may connect again."""
        super().__init__(setup, parts)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Any:
        self._tell(plan)
        return self._launch_here(plan)

    def _tell(self, plan: StepPlan) -> None:
        self._group.tell(messages.Launch(replace(plan, decision=None)))

    def _launch_here(self, plan: StepPlan) -> LaunchedStep:
        try:
            return super().launch(plan)
        except RuntimeError as error:  # of a collective, which knows less than the rank itself
            raise PeerLost(self._group.why_lost(otherwise=f"a step failed: {error}")) from error

    def poll_host(self) -> list[HostEvent]:
        events = super().poll_host()
        if isinstance(self._tier, GroupHostTier):
            # What was planned before the scheduler knows of a loss must not go to the next session: the other ranks are
            # told such steps before this, and those that this one has still to run are waited for.
            self._lost += [(lost, self._steps_under_way()) for lost in self._tier.take_lost()]
            waiting = [(lost, steps & self._steps_under_way()) for lost, steps in self._lost]
            self._lost = [(lost, steps) for lost, steps in waiting if steps]
            for lost, steps in waiting:
                if not steps:
                    self._tier.allow(lost)
        return events

    def _steps_under_way(self) -> frozenset[int]:
        """Return the steps that the other ranks were told, and this one has not begun."""
        return frozenset()

    def forget(self, request_id: str) -> None:
        self._group.tell(messages.Forget(request_id))
        super().forget(request_id)


class LastStageRunner(LeadRunner):
    """The runner of rank 0 in a pipeline: the other stages begin a step as it is launched, this one as it is collected.

    So several steps are under way, and this stage waits for the rows of the oldest one only when nothing else is to be
    done. What a plan gives the host tier is given to this rank's in the same order.
    """

    def __init__(self, setup: RunnerSetup, parts: RunnerParts, group: RankGroup) -> None:
        self._under_way: dict[int, set[str]] = {}
        """Step -> requests that have ended since it was launched; their ids may be in use again."""
        super().__init__(setup, parts, group)

    def launch(self, plan: StepPlan) -> Any:
        self._tell(plan)
        self._under_way[plan.step_id] = set()
        self.host_works = plan.has_host_rows or (self._tier is not None and self._tier.attends)
        return plan

    @torch.inference_mode()
    def collect(self, step: Any) -> StepOutput:
        self._ended = self._under_way.pop(step.step_id)
        return super().collect(self._launch_here(step))

    def _steps_under_way(self) -> frozenset[int]:
        return frozenset(self._under_way)

    def forget(self, request_id: str) -> None:
        for ended in self._under_way.values():
            ended.add(request_id)
        super().forget(request_id)
