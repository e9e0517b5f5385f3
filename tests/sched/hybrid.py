"""A policy whose first sub-batch has host rows whenever there are some."""

from __future__ import annotations

import random

from omniserve.sched.batch import Batch, HostRows
from omniserve.sched.neo import NEOPolicy

NAME = "tests.sched.hybrid:HybridNEO"


class HybridNEO(NEOPolicy):
    """``neo`` with a part of the host rows, or all, in the first sub-batch."""

    def set_up(self) -> None:
        super().set_up()
        self._rng = random.Random(0)

    def host_rows(self, batch: Batch, bound_s: float) -> HostRows:
        self._second.hybrid_share = self._rng.choice([0.0, 0.5, 1.0]) if batch.chunks else 0.0
        rows = super().host_rows(batch, bound_s)
        self._second.hybrid_share = 0.0
        return rows
