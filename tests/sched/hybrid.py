"""A policy whose first sub-batch has host rows whenever there are some."""

from __future__ import annotations

import random

from omniserve.sched.batch import Batch
from omniserve.sched.host_rows import HostRows
from omniserve.sched.neo import NEOPolicy, PipelinedRows
from omniserve.sched.second_batch import SecondBatch

NAME = "tests.sched.hybrid:HybridNEO"


class HybridNEO(NEOPolicy):
    """``neo`` with a part of the host rows, or all, in the first sub-batch."""

    def set_up(self) -> None:
        super().set_up()
        self.step.host_rows = HybridRows(SecondBatch(self.view))


class HybridRows(PipelinedRows):
    """The rows of ``neo``, some of them in the first sub-batch."""

    def __init__(self, second: SecondBatch) -> None:
        super().__init__(second)
        self._rng = random.Random(0)

    def choose(self, batch: Batch, bound_s: float) -> HostRows:
        self.second.hybrid_share = self._rng.choice([0.0, 0.5, 1.0]) if batch.chunks else 0.0
        rows = super().choose(batch, bound_s)
        self.second.hybrid_share = 0.0
        return rows
