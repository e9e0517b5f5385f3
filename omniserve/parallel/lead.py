"""Rank 0's runner: it tells the others each step before it runs it, and decides what has to be decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from omniserve.core.errors import PeerLost
from omniserve.core.plan import StepOutput, StepPlan
from omniserve.ops import collectives
from omniserve.parallel import messages
from omniserve.parallel.group import RankGroup
from omniserve.runner.lockstep import Lockstep
from omniserve.runner.runner import LaunchedStep, ModelRunner

T = TypeVar("T")


class LeadLockstep(Lockstep):
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

    def __init__(self, config: Any, *, group: RankGroup, **settings: Any) -> None:
        self._group = group
        super().__init__(config, **settings)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        self._group.tell(messages.Launch(replace(plan, decision=None)))
        try:
            return super().launch(plan)
        except RuntimeError as error:  # of a collective, which knows less than the rank itself
            raise PeerLost(self._group.why_lost(otherwise=f"a step failed: {error}")) from error

    def collect(self, step: LaunchedStep) -> StepOutput:
        return super().collect(step)

    def forget(self, request_id: str) -> None:
        self._group.tell(messages.Forget(request_id))
        super().forget(request_id)
